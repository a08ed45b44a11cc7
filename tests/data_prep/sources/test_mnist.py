"""MNIST's four idx files, compressed as published or not, and the datasets that share their
layout."""

import gzip
import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.manifest import load_manifest
from data_prep.sources import Source, SourceError, mnist
from tests.data_prep.samples import write_files
from tests.data_prep.sources.layouts import (
    Pixels,
    build,
    idx_of,
    listed,
    opened,
    pixels,
    ppm_of,
    refuses,
    written,
)

PICTURES = {"train": pixels(7, 28, 28, seed=1), "test": pixels(3, 28, 28, seed=2)}
LABELS = {"train": np.array([5, 0, 4, 1, 9, 2, 1], np.uint8), "test": np.array([7, 2, 1], np.uint8)}


def files(*, compressed: bool = True, prefix: str = "", test: str = "t10k") -> dict[str, bytes]:
    found = {}
    for split, stem in {"train": "train", "test": test}.items():
        found[f"{prefix}{stem}-images-idx3-ubyte"] = idx_of(PICTURES[split])
        found[f"{prefix}{stem}-labels-idx1-ubyte"] = idx_of(LABELS[split])
    return (
        {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in found.items()}
        if compressed
        else found
    )


def source_of(path: Path, **fields: object) -> Source:
    return opened("mnist", path, **fields)


def grey(picture_HW: Pixels) -> bytes:
    return ppm_of(np.stack([picture_HW] * 3, axis=2))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_build_holds_the_grey_pictures_as_rgb(tmp_path: Path, compressed: bool) -> None:
    path, out = write_files(tmp_path / "mnist", files(compressed=compressed)), tmp_path / "out"
    assert build("mnist", out, f"source.path={path}", "source.md5=off", "image_size=28") == 0
    manifest = load_manifest(out)
    assert manifest.classes == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    for split, pictures in PICTURES.items():
        assert written(out, split) == {
            f"{split}/{row:05d}": (grey(picture), int(LABELS[split][row]))
            for row, picture in enumerate(pictures)
        }


def test_kept_pictures_are_the_same_pixels_in_one_channel(tmp_path: Path) -> None:
    path, out = write_files(tmp_path / "mnist", files()), tmp_path / "out"
    assert (
        build(
            "mnist", out, f"source.path={path}", "source.md5=off", "image_size=28", "encoding=keep"
        )
        == 0
    )
    for name, sample in written(out, "test").items():
        with Image.open(io.BytesIO(sample.data)) as image:
            assert image.mode == "L"
            assert np.array_equal(np.asarray(image), PICTURES["test"][int(name[-5:])])


def test_relatives_of_mnist_have_their_own_names(tmp_path: Path) -> None:
    path = write_files(tmp_path / "fashion", files())
    assert source_of(path, variant="fashion").outline().classes[0] == "T-shirt/top"
    emnist = write_files(tmp_path / "emnist", files(prefix="emnist-letters-", test="test"))
    source = source_of(
        emnist, variant="other", prefix="emnist-letters-", transposed=True, md5="published"
    )
    assert source.outline().classes == tuple("0123456789")
    entries = listed(source)
    assert [entry.label for entry in entries] == [*LABELS["test"], *LABELS["train"]]
    assert source.read(entries[0]) == b"P5\n28 28\n255\n" + PICTURES["test"][0].T.tobytes()


def test_published_sums_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_files(tmp_path / "mnist", files())
    refuses(
        source_of(path, md5="published"),
        "unpacked, has the MD5 .* 6bbc9ace898e44ae57da46a324031adb is published",
    )
    refuses(
        source_of(path, md5="published", variant="fashion"),
        "f4a8712d7a061bf5bd6d2ca38dc4d50a is published",
    )
    refuses(
        source_of(path, md5="published", variant="kmnist"),
        "bdb82020997e1d708af4cf47b453dcf7 is published",
    )
    sums = {name: hashlib.md5(data).hexdigest() for name, data in files(compressed=False).items()}
    monkeypatch.setitem(mnist.MNIST_FILES, "fashion", sums)
    other = {
        f"{name}.gz": gzip.compress(data, 1, mtime=9)
        for name, data in files(compressed=False).items()
    }
    others = (
        write_files(tmp_path / "other", other),
        write_files(tmp_path / "unpacked", files(compressed=False)),
    )
    for place in (path, *others):  # the same bytes, however they were compressed
        assert len(listed(source_of(place, md5="published", variant="fashion"))) == 10
        with pytest.raises(
            SourceError, match=r"^source\.variant: .*; set source\.variant=fashion$"
        ):
            source_of(place, md5="published").outline()


DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(not DEBIAN.exists(), reason="needs Debian's package dataset-fashion-mnist")
def test_the_files_of_debian_are_the_published_ones() -> None:
    outline = source_of(DEBIAN, md5="published", variant="fashion").outline()
    assert [container.split for container in outline.containers] == ["train", "test"]
    with pytest.raises(SourceError, match=r"set source\.variant=fashion"):
        source_of(DEBIAN, md5="published").outline()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t10k-labels-idx1-ubyte", None, r"holds no t10k-labels-idx1-ubyte\.gz; give the folder with the four idx files"),
        ("train-images-idx3-ubyte", idx_of(PICTURES["train"])[:-1], "5,487 values, its header says 7 x 28 x 28"),
        ("train-images-idx3-ubyte", b"\x89PNG" + bytes(20), "begins with 89 50 4e 47, not with 00 00 08 03"),
        ("train-images-idx3-ubyte", idx_of(LABELS["train"]), "begins with 00 00 08 01, not with 00 00 08 03"),
        ("train-images-idx3-ubyte", b"", "begins with , not with 00 00 08 03"),
        ("train-labels-idx1-ubyte", idx_of(LABELS["train"][:6]), "train holds 6 labels for 7 pictures"),
        ("train-labels-idx1-ubyte", idx_of(LABELS["train"] + 2), "train: record 4 has the label 11, which is not one of 0 to 9"),
        ("train-images-idx3-ubyte", idx_of(pixels(7, 0, 28)), "its header says 7 x 0 x 28"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_line(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    found = {other: body for other, body in files(compressed=False).items() if other != name}
    path = write_files(tmp_path / "mnist", found | ({name: data} if data is not None else {}))
    refuses(source_of(path), message)
