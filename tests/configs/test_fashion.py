"""The table of README's first result has the committed results."""

import importlib
from types import ModuleType

import pandas as pd
import pytest
import torch

from tests.ranks import REPOSITORY


@pytest.fixture
def fashion(benchmarks: None) -> ModuleType:
    return importlib.import_module("fashion")


def test_readme_has_the_table_of_the_results(fashion: ModuleType) -> None:
    results, page = pd.read_csv(fashion.RESULTS), (REPOSITORY / "README.md").read_text()
    assert "\n".join(fashion.lines_of(results)) in page


def test_a_row_is_the_mean_and_deviation_over_seeds(fashion: ModuleType) -> None:
    made = pd.DataFrame(
        {
            "model": ["one", "two", "two", "two"],
            "top1": [0.9, 0.90, 0.92, 0.94],
            "parameters": [float("nan"), 1000, 1000, 1000],
            "minutes": [1, 1, 2, 3],
        }
    )
    assert fashion.lines_of(made)[2:] == [
        "| two | 92.0 ± 2.0 | 1,000 | 2.0 |",
        "| one | 90.0 | - | 1.0 |",
    ]


def test_the_peer_sees_crops_of_two_pixels_and_flips(fashion: ModuleType) -> None:
    torch.manual_seed(0)
    image = torch.arange(1.0, 37).reshape(1, 1, 6, 6)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))[0, 0]
    crops = [padded[y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
    views = {tuple(view.flatten().tolist()) for crop in crops for view in (crop, crop.flip(1))}
    augmented = fashion.augment(image.expand(2000, -1, -1, -1)).flatten(1)
    assert {tuple(view) for view in augmented.tolist()} == views
