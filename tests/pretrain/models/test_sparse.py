"""SW-MLP: the paper's block, the same model in two storages, a fixed random pattern in the
checkpoint, spectra, and counts."""

import itertools
import math
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config import OptimizerSettings
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.layers.sparse import (
    MaskedLinear,
    SparseLinear,
    connections_of,
    draw_connections,
    largest_singular_value,
)
from pretrain.models.spec import SparseMlpSpec
from pretrain.optim import build_optimizer
from tests.errors import fails

FIELDS = {"kind": "sw_mlp", "patch_size": 4, "num_channels": 5, "depth": 2, "density": 0.3}
BOTH = pytest.mark.parametrize("storage", ["masked", "sparse"])


def tiny(*, seed: int = 0, image_size: int = 8, **fields: object) -> ImageModel:
    spec = SparseMlpSpec.model_validate({**FIELDS, **fields})
    return build_model(spec, num_classes=3, image_size=image_size, seed=seed)


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def effective(layer: torch.nn.Module, of: str = "weight") -> Tensor:
    """Return the dense matrix of a layer or its gradient."""
    if isinstance(layer, MaskedLinear):
        found = layer.weight if of == "weight" else layer.weight.grad
        assert found is not None
        return (found * layer.mask).detach()
    assert isinstance(layer, SparseLinear)
    values = layer.values if of == "weight" else layer.values.grad
    assert values is not None
    matrix = torch.zeros(layer.out_features, layer.in_features, dtype=values.dtype)
    ends = layer.row_starts.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        matrix[row, layer.columns[start:end].long()] = values[start:end].detach()
    return matrix


def sparse_layers(model: ImageModel) -> list[torch.nn.Module]:
    found = [
        module for module in model.modules() if isinstance(module, MaskedLinear | SparseLinear)
    ]
    assert found
    return found


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"expansion": None, "width": 30},
        {"expansion": 2.0},
        {"expansion": 2.0, "outer_activation": True, "width": 30, "widen": "sparse"},
        {"expansion": None, "width": 30, "bias": False},
        {"expansion": None, "final_norm": True},
    ],
    ids=["one", "hidden", "as printed in S.17", "no bias", "final norm"],
)
def test_the_model_is_the_papers_formula(storage: str, fields: dict[str, object]) -> None:
    model = tiny(storage=storage, **fields)
    w = {
        name: weight.detach().normal_() for name, weight in model.named_parameters()
    }  # biases, too
    for layer in sparse_layers(model):
        if isinstance(layer, SparseLinear):
            layer.values.data.normal_()
    # random weights outside the mask have no effect
    of_layers = (MaskedLinear, SparseLinear)
    matrices = {
        name: effective(layer)
        for name, layer in model.named_modules()
        if isinstance(layer, of_layers)
    }

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ matrices.get(name, w.get(f"{name}.weight", x)).T + w.get(f"{name}.bias", 0)

    x = images()
    patches = [x[:, :, i : i + 4, j : j + 4].reshape(4, -1) for i in (0, 4) for j in (0, 4)]
    z = torch.cat([linear(patch, "stem") for patch in patches], dim=1)
    if "width" in fields:
        z = linear(z, "widen")
    for number in range(2):
        block = f"blocks.{number}"
        inner = layer_norm(z, z.shape[-1:], w[f"{block}.norm.weight"], w[f"{block}.norm.bias"])
        if fields["expansion"] is None:
            z = z + gelu(linear(inner, f"{block}.linear"))
        else:
            added = linear(gelu(linear(inner, f"{block}.expand")), f"{block}.contract")
            z = z + (gelu(added) if "outer_activation" in fields else added)
    if "final_norm" in fields:
        z = layer_norm(z, z.shape[-1:], w["norm.weight"], w["norm.bias"])
    torch.testing.assert_close(model(x), linear(z, "head"), rtol=1e-4, atol=1e-4)
    assert ("widen" in matrices) == ("widen" in fields) and any(
        name.endswith("stem.bias") for name in w
    ) == ("bias" not in fields)


@pytest.mark.parametrize("expansion", [None, 2.0])
def test_both_storages_are_one_model(expansion: float | None) -> None:
    """One seed gives equal weights, outputs and gradients, all nonzero."""
    masked = tiny(storage="masked", expansion=expansion)
    sparse = tiny(storage="sparse", expansion=expansion)
    torch.testing.assert_close(masked(images()), sparse(images()))
    for model in (masked, sparse):
        model(images()).square().sum().backward()
        assert [
            name
            for name, weight in model.named_parameters()
            if weight.grad is None or not weight.grad.any()
        ] == []
    for one, two in zip(sparse_layers(masked), sparse_layers(sparse), strict=True):
        assert torch.equal(effective(one), effective(two))
        torch.testing.assert_close(effective(one, "gradient"), effective(two, "gradient"))
    others = dict(sparse.named_parameters())
    for name, weight in masked.named_parameters():
        if name in others:
            torch.testing.assert_close(weight.grad, others[name].grad)


def test_the_gradients_of_the_sparse_product() -> None:
    layer = SparseLinear(7, num_outputs=5, density=0.4, variance=1.0).double()
    values = layer.values.detach().requires_grad_()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    names = {"bias": layer.bias.detach()}
    run = lambda values, x: torch.func.functional_call(layer, {**names, "values": values}, (x,))  # noqa: E731
    assert torch.autograd.gradcheck(run, (values, x))
    with FlopCounterMode(display=False) as counter:
        layer.float()(torch.randn(5, 7, requires_grad=True)).sum().backward()
    assert (
        counter.get_total_flops() == 3 * 2 * 5 * layer.values.numel()
    )  # what meta modules count: test_cost.py


def test_an_empty_row_column_and_matrix() -> None:
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[1, 0] = mask[1, 2] = mask[2, 2] = True
    connections = connections_of(mask)
    assert connections.row_starts.tolist() == [0, 0, 2, 3, 3] and connections.columns.tolist() == [
        0,
        2,
        2,
    ]
    assert connections.rows.tolist() == [1, 1, 2]
    starts, columns, order = connections.transposed()
    assert (
        starts.tolist() == [0, 1, 1, 3]
        and columns.tolist() == [1, 1, 2]
        and order.tolist() == [0, 1, 2]
    )
    assert draw_connections(7, num_outputs=5, density=1.0).mask().all()
    layer = SparseLinear(3, num_outputs=2, density=1e-9, variance=1.0)
    assert layer.values.numel() == 0
    layer(torch.randn(2, 3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("density", [0.003, 0.3, 0.9])
def test_connections_are_independent_draws(density: float) -> None:
    """Row and column counts have binomial means and variances, and neighbors are independent."""
    torch.manual_seed(0)
    connections = draw_connections(2000, num_outputs=1500, density=density)
    parts = (
        np.ones(len(connections.columns)),
        connections.columns.numpy(),
        connections.row_starts.numpy(),
    )
    mask = torch.from_numpy(csr_matrix(parts, shape=(1500, 2000)).toarray()).bool()
    assert torch.equal(connections.mask(), mask) and int(mask.sum()) == len(connections.columns)
    size, spread = mask.numel(), density * (1 - density)
    assert abs(mask.float().mean() - density) < 5 * math.sqrt(spread / size)
    for axis, count in ((0, 1500), (1, 2000)):
        assert mask.sum(axis).double().var() == pytest.approx(count * spread, rel=0.25)
        together = (
            mask.narrow(axis, 1, mask.shape[axis] - 1) & mask.narrow(axis, 0, mask.shape[axis] - 1)
        ).sum()
        assert (
            abs(int(together) - size * density**2)
            < 8 * math.sqrt(size * density**2) + 0.01 * size * density**2
        )


@pytest.mark.parametrize("name", ["lion", "adamw", "sgd"])
def test_both_storages_are_trained_alike(name: str) -> None:
    """Three steps with large weight decay give the same matrices, without new connections."""
    settings = OptimizerSettings.model_validate({"name": name, "lr": 0.01, "weight_decay": 5.0})
    models = [tiny(storage=storage, expansion=2.0) for storage in ("masked", "sparse")]
    before = [effective(layer) for layer in sparse_layers(models[0])]
    for model in models:
        model.double()
        optimizer = build_optimizer(model, settings)
        for _ in range(3):
            optimizer.zero_grad()
            model(images().double()).square().sum().backward()
            optimizer.step()
    pairs = zip(*map(sparse_layers, models), before, strict=True)
    for masked, sparse, start in pairs:
        torch.testing.assert_close(effective(masked), effective(sparse))
        assert not torch.equal(effective(sparse), start.double())
        assert isinstance(masked, MaskedLinear) and not masked.weight[~masked.mask].any()


def gradient_of_stem(model: ImageModel) -> Tensor:
    model.zero_grad()
    model(images()).square().sum().backward()
    found = model.get_parameter("stem.weight").grad
    assert found is not None
    return found


@BOTH
@pytest.mark.parametrize("saved_as", ["masked", "sparse"])
def test_a_checkpoint_brings_its_pattern_into_either_storage(
    storage: str, saved_as: str, tmp_path: Path
) -> None:
    saved = tiny(storage=saved_as, seed=1)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    model = tiny(storage=storage, seed=2)  # another pattern with another number of connections
    assert not torch.equal(model(images()), saved(images()))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(model(images()), saved(images()))
    torch.testing.assert_close(gradient_of_stem(model), gradient_of_stem(saved))
    for one, two in zip(sparse_layers(model), sparse_layers(saved), strict=True):
        assert torch.equal(effective(one), effective(two))
    assert {name: x.dtype for name, x in model.state_dict().items()} == {
        name: x.dtype for name, x in tiny(storage=storage).state_dict().items()
    }


@BOTH
def test_a_pattern_that_comes_alone_leaves_the_weights(storage: str) -> None:
    """An engine restores a pattern without weights, too."""
    model = tiny(storage=storage, seed=1)
    expected, of_stem = model(images()), gradient_of_stem(model)
    parameters = dict(model.named_parameters())
    pattern = {
        name: value.clone() for name, value in model.state_dict().items() if name not in parameters
    }
    assert len(pattern) == (2 if storage == "masked" else 4)
    for buffer in model.buffers():
        buffer.zero_()
    model.load_state_dict(pattern, strict=False)
    assert torch.equal(model(images()), expected)
    assert torch.equal(gradient_of_stem(model), of_stem)


@BOTH
def test_a_damaged_pattern_is_refused(storage: str) -> None:
    for name, value in (("columns", 99), ("row_starts", -1)):
        weights = tiny(storage="sparse").state_dict()
        weights[f"blocks.1.linear.{name}"][1] = value
        with fails("damaged", "blocks.1.linear"):
            tiny(storage=storage).load_state_dict(weights)


def test_a_huge_sparse_layer_takes_no_more_than_its_connections() -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer = SparseLinear(150_528, num_outputs=150_528, density=1e-5, variance=1.0)
    assert 224_000 < layer.values.numel() < 229_500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000


@pytest.mark.parametrize("gamma", [1.0, 0.25, 4.0])
def test_the_largest_singular_value_is_that_of_a_sparse_matrix(gamma: float) -> None:
    """The value is sqrt(L+) with q^2 = p gamma m (see sparse.py), not Marchenko-Pastur's. For gamma
    unequal to 1 it is also not the value for q^2 = p m."""
    width, density, c = round(600 / math.sqrt(gamma)), 0.06, 1 + math.sqrt(gamma)
    torch.manual_seed(0)
    found = []
    for _ in range(4):
        layer = SparseLinear(
            width, num_outputs=round(gamma * width), density=density, variance=1 / (density * width)
        )
        found.append(largest_singular_value(layer.matrix()))
    excess = 3 * c**2 * (1 - density) / (density * width)
    measured = sum(found) / len(found)
    assert measured == pytest.approx(math.sqrt(c**2 + excess / math.sqrt(gamma)), rel=0.015)
    assert measured != pytest.approx(c, rel=0.015)
    if gamma != 1:
        assert measured != pytest.approx(math.sqrt(c**2 + excess * math.sqrt(gamma)), rel=0.015)


@BOTH
@pytest.mark.parametrize(("expansion", "expected"), [(None, 2.0), (4.0, 3.0)])
def test_a_spectral_gain_starts_every_matrix_at_the_largest_singular_value_of_a_dense_one(
    storage: str, expansion: float | None, expected: float
) -> None:
    """Both matrices of a block begin at 1 + sqrt(gamma). Stem, pattern and all else do not depend
    on the gain."""
    fields: dict[str, object] = {
        "storage": storage,
        "density": 0.1,
        "expansion": expansion,
        "num_channels": 20,
    }
    plain, gained = tiny(**fields), tiny(**fields, init_gain="spectral")
    other = dict(plain.named_parameters())
    for one, two in zip(sparse_layers(plain), sparse_layers(gained), strict=True):
        before, after = effective(one).double(), effective(two).double()
        assert float(torch.linalg.matrix_norm(before, 2)) > 1.01 * expected
        assert float(torch.linalg.matrix_norm(after, 2)) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(
            after, before * (after.norm() / before.norm()), rtol=1e-5, atol=1e-7
        )
    changed = {
        name for name, weight in gained.named_parameters() if not torch.equal(weight, other[name])
    }
    assert changed and all(
        name.startswith("blocks.") and name.endswith((".weight", ".values")) for name in changed
    )
    assert not any("norm" in name for name in changed)


def test_the_largest_singular_value_of_what_is_mostly_empty() -> None:
    for nonzero in (0, 3, 400):
        torch.manual_seed(nonzero)
        dense = torch.zeros(300, 500, dtype=torch.float64)
        dense[torch.randint(300, (nonzero,)), torch.randint(500, (nonzero,))] = torch.randn(
            nonzero, dtype=torch.float64
        )
        found = largest_singular_value(csr_matrix(dense.numpy()))
        assert found == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-9)


@BOTH
def test_every_precision(storage: str) -> None:
    model = tiny(storage=storage, expansion=2.0)
    expected = model.double()(images().double())
    torch.testing.assert_close(model.float()(images()).double(), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = model(images())
    automatic.sum().backward()
    torch.testing.assert_close(automatic.double(), expected, rtol=0.05, atol=0.05)
    half = model.bfloat16()(images().bfloat16())
    half.sum().backward()
    torch.testing.assert_close(half.double(), expected, rtol=0.05, atol=0.05)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert dtypes and set(dtypes.values()) == {torch.bool if storage == "masked" else torch.int32}


@pytest.mark.slow
@BOTH
def test_traced_it_is_the_same(storage: str) -> None:
    model = tiny(storage=storage, expansion=2.0)
    expected = model(images())
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected.sum().backward()
    wanted = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    model.zero_grad()
    outputs = traced(images())
    torch.testing.assert_close(outputs, expected)
    outputs.sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name])


def test_auto_is_sparse_where_little_is_connected() -> None:
    specs = [
        SparseMlpSpec(kind="sw_mlp", density=density) for density in (0.9, 0.5, 0.06, 0.05, 0.001)
    ]
    assert [spec.is_sparse for spec in specs] == [False, False, False, True, True]
    assert isinstance(sparse_layers(tiny(density=0.05))[0], SparseLinear)
    assert isinstance(sparse_layers(tiny(density=0.5))[0], MaskedLinear)
