"""The MLPs of *Scaling MLPs* compared with independent code: any norm, activation, expansion and
depth; batch statistics, dropout."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pretrain.models.build import build_model, pooled_features
from pretrain.models.image_model import ImageModel
from pretrain.models.layers.batch_norm import BatchNorm1d, BatchNorm2d
from pretrain.models.spec import MlpSpec

IMAGE, WIDTH = 4, 10


def spec_with(**fields: object) -> MlpSpec:
    return MlpSpec(kind="mlp", **{"depth": 3, "width": WIDTH, **fields})  # type: ignore[arg-type]


BOTH = [{"bottleneck": "inverted"}, {"bottleneck": "none"}]
KINDS: dict[str, dict[str, object]] = {
    "inverted": {},
    "standard": {"bottleneck": "none"},
    "standard activation first": {"bottleneck": "none", "activation_first": True},
    "deep": {"depth": 7, "activation": "relu"},
    "batch norm": {"norm": "batch"},
    "no norm": {"norm": "none", "activation": "silu"},
    "narrow": {"expansion": 0.5},
    "odd expansion": {"expansion": 2.7, "width": 7},
    "standard tanh": {"activation": "tanh", "bottleneck": "none"},
    "linear": {"activation": "identity"},
    "norm after": {"norm_place": "after"},
    "no skip": {"skip_every": 0},
    "standard with skip": {"skip_every": 1, "bottleneck": "none"},
    "standard with skip, norm after": {
        "skip_every": 1,
        "bottleneck": "none",
        "norm_place": "after",
    },
    "skip every two": {"skip_every": 2, "depth": 6},
    "standard skip every three, activation first": {
        "skip_every": 3,
        "depth": 6,
        "bottleneck": "none",
        "activation_first": True,
    },
    "no bias": {"bias": False},
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "relu": lambda x: x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: 2 / (1 + torch.exp(-2 * x)) - 1,
    "identity": lambda x: x,
}


def built(spec: MlpSpec) -> ImageModel:
    """Return a float64 model without biases of 0, scales of 1 and initial statistics, which would
    hide a wrong place."""
    model = build_model(spec, num_classes=3, image_size=IMAGE, seed=0).double()
    generator = torch.Generator().manual_seed(99)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "running_mean", "running_var")) or (
            "norm" in name and name.endswith("weight")
        ):
            tensor.data.add_(
                torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype), alpha=0.5
            )
    return model


def images(count: int = 6) -> Tensor:
    return torch.randn(
        count, 3, IMAGE, IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )


def normalized(
    x_BM: Tensor, state: dict[str, Tensor], name: str, *, norm: str, training: bool
) -> Tensor:
    if norm == "none":
        return x_BM
    if norm == "layer":
        mean, variance = x_BM.mean(1, keepdim=True), x_BM.var(1, keepdim=True, correction=0)
    elif training:
        mean, variance = x_BM.mean(0), x_BM.var(0, correction=0)
    else:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    return (x_BM - mean) / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[
        f"{name}.bias"
    ]


def linear(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)


def by_the_paper(
    spec: MlpSpec, state: dict[str, Tensor], x_BCHW: Tensor, *, training: bool
) -> Tensor:
    """Return features and logits layer by layer: z + Wc act(We norm(z)), act(W norm(z)) or W
    act(norm(z))."""
    z, act = linear(x_BCHW.reshape(len(x_BCHW), -1), state, "stem"), ACTIVATIONS[spec.activation]
    skip_every = (
        {"inverted": 1, "none": 0}[spec.bottleneck] if spec.skip_every is None else spec.skip_every
    )
    for number in range(spec.depth):
        block = (
            f"blocks.{number // skip_every}.{number % skip_every}"
            if skip_every > 1
            else f"blocks.{number}"
        )
        if not skip_every or number % skip_every == 0:
            before = z
        norm = functools.partial(
            normalized, state=state, name=f"{block}.norm", norm=spec.norm, training=training
        )
        z = norm(z) if spec.norm_place == "before" else z
        if spec.bottleneck == "inverted":
            z = linear(act(linear(z, state, f"{block}.expand")), state, f"{block}.contract")
        elif spec.activation_first:
            z = linear(act(z), state, f"{block}.linear")
        else:
            z = act(linear(z, state, f"{block}.linear"))
        if skip_every and number % skip_every == skip_every - 1:
            z = before + z
        z = norm(z) if spec.norm_place == "after" else z
    return torch.cat([z, linear(z, state, "head")], dim=1)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
def test_the_model_and_its_gradients_are_the_papers_formula(
    fields: dict[str, object], training: bool
) -> None:
    spec = spec_with(**fields)
    model = built(spec).train(training)
    weights = dict(model.named_parameters())
    expected = by_the_paper(
        spec,
        {name: x.clone() for name, x in model.named_buffers()} | weights,
        images(),
        training=training,
    )
    logits = model(images())
    torch.testing.assert_close(logits, expected[:, spec.width :])
    signs = images()[:, 0, 0, :3]  # sums of batch-normalized numbers do not depend on the weights
    gradients = [
        torch.autograd.grad((y * signs).sum(), [*weights.values()])
        for y in (logits, expected[:, spec.width :])
    ]
    torch.testing.assert_close(*gradients)
    if spec.norm != "batch":
        torch.testing.assert_close(pooled_features(model, images()), expected[:, : spec.width])


def test_batch_norm_gathers_running_statistics_in_training_alone() -> None:
    """A step adds a tenth of the batch's mean and of its unbiased variance."""
    model, x = built(spec_with(norm="batch")), images()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()(x)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    model.train()(x)
    z = x.reshape(6, -1) @ model.get_parameter("stem.weight").T + model.get_parameter("stem.bias")
    name = "blocks.0.norm"
    mean, variance = (before[f"{name}.running_{kind}"] for kind in ("mean", "var"))
    torch.testing.assert_close(
        model.get_buffer(f"{name}.running_mean"), 0.9 * mean + 0.1 * z.mean(0)
    )
    torch.testing.assert_close(
        model.get_buffer(f"{name}.running_var"), 0.9 * variance + 0.1 * z.var(0)
    )


@pytest.mark.parametrize(
    ("fields", "num_dropouts"),
    [({"expansion": 1.0}, 2), (BOTH[1], 1)],
    ids=["inverted", "standard"],
)
def test_dropout_scales_what_it_keeps_and_only_in_training(
    fields: dict[str, object], num_dropouts: int
) -> None:
    """For Wc = 1 two dropouts multiply: 3 of 4 entries of a block's update are 0, the others are 4
    times as large."""
    torch.manual_seed(0)
    spec = spec_with(depth=1, width=400, dropout=0.5, **fields)
    model, x = built(spec), images(20)
    if spec.bottleneck == "inverted":
        torch.nn.init.eye_(model.get_parameter("blocks.0.contract.weight"))
        torch.nn.init.zeros_(model.get_parameter("blocks.0.contract.bias"))
    skip = (
        model.embed(x)
        if spec.bottleneck == "inverted"
        else torch.zeros(20, 400, dtype=torch.float64)
    )
    whole = model.eval().forward_features(x)
    expected = by_the_paper(spec, dict(model.named_parameters()), x, training=False)[:, :400]
    torch.testing.assert_close(whole, expected)
    kept, added = model.train().forward_features(x) - skip, whole - skip
    is_kept = kept.abs() > 1e-9
    assert is_kept.double().mean() == pytest.approx(0.5**num_dropouts, abs=0.03)
    torch.testing.assert_close(kept[is_kept], 2**num_dropouts * added[is_kept])


@pytest.mark.parametrize("norm", [BatchNorm1d, BatchNorm2d])
def test_bf16_weights_beside_fp32_statistics_normalize_as_fp32_does(
    norm: type[BatchNorm1d | BatchNorm2d],
) -> None:
    size = (6, 5) if norm is BatchNorm1d else (6, 5, 3, 3)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, mixed = norm(5), norm(5)
    mixed.weight.data, mixed.bias.data = mixed.weight.data.bfloat16(), mixed.bias.data.bfloat16()
    torch.testing.assert_close(mixed(x), exact(x.float()).bfloat16())
    assert mixed.running_var is not None and mixed.running_var.dtype == torch.float32
    torch.testing.assert_close(mixed.running_var, exact.running_var)
    torch.testing.assert_close(mixed.eval()(x), exact.eval()(x.float()).bfloat16())
