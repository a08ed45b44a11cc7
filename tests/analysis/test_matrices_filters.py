"""Filters are first-layer weights in the layout of the image, or of a patch in a Mixer."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from analysis.cli import main
from analysis.matrices.filters import Layer, first_layer, sheet
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.spec import StructuredMlpSpec
from pretrain.tracking.pictures import HEAD, Color, filters_of
from tests.analysis.conftest import MIXER, MLP, write_checkpoint
from tests.conftest import Capture
from tests.errors import printed_errors


def filters_in(checkpoint: Path, color: Color = "max") -> np.ndarray:
    layer = first_layer(Checkpoint.open(checkpoint))
    return filters_of(layer.weight_NF, side=layer.side, color=color)


def random_weights(num_neurons: int = 6) -> torch.Tensor:
    """Return weights of neurons over 3 x 4 x 4 inputs."""
    return torch.randn(num_neurons, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("color", get_args(Color))
def test_a_filter_is_one_weight_of_each_pixel(tmp_path: Path, color: Color) -> None:
    """The model flattens images as (color, row, column)."""
    weights = random_weights()
    checkpoint = write_checkpoint(tmp_path / "run", MLP, {"stem.weight": weights}, image_size=4)
    colors = weights.numpy().reshape(6, 3, 4, 4)
    expected = np.take_along_axis(colors, abs(colors).argmax(1)[:, None], axis=1)[:, 0]
    if color == "max":
        expected = colors.max(1)
    for source in (checkpoint, tmp_path / "run"):  # a run means its newest checkpoint
        np.testing.assert_array_equal(filters_in(source, color), expected)


def test_a_mixers_filters_are_those_of_one_patch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", MIXER, {"stem.weight": torch.arange(8 * 48.0).view(8, 48)})
    filters = filters_in(tmp_path / "run")
    assert filters.shape == (8, 4, 4)
    assert filters[1, 2, 3] == 48 + 32 + 2 * 4 + 3  # the last color has the largest


@pytest.mark.parametrize(("num_neurons", "which", "columns"), [(6, "first", 3), (40, "largest", 5)])
def test_checkpoints_are_side_by_side(
    tmp_path: Path, capsys: Capture, num_neurons: int, which: str, columns: int
) -> None:
    stem, run, path = random_weights(num_neurons), str(tmp_path / "run"), tmp_path / "filters"
    write_checkpoint(tmp_path / "run", MLP, {"stem.weight": stem}, image_size=4)
    assert main(["filters", run, run, "--out", str(path), "--which", which]) == 0
    with Image.open(path.with_suffix(".png")) as image:
        assert (image.format, image.size) == ("PNG", (2 * columns * 144 + 24, HEAD + columns * 144))
        both = np.asarray(image.convert("RGB"))[HEAD:]
    left = both[:, : columns * 144]
    np.testing.assert_array_equal(left, both[:, columns * 144 + 24 :])  # one checkpoint twice
    # by default the maximum over colors, as Scaling MLPs draws it (Appendix B)
    expected = sheet([Layer("", stem, 4)], which, 25)
    np.testing.assert_array_equal(left, np.asarray(expected)[HEAD:])
    # a panel is white only if it has no neuron
    panels = left.reshape(columns, 144, columns, 144, 3).min(axis=(1, 3, 4))
    assert (panels < 255).sum() == min(num_neurons, 25)
    (checkpoint,) = json.loads(path.with_suffix(".json").read_text())["inputs"].values()
    assert len(checkpoint) == 64 and "run, step 10" in capsys.readouterr().out
    rows = pd.read_parquet(path.with_suffix(".parquet"))
    assert rows.neuron.tolist() == [*range(num_neurons)] * 2
    assert (tmp_path / "filters-locality.svg").exists()


def test_the_first_neurons_and_the_largest() -> None:
    weights = random_weights()
    weights[4] *= 10

    def drawn(shown: torch.Tensor, which: str) -> np.ndarray:
        return np.asarray(sheet([Layer("x", shown, 4)], which, 1))[HEAD:]

    alone = [drawn(weights[n : n + 1], "first") for n in (0, 4)]
    np.testing.assert_array_equal([drawn(weights, which) for which in ("first", "largest")], alone)
    assert not np.array_equal(*alone)


def test_locality_in_closed_form() -> None:
    """Filters: one pixel, equal pixels, two pixels at a distance, no weights, noise."""
    side = 64
    kinds = torch.zeros(4, 3, side, side)
    kinds[0, 1, 5, 9] = -2.0
    kinds[1] = torch.tensor([1.0, -2.0, 3.0]).view(3, 1, 1)
    kinds[2, 0, 10, 10] = kinds[2, 2, 10, 42] = 1.0
    found = Layer("x", kinds.flatten(1), side).locality
    radius = ((side**2 - 1) / 6) ** 0.5 / side
    assert found.area.tolist() == pytest.approx([1 / side**2, 1.0, 2 / side**2, 0.0], abs=1e-12)
    assert found.radius.tolist() == pytest.approx([0, radius, 16 / side, 0], abs=1e-9)
    single = -1 / (side**2 - 1)  # one pixel of many: the correlation is nearly 0
    expected = [single, np.nan, single, np.nan]
    assert found.neighbors.tolist() == pytest.approx(expected, abs=1e-3, nan_ok=True)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(40, 3, side, side, generator=generator)
    uniform = torch.rand(40, 3 * side**2, generator=generator) - 0.5
    for kind, area in ((normal.flatten(1), 3 / 5), (uniform, 15 / 19)):
        assert Layer("x", kind, side).locality.area.mean() == pytest.approx(area, abs=0.005)
    noise, offset = (Layer("x", (normal + x).flatten(1), side).locality for x in (0, 10))
    assert offset.neighbors.tolist() == pytest.approx(noise.neighbors.tolist(), abs=1e-4)
    # horizontal neighbors share one of two summands, vertical neighbors none
    smooth = (normal[..., 1:] + normal[..., :-1])[..., :32, :32].flatten(1)
    assert Layer("x", smooth, 32).locality.neighbors.mean() == pytest.approx(1 / 4, abs=0.01)


@pytest.mark.parametrize(
    "name", ["structured", "damaged/checkpoints/step-00000010", "nan", "empty"]
)
def test_runs_without_filters(tmp_path: Path, capsys: Capture, name: str) -> None:
    spec, stem = StructuredMlpSpec(kind="structured", form="monarch"), random_weights()
    write_checkpoint(tmp_path / "structured", spec, {"head.bias": torch.zeros(2)})
    write_checkpoint(tmp_path / "nan", MLP, {"stem.weight": stem / 0}, image_size=4)
    damaged = write_checkpoint(tmp_path / "damaged", MLP, {"stem.weight": stem}, image_size=4)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    (tmp_path / "empty").mkdir()
    assert main(["filters", str(tmp_path / name), "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / name) in error and error.count("\n") == 1
    codes = {"structured": "unsupported", "nan": "not-finite"}
    if name in codes:
        assert [found for _, found in printed_errors(error)] == [codes[name]]
    assert not list(tmp_path.glob("x*"))
