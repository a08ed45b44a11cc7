"""A source file that changes before the last shard is written ends the build, even if it has been
read. The shards might mix both versions.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from data_prep.build import build as building
from data_prep.build import merge as merging
from data_prep.manifest import load_manifest
from data_prep.sources import SourceError
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import write_classes, write_files
from tests.data_prep.sources import test_imagenet1k
from tests.data_prep.sources.layouts import (
    SYNSETS,
    build,
    listed,
    opened,
    synset_folders,
    synset_tars,
    whole_tar,
)
from tests.data_prep.sources.published import CIFAR_10, MNIST, STL10, TINY
from tests.errors import fails

COUNTS = dict.fromkeys(SYNSETS, 2)
Case = tuple[str, Callable[[Path], Path], str]
CASES: dict[str, Case] = {
    "folder": (
        "folder",
        lambda root: write_classes(root, {"ant": 2, "ant/more": 1, "bee": 1}),
        "ant/more/000.jpg",
    ),
    "many files": (
        "folder",
        lambda root: write_classes(root, {f"class-{number}": 5 for number in range(5)}),
        "class-0/000.jpg",
    ),
    "synset folders": (
        "imagenet21k",
        lambda root: synset_folders(root, COUNTS),
        f"{SYNSETS[1]}/{SYNSETS[1]}_3.JPEG",
    ),
    "synset tars": ("imagenet21k", lambda root: synset_tars(root, COUNTS), f"{SYNSETS[1]}.tar"),
    "whole tar": ("imagenet21k", lambda root: whole_tar(root / "whole.tar", COUNTS), ""),
    "imagenet1k": ("imagenet1k", test_imagenet1k.downloaded, "ILSVRC2012_img_val.tar"),
    "imagenet1k, flat val": (
        "imagenet1k",
        test_imagenet1k.unpacked,
        "val/ILSVRC2012_val_00000002.JPEG",
    ),
    "tiny zip": ("tinyimagenet", lambda root: TINY.place(root, packed=True), ""),
    "tiny folder": (
        "tinyimagenet",
        lambda root: TINY.place(root, packed=False),
        "val/images/val_3.JPEG",
    ),
    "mnist": ("mnist", lambda root: MNIST.place(root, packed=False), "t10k-labels-idx1-ubyte"),
    "cifar": ("cifar", lambda root: CIFAR_10.place(root, packed=False), "data_batch_3"),
    "cifar.tar.gz": ("cifar", lambda root: CIFAR_10.place(root, packed=True), ""),
    "stl10": ("stl10", lambda root: STL10.place(root, packed=False), "fold_indices.txt"),
    "stl10.tar.gz": ("stl10", lambda root: STL10.place(root, packed=True), ""),
}
WORDS = {"imagenet21k": ["source.processing=raw"], "tinyimagenet": [], "folder": []}


class BuildWhile(Protocol):
    def __call__(self, name: str, alter: Callable[[Path], Any], *words: str) -> int: ...


@pytest.fixture
def build_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildWhile:
    """Return a function that builds, and alters the source when the last shard is written."""

    def run(name: str, alter: Callable[[Path], Any], *more: str) -> int:
        (kind, make, _), real = CASES[name], building.write_shards
        source = make(tmp_path / "in")

        def write_shards(*words: Any, **named: Any) -> Any:
            records = real(*words, **named)
            alter(source)
            return records

        monkeypatch.setattr(building, "write_shards", write_shards)
        words = WORDS.get(kind, ["source.md5=off"])
        return build(
            kind, tmp_path / "out", f"source.path={source}", "image_size=16", *words, *more
        )

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_touched_after_it_was_read_ends_the_build(
    tmp_path: Path, build_while: BuildWhile, refused: Refused, name: str
) -> None:
    file = CASES[name][2]
    code = build_while(name, lambda source: os.utime(source / file if file else source, ns=(1, 1)))
    refused(code, "source: 1 files", file or str(tmp_path / "in"), "[changed]")
    assert not list((tmp_path / "out").glob("*.json*"))


@pytest.mark.parametrize(
    ("file", "alter"),
    [
        ("bee/001.jpg", lambda file: file.write_bytes(b"another")),
        ("bee/000.jpg", lambda file: file.write_bytes(b"another")),
        ("bee/000.jpg", Path.unlink),
    ],
    ids=["added", "replaced", "removed"],
)
def test_files_that_come_go_or_are_replaced_end_the_build(
    tmp_path: Path,
    build_while: BuildWhile,
    refused: Refused,
    file: str,
    alter: Callable[[Path], Any],
) -> None:
    refused(
        build_while("folder", lambda source: alter(source / file)),
        "1 files",
        f"({file})",
        "[changed]",
    )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_source_whose_pictures_stay_as_they_are_is_built(
    tmp_path: Path, build_while: BuildWhile
) -> None:
    assert (
        build_while("folder", lambda source: write_files(source, {"ant/more/note.txt": b"mine"}))
        == 0
    )
    assert load_manifest(tmp_path / "out").num_written == 4


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tiny folder", "wnids.txt"),
        ("tiny folder", "val/val_annotations.txt"),
        ("imagenet1k", "ILSVRC2012_devkit_t12.tar.gz"),
        (
            "imagenet1k, flat val",
            "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
        ),
        ("imagenet1k, flat val", "../real.json"),
    ],
)
def test_files_of_labels_that_change_end_the_build(
    tmp_path: Path, build_while: BuildWhile, refused: Refused, name: str, file: str
) -> None:
    write_files(tmp_path, {"real.json": b"[[1], [], [2], [0], [0]]"})
    words = [f"source.real={tmp_path / 'real.json'}"] if name.startswith("imagenet1k") else []
    code = build_while(name, lambda source: os.utime(source / file, ns=(1, 1)), *words)
    refused(code, "source: 1 ", Path(file).name, "[changed]")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(("name", "ending"), [("synset folders", ""), ("synset tars", ".tar")])
def test_a_synset_that_appears_ends_the_build_too(
    tmp_path: Path, build_while: BuildWhile, refused: Refused, name: str, ending: str
) -> None:
    present, new = (f"{wnid}{ending}" for wnid in (SYNSETS[0], "n09999999"))
    copy = shutil.copy if ending else shutil.copytree
    code = build_while(name, lambda source: copy(source / present, source / new))
    refused(code, f"({new})", "[changed]")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_of_many_changed_files_all_are_counted_and_three_are_named(
    monkeypatch: pytest.MonkeyPatch, build_while: BuildWhile, refused: Refused
) -> None:
    monkeypatch.setattr(merging, "NUM_COMPARISONS", 2)

    def alter(source: Path) -> None:
        for path in sorted(source.rglob("*.jpg"))[3:]:
            os.utime(path, ns=(1, 1))

    names = "class-0/003.jpg, class-0/004.jpg, class-1/000.jpg"
    refused(build_while("many files", alter), "source: 22 files", f"({names})", "[changed]")


@pytest.mark.parametrize(
    "name", ["cifar", "cifar.tar.gz", "mnist", "stl10", "stl10.tar.gz", "tiny zip"]
)
def test_archives_with_a_stamp_need_no_second_listing_and_are_not_read_once_it_is_another(
    tmp_path: Path, name: str
) -> None:
    kind, make, file = CASES[name]
    path = make(tmp_path / "in")
    source, again = opened(kind, path), opened(kind, path)
    assert (
        all(part.stamp for part in source.outline().containers)
        and source.outline() == again.outline()
    )
    entry = listed(source)[0]
    with open(path / file, "ab") as changed:
        changed.write(b"more")
    with fails("changed", "source"):
        source.read(entry)
    (path / file).unlink()
    with pytest.raises(SourceError) as caught:
        source.read(entry)
    assert caught.value.code in ("missing-path", "damaged")
