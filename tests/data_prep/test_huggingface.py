"""Hugging Face's `datasets` and our datasets: `build` reads the exact bytes that it saved, and it
reads our builds."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from data_prep.cli import main
from data_prep.manifest import load_index, load_manifest, load_paths
from data_prep.sources.huggingface import HuggingFaceSettings, HuggingFaceSource
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, encoded, files_of, picture, write_classes, write_files
from tests.errors import fails

CLASSES = ["ant", "bee", "cat"]
COUNTS = {"train": 11, "validation": 4}


def saved(split: str, *, label: Any = None) -> datasets.Dataset:
    """Return PNG and JPEG images. Labels are named classes unless `label` gives another type."""
    numbers = range(COUNTS[split]) if split == "train" else range(20, 20 + COUNTS[split])
    kind = datasets.ClassLabel(names=CLASSES) if label is None else datasets.Value(label)
    value = {"string": lambda number: CLASSES[number % 3]}.get(label, lambda number: number % 3)
    data = [
        {"bytes": encoded(picture(seed=number), "PNG" if number % 2 else "JPEG"), "path": None}
        for number in numbers
    ]
    rows = {"id": list(numbers), "img": data, "fine": [value(number) for number in numbers]}
    return datasets.Dataset.from_dict(
        rows,
        features=datasets.Features(
            {"id": datasets.Value("int64"), "img": datasets.Image(), "fine": kind}
        ),
    )


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the same data in each form."""
    root = tmp_path_factory.mktemp("huggingface")
    both = datasets.DatasetDict({split: saved(split) for split in COUNTS})
    both.save_to_disk(root / "disk", num_shards={"train": 3, "validation": 1})
    (root / "parquet" / "data").mkdir(parents=True)
    both["train"].select(range(6)).to_parquet(
        root / "parquet" / "data" / "train-00000-of-00002.parquet", batch_size=4
    )  # in row groups
    both["train"].select(range(6, 11)).to_parquet(
        root / "parquet" / "data" / "train-00001-of-00002.parquet"
    )
    both["validation"].to_parquet(root / "parquet" / "data" / "validation-00000-of-00001.parquet")
    return {name: root / name for name in ("disk", "parquet")}


def pack(source: Path, out: Path, *words: str) -> int:
    base = [
        "encoding=keep",
        "image_size=16",
        "num_workers=1",
        "samples_per_shard=4",
        f"source.path={source}",
    ]
    return main(["build", "--source", "huggingface", "--out", str(out), *base, *words])


def stored(directory: Path, split: str) -> Counter[tuple[bytes, str]]:
    """Return the image bytes and classes by the index only."""
    manifest, found = load_manifest(directory), Counter[tuple[bytes, str]]()
    for shard in manifest.splits[split].shards:
        content = (directory / shard.file).read_bytes()
        for offset, length, label in np.load(directory / shard.index_file).tolist():
            found[content[offset : offset + length], manifest.classes[label]] += 1
    return found


@pytest.mark.parametrize("form", ["disk", "parquet"])
def test_every_picture_and_class_is_what_datasets_reads_itself(
    places: dict[str, Path], tmp_path: Path, form: str
) -> None:
    assert pack(places[form], tmp_path / "out") == 0
    loaded = datasets.load_from_disk(places["disk"])
    for split, ours in (("train", "train"), ("validation", "val")):
        rows = loaded[split].cast_column("img", datasets.Image(decode=False))
        expected = Counter((row["img"]["bytes"], CLASSES[row["fine"]]) for row in rows)
        assert (
            stored(tmp_path / "out", ours) == expected and sum(expected.values()) == COUNTS[split]
        )
    manifest = load_manifest(tmp_path / "out")
    assert (
        manifest.source["kind"] == "huggingface"
        and str(places[form]) not in manifest.model_dump_json()
    )
    paths = [
        path
        for shard in manifest.splits["train"].shards
        for path in load_paths(tmp_path / "out", shard)
    ]
    assert len(set(paths)) == 11 and all(
        path.startswith(("train/data-", "data/train-")) for path in paths
    )


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("cifar10-train cifar10-test", "train test"),
        ("train-00000-of-00001 eval-00000-of-00001 my_validation", "train test val"),
        ("a.Training b.DEV2 valid/0 more/test/1", "train val val test"),
        ("untrained latest", "train train"),
        ("train extra latest", None),
        ("train_val", None),
    ],
)
def test_the_split_is_a_word_of_the_file_name(
    places: dict[str, Path], tmp_path: Path, names: str, splits: str | None
) -> None:
    data = (places["parquet"] / "data" / "validation-00000-of-00001.parquet").read_bytes()
    write_files(tmp_path, {f"{name}.parquet": data for name in names.split()})
    source = HuggingFaceSource(HuggingFaceSettings(kind="huggingface", path=str(tmp_path)))
    if splits is None:
        with fails("unknown-format", "source.path"):
            source.outline()
    else:
        found = {each.path.rpartition(".")[0]: each.split for each in source.outline().containers}
        assert found == dict(zip(names.split(), splits.split(), strict=True))


def test_the_parts_of_a_split_dataset_keep_their_names(tmp_path: Path) -> None:
    """In both parts, train_test_split() keeps the split of their origin."""
    origin = datasets.Dataset(saved("train").data, split="train")
    origin.train_test_split(test_size=4).save_to_disk(tmp_path / "saved")
    assert pack(tmp_path / "saved", tmp_path / "out", "source.val_fraction=0") == 0
    splits = load_manifest(tmp_path / "out").splits
    assert {name: split.num_samples for name, split in splits.items()} == {"train": 7, "test": 4}


@pytest.mark.processes
def test_one_split_has_some_held_out_and_the_number_of_workers_changes_no_byte(
    places: dict[str, Path], tmp_path: Path
) -> None:
    file = places["parquet"] / "data" / "train-00000-of-00002.parquet"
    for workers in (1, 2):
        assert (
            pack(
                file,
                tmp_path / str(workers) / "out",
                f"num_workers={workers}",
                "source.val_fraction=0.5",
            )
            == 0
        )
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    manifest = load_manifest(tmp_path / "1" / "out")
    assert manifest.num_held_out == 3 and set(manifest.splits) == {"train", "val"}


@pytest.mark.parametrize(
    ("labels", "num_held_out"),
    [([-1, 0, 1, 0, 1, 0, 1], 2), ([None, 0, 0, 0, 0, 0, 0], 1), ([-1] * 7, 0), ([None] * 7, 0)],
)
def test_unlabeled_rows_stay_in_train(
    tmp_path: Path, labels: list[int | None], num_held_out: int
) -> None:
    """The hub marks rows without a label with -1 or null, mostly in test splits."""
    rows = {
        "image": [encoded(picture(seed=number)) for number in range(7)],
        "label": pyarrow.array(labels, pyarrow.int64()),
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "data.parquet")
    assert pack(tmp_path / "data.parquet", tmp_path / "out", "source.val_fraction=0.2") == 0
    manifest = load_manifest(tmp_path / "out")
    found = {
        split: [
            label
            for shard in each.shards
            for label in load_index(tmp_path / "out", shard)[:, 2].tolist()
        ]
        for split, each in manifest.splits.items()
    }
    assert manifest.num_held_out == len(
        found.get("val", [])
    ) == num_held_out and -1 not in found.get("val", [])
    assert found["train"].count(-1) == sum(each in (-1, None) for each in labels)


@pytest.mark.parametrize("label", ["string", "int64"])
def test_labels_without_names_are_words_in_their_order_or_numbers(
    tmp_path: Path, label: str
) -> None:
    saved("train", label=label).save_to_disk(tmp_path / "saved")
    words = ["source.columns={label: fine}", "source.val_fraction=0"]
    assert pack(tmp_path / "saved", tmp_path / "out", *words) == 0
    manifest = load_manifest(tmp_path / "out")
    assert manifest.classes == (tuple(CLASSES) if label == "string" else ("0", "1", "2"))
    names = dict(zip(manifest.classes, CLASSES, strict=True))
    numbers = range(COUNTS["train"])
    expected = Counter(
        (encoded(picture(seed=each), "PNG" if each % 2 else "JPEG"), CLASSES[each % 3])
        for each in numbers
    )
    assert (
        Counter(
            {
                (data, names[name]): count
                for (data, name), count in stored(tmp_path / "out", "train").items()
            }
        )
        == expected
    )


def test_a_missing_picture_is_a_reject_and_mistakes_are_one_line(
    places: dict[str, Path], tmp_path: Path, refused: Refused
) -> None:
    pictures = [
        {"bytes": encoded(picture(seed=1)), "path": "a.jpg"},
        {"bytes": None, "path": "/etc/passwd"},
        None,
    ]
    table = pyarrow.table(
        {"image": pictures, "other": pictures, "label": [0, 0, 1], "class": [0, None, 1]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    out, file, choice = (
        tmp_path / "out",
        tmp_path / "a.parquet",
        "source.columns={image: image, label: label}",
    )
    (tmp_path / "none").mkdir()
    (tmp_path / "cut.parquet").write_bytes(file.read_bytes()[:-9])
    for place, words, code in (
        (file, [], "conflict"),
        (file, ["source.columns={label: label}"], "conflict"),
        (file, ["source.columns={label: lable}"], "unknown-name"),
        (file, ["source.columns={label: image}"], "bad-value"),
        (tmp_path / "none", [], "unknown-format"),
        (tmp_path / "cut.parquet", [], "damaged"),
    ):
        field = "source.columns: " if place == file else "source.path: "
        refused(pack(place, out, *words), field, f"[{code}]")
    assert pack(file, out, choice, "max_reject_fraction=1", "source.val_fraction=0") == 0
    assert load_manifest(out).num_written == 1 and load_manifest(out).num_rejected == 2
    reasons = {
        json.loads(line)["reason"] for line in (out / "rejected.jsonl").read_text().splitlines()
    }
    assert reasons == {
        "not_held",
        "empty",
    }  # a path is ignored, because it may be any file of this machine


def test_datasets_reads_what_we_build(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"train/ant": 7, "train/bee": 6})
    for encoding, extension in (("raw", "ppm"), ("jpeg", "jpg")):
        out = tmp_path / encoding
        assert build(source, out, f"encoding={encoding}", "samples_per_shard=5") == 0
        expected = stored(out, "train")
        files = {"train": [str(path) for path in sorted(out.glob("*.tar"))]}
        found = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
        classes = load_manifest(out).classes

        def pixels(data: bytes) -> bytes:
            return Image.open(io.BytesIO(data)).convert("RGB").tobytes()

        read = Counter(
            (sample[extension].convert("RGB").tobytes(), classes[sample["cls"]]) for sample in found
        )
        assert (
            read
            == Counter({(pixels(data), name): count for (data, name), count in expected.items()})
            and len(read) == 13
        )


def test_datasets_drops_a_format_of_mixed_shards_and_build_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When `datasets` reads all formats, remove `build`'s warning and its text in docs/data.md."""
    pngs = {f"bee/{number}.jpg": encoded(picture(seed=number), "PNG") for number in range(12)}
    source = write_files(write_classes(tmp_path / "in", {"ant": 16}), pngs)
    assert build(source, tmp_path / "out", "encoding=keep", "order=listed") == 0
    assert "drops" in capsys.readouterr().err
    files = [str(path) for path in (tmp_path / "out").glob("*.tar")]
    found = list(
        datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    )
    assert (
        len(found) == 28
        and sum(sample.get("jpg") is None and sample.get("png") is None for sample in found) == 12
    )
