"""A file of any source that changes before the last shard is written ends the build, even if it has been read: what was written may
be a mixture.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.build import build as building
from data_prep.build import merge as merging
from data_prep.manifest import load_manifest
from data_prep.sources import SourceError
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import write_classes, write_files
from tests.data_prep.sources import test_cifar, test_imagenet1k, test_mnist, test_stl10, test_tinyimagenet
from tests.data_prep.sources.archives import FIRST, write_synset_folders, write_synset_tars, write_whole_tar
from tests.data_prep.sources.layouts import build, listed, opened

COUNTS = dict.fromkeys(FIRST, 2)
Case = tuple[str, Callable[[Path], Path], str]
CASES: dict[str, Case] = {
    "folder": ("folder", lambda root: write_classes(root, {"ant": 2, "ant/more": 1, "bee": 1}), "ant/more/000.jpg"),
    "synset folders": ("imagenet21k", lambda root: write_synset_folders(root, COUNTS), f"{FIRST[1]}/{FIRST[1]}_3.JPEG"),
    "synset tars": ("imagenet21k", lambda root: write_synset_tars(root, COUNTS), f"{FIRST[1]}.tar"),
    "whole tar": ("imagenet21k", lambda root: write_whole_tar(root / "whole.tar", COUNTS), ""),
    "imagenet1k": ("imagenet1k", test_imagenet1k.downloaded, "ILSVRC2012_img_val.tar"),
    "imagenet1k, flat val": ("imagenet1k", test_imagenet1k.unpacked, "val/ILSVRC2012_val_00000002.JPEG"),
    "tiny zip": ("tinyimagenet", lambda root: test_tinyimagenet.place(root, test_tinyimagenet.WHOLE, unpacked=False), ""),
    "tiny folder": (
        "tinyimagenet",
        lambda root: test_tinyimagenet.place(root, test_tinyimagenet.WHOLE, unpacked=True),
        "val/images/val_3.JPEG",
    ),
    "mnist": ("mnist", lambda root: write_files(root, test_mnist.files()), "t10k-labels-idx1-ubyte.gz"),
    "cifar": ("cifar", lambda root: test_cifar.archive(root, "cifar-10-python", unpacked=True), "data_batch_3"),
    "stl10.tar.gz": ("stl10", lambda root: test_stl10.place(root, test_stl10.files(), unpacked=False), ""),
    "cifar.tar.gz": ("cifar", lambda root: test_cifar.archive(write_files(root, {"beside": b""}), "cifar-10-binary"), ""),
    "stl10": ("stl10", lambda root: test_stl10.place(root, test_stl10.files(), unpacked=True), "fold_indices.txt"),
}
WORDS = {"imagenet21k": ["source.processing=raw"], "tinyimagenet": [], "folder": []}


def build_and(alter: Callable[[], Any], case: Case, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a build whose source is altered when its last shard is written."""
    real = building.write_shards

    def write_shards(*words: Any, **named: Any) -> Any:
        records = real(*words, **named)
        alter()
        return records

    monkeypatch.setattr(building, "write_shards", write_shards)
    return build(case[0], out, f"source.path={source}", "image_size=16", *WORDS.get(case[0], ["source.md5=off"]))


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_touched_after_it_was_read_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case, out = CASES[name], tmp_path / "out"
    source = case[1](tmp_path / "in")
    file = source / case[2] if case[2] else source
    assert build_and(lambda: os.utime(file, ns=(1, 1)), case, source, out, monkeypatch) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("data_prep: source: 1 files have changed since they were listed (")
    assert (case[2] or str(file)) in said
    assert not list(out.glob("*.json*"))


@pytest.mark.parametrize("change", ["added", "removed", "replaced", "nothing"])
def test_files_that_come_go_or_are_replaced_end_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    case, out = CASES["folder"], tmp_path / "out"
    source = case[1](tmp_path / "in")
    file = source / "bee" / ("001.jpg" if change == "added" else "000.jpg")

    def alter() -> None:
        if change == "removed":
            file.unlink()
        elif change != "nothing":
            file.write_bytes(b"another")

    assert build_and(alter, case, source, out, monkeypatch) == (0 if change == "nothing" else 2)
    if change == "nothing":
        assert load_manifest(out).num_written == 4
    else:
        assert f"source: 1 files have changed since they were listed (bee/{file.name})" in capsys.readouterr().err
        assert not (out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tiny folder", "wnids.txt"),
        ("tiny folder", "val/val_annotations.txt"),
        ("imagenet1k", "ILSVRC2012_devkit_t12.tar.gz"),
        ("imagenet1k, flat val", "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"),
        ("imagenet1k, flat val", "real.json"),
    ],
)
def test_files_of_labels_that_change_end_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, name: str, file: str
) -> None:
    (kind, make, _), out = CASES[name], tmp_path / "out"
    source = make(tmp_path / "in")
    write_files(source, {"real.json": b"[[1], [], [2], [0], [0]]"})
    words = [f"source.real={source / 'real.json'}"] if kind == "imagenet1k" else []
    monkeypatch.setitem(WORDS, kind, [*WORDS.get(kind, ["source.md5=off"]), *words])
    refused(
        build_and(lambda: os.utime(source / file, ns=(1, 1)), (kind, make, ""), source, out, monkeypatch),
        "1 folders, archives or lists of labels have changed since they were listed (",
        Path(file).name,
    )
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize(("name", "ending"), [("synset folders", ""), ("synset tars", ".tar")])
def test_a_synset_that_appears_ends_the_build_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, name: str, ending: str
) -> None:
    case, out = CASES[name], tmp_path / "out"
    source = case[1](tmp_path / "in")
    copy = shutil.copy if ending else shutil.copytree
    present, new = (source / f"{wnid}{ending}" for wnid in (FIRST[0], "n09999999"))
    refused(
        build_and(lambda: copy(present, new), case, source, out, monkeypatch), f"have changed since they were listed ({new.name})"
    )
    assert not (out / "manifest.json").exists()


def test_of_many_changed_files_all_are_counted_and_three_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(merging, "NUM_COMPARISONS", 2)
    case, source = CASES["folder"], write_classes(tmp_path / "in", {f"class-{number}": 5 for number in range(5)})
    files = sorted(source.rglob("*.jpg"))

    def alter() -> None:
        for path in files[3:]:
            os.utime(path, ns=(1, 1))

    assert build_and(alter, case, source, tmp_path / "out", monkeypatch) == 2
    named = ", ".join(str(path.relative_to(source)) for path in files[3:6])
    assert f"source: 22 files have changed since they were listed ({named})" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cifar", "cifar.tar.gz", "mnist", "stl10", "stl10.tar.gz", "tiny zip"])
def test_archives_with_a_stamp_need_no_second_listing_and_are_not_read_once_it_is_another(tmp_path: Path, name: str) -> None:
    kind, make, file = CASES[name]
    path = make(tmp_path / "in")
    source, again = opened(kind, path), opened(kind, path)
    assert all(part.stamp for part in source.outline().containers) and source.outline() == again.outline()
    entry = listed(source)[0]
    with open(path / file, "ab") as changed:
        changed.write(b"more")
    with pytest.raises(SourceError, match=f"{re.escape(entry.locator)}: the source has changed since it was listed"):
        source.read(entry)
    (path / file).unlink()
    with pytest.raises(SourceError, match=r"^source\.path: .* (is not there|lacks|holds no)"):
        source.read(entry)
