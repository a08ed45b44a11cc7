"""The filters are the first-layer weights laid out as the picture was, in a Mixer as a patch of it;
some models have none."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from analysis.cli import main
from analysis.matrices.filters import Layer, first_layer, sheet
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.spec import StructuredMlpSpec
from pretrain.tracking.pictures import HEAD, filters_of
from tests.analysis.conftest import MIXER, MLP, write_checkpoint
from tests.conftest import Capture
from tests.errors import printed_errors


def filters_in(checkpoint: Path) -> np.ndarray:
    layer = first_layer(Checkpoint.open(checkpoint))
    return filters_of(layer.weight_NF, side=layer.side)


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
        [
            [max((each[c * 16 + r * 4 + x] for c in range(3)), key=abs) for x in range(4)]
            for r in range(4)
        ]
        for each in weights
    ]
    for source in (checkpoint, tmp_path / "run"):  # a run stands for its newest checkpoint
        np.testing.assert_array_equal(filters_in(source), np.array(expected, np.float32))


@pytest.mark.parametrize(("num_neurons", "which"), [(6, "first"), (40, "largest"), (40, "all")])
def test_checkpoints_stand_side_by_side(
    tmp_path: Path, capsys: Capture, num_neurons: int, which: str
) -> None:
    stem = torch.randn(num_neurons, 48, generator=torch.Generator().manual_seed(1))
    write_checkpoint(tmp_path / "run", MLP, {"stem.weight": stem}, image_size=4)
    path = tmp_path / "filters"
    assert (
        main(
            [
                "filters",
                str(tmp_path / "run"),
                str(tmp_path / "run"),
                "--out",
                str(path),
                "--which",
                which,
            ]
        )
        == 0
    )
    columns = 7 if which == "all" and num_neurons == 40 else 3 if num_neurons == 6 else 5
    with Image.open(path.with_suffix(".png")) as image:
        assert (image.format, image.size) == ("PNG", (2 * columns * 144 + 24, HEAD + columns * 144))
        both = np.asarray(image.convert("RGB"))
    left = both[HEAD:, : columns * 144]
    np.testing.assert_array_equal(
        left, both[HEAD:, columns * 144 + 24 :]
    )  # the same checkpoint twice
    pixels = left.reshape(columns, 144, columns, 144, 3)
    # a panel is white where there is no neuron, and only there
    assert int((pixels.min(axis=(1, 3, 4)) < 255).sum()) == (
        num_neurons if which == "all" else min(num_neurons, 25)
    )
    facts = json.loads(path.with_suffix(".json").read_text())
    (checkpoint,) = facts["inputs"].values()
    assert len(checkpoint) == 64 and "run, step 10" in capsys.readouterr().out
    rows = pq.read_table(path.with_suffix(".parquet")).to_pylist()
    assert [row["neuron"] for row in rows] == [*range(num_neurons)] * 2
    assert (tmp_path / "filters-locality.svg").exists()


def test_the_first_neurons_and_the_largest(weights: torch.Tensor) -> None:
    weights[4] *= 10
    first, largest = (
        sheet([Layer("x", weights, 4)], which=which, count=1) for which in ("first", "largest")
    )
    alone = [sheet([Layer("x", weights[n : n + 1], 4)], which="first", count=1) for n in (0, 4)]
    for drawn, expected in zip((first, largest), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(drawn)[HEAD:], np.asarray(expected)[HEAD:])
    assert not np.array_equal(*(np.asarray(each)[HEAD:] for each in alone))


def test_locality_in_closed_form() -> None:
    """One pixel, all pixels alike, two pixels at a distance, noise."""
    side = 64
    kinds = torch.zeros(4, 3, side, side)
    kinds[0, 1, 5, 9] = -2.0
    kinds[1] = torch.tensor([1.0, -2.0, 3.0]).view(3, 1, 1)
    kinds[2, 0, 10, 10] = kinds[2, 2, 10, 42] = 1.0
    found = Layer("x", kinds.flatten(1), side).locality
    assert found["area"].tolist() == pytest.approx([1 / side**2, 1.0, 2 / side**2, 0.0], abs=1e-12)
    assert found["radius"].tolist() == pytest.approx(
        [0, ((side**2 - 1) / 6) ** 0.5 / side, 16 / side, 0], abs=1e-9
    )
    assert found["neighbors"].tolist() == pytest.approx([0, 1, 0, 0], abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(40, 3 * side**2, generator=generator)
    uniform = torch.rand(40, 3 * side**2, generator=generator) - 0.5
    assert Layer("x", normal, side).locality["area"].mean() == pytest.approx(3 / 5, abs=0.005)
    assert Layer("x", uniform, side).locality["area"].mean() == pytest.approx(15 / 19, abs=0.005)
    smooth = (normal.view(40, 3, side, side)[..., 1:] + normal.view(40, 3, side, side)[..., :-1])[
        ..., :32, :32
    ]
    across, down = (
        1 / 2,
        0,
    )  # neighbours in a row share one of two summands, those in a column nothing
    assert Layer("x", smooth.flatten(1), 32).locality["neighbors"].mean() == pytest.approx(
        (across + down) / 2, abs=0.01
    )


def test_a_mixers_filters_are_those_of_one_patch(tmp_path: Path) -> None:
    stem = torch.arange(8 * 48.0).view(8, 48)
    write_checkpoint(tmp_path / "run", MIXER, {"stem.weight": stem})
    filters = filters_in(tmp_path / "run")
    assert filters.shape == (8, 4, 4)
    assert filters[1, 2, 3] == 48 + 32 + 2 * 4 + 3  # the last colour has the largest


def test_what_has_no_filters_is_one_clear_line(
    tmp_path: Path, weights: torch.Tensor, capsys: Capture
) -> None:
    spec = StructuredMlpSpec(kind="structured", form="monarch")
    write_checkpoint(tmp_path / "structured", spec, {"head.bias": torch.zeros(2)})
    damaged = (
        write_checkpoint(tmp_path / "damaged", MLP, {"stem.weight": weights}, image_size=4)
        / "model.safetensors"
    )
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    write_checkpoint(tmp_path / "nan", MLP, {"stem.weight": weights / 0}, image_size=4)
    (tmp_path / "empty").mkdir()
    for name, code in (
        ("structured", "unsupported"),
        ("damaged/checkpoints/step-00000010", None),
        ("nan", "not-finite"),
        ("empty", None),
    ):
        assert main(["filters", str(tmp_path / name), "--out", str(tmp_path / "x")]) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / name) in error and error.count("\n") == 1
        if code is not None:
            assert [found for _, found in printed_errors(error)] == [code]
    assert not list(tmp_path.glob("x*"))
