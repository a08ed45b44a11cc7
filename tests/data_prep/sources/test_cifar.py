"""CIFAR as published: two archives and the folders that they unpack to."""

import hashlib
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import Source, SourceError, cifar
from tests.data_prep.samples import write_files
from tests.data_prep.sources.layouts import (
    build,
    listed,
    opened,
    pixels,
    ppm_of,
    python2_pickle,
    refuses,
    tar_gz_of,
    written,
)

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FINE = [f"fine_{number:02d}" for number in range(100)]
COARSE = [f"coarse_{number:02d}" for number in range(20)]
BATCHES = [
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
]
NUM = 4
"""Records in each file here; 10,000 and more as published."""

TEN_PIXELS = {name: pixels(NUM, 3, 32, 32, seed=number) for number, name in enumerate(BATCHES)}
TEN_LABELS = {
    name: [(3 * number + row) % 10 for row in range(NUM)] for number, name in enumerate(BATCHES)
}
HUNDRED_PIXELS = {
    name: pixels(NUM, 3, 32, 32, seed=10 + number) for number, name in enumerate(["train", "test"])
}
FINE_LABELS = {"train": [99, 0, 50, 7], "test": [3, 98, 3, 1]}
COARSE_LABELS = {"train": [19, 0, 5, 7], "test": [3, 18, 3, 1]}


def ten_python() -> dict[str, bytes]:
    folder = "cifar-10-batches-py"
    meta = {"num_cases_per_batch": 10000, "label_names": TEN, "num_vis": 3072}
    files = {f"{folder}/readme.html": b"<meta>", f"{folder}/batches.meta": python2_pickle(meta)}
    for name in BATCHES:
        fields = {
            "batch_label": f"batch {name}",
            "labels": TEN_LABELS[name],
            "data": TEN_PIXELS[name].reshape(NUM, 3072),
        }
        files[f"{folder}/{name}"] = python2_pickle(
            fields | {"filenames": [f"{name}_{row}.png" for row in range(NUM)]}
        )
    return files


def hundred_python() -> dict[str, bytes]:
    folder = "cifar-100-python"
    files = {
        f"{folder}/file.txt~": b"",
        f"{folder}/meta": python2_pickle({"fine_label_names": FINE, "coarse_label_names": COARSE}),
    }
    for name in ("test", "train"):
        fields = {
            "filenames": [f"{name}_{row}.png" for row in range(NUM)],
            "batch_label": f"{name}ing batch 1 of 1",
        }
        fields |= {"fine_labels": FINE_LABELS[name], "coarse_labels": COARSE_LABELS[name]}
        files[f"{folder}/{name}"] = python2_pickle(
            fields | {"data": HUNDRED_PIXELS[name].reshape(NUM, 3072)}
        )
    return files


VERSIONS: dict[str, Callable[[], dict[str, bytes]]] = {
    "cifar-10-python": ten_python,
    "cifar-100-python": hundred_python,
}


def archive(tmp_path: Path, version: str, *, unpacked: bool = False) -> Path:
    files = VERSIONS[version]()
    if unpacked:
        return write_files(tmp_path / version, files) / next(iter(files)).split("/")[0]
    path = tmp_path / f"{version}.tar.gz"
    path.write_bytes(tar_gz_of(files))
    return path


def source_of(path: Path, **fields: object) -> Source:
    return opened("cifar", path, **fields)


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gives_the_pictures_and_labels_as_they_were(
    tmp_path: Path, version: str, unpacked: bool
) -> None:
    source = source_of(archive(tmp_path, version, unpacked=unpacked))
    ten = version.startswith("cifar-10-")
    of_file, labels = (TEN_PIXELS, TEN_LABELS) if ten else (HUNDRED_PIXELS, FINE_LABELS)
    assert source.outline().classes == tuple(TEN if ten else FINE)
    assert {part.path: part.split for part in source.outline().containers} == {
        f"{name}": "test" if name.startswith("test") else "train" for name in of_file
    }
    entries = listed(source)
    assert [(entry.locator, entry.label) for entry in entries] == sorted(
        (f"{name}/{row:05d}", labels[name][row]) for name in of_file for row in range(NUM)
    )
    for entry in entries:
        name, row = entry.container.path, int(entry.name)
        data = source.read(entry)
        assert data == ppm_of(of_file[name][row].transpose(1, 2, 0))
        assert len(data) == entry.num_bytes


def test_a_build_holds_the_pictures_as_published(tmp_path: Path) -> None:
    path, out = archive(tmp_path, "cifar-10-python"), tmp_path / "out"
    words = [f"source.path={path}", "source.md5=off", "image_size=32", "encoding=keep"]
    assert build("cifar", out, *words) == 0
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    for split, names in (("train", BATCHES[:5]), ("test", BATCHES[5:])):
        assert written(out, split) == {
            f"{name}/{row:05d}": (
                ppm_of(TEN_PIXELS[name][row].transpose(1, 2, 0)),
                TEN_LABELS[name][row],
            )
            for name in names
            for row in range(NUM)
        }


def test_coarse_labels_are_those_of_the_twenty_classes(tmp_path: Path) -> None:
    source = source_of(archive(tmp_path, "cifar-100-python"), labels="coarse")
    assert source.outline().classes == tuple(COARSE)
    assert [entry.label for entry in listed(source)] == COARSE_LABELS["test"] + COARSE_LABELS[
        "train"
    ]


def test_published_sums_are_asked_for_unless_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is opened: those of archives, whatever they are called, and of what the
    python versions unpack to."""
    renamed = write_files(tmp_path, {"renamed.tgz": b"whatever it is"}) / "renamed.tgz"
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "read_members", None)
        refuses(
            source_of(renamed, md5="published"),
            r"c58f\w+ \(cifar-10-python\.tar\.gz\), .* is published.*md5=off",
        )
    path, folder = (
        archive(tmp_path, "cifar-10-python"),
        archive(tmp_path, "cifar-100-python", unpacked=True),
    )
    found = hashlib.md5(path.read_bytes()).hexdigest()
    message = f"has the MD5 {found}, and c58f30108f718f92721af3b95e74349a is published.*md5=off"
    refuses(source_of(path, md5="published"), message)
    refuses(source_of(folder, md5="published"), "16019d7e3df5f24257cddd939b257f8d is published")
    monkeypatch.setitem(cifar.CIFAR_ARCHIVES, "cifar-10-python.tar.gz", found)
    sums = {
        name: hashlib.md5((folder / name).read_bytes()).hexdigest()
        for name in ("train", "test", "meta")
    }
    monkeypatch.setattr(cifar, "CIFAR_FILES", sums)
    assert len(listed(source_of(path, md5="published"))) == 6 * NUM
    assert len(listed(source_of(folder, md5="published"))) == 2 * NUM


def test_files_are_pickled_here_as_those_that_are_published_were() -> None:
    """Byte for byte, opcodes and all: of one of them everything is known."""
    name = "batches.meta"
    assert (
        hashlib.md5(ten_python()[f"cifar-10-batches-py/{name}"]).hexdigest()
        == cifar.CIFAR_FILES[name]
    )


# ---- mistakes
# ---------------------------------------------------------------------------------------------------


def replaced(files: dict[str, bytes], name: str, data: bytes | None) -> dict[str, bytes]:
    """`files` with the one of that name replaced, or without it."""
    (full,) = [path for path in files if path.endswith(f"/{name}")]
    return {path: body for path, body in files.items() if path != full} | (
        {full: data} if data is not None else {}
    )


def a_batch(**fields: object) -> bytes:
    rows = TEN_PIXELS["data_batch_1"].reshape(NUM, 3072)
    return python2_pickle({"labels": [0, 1, 2, 3], "data": rows, **fields})


@pytest.mark.parametrize(
    ("version", "name", "data", "message"),
    [
        ("cifar-10-python", "data_batch_3", None, "looks like cifar-10-python.tar.gz but lacks data_batch_3"),
        ("cifar-10-python", "data_batch_1", a_batch(labels=[0, 1, 2]), "data_batch_1 holds 3 labels for 4 pictures"),
        ("cifar-10-python", "data_batch_1", a_batch(labels=[0, 1, -2, 3]), "record 2 has the label -2"),
        ("cifar-10-python", "data_batch_1", a_batch(labels="abcd"), "labels is no list of integers"),
        ("cifar-10-python", "data_batch_1", a_batch(data=pixels(4, 3071)), r"data is u1 of the shape \(4, 3071\), not"),
        ("cifar-10-python", "data_batch_1", a_batch(data=np.zeros((4, 3072), np.int64)), r"data is i8 of the shape \(4, 3072\)"),
        ("cifar-10-python", "data_batch_1", a_batch(data=[1, 2]), "data is no array"),
        ("cifar-10-python", "data_batch_1", python2_pickle({"data": 1}), r"data_batch_1 is damaged \(has no labels\)"),
        ("cifar-10-python", "data_batch_1", python2_pickle([1]), r"data_batch_1 is damaged \(is no dict\)"),
        ("cifar-10-python", "batches.meta", python2_pickle({"label_names": [1]}), "label_names is no list of names"),
        ("cifar-10-python", "batches.meta", b"", "batches.meta is damaged"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_line(
    tmp_path: Path, version: str, name: str, data: bytes | None, message: str
) -> None:
    files = replaced(VERSIONS[version](), name, data)
    write_files(tmp_path, files | {"archive.tar.gz": tar_gz_of(files)})
    for place in (next(iter(files)).split("/")[0], "archive.tar.gz"):
        refuses(source_of(tmp_path / place), message)


def test_what_is_not_cifar_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"other.tar.gz": tar_gz_of({"folder/file": b""})})
    refuses(
        source_of(tmp_path / "nothing"),
        r"does not exist|is not there; give the \.tar\.gz as downloaded",
    )
    for place in (tmp_path, tmp_path / "other.tar.gz"):
        refuses(source_of(place), "holds none of the files of CIFAR-10 or CIFAR-100")
    with pytest.raises(SourceError, match=r"^source\.labels: .* has no coarse labels"):
        source_of(archive(tmp_path, "cifar-10-python"), labels="coarse").outline()


def test_an_archive_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, "cifar-10-python")
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 12):
        path.write_bytes(whole[:length])
        refuses(source_of(path), "download it again")


def test_a_file_twice_in_an_archive_is_refused_and_paths_out_of_it_lead_nowhere(
    tmp_path: Path,
) -> None:
    path = tmp_path / "home" / "cifar.tar.gz"
    files = ten_python()
    write_files(tmp_path, {"home/cifar.tar.gz": tar_gz_of(files | {"../../data_batch_1": b""})})
    refuses(source_of(path), r"holds data_batch_1 twice")
    write_files(
        tmp_path,
        {"home/cifar.tar.gz": tar_gz_of(files | {"../escaped": b"x", "/tmp/escaped": b"x"})},
    )
    assert len(listed(source_of(path))) == 6 * NUM
    assert [found.name for found in tmp_path.rglob("*")] == ["home", "cifar.tar.gz"]


# ---- hostile pickles
# --------------------------------------------------------------------------------------------

HOSTILE = {
    "global": b"cos\nsystem\n(S'touch {place}'\ntR.",
    "posix": b"cposix\nsystem\n(S'touch {place}'\ntR.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'touch {place}'\ntR.",
    "inst": b"(S'touch {place}'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch {place}'\no.",
    "newobj": b"\x80\x02cos\nsystem\nS'touch {place}'\n\x85\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "eval": b"c__builtin__\neval\n(S'1'\ntR.",
    "fromfile": b"cnumpy\nfromfile\n(S'/etc/passwd'\ntR.",
    "persistent": b"Ppersistent\n.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 28) + b".",
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_in_a_pickle_is_ever_run_nor_memory_reserved_for_a_length_that_it_claims(
    tmp_path: Path, hostile: str
) -> None:
    place = tmp_path / "ran"
    folder = archive(tmp_path, "cifar-10-python", unpacked=True)
    (folder / "test_batch").write_bytes(HOSTILE[hostile].replace(b"{place}", str(place).encode()))
    tracemalloc.start()
    named = (
        r" \(asks for the global os\.system, which arrays of numbers never need"
        if hostile == "global"
        else ""
    )
    refuses(source_of(folder), f"test_batch is damaged{named}")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert not place.exists()


def test_pickles_of_later_pythons_are_read_too(tmp_path: Path) -> None:
    folder, pictures = archive(tmp_path, "cifar-10-python", unpacked=True), TEN_PIXELS["test_batch"]
    rows = np.asfortranarray(pictures.reshape(NUM, 3072))
    fields = {
        "labels": TEN_LABELS["test_batch"],
        "data": rows,
        "long": 1 << 70,
        "float": 0.5,
        "é": (None, True),
    }
    for protocol in range(5):
        (folder / "test_batch").write_bytes(pickle.dumps(fields, protocol=protocol))
        source = source_of(folder)
        entries = [entry for entry in listed(source) if entry.container.split == "test"]
        assert [source.read(entry) for entry in entries] == [
            ppm_of(picture.transpose(1, 2, 0)) for picture in pictures
        ], protocol
