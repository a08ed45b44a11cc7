"""Initial weights of the mixings: squared singular values follow the Marchenko-Pastur law, and the
largest value tends to 1 + sqrt(gamma).

The bounds hold for 30 seeds of such matrices, and fail for a standard deviation that is 5 % off.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pretrain.models.build import build_model
from pretrain.models.spec import MixerSpec

SIDE = 196  # S (14 x 14 patches); C is another number
CHANNELS = 160


def mixing_weights(**fields: object) -> dict[str, Tensor]:
    spec = MixerSpec(kind="mixer", patch_size=2, num_channels=CHANNELS, depth=2, **fields)  # type: ignore[arg-type]
    model = build_model(spec, num_classes=2, image_size=28, seed=0)
    found = {
        name: module.weight.detach().double()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "mixing" in name
    }
    assert len(found) == 4 * spec.layers_per_mixing
    return found


def marchenko_pastur(gamma: float, num_points: int = 20_001) -> tuple[np.ndarray, np.ndarray]:
    """Return x and the fraction of the min(S, gamma S) squared singular values below x. The matrix
    is gamma S x S with entries N(0, 1/S).

    The density is sqrt((b - x)(x - a)) / (2 pi x) with a and b = (1 -+ sqrt(gamma))^2. Its integral
    is min(1, gamma). The sum runs over the angle t of x = middle - radius cos t, at the middles of
    small steps. (For gamma = 1 the edge is x = 0.)
    """
    low, high = (1 - math.sqrt(gamma)) ** 2, (1 + math.sqrt(gamma)) ** 2
    edges = np.linspace(0, math.pi, num_points)
    angle = (edges[1:] + edges[:-1]) / 2
    radius = (high - low) / 2
    x = (high + low) / 2 - radius * np.cos(angle)
    share = np.cumsum((radius * np.sin(angle)) ** 2 / (2 * math.pi * x)) * (edges[1] - edges[0])
    assert share[-1] == pytest.approx(min(1.0, gamma), abs=1e-3)
    return x, share / share[-1]


def spacings_from_law(weight: Tensor, *, gamma: float) -> float:
    """Return Kolmogorov's distance between the two distributions of squared singular values, in
    units of 1 / their number."""
    squares = np.sort(torch.linalg.svdvals(weight).square().numpy())
    law = np.interp(squares, *marchenko_pastur(gamma), left=0.0, right=1.0)
    steps = np.arange(len(squares) + 1) / len(squares)
    return float(max(np.abs(law - steps[1:]).max(), np.abs(law - steps[:-1]).max())) * len(squares)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 4.0])
def test_both_weights_of_a_mixers_mixings_meet_marchenko_and_pastur(gamma: float) -> None:
    """W2 is S x gamma S with variance 1/S: it has the singular values of a gamma S x S matrix,
    too."""
    for name, weight in mixing_weights(expansion=gamma).items():
        size = SIDE if "token" in name else CHANNELS
        expected = (round(gamma * size), size) if "inner" in name else (size, round(gamma * size))
        assert weight.shape == expected, name
        assert spacings_from_law(weight, gamma=gamma) < 4, name
        assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(
            1 + math.sqrt(gamma), rel=0.05
        ), name


def test_all_weights_of_an_s_mixer_meet_the_law_of_gamma_1() -> None:
    for name, weight in mixing_weights(layers_per_mixing=1).items():
        assert spacings_from_law(weight, gamma=1) < 4, name
        assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(2, rel=0.05), name


def test_torchs_initial_weights_are_smaller_and_can_be_asked_for() -> None:
    """Uniform within 1 / sqrt(inputs) has a third of the variance; for W2 the variance is also
    divided by gamma."""
    for name, weight in mixing_weights(init="torch").items():
        limit = weight.shape[1] ** -0.5
        assert 0.999 * limit < float(weight.abs().max()) <= limit, name
        by_inputs = 3**-0.5 if "inner" in name else 12**-0.5
        assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(
            3 * by_inputs, rel=0.05
        ), name
        assert spacings_from_law(weight, gamma=4) > 50, name


def test_the_skip_path_of_a_first_block_keeps_the_size_of_what_it_reads() -> None:
    """The S x S0 entries of W~ are N(0, 1/S0), without bias."""
    spec = MixerSpec(kind="mixer", patch_size=2, num_channels=8, num_tokens=300, depth=1)
    weight = build_model(spec, num_classes=2, image_size=28, seed=0).get_parameter(
        "blocks.0.skip.linear.weight"
    )
    assert weight.shape == (300, SIDE)
    assert float(weight.detach().square().mean()) == pytest.approx(1 / SIDE, rel=0.02)
