"""Models: counts as literals, and known to timm."""

import pytest
import timm
import torch

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from pretrain.models.build import build_model, forward_flops, num_parameters
from pretrain.models.presets import PRESETS, spec_of


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


def test_timm_creates_our_models_by_name() -> None:
    model = timm.create_model("mlp_b6_wi256", num_classes=7, img_size=16)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)
    assert model.default_cfg["classifier"] == "head"
    model.reset_classifier(4)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 4)
    assert set(timm.list_models("*_wi*")) >= {name for name in PRESETS if name.startswith("mlp")}
