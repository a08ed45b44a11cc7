"""Models: counts as literals, gradients everywhere, equal to a few independent lines, and known to timm."""

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from pretrain.models.build import build_model, pooled_features
from pretrain.models.cost import forward_flops, num_parameters
from pretrain.models.presets import PRESETS, spec_of
from pretrain.models.spec import MixerSpec, MlpSpec

SMALL = [
    MlpSpec(kind="mlp", depth=2, width=12),
    MlpSpec(kind="mlp", depth=2, width=12, bottleneck="none"),
    MixerSpec(kind="mixer", patch_size=4, num_channels=10, depth=2, expansion=2.0),
]


@pytest.mark.parametrize(
    ("name", "count"),
    [  # with the 11,230 classes of the public checkpoints; paper B prints 9, 24, 74, 12, 37, 124 M
        ("mlp_b6_wi256", 9_188_574),
        ("mlp_b6_wi512", 24_657_374),
        ("mlp_b6_wi1024", 74_469_342),
        ("mlp_b12_wi256", 12_345_054),
        ("mlp_b12_wi512", 37_261_790),
        ("mlp_b12_wi1024", 124_843_998),
    ],
)
def test_parameter_counts_of_the_pretrained_mlps(name: str, count: int) -> None:
    with torch.device("meta"):
        assert num_parameters(build_model(spec_of(name), num_classes=11_230, image_size=64)) == count


def test_the_mlp_of_the_efficiency_table() -> None:
    """B-12/Wi-768 on ImageNet-1k: 66.89 M parameters, 66.8 M multiply-adds."""
    spec = spec_of("mlp_b12_wi768")
    with torch.device("meta"):
        count = num_parameters(build_model(spec, num_classes=1000, image_size=64))
    assert round(count / 1e6, 2) == 66.89
    assert round(forward_flops(spec, num_classes=1000, image_size=64) / 2e6, 1) == 66.8


def test_mixer_b_16_has_timms_count() -> None:
    with torch.device("meta"):
        ours = build_model(spec_of("mixer_b_16"), num_classes=1000, image_size=224)
        theirs = timm.create_model("mixer_b16_224")
    assert num_parameters(ours) == num_parameters(theirs) == 59_880_472


@pytest.mark.parametrize("spec", SMALL, ids=["inverted", "standard", "mixer"])
def test_every_weight_gets_a_gradient(spec: MlpSpec | MixerSpec) -> None:
    model = build_model(spec, num_classes=3, image_size=8, seed=0)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


@pytest.mark.parametrize("spec", SMALL, ids=["inverted", "standard", "mixer"])
def test_weights_are_a_function_of_the_seed(spec: MlpSpec | MixerSpec) -> None:
    torch.manual_seed(1)
    one = build_model(spec, num_classes=3, image_size=8, seed=5).state_dict()
    torch.manual_seed(2)
    two = build_model(spec, num_classes=3, image_size=8, seed=5).state_dict()
    other = build_model(spec, num_classes=3, image_size=8, seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["stem.weight"], other["stem.weight"])


def norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def test_the_inverted_bottleneck_mlp_is_the_papers_formula() -> None:
    model = build_model(SMALL[0], num_classes=3, image_size=8, seed=0)
    x, w = torch.randn(2, 3, 8, 8), dict(model.named_parameters())
    z = linear(x.reshape(2, -1), w, "stem")
    for block in ("blocks.0", "blocks.1"):
        z = z + linear(gelu(linear(norm(z, w, f"{block}.norm"), w, f"{block}.expand")), w, f"{block}.contract")
    torch.testing.assert_close(model(x), linear(z, w, "head"))


def test_the_mixer_is_the_papers_formula() -> None:
    model = build_model(SMALL[2], num_classes=3, image_size=8, seed=0)
    x, w = torch.randn(2, 3, 8, 8), dict(model.named_parameters())
    patches = torch.stack([x[:, :, i : i + 4, j : j + 4].reshape(2, -1) for i in (0, 4) for j in (0, 4)], dim=1)
    z = linear(patches, w, "stem")
    for block in ("blocks.0", "blocks.1"):
        across = norm(z, w, f"{block}.token_norm").transpose(1, 2)
        mixed = linear(gelu(linear(across, w, f"{block}.token_mixing.inner")), w, f"{block}.token_mixing.outer")
        u = z + mixed.transpose(1, 2)
        inner = gelu(linear(norm(u, w, f"{block}.channel_norm"), w, f"{block}.channel_mixing.inner"))
        z = u + linear(inner, w, f"{block}.channel_mixing.outer")
    pooled = norm(z, w, "norm").mean(dim=1)
    torch.testing.assert_close(pooled_features(model, x), pooled)
    torch.testing.assert_close(model(x), linear(pooled, w, "head"))


def test_timm_creates_our_models_by_name() -> None:
    model = timm.create_model("mlp_b6_wi256", num_classes=7, img_size=16)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)
    assert model.default_cfg["classifier"] == "head"
    model.reset_classifier(4)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 4)
    assert set(timm.list_models("*_wi*")) >= {name for name in PRESETS if name.startswith("mlp")}
