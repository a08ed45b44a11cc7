"""Changes of pictures are what they are called, and what is measured is what plain computations
find."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from analysis.cli import main
from analysis.features.invariance import changes
from analysis.output import hash_of
from pretrain.augment.augmentation import pixel_order
from pretrain.models.spec import MixerSpec
from tests.analysis.test_features import opened, plain_cka
from tests.conftest import Capture
from tests.finetune.tiny import judge, model_of, normalised, write_folder

MIXER = MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=1, expansion=2)


def changed(kind: str, amount: float, direction: str, images: Tensor) -> Tensor:
    """By hand."""
    size, out = images.shape[2], torch.zeros_like(images)
    rows, columns = np.mgrid[:size, :size]
    if kind == "none":
        return images
    if kind == "permutation":
        return images.flatten(2)[:, :, pixel_order(0, size=size)].reshape(images.shape)
    if kind == "flip":
        return (
            images[:, :, :, list(range(size))[::-1]]
            if direction == "left to right"
            else images[:, :, list(range(size))[::-1]]
        )
    down, right = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}[direction]
    for row, column in zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True):
        there = row - down * int(amount), column - right * int(amount)
        if min(there) >= 0 and max(there) < size:
            out[:, :, row, column] = images[:, :, there[0], there[1]]
    return out


def test_what_is_measured_is_what_a_plain_computation_finds(
    tmp_path: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("finetune.evaluate.report.draw", lambda *words, **also: [])
    place, out = write_folder(tmp_path / "mixer", shapes, spec=MIXER), tmp_path / "out" / "found"
    ordered = write_folder(tmp_path / "ordered", shapes, spec=MIXER, pixel_permutation=4)
    words = [
        "--batch",
        "24",
        "--quick",
        "--views",
        "3",
        "--seeds",
        "2",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    assert main(["invariance", str(place), str(ordered), str(shapes), *words]) == 0
    assert "shift by 8 px" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "out" / "found.parquet").to_pylist()
    images, labels = normalised(place, shapes)
    order, batches = (
        pixel_order(4, size=16),
        torch.from_numpy(np.random.default_rng(0).permutation(72)).split(24),
    )
    with torch.no_grad():
        for run in (place, ordered):
            model, own = model_of(run), [row for row in rows if row["run"] == str(run)]
            usual: Tensor | None = None
            unchanged = (
                images.flatten(2)[:, :, order].reshape(images.shape) if run == ordered else images
            )
            assert {row["amount"] for row in own if row["kind"] == "shift"} == {
                1,
                2,
                4,
                8,
            }  # 16 leaves nothing of 16
            for row in (row for row in own if row["kind"] not in ("crop", "views")):
                fed = changed(row["kind"], row["amount"], row["direction"], images)
                fed = fed.flatten(2)[:, :, order].reshape(fed.shape) if run == ordered else fed
                answers = model(fed).argmax(1).numpy()
                usual = answers if usual is None else usual
                found = (answers == labels).mean(), (answers == usual).mean()
                assert (row["top1"], row["agreement"]) == pytest.approx(found, abs=1.5 / 72), (
                    row
                )  # rounding may turn one
                assert row["standard_error"] == pytest.approx(
                    (row["top1"] * (1 - row["top1"]) / 72) ** 0.5
                )
                if row["direction"] in ("left", "upside down"):
                    subject = opened(run, shapes)
                    first, second = (
                        [subject.run(x[ids].double(), torch.clone)[1] for ids in batches]
                        for x in (unchanged, fed)
                    )
                    np.testing.assert_allclose(
                        row["cka"], plain_cka(first, second).diagonal(), rtol=1e-3
                    )
            assert (
                own[0]["kind"] == "none"
                and own[0]["agreement"] == 1
                and own[0]["cka"] == pytest.approx([1, 1], abs=1e-12)
            )
    views = {
        (row["amount"], row["seed"]): row["top1"]
        for row in rows
        if row["kind"] == "views" and row["run"] == str(place)
    }
    assert sorted(views) == [(amount, seed) for amount in (1, 2, 3) for seed in (0, 1)]
    for seed in (0, 1):
        result = judge(place, shapes, tmp_path / f"judged-{seed}", views=3, seed=seed)
        assert views[3, seed] == pytest.approx(result["eval/top1"], abs=1e-9)
    facts = json.loads((tmp_path / "out" / "found.json").read_text())
    assert set(facts["inputs"]) == {str(place), str(ordered), str(shapes)}
    assert facts["inputs"][str(shapes)] == hash_of(f"file://{shapes}")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"found{end}"
        for end in (".json", ".parquet", ".png", ".svg", "-mixings.png", "-mixings.svg")
    }


def test_a_crop_is_the_middle_at_the_size_of_the_whole() -> None:
    whole = torch.linspace(0, 1, 20).expand(1, 3, 20, 20)  # a slope along the columns
    found = {
        change.amount: change.of(whole)[0, 0, 0] for change in changes(20) if change.kind == "crop"
    }
    assert sorted(found) == [0.5, 0.6, 0.7, 0.8, 0.9]
    for share, row in found.items():
        assert float(row.mean()) == pytest.approx(0.5, abs=1e-6)
        assert float(row[10] - row[9]) == pytest.approx(share / 19, rel=1e-4)  # as much flatter
    assert {change.amount for change in changes(20) if change.kind == "shift"} == {*range(1, 17)}


def test_a_run_of_other_classes_is_one_line(
    tmp_path: Path, shapes: Path, other_shapes: Path, capsys: Capture
) -> None:
    place = write_folder(tmp_path / "mixer", shapes, spec=MIXER)
    assert main(["invariance", str(place), str(other_shapes)]) == 2
    error = capsys.readouterr().err
    assert str(other_shapes) in error and error.count("\n") == 1
