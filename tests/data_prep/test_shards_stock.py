"""Our shards are plain WebDataset tars. Stock `webdataset` and `tarfile` read the images and labels
that an independent decoder finds at the index's places.
"""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
import wids
from numpy.typing import NDArray
from PIL import Image

from tests.data_prep.samples import build, encoded, picture, write_classes, write_files

EXTENSIONS = {"raw": {"ppm"}, "jpeg": {"jpg"}, "keep": {"jpg", "png"}}
SHAPES = {"raw": (24, 24, 3), "jpeg": (24, 24, 3), "keep": (30, 40, 3)}


# stock webdataset does not close the files that it has read
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """19 images of 40 x 30 pixels, one of them a PNG."""
    counts = {"train/ant": 7, "train/bee": 6, "val/ant": 2, "val/bee": 3}
    root = write_classes(tmp_path_factory.mktemp("pictures") / "source", counts)
    return write_files(root, {"train/bee/last.jpg": encoded(picture(seed=50), "PNG")})


@pytest.fixture(scope="module")
def shards(source: Path) -> dict[str, list[Path]]:
    """Return the four shards of each encoding, with at most 5 images each."""
    found = {}
    for encoding in EXTENSIONS:
        out = source.with_name(encoding)
        assert (
            build(source, out, f"encoding={encoding}", "image_size=24", "samples_per_shard=5") == 0
        )
        found[encoding] = sorted(out.glob("*.tar"))
        assert len(found[encoding]) == 4
    return found


def by_index(shard: Path) -> list[tuple[NDArray[np.uint8], int]]:
    """Return (pixels, label) at the byte ranges of the index."""
    content = shard.read_bytes()
    rows = np.load(shard.with_suffix(".npy"))
    assert rows.dtype == np.int64
    assert len(rows) > 0
    return [
        (pixels_of(content[offset : offset + length]), label)
        for offset, length, label in rows.tolist()
    ]


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("encoding", EXTENSIONS)
def test_stock_webdataset_reads_the_pictures_and_labels_of_the_index(
    shards: dict[str, list[Path]], encoding: str
) -> None:
    for shard in shards[encoding]:
        expected = by_index(shard)
        stock = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode("rgb8"))
        assert len(stock) == len(expected)
        for sample, (pixels, label) in zip(stock, expected, strict=True):
            (extension,) = EXTENSIONS[encoding] & sample.keys()
            assert sample["cls"] == label and pixels.shape == SHAPES[encoding]
            np.testing.assert_array_equal(sample[extension], pixels)


@pytest.mark.parametrize("encoding", EXTENSIONS)
def test_a_plain_tar_holds_image_label_and_provenance_under_one_key(
    shards: dict[str, list[Path]], encoding: str
) -> None:
    others = ["cls"] if encoding == "raw" else ["cls", "json"]
    for shard in shards[encoding]:
        expected = by_index(shard)
        with tarfile.open(shard, mode="r:") as archive:
            members = [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
        assert len(members) == (1 + len(others)) * len(expected)
        for number, (pixels, label) in enumerate(expected):
            first, *rest = members[number * (1 + len(others)) : (number + 1) * (1 + len(others))]
            key = f"{shard.stem}-{number:06d}"
            assert first[0] in {f"{key}.{extension}" for extension in EXTENSIONS[encoding]}
            assert [name for name, _ in rest] == [f"{key}.{extension}" for extension in others]
            np.testing.assert_array_equal(pixels_of(first[1]), pixels)
            assert rest[0][1] == str(label).encode()


@pytest.mark.parametrize("encoding", EXTENSIONS)
def test_wids_finds_every_sample_by_the_index_beside_our_shards(
    shards: dict[str, list[Path]], encoding: str, tmp_path: Path
) -> None:
    for split, count in (("train", 14), ("val", 5)):
        ours = [shard for shard in shards[encoding] if shard.name.startswith(split)]
        expected = [each for shard in ours for each in by_index(shard)]
        index = str(ours[0].parent / f"{split}-wids.json")
        found = wids.ShardListDataset(index, cache_dir=str(tmp_path), transformations=[dict])
        assert len(found) == len(expected) == count
        for number in (count - 1, *range(count)):  # in any order
            sample, (pixels, label) = found[number], expected[number]
            (extension,) = {f".{each}" for each in EXTENSIONS[encoding]} & sample.keys()
            assert int(sample[".cls"].read()) == label
            np.testing.assert_array_equal(pixels_of(sample[extension].read()), pixels)
        found.close()


@pytest.mark.parametrize("encoding", ["jpeg", "keep"])
def test_every_picture_is_of_the_class_that_its_label_names_and_keep_writes_the_very_bytes_under_the_true_extension(
    source: Path, shards: dict[str, list[Path]], encoding: str
) -> None:
    seen = {}
    for shard in shards[encoding]:
        for sample in webdataset.WebDataset(str(shard), shardshuffle=False).decode(
            only=["json", "cls"]
        ):
            split, name, _ = sample["json"]["path"].split("/")
            assert shard.name.startswith(f"{split}-") and name == ("ant", "bee")[sample["cls"]]
            (extension,) = EXTENSIONS[encoding] & sample.keys()
            seen[sample["json"]["path"]] = (extension, sample[extension])
    assert len(seen) == 19
    if encoding == "keep":
        png = "train/bee/last.jpg"
        assert seen == {
            path: ("png" if path == png else "jpg", (source / path).read_bytes()) for path in seen
        }


def test_shards_that_mix_formats_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_files(
        write_classes(tmp_path / "in", {"ant": 2}), {"bee/a.jpg": encoded(picture(seed=9), "PNG")}
    )
    for encoding, said in (("jpeg", False), ("keep", True)):
        assert build(source, tmp_path / encoding, f"encoding={encoding}") == 0
        assert ("the shards mix .jpg, .png images" in capsys.readouterr().err) == said
