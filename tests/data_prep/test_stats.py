"""The results of `stats` equal an independent count of the same files."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.check.stats import stats
from data_prep.cli import main
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, encoded, files_of, picture, write_files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 images (9 train, 4 val) of three sizes, and two files that are not images."""
    files = {f"train/ant/{number}.jpg": encoded(picture(seed=number)) for number in range(6)}
    files |= {
        f"train/bee/{number}.png": encoded(picture(seed=9, width=21 + number), "PNG")
        for number in range(2)
    }
    files |= {"train/cat/0.jpg": encoded(picture(seed=11))}
    files |= {f"val/ant/{number}.jpg": encoded(picture(seed=20 + number)) for number in range(4)}
    files |= {"train/cat/none.jpg": b"", "val/bee/text.jpg": b"no picture"}
    return write_files(tmp_path_factory.mktemp("pictures") / "source", files)


def pack(source: Path, out: Path, encoding: str) -> Path:
    assert (
        build(
            source,
            out,
            f"encoding={encoding}",
            "max_reject_fraction=1",
            "samples_per_shard=4",
            "draft=false",
        )
        == 0
    )
    return out


def by_hand(directory: Path, split: str) -> list[np.ndarray[Any, Any]]:
    """Return every image of a split at 16 px from the tars."""
    found = []
    for path in sorted(directory.glob(f"{split}-*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if not member.name.endswith((".cls", ".json")):
                    body = archive.extractfile(member)
                    assert body is not None
                    found.append(np.asarray(Image.open(io.BytesIO(body.read())).convert("RGB")))
    assert found
    return found


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_numbers_are_those_of_an_independent_count(
    source: Path, tmp_path: Path, encoding: str
) -> None:
    directory = pack(source, tmp_path / "animals", encoding)
    before = files_of(directory)
    found = stats(directory, recompute=True)
    assert (found["read"], found["written"], found["num_classes"]) == (15, 13, 3)
    assert found["rejected"] == {"empty": 1, "not_an_image": 1}
    train, val = found["splits"]["train"], found["splits"]["val"]
    assert (train["samples"], train["unlabeled"], train["shards"], train["classes"]) == (9, 0, 3, 3)
    assert train["per_class"] == {"min": 1, "5 %": 1, "median": 2, "95 %": 6, "max": 6}
    assert train["imbalance"] == 6.0
    assert train["largest"] == [["ant", 6], ["bee", 2], ["cat", 1]]
    assert val["per_class"] == {"min": 0, "5 %": 0, "median": 0, "95 %": 4, "max": 4}
    assert (val["classes"], val["smallest"][0]) == (1, ["cat", 0])
    assert train["tar_bytes"] == sum(path.stat().st_size for path in directory.glob("train-*.tar"))
    assert found["sizes"] == [{"width": 16, "height": 16, "count": 13}]
    pixels = np.stack(by_hand(directory, "train")).reshape(-1, 3) / 255
    assert np.allclose(found["recomputed_channel_mean"], pixels.mean(axis=0), atol=1e-9)
    assert np.allclose(found["recomputed_channel_std"], pixels.std(axis=0), atol=1e-9)
    if encoding == "raw":  # the manifest's statistics of JPEGs precede encoding
        assert np.allclose(found["recomputed_channel_mean"], found["channel_mean"], atol=1e-9)
    assert files_of(directory) == before


@pytest.mark.processes
def test_sizes_of_kept_pictures_are_read_off_their_headers(source: Path, tmp_path: Path) -> None:
    directory = pack(source, tmp_path / "animals", "keep")
    found = stats(directory, num_workers=2)
    pictures = [*by_hand(directory, "train"), *by_hand(directory, "val")]
    wanted = Counter((array.shape[1], array.shape[0]) for array in pictures)
    assert {(size["width"], size["height"]): size["count"] for size in found["sizes"]} == wanted
    assert wanted == {(40, 30): 11, (21, 30): 1, (22, 30): 1}
    assert found["sizes"][0]["count"] == 11
    assert stats(directory) == found


def test_the_command_prints_tables_or_json(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = pack(source, tmp_path / "animals", "keep")
    capsys.readouterr()
    assert main(["stats", str(directory), "--json", "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == stats(directory)
    assert main(["stats", str(directory), "--recompute", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "read 15 = written 13 + rejected 2 (empty 1, not_an_image 1)" in said
    assert "train: largest classes ant 6, bee 2, cat 1; smallest cat 1, bee 2, ant 6" in said
    assert "40 x 30" in said
    (width,) = (
        line.split()
        for line in said.splitlines()
        if line.startswith("width ") and " x " not in line
    )
    assert width == ["width", "21", "21", "40", "40", "40"]  # widths: 21, 22 and eleven times 40
    assert "recomputed" in said
    assert max(len(line) for line in said.splitlines() if not line.startswith(str(directory))) <= 80


def test_a_damaged_picture_is_one_line(source: Path, tmp_path: Path, refused: Refused) -> None:
    directory = pack(source, tmp_path / "animals", "keep")
    tar = directory / "train-000000.tar"
    content = bytearray(tar.read_bytes())
    content[512:600] = b"x" * 88
    tar.write_bytes(content)
    refused(main(["stats", str(directory), "--workers", "1"]), "[damaged]", "[damaged]")
