"""Monarch and Kronecker layers equal dense matrices from kron, block_diag and permutations."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from pretrain.models.build import build_model
from pretrain.models.spec import StructuredMlpSpec
from pretrain.models.structured import Kronecker, Monarch

H, V, S, C = 4, 6, 3, 5
FORMS = pytest.mark.parametrize("form", ["monarch", "kronecker"])


def spec(form: str, **fields: object) -> StructuredMlpSpec:
    fields = {"kind": "structured", "form": form, "num_rows": S, "num_columns": C, **fields}
    return StructuredMlpSpec.model_validate(fields)


def transposition(rows: int, columns: int) -> Tensor:
    """Return the matrix that maps the entries of a (rows, columns) grid in row order to the
    transpose's."""
    return torch.eye(rows * columns, dtype=torch.float64)[
        torch.arange(rows * columns).view(rows, columns).T.flatten()
    ]


def dense(form: str, weights: dict[str, Tensor], *, rows: int, out: tuple[int, int]) -> Tensor:
    """Return the dense matrix for the entries of a grid with `rows` rows, in row order."""
    if form == "kronecker":
        return torch.kron(weights["of_columns"], weights["of_rows"])
    right, left = torch.block_diag(*weights["per_row"]), torch.block_diag(*weights["per_column"])
    return transposition(*out).T @ left @ transposition(rows, out[1]) @ right


@FORMS
def test_a_layer_is_its_dense_matrix(form: str) -> None:
    layer = {"monarch": Monarch, "kronecker": Kronecker}[form]((H, V), out=(S, C)).double()
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    x = torch.randn(2, H, V, dtype=torch.float64)

    def ours(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x,)).flatten(1)

    def theirs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return x.flatten(1) @ dense(form, weights, rows=H, out=(S, C)).T

    torch.testing.assert_close(ours(weights, x), theirs(weights, x))
    gradients = [
        torch.func.grad(lambda w, x, run=run: run(w, x).pow(3).sum(), argnums=(0, 1))(weights, x)
        for run in (ours, theirs)
    ]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert all(gradient.all() for gradient in [*gradients[0][0].values(), gradients[0][1]])


@FORMS
@pytest.mark.parametrize("grayscale", [True, False])
def test_the_model_is_the_papers_formula(form: str, grayscale: bool) -> None:
    model = build_model(
        spec(form, grayscale=grayscale), num_classes=3, image_size=H, seed=0
    ).double()
    x = torch.randn(2, 3, H, H, dtype=torch.float64)
    rows = x.sum(1) / 3 if grayscale else torch.cat([x[:, 0], x[:, 1], x[:, 2]], dim=2)
    matrices = [
        dense(form, dict(layer.named_parameters()), rows=rows_in, out=(S, C))
        for layer, rows_in in ((model.stem, H), (model.blocks[0].linear, S))
    ]
    hidden = torch.relu(rows.flatten(1) @ matrices[0].T) @ matrices[1].T
    w = dict(model.named_parameters())
    expected = hidden @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.forward_features(x).flatten(1), hidden)
    torch.testing.assert_close(model.float()(x.float()).double(), expected, rtol=1e-5, atol=1e-5)
    model(x.float()).square().sum().backward()
    assert [
        name
        for name, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ] == []


@FORMS
def test_small_matrices_start_with_the_variance_of_one_over_inputs(form: str) -> None:
    model = build_model(
        spec(form, num_rows=150, num_columns=80), num_classes=3, image_size=100, seed=0
    )
    found = {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if not name.startswith("head")
    }
    assert len(found) == 4
    for weight in found.values():
        assert weight.var() == pytest.approx(1 / weight.shape[-1], rel=0.06)
        assert abs(weight.mean()) < 5 / (weight.shape[-1] * weight.numel()) ** 0.5
