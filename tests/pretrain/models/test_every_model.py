"""What holds for every registered model, or one of each kind at its own widths, with its first two
blocks."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain.models.build import build
from pretrain.models.presets import PRESETS, spec_of

DISTINCT = [
    "mlp_b6_wi256",
    "mlp_l6_wi1024",
    "mixer_b_16",
    "mixer_ss_w",
    "mixer_p14",
    "rp_mixer_ss_w",
    "smixer_c32",
]
DISTINCT += [
    "rp_smixer_c32",
    "sw_mlp_540",
    "monarch_mnist",
    "kronecker_mnist",
]  # others have other sizes; timm's: test_baselines.py


def short(name: str, **changes: Any) -> nn.Module:
    fields = type(spec_of(name)).model_fields
    return build(
        name, num_classes=7, seed=0, **({"depth": 2} if "depth" in fields else {}) | changes
    )


def pictures(name: str, *, batch: int = 2) -> Tensor:
    size = PRESETS[name].image_size
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def compare(expected: Tensor, found: Tensor, *, tolerance: float) -> None:
    scale = expected.abs().max().item()
    assert scale > 0
    assert (expected - found).abs().max().item() <= tolerance * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_reach_every_weight_and_double_precision_agrees(name: str) -> None:
    model, x = short(name).eval(), pictures(name)
    single, of_single = logits_and_gradients(model, x)
    double, of_double = logits_and_gradients(model.double(), x.double())
    assert single.shape == (2, 7)
    assert [
        key for key, gradient in of_single.items() if gradient is None or not gradient.any()
    ] == []
    compare(double, single.double(), tolerance=1e-5)
    largest = max(gradient.abs().max().item() for gradient in of_double.values())
    for key, gradient in of_double.items():
        assert (gradient - of_single[key]).abs().max().item() <= 1e-4 * largest, key


def logits_and_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(x)
    (logits * torch.linspace(-1, 1, 14, dtype=x.dtype).reshape(2, 7)).sum().backward()
    return logits.detach(), {key: weight.grad for key, weight in model.named_parameters()}  # type: ignore[misc]


ONE_OF_EACH = [
    ("mlp_b6_wi256", {}),
    ("mlp_l6_wi1024", {"width": 64, "norm": "batch"}),
    ("mixer_ss_w", {"num_channels": 24}),
    ("rp_mixer_ss_w", {"num_channels": 24, "num_tokens": 40}),
    ("rp_smixer_c32", {}),
    ("sw_mlp_540", {"storage": "sparse", "density": 0.1}),
    ("sw_mlp_540", {"storage": "masked"}),
    ("monarch_mnist", {}),
    ("kronecker_mnist", {}),
]


@pytest.mark.parametrize(("name", "changes"), ONE_OF_EACH)
def test_weights_are_a_function_of_the_seed(name: str, changes: dict[str, Any]) -> None:
    states = []
    for before, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(before)
        states.append(build(name, num_classes=7, seed=seed, **changes).state_dict())
    one, two, other = states
    assert all(torch.equal(one[key], two[key]) for key in one)
    drawn = [
        key
        for key in one
        if key.endswith(("weight", "index", "mask", "columns", "per_row")) and "norm" not in key
    ]
    assert drawn and not any(
        one[key].shape == other[key].shape and torch.equal(one[key], other[key]) for key in drawn
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mlp_b6_wi256", {"norm": "batch"}),
        ("mlp_l6_wi1024", {"width": 64}),
        ("mixer_ss_w", {"num_channels": 24}),
        ("rp_mixer_ss_w", {"num_channels": 24, "num_tokens": 40, "permuted_blocks": (1,)}),
        ("sw_mlp_540", {"storage": "sparse", "density": 0.1}),
        ("monarch_mnist", {}),
        ("kronecker_mnist", {}),
    ],
)
def test_onnx_computes_the_same_for_any_batch(name: str, changes: dict[str, Any]) -> None:
    from onnx.reference import ReferenceEvaluator

    model = short(name, **changes).eval()
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(
            model, (pictures(name),), dynamo=True, verbose=False, dynamic_shapes=({0: batch},)
        )
    assert program is not None
    x = pictures(name, batch=3)
    outputs = ReferenceEvaluator(program.model_proto).run(
        None, {program.model.graph.inputs[0].name: x.numpy()}
    )
    with torch.no_grad():
        compare(model(x), torch.from_numpy(outputs[0]), tolerance=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mlp_b6_wi256", {"depth": 1}),
        ("mixer_ss_w", {"num_channels": 24}),
        ("mixer_ss_w", {"num_channels": 24, "num_tokens": 40}),
        ("sw_mlp_540", {}),
        ("monarch_mnist", {}),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 1.5, 2])
def test_pictures_of_another_size_are_refused(
    name: str, changes: dict[str, Any], factor: float
) -> None:
    model, size = short(name, **changes), int(PRESETS[name].image_size * factor)
    for training in (True, False):
        with pytest.raises(RuntimeError):
            model.train(training)(torch.zeros(2, 3, size, size))
