"""STL-10's binary files, column by column, from the archive or the folder, with the ten folds."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import load_annotation, load_manifest, load_paths
from data_prep.sources import Source, stl10
from tests.data_prep.samples import tar_of, write_files
from tests.data_prep.sources.layouts import (
    Pixels,
    build,
    listed,
    opened,
    pixels,
    ppm_of,
    refuses,
    tar_gz_of,
    written,
)
from tests.errors import fails

CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
PICTURES = {
    "train": pixels(12, 96, 96, 3, seed=1),
    "test": pixels(4, 96, 96, 3, seed=2),
    "unlabelled": pixels(6, 96, 96, 3, seed=3),
}
LABELS = {
    "train": [1, 9, 0, 3, 3, 2, 1, 0, 5, 4, 8, 7],
    "test": [9, 0, 4, 4],
    "unlabelled": [-1] * 6,
}
FILES = {"train": "train_X.bin", "test": "test_X.bin", "unlabelled": "unlabeled_X.bin"}
FOLDS = [[fold, (fold + 5) % 12] for fold in range(10)]


def stored(picture_HWC: Pixels) -> bytes:
    """Red, green, blue; of each the columns from left to right; of each column the rows from top to
    bottom."""
    return b"".join(
        picture_HWC[:, column, colour].tobytes()
        for colour in range(3)
        for column in range(picture_HWC.shape[1])
    )


def files() -> dict[str, bytes]:
    found = {
        f"stl10_binary/{FILES[split]}": b"".join(map(stored, pictures))
        for split, pictures in PICTURES.items()
    }
    found |= {
        f"stl10_binary/{split}_y.bin": bytes(label + 1 for label in LABELS[split])
        for split in ("train", "test")
    }
    found["stl10_binary/class_names.txt"] = "".join(f"{name}\n" for name in CLASSES).encode()
    found["stl10_binary/fold_indices.txt"] = "".join(
        " ".join(map(str, fold)) + "\n" for fold in FOLDS
    ).encode()
    return found


WHOLE = files()


def place(tmp_path: Path, found: dict[str, bytes], *, unpacked: bool) -> Path:
    if unpacked:
        return write_files(tmp_path, found) / "stl10_binary"
    return write_files(tmp_path, {"stl10_binary.tar.gz": tar_gz_of(found)}) / "stl10_binary.tar.gz"


def source_of(path: Path, **fields: object) -> Source:
    return opened("stl10", path, **fields)


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_build_holds_pictures_labels_and_folds_as_published(
    tmp_path: Path, unpacked: bool
) -> None:
    path, out = place(tmp_path, WHOLE, unpacked=unpacked), tmp_path / "out"
    assert (
        build(
            "stl10",
            out,
            f"source.path={path}",
            "source.md5=off",
            "image_size=96",
            "samples_per_shard=5",
        )
        == 0
    )
    manifest = load_manifest(out)
    assert manifest.classes == tuple(CLASSES)
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    for split, pictures in PICTURES.items():
        assert written(out, split) == {
            f"{FILES[split]}/{row:06d}": (ppm_of(picture), LABELS[split][row])
            for row, picture in enumerate(pictures)
        }
    train = manifest.splits["train"]
    order = [int(name[-6:]) for shard in train.shards for name in load_paths(out, shard)]
    folds = load_annotation(out, train, "folds")
    assert folds.shape == (12, 10)
    assert [
        sorted(row for row, chosen in zip(order, folds[:, fold], strict=True) if chosen)
        for fold in range(10)
    ] == [sorted(fold) for fold in FOLDS]
    assert all(not manifest.splits[split].annotations for split in ("test", "unlabelled"))
    assert not list(out.rglob("*.bin"))  # the unpacked archive is removed at the end


def test_a_disk_without_space_for_the_archive_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(place(tmp_path, WHOLE, unpacked=False))
    monkeypatch.setattr(stl10, "unpacked_bytes", lambda path: 1 << 62)
    with fails("no-space", "source.path"):
        source.outline()


def test_the_unlabelled_pictures_can_be_left_out(tmp_path: Path) -> None:
    found = {name: data for name, data in WHOLE.items() if "unlabeled" not in name}
    path = place(tmp_path, found, unpacked=False)
    refuses(source_of(path), r"lacks unlabeled_X\.bin; give stl10_binary\.tar\.gz as downloaded")
    assert {entry.container.split for entry in listed(source_of(path, unlabelled=False))} == {
        "train",
        "test",
    }


def test_published_sums_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, folder = (place(tmp_path, WHOLE, unpacked=unpacked) for unpacked in (False, True))
    refuses(source_of(archive, md5="published"), "91f7769df0f17e558f3565bffb0c7dfb is published")
    refuses(source_of(folder, md5="published"), "918c2871b30a85fa023e0c44e0bee87f is published")
    monkeypatch.setattr(stl10, "STL10_ARCHIVE", hashlib.md5(archive.read_bytes()).hexdigest())
    sums = {
        name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in stl10.STL10_FILES
    }
    monkeypatch.setattr(stl10, "STL10_FILES", sums)
    assert (
        len(listed(source_of(archive, md5="published")))
        == len(listed(source_of(folder, md5="published")))
        == 22
    )


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("class_names.txt", None, r"class_names\.txt"),
        (
            "train_X.bin",
            bytes(27647),
            r"train_X\.bin has 27,647 bytes, which is not a number of pictures of 27,648",
        ),
        ("test_X.bin", b"", r"test_X\.bin has 0 bytes"),
        ("train_y.bin", bytes([1] * 11), r"train_y\.bin holds 11 labels for 12 pictures"),
        (
            "test_y.bin",
            bytes([1, 2, 0, 3]),
            r"test_y\.bin: record 2 has the label 0, which is not one of 1 to 10",
        ),
        (
            "test_y.bin",
            bytes([1, 2, 10, 11]),
            r"test_y\.bin: record 3 has the label 11, which is not one of 1 to 10",
        ),
        ("class_names.txt", b"", "names no classes"),
        ("class_names.txt", b"\xff\n", r"class_names\.txt is damaged"),
        ("fold_indices.txt", b"0 1\n" * 9, "9 lines, 10 folds are published"),
        (
            "fold_indices.txt",
            b"0 12\n" * 10,
            r"fold_indices\.txt is damaged \(index 12 is out of bounds",
        ),
        ("fold_indices.txt", b"0 one\n" * 10, r"fold_indices\.txt is damaged"),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    found = {path: body for path, body in WHOLE.items() if not path.endswith(f"/{name}")}
    found |= {f"stl10_binary/{name}": data} if data is not None else {}
    for unpacked in (False, True):
        refuses(source_of(place(tmp_path, found, unpacked=unpacked)), message)


def test_an_archive_cut_or_altered_anywhere_is_refused(tmp_path: Path) -> None:
    path = place(tmp_path, WHOLE, unpacked=False)
    data = path.read_bytes()
    damaged = [data[:length] for length in range(0, len(data), len(data) // 11)]
    damaged += [data[:-4], data[:-1]]
    damaged += [
        data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for at in range(len(data) // 2, len(data), len(data) // 7)
    ]
    damaged += [data[:-8] + struct.pack("<II", 1, len(tar_of(WHOLE)))]
    for mutant in damaged:
        path.write_bytes(mutant)
        refuses(source_of(path), r"stl10_binary\.tar\.gz")


def test_an_archive_in_several_gzip_streams_or_with_padding_is_whole(tmp_path: Path) -> None:
    plain = tar_of(WHOLE)
    half = len(plain) // 2
    pieces = gzip.compress(plain[:half]) + gzip.compress(plain[half:])
    for data in (pieces, gzip.compress(plain) + bytes(512)):
        path = write_files(tmp_path, {"stl10_binary.tar.gz": data}) / "stl10_binary.tar.gz"
        source = source_of(path)
        entries = listed(source)
        assert [source.read(entry) for entry in entries[:4]] == [
            ppm_of(picture) for picture in PICTURES["test"]
        ]


def test_pictures_are_stored_column_by_column() -> None:
    corner = np.zeros((96, 96, 3), np.uint8)
    corner[1, 0, 0] = 7  # the second row of the first column of red
    assert stored(corner).index(7) == 1
