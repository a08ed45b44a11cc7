"""ImageNet-21k in its three forms makes the same samples; the held-out images are a seeded function of each class alone."""

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.archives.files import sort_out
from data_prep.archives.inventory import Entry
from data_prep.cli import main
from data_prep.manifest import Manifest, load_manifest, load_paths
from data_prep.sources import SourceError
from data_prep.sources.imagenet21k import ImageNet21kSettings, ImageNet21kSource
from data_prep.sources.synsets import find_synsets
from tests.data_prep.conftest import Refused
from tests.data_prep.sources.archives import (
    FIRST,
    jpeg,
    synset_files,
    tar_of,
    write_synset_folders,
    write_synset_tars,
    write_whole_tar,
)
from tests.data_prep.sources.layouts import written

COUNTS = dict(zip(FIRST, (9, 3, 7), strict=True))


def build(path: Path, out: Path, *overrides: str) -> int:
    words = [f"source.path={path}", "image_size=16", "num_workers=1", "samples_per_shard=6", "name=in21k", *overrides]
    return main(["build", "--source", "imagenet21k", "--out", str(out), *words])


def ridnik(path: Path, out: Path, *overrides: str) -> Manifest:
    assert build(path, out, "source.min_images=4", "source.val_per_class=2", *overrides) == 0
    return load_manifest(out)


def files_of_split(out: Path, split: str) -> list[str]:
    """The picture files of a split in the order of its samples, by their own names."""
    shards = load_manifest(out).split(split).shards
    return [path.rpartition("/")[2] for shard in shards for path in load_paths(out, shard)]


FORMS: dict[str, Callable[[Path], Path]] = {
    "folders": lambda root: write_synset_folders(root / "winter21_whole", COUNTS),
    "tars": lambda root: write_synset_tars(root / "winter21_whole", COUNTS),
    "whole tar": lambda root: write_whole_tar(root / "fall11_whole.tar", COUNTS),
    "whole tar with a folder": lambda root: write_whole_tar(root / "w.tar", COUNTS, prefix="winter21_whole/"),
}


def test_all_forms_make_the_same_shards(tmp_path: Path) -> None:
    shards = {}
    for number, (form, write) in enumerate(FORMS.items()):
        out = tmp_path / f"out{number}"
        ridnik(write(tmp_path / str(number)), out)
        shards[form] = {path.name: path.read_bytes() for path in sorted(out.glob("*.tar")) + sorted(out.glob("*.npy"))}
    first = shards["folders"]
    assert first
    assert all(found == first for found in shards.values())


def test_keep_encoding_gives_back_the_published_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert build(FORMS["whole tar"](tmp_path), out, "encoding=keep", "source.processing=raw", "num_workers=2") == 0
    manifest = load_manifest(out)
    assert manifest.classes == FIRST
    found = {path: (image, manifest.classes[label]) for path, (image, label) in written(out, "train").items()}
    wanted = {
        f"fall11_whole.tar/{wnid}.tar/{name}": (data, wnid)
        for wnid, count in COUNTS.items()
        for name, data in synset_files(wnid, count).items()
    }
    assert found == wanted


def test_the_processing_keeps_large_classes_and_holds_out_a_fixed_number_of_each(tmp_path: Path) -> None:
    manifest = ridnik(FORMS["tars"](tmp_path), tmp_path / "out")
    assert manifest.classes == (FIRST[0], FIRST[2])
    assert manifest.split("val").class_counts == (2, 2)
    assert manifest.split("train").class_counts == (7, 5)
    assert manifest.num_left_out == {"small classes": 3}
    train, val = files_of_split(tmp_path / "out", "train"), files_of_split(tmp_path / "out", "val")
    everything = [name for wnid in (FIRST[0], FIRST[2]) for name in synset_files(wnid, COUNTS[wnid])]
    assert sorted(train + val) == sorted(everything)
    assert manifest.source["seed"] == 0


def test_a_class_of_just_the_limit_is_left_out(tmp_path: Path) -> None:
    source = write_synset_tars(tmp_path / "in", dict(zip(FIRST, (4, 5, 6), strict=True)))
    assert ridnik(source, tmp_path / "out").classes == FIRST[1:]


def test_the_held_out_images_depend_on_seed_and_class_alone(tmp_path: Path) -> None:
    alone = write_synset_tars(tmp_path / "alone", {FIRST[0]: COUNTS[FIRST[0]]})
    ridnik(FORMS["tars"](tmp_path), tmp_path / "all")
    ridnik(alone, tmp_path / "one")
    ridnik(alone, tmp_path / "other", "source.seed=1")
    of_first = {name for name in files_of_split(tmp_path / "all", "val") if name.startswith(FIRST[0])}
    assert len(of_first) == 2
    assert set(files_of_split(tmp_path / "one", "val")) == of_first
    assert set(files_of_split(tmp_path / "other", "val")) != of_first
    assert of_first != set(list(synset_files(FIRST[0], 9))[:2])  # not merely the first ones


def test_only_the_asked_for_classes_are_listed_and_labelled_anew(tmp_path: Path) -> None:
    source = FORMS["tars"](tmp_path)
    (source / f"{FIRST[1]}.tar").write_bytes(b"damaged, but nobody asks for it")
    (tmp_path / "classes.txt").write_text(f"{FIRST[2]}\n")
    out = tmp_path / "out"
    assert build(source, out, f"classes_file={tmp_path / 'classes.txt'}", "source.processing=raw") == 0
    manifest = load_manifest(out)
    assert manifest.classes == (FIRST[2],)
    assert manifest.split("train").class_counts == (7,)
    labels = [int(row[2]) for shard in manifest.split("train").shards for row in np.load(out / shard.index_file)]
    assert labels == [0] * 7


def _link(_: bytes) -> bytes:
    link = tarfile.TarInfo(f"{FIRST[1]}_1.JPEG")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return link.tobuf()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda data: data[:-6000], f"{FIRST[1]}.tar is cut"),
        (lambda data: data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512), f"{FIRST[1]}.tar is cut at byte"),
        (lambda data: data.replace(b"_10.JPEG", b"^10.JPEG", 1), f"{FIRST[1]}.tar is damaged at byte"),
        (gzip.compress, f"{FIRST[1]}.tar is"),
        (_link, "which is a link or device"),
        (lambda _: tar_of({}), f"1 classes of this imagenet21k source hold no pictures ({FIRST[1]}.tar)"),
    ],
)
def test_a_damaged_archive_is_one_clear_line(
    tmp_path: Path, refused: Refused, harm: Callable[[bytes], bytes], message: str
) -> None:
    source = FORMS["tars"](tmp_path)
    tar = source / f"{FIRST[1]}.tar"
    tar.write_bytes(harm(tar.read_bytes()))
    refused(build(source, tmp_path / "out", "source.processing=raw"), "data_prep: source.path: ", message)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_all_damaged_tars_are_named_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FORMS["tars"](tmp_path)
    for wnid in FIRST[:2]:
        (source / f"{wnid}.tar").write_bytes(b"<html>please sign in</html>" * 50)
    assert build(source, tmp_path / "out", "source.processing=raw") == 2
    said = capsys.readouterr().err
    assert f"{FIRST[0]}.tar is damaged at byte 0" in said and "(and 1 more: " in said and f"{FIRST[1]}.tar is" in said


def test_a_folder_of_synset_tars_is_scanned_once_and_no_tar_is_opened_for_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, scanned, opened = FORMS["tars"](tmp_path), [], []
    monkeypatch.setattr("data_prep.sources.synsets.sort_out", lambda path: (scanned.append(path), sort_out(path))[1])
    monkeypatch.setattr("data_prep.archives.files._is_picture", opened.append)
    (source / "LICENSE").write_text("free")
    assert len(find_synsets(source, "", split="train")) == len(FIRST)
    assert (scanned, opened) == ([source], [source / "LICENSE"])


def test_a_compressed_whole_tar_says_what_to_do(tmp_path: Path, refused: Refused) -> None:
    whole = FORMS["whole tar"](tmp_path)
    packed = whole.with_name("winter21_whole.tar.gz")
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    refused(build(packed, tmp_path / "out"), "unpack it once (tar xzf winter21_whole.tar.gz)")


def test_a_tar_that_changes_while_it_is_packed_is_noticed(tmp_path: Path) -> None:
    source_path = FORMS["whole tar"](tmp_path)
    source = ImageNet21kSource(ImageNet21kSettings(kind="imagenet21k", path=str(source_path), processing="raw"))
    container = source.outline().containers[0]
    entries = source.entries(container)
    entry = Entry(container, entries.names[0], int(entries.offsets[0]), int(entries.sizes[0]), 0)
    assert source.read(entry) == synset_files(FIRST[0], 9)[entry.name]
    data = bytearray(source_path.read_bytes())
    data[entry.offset - 512] ^= 255
    source_path.write_bytes(bytes(data))  # the same file, changed in place
    with pytest.raises(SourceError, match="is not where it was when this tar was listed"):
        source.read(entry)


def _name_twice(source: Path) -> None:
    with tarfile.open(source / f"{FIRST[0]}.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo(next(iter(synset_files(FIRST[0], 1)))))


def _whole_twice(path: Path, counts: dict[str, int]) -> Path:
    inner = tar_of(synset_files(FIRST[0], 2))
    path.write_bytes(tar_of({f"a/{FIRST[0]}.tar": inner, f"b/{FIRST[0]}.tar": inner}))
    return path


TARS, FOLDERS = write_synset_tars, write_synset_folders
NEITHER = "1 entries that are neither folders nor files of its own"


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (
            TARS,
            lambda source: (source / f"{FIRST[1]}.tar").symlink_to("gone.tar"),
            f"{NEITHER} ({FIRST[1]}.tar: a link to nowhere)",
        ),
        (FOLDERS, lambda source: (source / FIRST[1]).symlink_to("elsewhere"), f"{NEITHER} ({FIRST[1]}: a link to nowhere)"),
        (FOLDERS, lambda source: (source / FIRST[1]).symlink_to("."), f"({FIRST[1]}: a link to a folder that it lies in)"),
        (FOLDERS, lambda source: (source / "picture").write_bytes(jpeg(1)), "1 pictures lie in"),
        (
            TARS,
            lambda source: (source / f"{FIRST[1]}.tar.part").write_bytes(b"half"),
            f"{FIRST[1]}.tar.part, which is no finished syn",
        ),
        (TARS, _name_twice, f"{FIRST[0]}.tar holds a name twice"),
        (_whole_twice, lambda _: None, f"holds the synset {FIRST[0]} twice"),
        (TARS, lambda source: (source / "holiday.tar").write_bytes(tar_of({"me.jpg": b"x"})), "'holiday.tar', which is no synset"),
    ],
)
def test_what_would_be_lost_is_refused(
    tmp_path: Path, refused: Refused, write: Callable[..., Path], change: Callable[[Path], None], message: str
) -> None:
    source = write(tmp_path / "in", {FIRST[0]: 2})
    change(source)
    refused(build(source, tmp_path / "out", "source.processing=raw"), message)


def test_a_class_must_not_lose_all_its_images_to_validation(tmp_path: Path, refused: Refused) -> None:
    refused(
        build(FORMS["tars"](tmp_path), tmp_path / "out", "source.min_images=1", "source.val_per_class=2"),
        "source.min_images: 1 is less than val_per_class, 2",
    )
