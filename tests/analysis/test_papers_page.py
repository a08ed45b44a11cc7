"""The numbers of docs/papers.md that no other test computes."""

import re

import numpy as np
import pytest
import torch

from pretrain.models.build import build_model
from pretrain.models.cost import width_and_connections
from pretrain.models.presets import spec_of
from tests.papers_page import PAGE

LARGE = {"num_tokens": 256, "num_channels": 588, "depth": 8, "expansion": 4.0, "patch_size": 14}


def numbers_below(heading: str) -> list[list[float]]:
    """Return the numbers of each row of the first table below a heading."""
    lines = PAGE.read_text().partition(f"\n## {heading}")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            return rows
        rows.append([float(each) for each in re.findall(r"[\d.]+", line)])
    return rows


@pytest.mark.slow
def test_the_table_of_the_largest_singular_value() -> None:
    rows = numbers_below("The Mixer paper: the largest singular value of an SW-MLP")
    assert len(rows) == 3
    for gamma, m, p, *shown in rows:
        shape = (int(gamma * m), int(m))
        largest = []
        for seed in range(6):
            generator = np.random.default_rng(seed)
            weights = generator.standard_normal(shape) / np.sqrt(p * m)
            largest.append(np.linalg.norm(weights * (generator.random(shape) < p), 2))
        edge = 1 + gamma**0.5
        corrections = [3 * edge**2 * gamma**0.5 * (1 - p) / (p * q * m) for q in (1, gamma)]
        formulas = [(edge**2 + each) ** 0.5 for each in corrections]
        assert shown == pytest.approx([np.mean(largest), *formulas, edge], abs=6e-4)


def test_the_permutations_of_a_large_mixer() -> None:
    """The permutations take 38.5 MB, half of it in a checkpoint."""
    assert "38.5 MB" in PAGE.read_text()
    with torch.device("meta"):
        spec = spec_of("rp_mixer_b_w", **LARGE)
        model = build_model(spec, num_classes=1000, image_size=224)
    stored = {name: each for name, each in model.named_buffers() if each.dtype == torch.int32}
    num_bytes = sum(4 * each.numel() for each in stored.values())
    assert num_bytes / 1e6 == pytest.approx(38.5, abs=0.05)
    saved = sum(
        4 * model.state_dict()[name].numel() for name in stored if name in model.state_dict()
    )
    assert 2 * saved == num_bytes


def test_the_connections_of_large_mixers() -> None:
    """The mixings' 16.26 G operations, and the explanation of gamma = 4.57."""
    page = PAGE.read_text()
    _, omega = width_and_connections(spec_of("mixer_b_w", **LARGE), image_size=224)
    assert f"{4 * 8 * 2 * omega / 1e9:.2f} G" in page
    _, without_gamma = width_and_connections(spec_of("mixer_b_w", expansion=1.0), image_size=224)
    assert f"{round(without_gamma):,}" in page
    assert f"{290_217_984 / without_gamma:.4f}" in page
