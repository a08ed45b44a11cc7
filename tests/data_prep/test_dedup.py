"""`dedup` finds copies of an image and nothing else, drops them from training only, and leaves
nothing for a second run."""

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFont
from sklearn.datasets import load_digits

from data_prep.choose.dedup import compare
from data_prep.choose.hashes import DTYPE, picture_hashes, same_colors
from data_prep.choose.neighbors import near_pairs, plan
from data_prep.cli import main
from data_prep.manifest import load_manifest, load_paths
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, encoded, files_of, write_files


def textured(seed: int, *, size: int = 64) -> Image.Image:
    """Return an image with detail at every scale, like photographs (amplitude falls with
    frequency)."""
    numbers = np.random.default_rng(seed)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size), np.fft.fftfreq(size)))
    frequency[0, 0] = 1
    fields = [
        np.fft.ifft2(np.fft.fft2(numbers.normal(size=(size, size))) / frequency).real
        for _ in range(4)
    ]
    luma = fields[3] / fields[3].std()
    pixels = np.stack([luma + 0.4 * field / field.std() for field in fields[:3]], axis=-1)
    return Image.fromarray((pixels * 45 + 125).clip(0, 255).astype(np.uint8))


def shape(color: str, *, background: str = "white") -> Image.Image:
    picture = Image.new("RGB", (64, 64), background)
    picture.paste(color, (12, 16, 32, 48))
    return picture


def reencoded(picture: Image.Image, quality: int) -> Image.Image:
    return Image.open(io.BytesIO(encoded(picture, quality=quality))).convert("RGB")


def dedup(directory: Path, *words: str, out: Path) -> list[dict[str, Any]]:
    """Run `dedup`. Return the lines of its list."""
    assert main(["dedup", str(directory), "--workers", "1", "--out", str(out), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


# ---- fingerprints

CHANGES: dict[str, tuple[Callable[[Image.Image], Image.Image], float]] = {
    "jpeg of quality 50": (lambda picture: reencoded(picture, 50), 0.99),
    "jpeg of quality 20": (lambda picture: reencoded(picture, 20), 0.97),
    "halved": (lambda picture: picture.resize((32, 32), Image.Resampling.BICUBIC), 0.99),
    "halved and doubled": (lambda picture: picture.resize((32, 32)).resize((64, 64)), 0.99),
    "a fifth brighter": (lambda picture: ImageEnhance.Brightness(picture).enhance(1.2), 0.97),
    "less contrast": (lambda picture: ImageEnhance.Contrast(picture).enhance(0.8), 0.99),
    "a crop of 3 %": (
        lambda picture: picture.resize((64, 64), Image.Resampling.BICUBIC, box=(1, 1, 63, 63)),
        0.85,
    ),
}
"""Change of an image, and the fraction of images that must be found within 6 bits."""


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    return [textured(seed) for seed in range(200)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_picture_is_found_again(photographs: list[Image.Image], change: str) -> None:
    (function, share), pictures = CHANGES[change], photographs
    before, after = (
        picture_hashes(pictures),
        picture_hashes([function(picture) for picture in pictures]),
    )
    near = np.bitwise_count(before["bits"] ^ after["bits"]) <= 6
    rows = np.arange(200)
    same = same_colors(np.concatenate([before["colors"], after["colors"]]), rows, rows + 200)
    assert (near & same).mean() >= share


def test_different_pictures_are_not_alike(photographs: list[Image.Image]) -> None:
    hashes = picture_hashes(photographs)
    like, _ = compare(hashes, near=10, first=0)
    assert (like == -1).all()


def test_the_same_drawing_in_other_colors_is_another_picture() -> None:
    pictures = [
        shape(color, background=paper)
        for color in ("red", "green", "blue")
        for paper in ("white", "black")
    ]
    hashes = picture_hashes(pictures)
    assert len(set(hashes["bits"].tolist())) < 6  # luma only would confuse some
    assert (compare(hashes, near=6, first=0)[0] == -1).all()


def test_pictures_of_one_color_are_alike_only_if_their_pixels_are() -> None:
    pictures = [Image.new("RGB", (32, 32), color) for color in ("red", "#fe0000", "white", "red")]
    hashes = picture_hashes(pictures)
    assert hashes["plain"].all()
    assert compare(hashes, near=6, first=0)[0].tolist() == [-1, -1, -1, 0]


def test_line_art_and_digits_are_told_apart_and_photographs_are_still_judged(
    photographs: list[Image.Image],
) -> None:
    scanned = [
        Image.fromarray(digit.astype(np.uint8) * 15).convert("RGB")
        for digit in load_digits().images[:600]
    ]
    written, font = [], ImageFont.load_default(18)
    for number in range(600):
        written.append(Image.new("RGB", (64, 64), "white"))
        ImageDraw.Draw(written[-1]).text((4, 20), f"{number * 7919 % 100_000:05d}", "black", font)
    for pictures in (scanned, written):
        like, _ = compare(
            picture_hashes([each.resize((48, 48)) for each in pictures]), near=6, first=0
        )
        assert (like >= 0).sum() <= 2
    photographs = photographs[:100]
    on_white = [Image.new("RGB", (96, 96), "white") for _ in photographs]  # like products in shops
    for ground, photograph in zip(on_white, photographs, strict=True):
        ground.paste(photograph, (16, 16))
    for pictures in (photographs, on_white):
        assert not picture_hashes(pictures)["plain"].any()
        like, _ = compare(
            picture_hashes([*pictures, *(reencoded(each, 85) for each in pictures)]),
            near=6,
            first=0,
        )
        assert (like[:100] < 0).all() and (like[100:] == np.arange(100)).mean() >= 0.99


def test_a_hash_does_not_hang_on_the_pictures_beside_it() -> None:
    pictures = [textured(seed) for seed in range(9)] + [shape("red")]
    together = picture_hashes(pictures)
    alone = np.concatenate([picture_hashes([picture]) for picture in pictures])
    assert (together == alone).all()


# ---- the search


@pytest.mark.parametrize("near", [0, 1, 4, 6, 10])
def test_the_search_finds_the_pairs_that_comparing_all_with_all_finds(near: int) -> None:
    numbers = np.random.default_rng(near)
    centers = numbers.integers(0, 2**64, 60, dtype=np.uint64)
    flips = numbers.integers(0, 64, (600, 5))
    bits = centers[numbers.integers(0, 60, 600)]
    for column in flips.T:
        bits ^= np.uint64(1) << column.astype(np.uint64)
    apart = [[bin(int(x) ^ int(y)).count("1") for y in bits] for x in bits]
    wanted = {
        (a, b, apart[a][b])
        for a in range(600)
        for b in range(max(a + 1, 100), 600)
        if apart[a][b] <= near
    }
    assert len(wanted) > (0 if near > 1 else -1)
    a, b, distance = near_pairs(bits, near=near, first=100)
    assert set(zip(a.tolist(), b.tolist(), distance.tolist(), strict=True)) == wanted
    assert len(a) == len(wanted)


def test_memory_grows_with_the_pairs_and_not_with_the_tables() -> None:
    flips = np.random.default_rng(0).integers(0, 64, (400, 3))
    bits = np.bitwise_or.reduce(
        np.uint64(1) << flips.astype(np.uint64), axis=1
    )  # all within 6 bits of each other
    tracemalloc.start()
    a, _, _ = near_pairs(bits, near=6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(a) == 400 * 399 // 2
    assert len(plan(len(bits), near=6)) >= 7 and peak < 100 * len(a)


def test_no_plan_compares_all_with_all_at_the_size_of_imagenet21k() -> None:
    masks = plan(14_000_000, near=6)
    assert len(masks) < 500
    assert (
        min(int(mask).bit_count() for mask in masks) >= 20
    )  # 14 million hashes: about 13 in each run of equal bits


def test_a_thousand_copies_of_one_picture_are_one_group() -> None:
    hashes = np.zeros(1000, DTYPE)
    hashes["pixels"][:, 0] = np.arange(1000)
    hashes["bits"] = 5
    hashes["colors"] = picture_hashes([shape("red")])["colors"]
    like, distance = compare(hashes, near=4, first=0)
    assert like.tolist() == [-1, *[0] * 999]
    assert distance.tolist() == [-1, *[0] * 999]


# ---- datasets


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [textured(seed, size=48) for seed in range(24)]


@pytest.fixture
def source(tmp_path: Path, pictures: list[Image.Image]) -> Path:
    """Write 20 train and 4 val images. Copies: a train image twice, a train image as a bad JPEG,
    and a val image in train."""
    files = {
        f"train/ant/{number:02d}.png": encoded(pictures[number], "PNG") for number in range(20)
    }
    files |= {
        f"val/ant/{number:02d}.png": encoded(pictures[number], "PNG") for number in range(20, 24)
    }
    files["train/bee/twice.bmp"] = encoded(pictures[3], "BMP")
    files["train/bee/worse.jpg"] = encoded(pictures[7], quality=40)
    files["train/bee/leak.jpg"] = encoded(pictures[21], quality=60)
    files["val/bee/again.png"] = encoded(pictures[22], "PNG")
    return write_files(tmp_path / "source", files)


def pack(source: Path, out: Path, *words: str) -> Path:
    assert build(source, out, "image_size=32", "order=listed", "samples_per_shard=8", *words) == 0
    return out


def test_doubles_are_listed_the_first_stays_and_evaluation_is_whole(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = pack(source, tmp_path / "animals")
    before = files_of(directory)
    lines = dedup(directory, out=tmp_path / "list.jsonl")
    assert "the list drops 13.0% of train. Check some of its pairs" in capsys.readouterr().err
    found = [
        (line["path"], line["reason"], line["of"]["split"], line["of"]["path"]) for line in lines
    ]
    assert found == [
        ("train/bee/leak.jpg", "near", "val", "val/ant/21.png"),
        ("train/bee/twice.bmp", "exact", "train", "train/ant/03.png"),
        ("train/bee/worse.jpg", "near", "train", "train/ant/07.png"),
    ]
    assert [line["distance"] == 0 for line in lines] == [
        line["reason"] == "exact" or line["distance"] == 0 for line in lines
    ]
    assert lines[1] == {
        "path": "train/bee/twice.bmp",
        "key": "train-000002-000005",
        "split": "train",
        "reason": "exact",
        "distance": 0,
        "of": {
            "dataset": "animals",
            "split": "train",
            "key": "train-000000-000003",
            "path": "train/ant/03.png",
        },
    }
    assert files_of(directory) == before


def test_after_a_build_without_the_list_nothing_is_found(tmp_path: Path, source: Path) -> None:
    directory = pack(source, tmp_path / "animals")
    assert len(dedup(directory, out=tmp_path / "list.jsonl")) == 3
    clean = pack(source, tmp_path / "clean", f"exclude=[{tmp_path / 'list.jsonl'}]")
    manifest = load_manifest(clean)
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {
        "train": 20,
        "val": 5,
    }
    assert manifest.num_left_out == {"excluded": 3}
    assert dedup(clean, out=tmp_path / "none.jsonl") == []
    words = [f"--out={tmp_path}/some", f"--exclude={tmp_path}/list.jsonl"]
    assert main(["subset", str(directory), *words]) == 0
    assert dedup(tmp_path / "some", out=tmp_path / "none.jsonl") == []


def test_every_match_with_another_dataset_is_dropped_whatever_its_size_and_encoding(
    tmp_path: Path, source: Path, pictures: list[Image.Image]
) -> None:
    others = {f"test/x/{number}.png": encoded(pictures[number], "PNG") for number in (3, 5)}
    others["test/x/new.png"] = encoded(textured(99), "PNG")
    other = tmp_path / "downstream"
    assert (
        build(write_files(tmp_path / "other", others), other, "image_size=40", "encoding=jpeg") == 0
    )
    directory = pack(source, tmp_path / "animals")
    lines = dedup(directory, "--against", str(other), out=tmp_path / "list.jsonl")
    dropped = {line["path"] for line in lines if line["of"]["dataset"] == "downstream"}
    assert dropped == {"train/ant/03.png", "train/ant/05.png"}
    assert {line["path"] for line in lines} - dropped == {
        f"train/bee/{name}" for name in ("leak.jpg", "twice.bmp", "worse.jpg")
    }


def test_only_equal_pixels_and_other_splits_where_that_is_asked_for(
    tmp_path: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = pack(source, tmp_path / "animals")
    assert [line["path"] for line in dedup(directory, "--exact", out=tmp_path / "a.jsonl")] == [
        "train/bee/twice.bmp"
    ]
    lines = dedup(directory, "--split", "val", "--split", "train", out=tmp_path / "b.jsonl")
    assert [line["path"] for line in lines] == [
        f"train/bee/{name}" for name in ("leak.jpg", "twice.bmp", "worse.jpg")
    ] + ["val/bee/again.png"]
    capsys.readouterr()
    monkeypatch.setattr("data_prep.commands.choosing.MANY", 0.15)  # 3 of 23 in train, 1 of 5 in val
    dedup(directory, "--split", "val", "--split", "train", out=tmp_path / "b.jsonl")
    assert [
        line.partition(". ")[0] for line in capsys.readouterr().err.splitlines() if "drops" in line
    ] == ["data_prep: the list drops 20.0% of val"]


@pytest.mark.processes
def test_other_encodings_and_any_number_of_workers_give_the_same_list(
    tmp_path: Path, source: Path
) -> None:
    for encoding in ("jpeg", "keep"):
        directory = pack(source, tmp_path / encoding / "animals", f"encoding={encoding}")
        alone = dedup(directory, out=tmp_path / f"{encoding}.jsonl")
        assert len(alone) == 3
    assert dedup(directory, "--workers", "2", out=tmp_path / "two.jsonl") == alone


def test_kept_hashes_are_used_again_and_those_of_changed_shards_are_not(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = pack(source, tmp_path / "animals")
    lines = dedup(directory, "--hashes", str(tmp_path / "hashes"), out=tmp_path / "a.jsonl")
    assert len(list((tmp_path / "hashes").iterdir())) == 4
    hashed: list[int] = []

    def counted(pictures: list[Image.Image]) -> Any:
        hashed.append(len(pictures))
        return picture_hashes(pictures)

    monkeypatch.setattr("data_prep.choose.hashes.picture_hashes", counted)
    assert dedup(directory, "--hashes", str(tmp_path / "hashes"), out=tmp_path / "b.jsonl") == lines
    assert hashed == []
    other = pack(source, tmp_path / "other", "samples_per_shard=12")
    dedup(other, "--hashes", str(tmp_path / "hashes"), out=tmp_path / "c.jsonl")
    assert sum(hashed) == 23  # val's only shard is the same


def test_the_summary_counts_what_the_list_holds(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = pack(source, tmp_path / "animals")
    capsys.readouterr()
    assert main(["dedup", str(directory), "--json", "--workers", "1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["samples"], said["duplicates"], said["plain"], said["out"]) == (23, 3, 0, None)
    assert sum(row["count"] for row in said["by"]) == 3
    assert {
        "split": "train",
        "of_dataset": "animals",
        "of_split": "val",
        "reason": "near",
        "count": 1,
    } in said["by"]
    assert main(["dedup", str(directory), "--workers", "1"]) == 0
    assert "3 of 23 samples repeat an earlier image" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-hamming", "11"], "[bad-value]"),
        (["--split", "trian"], "[unknown-name]"),
        (["--against", "nowhere"], "nowhere: no such dataset directory"),
        (["--hashes", __file__], "[exists]"),
        (["--out", "some.txt"], "[bad-value]"),
        (["--out", "rejected.jsonl"], "[bad-value]"),
        (["--out", "s3://bucket/list.jsonl"], "[unsupported]"),
        (["--out", "not/there/list.jsonl"], "[unreadable]"),
    ],
)
def test_a_mistake_is_one_line(
    shapes: Path, tmp_path: Path, refused: Refused, words: list[str], message: str
) -> None:
    refused(
        main(
            ["dedup", str(shapes), "--workers", "1", "--out", str(tmp_path / "list.jsonl"), *words]
        ),
        message,
    )
    assert not (tmp_path / "list.jsonl").exists()


def test_where_the_list_cannot_go_is_said_before_hashing(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("data_prep.choose.dedup.shard_hashes", None)
    (tmp_path / "folder.jsonl").mkdir()
    thesis = tmp_path / "thesis.jsonl"
    for content in ("years of work", '{"path": "a.jpg"}\n'):
        thesis.write_text(content)
        for path, code in [(tmp_path / "folder.jsonl", "[unreadable]"), (thesis, "[exists]")]:
            refused(main(["dedup", str(shapes), "--workers", "1", "--out", str(path)]), code)
        assert thesis.read_text() == content


def test_the_shapes_have_no_double(shapes: Path, other_shapes: Path, tmp_path: Path) -> None:
    assert load_paths(shapes, load_manifest(shapes).splits["train"].shards[0])
    assert dedup(shapes, "--against", str(other_shapes), out=tmp_path / "list.jsonl") == []
