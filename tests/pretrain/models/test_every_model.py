"""Properties of every registered model, or one model of each kind at full width with two blocks."""

from typing import Any

import pytest
import torch
from torch import nn

from pretrain.models.build import build
from pretrain.models.presets import PRESETS, spec_of


def short(name: str, **changes: Any) -> nn.Module:
    fields = type(spec_of(name)).model_fields
    return build(
        name, num_classes=7, seed=0, **({"depth": 2} if "depth" in fields else {}) | changes
    )


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
