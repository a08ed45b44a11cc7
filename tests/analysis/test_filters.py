"""The filters are the first-layer weights laid out as the picture was, in a Mixer as a patch of it; some models have none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from analysis.cli import main
from analysis.filters import first_layer
from pretrain.models.spec import StructuredMlpSpec
from tests.analysis.conftest import MIXER, MLP, write_checkpoint


@pytest.fixture
def weights() -> torch.Tensor:
    """Of 6 neurons over 3 x 4 x 4 inputs."""
    return torch.randn(6, 48, generator=torch.Generator().manual_seed(0))


def test_a_filter_is_the_maximum_over_colours_of_each_pixels_weights(tmp_path: Path, weights: torch.Tensor) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", MLP, {"stem.weight": weights}, image_size=4)
    filters = first_layer(checkpoint)
    assert filters.shape == (6, 4, 4)
    numbers = weights.numpy()
    for neuron in range(6):
        for row in range(4):
            for column in range(4):
                # the model flattens (colour, row, column)
                colours = [numbers[neuron, colour * 16 + row * 4 + column] for colour in range(3)]
                assert filters[neuron, row, column] == max(colours)


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path, weights: torch.Tensor) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", MLP, {"stem.weight": weights}, image_size=4)
    np.testing.assert_array_equal(first_layer(tmp_path / "run"), first_layer(checkpoint))


@pytest.mark.parametrize("num_neurons", [6, 40])
def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str], num_neurons: int) -> None:
    stem = torch.randn(num_neurons, 48, generator=torch.Generator().manual_seed(1))
    write_checkpoint(tmp_path / "run", MLP, {"stem.weight": stem}, image_size=4)
    path = tmp_path / "filters.png"
    assert main(["filters", str(tmp_path / "run"), "--out", str(path)]) == 0
    assert f"picture: {path}" in capsys.readouterr().out
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (720, 720))
        pixels = np.asarray(image.convert("RGB")).reshape(5, 144, 5, 144, 3)
    # a panel is white where there is no neuron, and only there
    assert int((pixels.min(axis=(1, 3, 4)) < 255).sum()) == min(num_neurons, 25)


def test_a_mixers_filters_are_those_of_one_patch(tmp_path: Path) -> None:
    stem = torch.arange(8 * 48.0).view(8, 48)
    write_checkpoint(tmp_path / "run", MIXER, {"stem.weight": stem})
    filters = first_layer(tmp_path / "run")
    assert filters.shape == (8, 4, 4)
    assert filters[1, 2, 3] == 48 + 32 + 2 * 4 + 3  # the last colour has the largest


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = StructuredMlpSpec(kind="structured", form="monarch")
    write_checkpoint(tmp_path / "run", spec, {"head.bias": torch.zeros(2)})
    assert main(["filters", str(tmp_path / "run"), "--out", str(tmp_path / "x.png")]) == 2
    assert "is Monarch 28 x 28, whose first layer has no filters; give an MLP or a Mixer" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, weights: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", MLP, {"stem.weight": weights}, image_size=4)
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    assert main(["filters", str(tmp_path / "run"), "--out", str(tmp_path / "x.png")]) == 2
    assert "model.safetensors has changed" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["filters", str(tmp_path), "--out", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr().err
    assert "holds no checkpoint; give a run directory" in said
    assert said.count("\n") == 1
