"""All three forms of ImageNet-21k give the same samples. Held-out images depend only on the seed
and the class."""

import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import Manifest, load_manifest, load_paths
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import tar_of, write_files
from tests.data_prep.sources import layouts
from tests.data_prep.sources.layouts import (
    SYNSETS,
    listed,
    opened,
    synset_files,
    synset_folders,
    synset_tars,
    whole_tar,
    written,
)
from tests.errors import fails

COUNTS = dict(zip(SYNSETS, (9, 3, 7), strict=True))


def build(path: Path, out: Path, *overrides: str) -> int:
    words = ["image_size=16", "samples_per_shard=6", "name=in21k", *overrides]
    return layouts.build("imagenet21k", out, f"source.path={path}", *words)


def ridnik(path: Path, out: Path, *overrides: str) -> Manifest:
    assert build(path, out, "source.min_images=4", "source.val_per_class=2", *overrides) == 0
    return load_manifest(out)


def files_of_split(out: Path, split: str) -> list[str]:
    """Return the names of a split's image files in sample order."""
    shards = load_manifest(out).split(split).shards
    return [path.rpartition("/")[2] for shard in shards for path in load_paths(out, shard)]


FORMS: dict[str, Callable[[Path], Path]] = {
    "folders": lambda root: synset_folders(root / "winter21_whole", COUNTS),
    "tars": lambda root: synset_tars(root / "winter21_whole", COUNTS),
    "whole tar": lambda root: whole_tar(root / "fall11_whole.tar", COUNTS),
    "whole tar of archives without an ending": lambda root: whole_tar(
        root / "w.tar", COUNTS, ending=""
    ),
    "whole tar with a folder": lambda root: whole_tar(
        root / "w.tar", COUNTS, prefix="winter21_whole/"
    ),
}


def test_all_forms_make_the_same_shards(tmp_path: Path) -> None:
    shards = {}
    for number, (form, write) in enumerate(FORMS.items()):
        out = tmp_path / f"out{number}"
        ridnik(write(tmp_path / str(number)), out)
        shards[form] = {
            path.name: path.read_bytes()
            for path in sorted(out.glob("*.tar")) + sorted(out.glob("*.npy"))
        }
    first = shards["folders"]
    assert first
    assert all(found == first for found in shards.values())


@pytest.mark.processes
def test_keep_encoding_gives_back_the_published_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        build(
            FORMS["whole tar"](tmp_path),
            out,
            "encoding=keep",
            "source.processing=raw",
            "num_workers=2",
        )
        == 0
    )
    manifest = load_manifest(out)
    assert manifest.classes == SYNSETS
    found = {
        path: (image, manifest.classes[label])
        for path, (image, label) in written(out, "train").items()
    }
    wanted = {
        f"fall11_whole.tar/{wnid}.tar/{name}": (data, wnid)
        for wnid, count in COUNTS.items()
        for name, data in synset_files(wnid, count).items()
    }
    assert found == wanted


def test_the_processing_keeps_large_classes_and_holds_out_a_fixed_number_of_each(
    tmp_path: Path,
) -> None:
    manifest = ridnik(FORMS["tars"](tmp_path), tmp_path / "out")
    assert manifest.classes == (SYNSETS[0], SYNSETS[2])
    assert manifest.split("val").class_counts == (2, 2)
    assert manifest.split("train").class_counts == (7, 5)
    assert manifest.num_left_out == {"small classes": 3}
    train, val = files_of_split(tmp_path / "out", "train"), files_of_split(tmp_path / "out", "val")
    everything = [
        name for wnid in (SYNSETS[0], SYNSETS[2]) for name in synset_files(wnid, COUNTS[wnid])
    ]
    assert sorted(train + val) == sorted(everything)
    assert manifest.source["seed"] == 0


def test_a_class_of_just_the_limit_is_left_out(tmp_path: Path) -> None:
    assert (
        ridnik(FORMS["tars"](tmp_path), tmp_path / "out", "source.min_images=7").classes
        == SYNSETS[:1]
    )


def test_a_skipped_image_is_counted_once(tmp_path: Path) -> None:
    names = [f"{wnid}.tar/{next(iter(synset_files(wnid, 1)))}" for wnid in SYNSETS]
    lines = "".join(json.dumps({"path": name}) + "\n" for name in names)
    (tmp_path / "list").write_text(lines)
    words = (f"exclude=[{tmp_path / 'list'}]", "per_class={train: 3, val: 1}")
    manifest = ridnik(FORMS["tars"](tmp_path), tmp_path / "out", *words)
    assert manifest.num_left_out["small classes"] == COUNTS[SYNSETS[1]]
    assert manifest.num_read + sum(manifest.num_left_out.values()) == sum(COUNTS.values())


def test_the_held_out_images_depend_on_seed_and_class_alone(tmp_path: Path) -> None:
    alone = synset_tars(tmp_path / "alone", {SYNSETS[0]: COUNTS[SYNSETS[0]]})
    ridnik(FORMS["tars"](tmp_path), tmp_path / "all")
    ridnik(alone, tmp_path / "one")
    ridnik(alone, tmp_path / "other", "source.seed=1")
    of_first = {
        name for name in files_of_split(tmp_path / "all", "val") if name.startswith(SYNSETS[0])
    }
    assert len(of_first) == 2
    assert set(files_of_split(tmp_path / "one", "val")) == of_first
    assert set(files_of_split(tmp_path / "other", "val")) != of_first
    assert of_first != set(list(synset_files(SYNSETS[0], 9))[:2])  # not simply the first files


def test_only_the_asked_for_classes_are_listed_and_labeled_anew(tmp_path: Path) -> None:
    source = FORMS["tars"](tmp_path)
    (source / f"{SYNSETS[1]}.tar").write_bytes(b"damaged, but nobody asks for it")
    (tmp_path / "classes.txt").write_text(f"{SYNSETS[2]}\n")
    out = tmp_path / "out"
    assert (
        build(source, out, f"classes_file={tmp_path / 'classes.txt'}", "source.processing=raw") == 0
    )
    manifest = load_manifest(out)
    assert manifest.classes == (SYNSETS[2],)
    assert manifest.split("train").class_counts == (7,)
    labels = [
        int(row[2])
        for shard in manifest.split("train").shards
        for row in np.load(out / shard.index_file)
    ]
    assert labels == [0] * 7


HARMS: list[tuple[Callable[[bytes], bytes], str, str]] = [
    (lambda data: data[:-6000], "is cut", "damaged"),
    (gzip.compress, "tar xzf", "unsupported"),
    (lambda _: tar_of({}), "1 class folders of this imagenet21k source have no images", "empty"),
]


@pytest.mark.parametrize(("harm", "words", "code"), HARMS, ids=range(len(HARMS)))
def test_a_damaged_archive_is_one_line_with_one_fix(
    tmp_path: Path, refused: Refused, harm: Callable[[bytes], bytes], words: str, code: str
) -> None:
    source = FORMS["tars"](tmp_path)
    tar = source / f"{SYNSETS[1]}.tar"
    tar.write_bytes(harm(tar.read_bytes()))
    exit_code = build(source, tmp_path / "out", "source.processing=raw")
    refused(exit_code, "source.path: ", f"{SYNSETS[1]}.tar", words, f"[{code}]")
    assert not list((tmp_path / "out").glob("*.tar"))


def test_all_damaged_tars_are_named_in_one_run(tmp_path: Path, refused: Refused) -> None:
    source, damaged = FORMS["tars"](tmp_path), [f"{wnid}.tar" for wnid in SYNSETS[:2]]
    write_files(source, dict.fromkeys(damaged, b"<html>please sign in</html>" * 50))
    words = (f"{damaged[0]} is damaged at byte 0", "(and 1 more: ", f"{damaged[1]} is")
    refused(build(source, tmp_path / "out", "source.processing=raw"), *words)


def test_a_tar_that_changes_while_it_is_packed_is_noticed(tmp_path: Path) -> None:
    path = FORMS["whole tar"](tmp_path)
    source = opened("imagenet21k", path, processing="raw")
    entry = listed(source)[0]
    assert source.read(entry) == synset_files(SYNSETS[0], 9)[entry.name]
    data = bytearray(path.read_bytes())
    data[entry.offset - 512] ^= 255
    path.write_bytes(bytes(data))  # the same file, changed in place
    with fails("changed", "source"):
        source.read(entry)


def _name_twice(source: Path) -> None:
    with tarfile.open(source / f"{SYNSETS[0]}.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo(next(iter(synset_files(SYNSETS[0], 1)))))


def _whole_twice(path: Path, _: dict[str, int]) -> Path:
    path.write_bytes(tar_of({f"{folder}/{SYNSETS[0]}.tar": tar_of({}) for folder in "ab"}))
    return path


TARS, FOLDERS, TAR = synset_tars, synset_folders, f"{SYNSETS[1]}.tar"


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (
            FOLDERS,
            lambda source: (source / SYNSETS[1]).symlink_to("."),
            f"({SYNSETS[1]}: a link to a folder that contains it)",
        ),
        (
            FOLDERS,
            lambda source: (source / "picture").write_bytes(b"\xff\xd8\xff"),
            "1 images are in",
        ),
        (TARS, lambda source: (source / f"{TAR}.part").write_bytes(b"half"), f"{TAR}.part"),
        (TARS, _name_twice, f"{SYNSETS[0]}.tar contains two files"),
        (_whole_twice, lambda _: None, f"has the synset {SYNSETS[0]} twice"),
        (
            TARS,
            lambda source: (source / "holiday.tar").write_bytes(tar_of({"me.jpg": b"x"})),
            "'holiday.tar', which is no synset",
        ),
    ],
)
def test_what_would_be_lost_is_refused(
    tmp_path: Path,
    refused: Refused,
    write: Callable[..., Path],
    change: Callable[[Path], None],
    message: str,
) -> None:
    source = write(tmp_path / "in", {SYNSETS[0]: 2})
    change(source)
    refused(build(source, tmp_path / "out", "source.processing=raw"), message)


def test_a_class_must_not_lose_all_its_images_to_validation(
    tmp_path: Path, refused: Refused
) -> None:
    refused(
        build(
            FORMS["tars"](tmp_path),
            tmp_path / "out",
            "source.min_images=1",
            "source.val_per_class=2",
        ),
        "source.min_images: 1 is less than val_per_class, 2",
    )
