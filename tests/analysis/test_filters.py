"""The filters are the first-layer weights laid out as the picture was, in a Mixer as a patch of it; some models have none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from analysis.cli import main
from analysis.filters import first_layer
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.spec import StructuredMlpSpec
from pretrain.tracking.pictures import HEAD, filters_of
from tests.analysis.conftest import MIXER, MLP, write_checkpoint
from tests.conftest import Capture


def filters_in(checkpoint: Path) -> np.ndarray:
    weight, side = first_layer(Checkpoint.open(checkpoint))
    return filters_of(weight, side=side)


@pytest.fixture
def weights() -> torch.Tensor:
    """Of 6 neurons over 3 x 4 x 4 inputs."""
    return torch.randn(6, 48, generator=torch.Generator().manual_seed(0))


def test_a_filter_is_the_weight_of_each_pixel_that_is_furthest_from_zero_over_colours(
    tmp_path: Path, weights: torch.Tensor
) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", MLP, {"stem.weight": weights}, image_size=4)
    # the model flattens (colour, row, column)
    expected = [
        [[max((each[c * 16 + r * 4 + x] for c in range(3)), key=abs) for x in range(4)] for r in range(4)] for each in weights
    ]
    for source in (checkpoint, tmp_path / "run"):  # a run stands for its newest checkpoint
        np.testing.assert_array_equal(filters_in(source), np.array(expected, np.float32))


@pytest.mark.parametrize("num_neurons", [6, 40])
def test_the_picture_is_a_png(tmp_path: Path, capsys: Capture, num_neurons: int) -> None:
    stem = torch.randn(num_neurons, 48, generator=torch.Generator().manual_seed(1))
    write_checkpoint(tmp_path / "run", MLP, {"stem.weight": stem}, image_size=4)
    path = tmp_path / "filters.png"
    assert main(["filters", str(tmp_path / "run"), "--out", str(path)]) == 0
    assert f"picture: {path}" in capsys.readouterr().out
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (720, HEAD + 720))
        pixels = np.asarray(image.convert("RGB"))[HEAD:].reshape(5, 144, 5, 144, 3)
    # a panel is white where there is no neuron, and only there
    assert int((pixels.min(axis=(1, 3, 4)) < 255).sum()) == min(num_neurons, 25)


def test_a_mixers_filters_are_those_of_one_patch(tmp_path: Path) -> None:
    stem = torch.arange(8 * 48.0).view(8, 48)
    write_checkpoint(tmp_path / "run", MIXER, {"stem.weight": stem})
    filters = filters_in(tmp_path / "run")
    assert filters.shape == (8, 4, 4)
    assert filters[1, 2, 3] == 48 + 32 + 2 * 4 + 3  # the last colour has the largest


def test_what_has_no_filters_is_one_clear_line(tmp_path: Path, weights: torch.Tensor, capsys: Capture) -> None:
    spec = StructuredMlpSpec(kind="structured", form="monarch")
    write_checkpoint(tmp_path / "structured", spec, {"head.bias": torch.zeros(2)})
    damaged = write_checkpoint(tmp_path / "damaged", MLP, {"stem.weight": weights}, image_size=4) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("structured", "is Monarch 28 x 28, whose first layer has no filters; give an MLP or a Mixer"),
        ("damaged/checkpoints/step-00000010", "model.safetensors has changed"),
        ("empty", "holds no checkpoint; give a run directory"),
    ):
        assert main(["filters", str(tmp_path / name), "--out", str(tmp_path / "x.png")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "x.png").exists()
