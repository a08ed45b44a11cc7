"""Every published form of ImageNet-1k gives the same labels. ReaL labels follow their images."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import load_annotation, load_manifest, load_paths
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import tar_of, write_files
from tests.data_prep.sources import layouts
from tests.data_prep.sources.layouts import (
    SYNSETS,
    devkit,
    devkit_files,
    synset_folders,
    synset_tars,
    val_files,
    whole_tar,
)

NUMBERS = {1: SYNSETS[2], 2: SYNSETS[0], 3: SYNSETS[1]}
"""The devkit's numbers are not in the order of the wnids."""
TRUTH = [3, 1, 2, 2, 1]
WANTED = [1, 2, 0, 0, 2]
"""TRUTH as indices of the sorted wnids."""
COUNTS = dict.fromkeys(SYNSETS, 4)


def downloaded(root: Path) -> Path:
    """Write the three archives as downloaded."""
    whole_tar(root / "ILSVRC2012_img_train.tar", COUNTS)
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_of(val_files(5)))
    devkit(root, devkit_files(NUMBERS, TRUTH))
    return root


def unpacked(root: Path) -> Path:
    """Write the train folders, a flat val folder and the unpacked development kit."""
    synset_folders(root / "train", COUNTS)
    write_files(root / "val", val_files(5))
    write_files(root, devkit_files(NUMBERS, TRUTH))
    return root


def sorted_by_hand(root: Path) -> Path:
    """Write the result of the usual shell script: val in synset folders, without the development
    kit."""
    synset_tars(root / "train", COUNTS)
    for (name, data), label in zip(val_files(5).items(), WANTED, strict=True):
        write_files(root / "val" / SYNSETS[label], {name: data})
    return root


FORMS = {"downloaded": downloaded, "unpacked": unpacked, "sorted": sorted_by_hand}


def build(path: Path, out: Path, *overrides: str) -> int:
    words = ["image_size=16", "samples_per_shard=3", "source.md5=off", *overrides]
    return layouts.build("imagenet1k", out, f"source.path={path}", *words)


def samples_of(out: Path, split: str) -> dict[str, tuple[bytes, int]]:
    """Return (bytes, label) by file name."""
    return {path.rpartition("/")[2]: sample for path, sample in layouts.written(out, split).items()}


def real_labels_of(out: Path) -> dict[int, list[int]]:
    """Return val's ReaL labels by image number."""
    split = load_manifest(out).split("val")
    bits = load_annotation(out, split, "real")
    paths = [path for shard in split.shards for path in load_paths(out, shard)]
    return {
        int(path[-13:-5]): np.flatnonzero(row).tolist()
        for path, row in zip(paths, bits, strict=True)
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_published_pictures_their_labels(tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    assert build(FORMS[form](tmp_path / "in"), out, "encoding=keep") == 0
    assert load_manifest(out).classes == SYNSETS
    assert samples_of(out, "val") == {
        name: (data, label)
        for (name, data), label in zip(val_files(5).items(), WANTED, strict=True)
    }
    train = samples_of(out, "train")
    assert len(train) == 12
    assert all(SYNSETS[label] == name.split("_")[0] for name, (_, label) in train.items())


def test_real_labels_follow_their_pictures(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("[[5, 7], [], [999], [0], [1, 2, 3]]")
    source = downloaded(tmp_path / "in")
    # one image is damaged: its row must disappear from the annotation, too
    data = val_files(5)
    data["ILSVRC2012_val_00000004.JPEG"] = b"no picture"
    (source / "ILSVRC2012_img_val.tar").write_bytes(tar_of(data))
    out = tmp_path / "out"
    assert (
        build(source, out, f"source.real={tmp_path / 'real.json'}", "max_reject_fraction=0.5") == 0
    )
    assert real_labels_of(out) == {1: [5, 7], 2: [], 3: [999], 5: [1, 2, 3]}
    assert not load_manifest(out).split("train").annotations


def test_splits_may_be_asked_for_alone(tmp_path: Path) -> None:
    source = downloaded(tmp_path / "in")
    (source / "ILSVRC2012_img_train.tar").unlink()
    assert build(source, tmp_path / "val", "source.splits=[val]") == 0
    assert list(load_manifest(tmp_path / "val").splits) == ["val"]
    assert load_manifest(tmp_path / "val").classes == SYNSETS


KIT, VAL, GONE, DANGLING = "ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_img_val.tar", None, "a link"
CUT_META = {"ILSVRC2012_devkit_t12/data/meta.mat": b"MATLAB 5"}


def harmed(root: Path, name: str, content: bytes | str | None) -> Path:
    """Write the downloaded archives, but replace or remove one of them, or make it a dangling
    link."""
    path = downloaded(root) / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.unlink()
        if content == DANGLING:
            path.symlink_to("elsewhere")
    return root


NUMBERED_FROM_0 = dict(
    zip(
        [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(5)],
        val_files(5).values(),
        strict=True,
    )
)
HARMS = [
    (lambda root: harmed(root, KIT, GONE), "missing-path"),
    (lambda root: harmed(root, VAL, GONE), "missing-path"),
    (lambda root: harmed(root, VAL, tar_of(val_files(6))), "mismatch"),
    (lambda root: harmed(root, VAL, tar_of(val_files(4))), "mismatch"),
    (lambda root: harmed(root, VAL, tar_of(NUMBERED_FROM_0)), "mismatch"),
    (lambda root: harmed(root, VAL, b"\x1f\x8b\x08" + bytes(99)), "unsupported"),
    (lambda root: harmed(root, VAL, DANGLING), "damaged"),
    (lambda root: harmed(root, KIT, DANGLING), "damaged"),
    (lambda root: harmed(root, VAL, tar_of({"image.JPEG": b"x"})), "unknown-format"),
    (lambda root: harmed(root, KIT, b"\x1f\x8b\x08" + bytes(99)), "damaged"),
    (
        lambda root: (
            whole_tar(
                downloaded(root) / "ILSVRC2012_img_train.tar", dict.fromkeys(SYNSETS[:2], 2)
            ).parent
        ),
        "mismatch",
    ),
    (
        lambda root: devkit(downloaded(root), devkit_files(NUMBERS, [1, 2, 3, 1, 77])).parent,
        "damaged",
    ),
    (
        lambda root: devkit(downloaded(root), devkit_files(NUMBERS, TRUTH) | CUT_META).parent,
        "damaged",
    ),
]


@pytest.mark.parametrize(("make", "code"), HARMS, ids=range(len(HARMS)))
def test_a_missing_or_damaged_part_is_one_line(
    tmp_path: Path, refused: Refused, make: Callable[[Path], Path], code: str
) -> None:
    refused(build(make(tmp_path / "in"), tmp_path / "out"), "source.path: ", f"[{code}]")


def test_val_folders_without_a_synset_or_with_too_few_images_are_one_line(
    tmp_path: Path, refused: Refused
) -> None:
    source = sorted_by_hand(tmp_path / "in")
    (source / "val" / SYNSETS[1] / "ILSVRC2012_val_00000001.JPEG").unlink()
    (tmp_path / "real.json").write_text(json.dumps([[0]] * 5))
    for words in ([f"source.real={tmp_path / 'real.json'}"], []):
        if not words:
            write_files(source, devkit_files(NUMBERS, TRUTH))
        refused(build(source, tmp_path / "out", *words), "val has 4 images", "[mismatch]")
    shutil.rmtree(source / "val" / SYNSETS[2])
    (source / "val" / SYNSETS[2]).symlink_to("elsewhere")
    refused(build(source, tmp_path / "out"), SYNSETS[2], "[unknown-format]")
    (source / "val" / SYNSETS[2]).unlink()
    refused(build(source, tmp_path / "out"), SYNSETS[2], "[mismatch]")


def test_the_archive_is_a_file_and_what_it_unpacks_to_a_folder(
    tmp_path: Path, refused: Refused
) -> None:
    source = sorted_by_hand(tmp_path / "in")
    (source / VAL).mkdir()  # a folder, not the archive
    assert build(source, tmp_path / "folder") == 0
    shutil.rmtree(source / "val")
    (source / "val").touch()  # a file, not a folder
    refused(build(source, tmp_path / "out"), "[missing-path]")


def test_a_compressed_archive_is_refused_before_it_is_read_for_its_sum(
    tmp_path: Path, refused: Refused
) -> None:
    source = sorted_by_hand(tmp_path / "in")
    (source / VAL).write_bytes(b"\x1f\x8b\x08" + bytes(99))
    refused(build(source, tmp_path / "out", "source.md5=all"), "[unsupported]")


def test_a_devkit_with_another_checksum_is_refused(tmp_path: Path, refused: Refused) -> None:
    refused(build(downloaded(tmp_path / "in"), tmp_path / "out", "source.md5=devkit"), "[damaged]")


WRONG = [
    "{",
    "[1, 2]",
    "[[1], [2], [3], [4], [-1]]",
    "[[1000]]",
    '[["a"], [2], [3], [4], [5]]',
    "3",
]


@pytest.mark.parametrize("content", [*WRONG, "[[1], [2]]"])
def test_wrong_real_labels_are_one_clear_line(
    tmp_path: Path, refused: Refused, content: str
) -> None:
    (tmp_path / "real.json").write_text(content)
    words = f"source.real={tmp_path / 'real.json'}"
    code = "[damaged]" if content in WRONG else "[mismatch]"
    refused(build(downloaded(tmp_path / "in"), tmp_path / "out", words), "source.real: ", code)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_real_labels_are_renumbered_with_the_classes_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(json.dumps([[1], [2], [0, 1], [0], [2, 1]]))
    out, kept = tmp_path / "out", f"classes=[{SYNSETS[1]}, {SYNSETS[2]}]"
    assert (
        build(downloaded(tmp_path / "in"), out, f"source.real={tmp_path / 'real.json'}", kept) == 0
    )
    # images 1, 2 and 5 are of the kept classes 1 and 2, now 0 and 1
    assert real_labels_of(out) == {1: [0], 2: [1], 5: [0, 1]}
