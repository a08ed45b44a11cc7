"""What holds for every registered model: at its own widths, with two of its blocks (the others are like the second)."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain.models.build import build
from pretrain.models.presets import PRESETS, spec_of

NAMES = sorted(PRESETS)
OURS = [name for name in NAMES if spec_of(name).kind != "timm"]  # timm's two: test_baselines.py
DISTINCT = [
    name for name in OURS if name not in ("mixer_p7", "mixer_p8", "mixer_p28", "mixer_p32")
]  # p14, in other sizes


def short(name: str, **changes: Any) -> nn.Module:
    fields = type(spec_of(name)).model_fields
    return build(name, num_classes=7, seed=0, **({"depth": 2} if "depth" in fields else {}) | changes)


def pictures(name: str, *, batch: int = 2) -> Tensor:
    size = PRESETS[name].image_size
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def compare(expected: Tensor, found: Tensor, *, tolerance: float) -> None:
    scale = expected.abs().max().item()
    assert scale > 0
    assert (expected - found).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("name", OURS)
def test_gradients_reach_every_weight_and_double_precision_agrees(name: str) -> None:
    model, x = short(name).eval(), pictures(name)
    logits = model(x)
    assert logits.shape == (2, 7)
    (logits * torch.linspace(-1, 1, 14).reshape(2, 7)).sum().backward()
    without = [key for key, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []
    gradient = next(model.parameters()).grad
    assert gradient is not None
    single = gradient.clone()
    model.zero_grad()
    double = model.double()(x.double())
    (double * torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(2, 7)).sum().backward()
    compare(double, logits.double(), tolerance=1e-5)
    compare(gradient_of(model), single.double(), tolerance=1e-4)


def gradient_of(model: nn.Module) -> Tensor:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("name", DISTINCT)
def test_the_captured_graph_computes_the_same_for_any_batch(name: str) -> None:
    model = short(name).eval()
    batch = torch.export.Dim("batch")
    graph = torch.export.export(model, (pictures(name),), dynamic_shapes=({0: batch},)).module()
    x = pictures(name, batch=3)
    with torch.no_grad():
        compare(model(x), graph(x), tolerance=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_model_runs_forward_and_backward_in_shapes(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
        logits = model(torch.empty_like(pictures(name), device="meta"))
    assert logits.shape == (2, PRESETS[name].num_classes)
    logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


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
def test_onnx_computes_the_same_for_any_batch(name: str, changes: dict[str, Any]) -> None:
    from onnx.reference import ReferenceEvaluator

    model = short(name, **changes).eval()
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(model, (pictures(name),), dynamo=True, verbose=False, dynamic_shapes=({0: batch},))
    assert program is not None
    x = pictures(name, batch=3)
    outputs = ReferenceEvaluator(program.model_proto).run(None, {program.model.graph.inputs[0].name: x.numpy()})
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
def test_pictures_of_another_size_are_refused(name: str, changes: dict[str, Any], factor: float) -> None:
    model, size = short(name, **changes), int(PRESETS[name].image_size * factor)
    for training in (True, False):
        with pytest.raises(RuntimeError):
            model.train(training)(torch.zeros(2, 3, size, size))
