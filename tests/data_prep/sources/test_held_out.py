"""Splits without copies: equal files are in one split, and near-copies are reported."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.manifest import load_manifest, load_paths
from tests.conftest import Capture
from tests.data_prep.samples import build, encoded, picture, write_files

Copy = Callable[[Path, Path], object]


def paths_of(dataset: Path) -> dict[str, set[str]]:
    splits = load_manifest(dataset).splits
    return {
        name: {path for shard in split.shards for path in load_paths(dataset, shard)}
        for name, split in splits.items()
    }


@pytest.mark.parametrize(
    "copy", [shutil.copy, os.link, os.symlink], ids=["copy", "hard link", "symbolic link"]
)
@pytest.mark.parametrize("other", ["ant", "bee"], ids=["same class", "other class"])
def test_equal_files_are_in_one_split(
    copy: Copy, other: str, tmp_path: Path, capsys: Capture
) -> None:
    names = [f"{name}/{number}.png" for name in ("ant", "bee") for number in range(20)]
    source = write_files(
        tmp_path / "source",
        {name: encoded(picture(seed=seed), "PNG") for seed, name in enumerate(names)},
    )
    for number in range(20):
        copy(source / f"ant/{number}.png", source / f"{other}/copy-of-{number}.png")
    assert build(source, tmp_path / "out", "source.val_fraction=0.3") == 0
    train, val = (paths_of(tmp_path / "out")[split] for split in ("train", "val"))
    copies = [(f"ant/{number}.png", f"{other}/copy-of-{number}.png") for number in range(20)]
    assert [pair for pair in copies if len(train.intersection(pair)) == 1] == []
    assert (
        len({path for path in val if "copy" not in path}) == 12
        and "are also in train" not in capsys.readouterr().err
    )


@pytest.mark.parametrize("layout", ["", "train/"], ids=["held out", "own splits"])
def test_resaved_images_in_two_splits_are_counted_and_the_named_commands_drop_them(
    layout: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images = {f"{layout}ant/{number}": picture(seed=number) for number in range(30)}
    copies = {
        f"val/ant/{number}" if layout else f"ant/again-{number}": picture(seed=number)
        for number in range(20)
    }
    write_files(
        Path("source"),
        {f"{name}.png": encoded(image, "PNG", compress_level=1) for name, image in images.items()},
    )
    write_files(
        Path("source"),
        {f"{name}.png": encoded(image, "PNG", compress_level=9) for name, image in copies.items()},
    )
    assert build(Path("source"), Path("out"), "source.val_fraction=0.5") == 0
    warning = capsys.readouterr().err
    number = int(warning.split(" of ")[0].removeprefix("data_prep: "))
    assert "of val are also in train" in warning and (number == 20 if layout else number > 0)
    dedup = warning.partition("data_prep dedup ")[2].partition(", then")[0]
    assert main(["dedup", *dedup.split()]) == 0
    assert (
        build(
            Path("source"), Path("clean"), "source.val_fraction=0.5", "exclude=[duplicates.jsonl]"
        )
        == 0
    )
    assert "are also in train" not in capsys.readouterr().err


def test_a_validation_split_is_held_out_of_train_if_there_is_only_a_test_split(
    tmp_path: Path,
) -> None:
    names = [
        f"{split}/{name}/{number}.png"
        for split in ("train", "test")
        for name in ("ant", "bee")
        for number in range(10)
    ]
    source = write_files(
        tmp_path / "source",
        {name: encoded(picture(seed=seed), "PNG") for seed, name in enumerate(names)},
    )
    assert build(source, tmp_path / "out", "source.val_fraction=0.2") == 0
    counts = {
        name: split.class_counts for name, split in load_manifest(tmp_path / "out").splits.items()
    }
    assert counts == {"train": (8, 8), "val": (2, 2), "test": (10, 10)}
