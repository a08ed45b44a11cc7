"""`verify` finds every kind of damage and names the file. A dataset that matches its manifest has
no faults."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.check.verify import verify
from data_prep.cli import main
from data_prep.manifest import PARTS, DatasetError, load_manifest, load_rejected
from pretrain.data.reader import open_split
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import (
    build,
    change_manifest,
    encoded,
    files_of,
    picture,
    replace_index,
    write_classes,
    write_files,
)
from tests.soak import soaked


def verify_command(directory: Path, *words: str) -> int:
    return main(["verify", str(directory), "--workers", "1", *words])


def flip_byte(directory: Path, *, name: str, place: int) -> None:
    content = bytearray((directory / name).read_bytes())
    content[place] ^= 0x40
    (directory / name).write_bytes(content)


@pytest.mark.parametrize("fixture", ["shapes", "other_shapes"])
def test_a_good_dataset_has_no_faults(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], fixture: str
) -> None:
    directory: Path = request.getfixturevalue(fixture)
    num_samples = {"shapes": 8 * 39, "other_shapes": 5 * 19}[fixture]
    capsys.readouterr()
    assert verify_command(directory) == 0
    assert capsys.readouterr().out == f"{directory}: {num_samples} samples match the manifest\n"
    assert verify_command(directory, "--json") == 0
    nothing = {"num_faults": 0, "faults": [], "notes": []}
    assert json.loads(capsys.readouterr().out) == {
        "dataset": str(directory),
        "samples": num_samples,
        **nothing,
    }


@pytest.mark.parametrize("encoding", ["jpeg", "keep"])
def test_a_good_dataset_of_files_with_rejects_has_no_faults(tmp_path: Path, encoding: str) -> None:
    source = write_classes(tmp_path / "source", {"ant": 4})
    write_files(
        source, {"ant/text.jpg": b"no", "ant/wide.png": encoded(picture(seed=9, width=90), "PNG")}
    )
    assert build(source, tmp_path / "out", f"encoding={encoding}", "max_reject_fraction=1") == 0
    found = verify(tmp_path / "out")
    assert found.manifest.num_written == 5
    assert (found.faults, found.notes) == ([], [])


@pytest.mark.parametrize("num_bytes", [0, 600, 2560 * 10, 2560 * 10 + 700])
def test_a_truncated_shard_is_found_and_the_others_are_still_read(
    dataset: Path, num_bytes: int
) -> None:
    path = dataset / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:num_bytes])
    (dataset / "val-000000.tar").unlink()
    faults = verify(dataset).faults
    assert any(
        fault.startswith("train-000000.tar: sha256 differs") and f"({num_bytes:,} bytes" in fault
        for fault in faults
    )
    assert any("samples, 64 expected" in fault for fault in faults)
    assert "val-000000.tar: it is missing" in faults


def test_a_changed_or_missing_index_or_list_of_rejects_is_found(dataset: Path) -> None:
    flip_byte(dataset, name="train-000002.npy", place=-1)
    gone = ("val-000001.npy", "rejected.jsonl")
    for name in gone:
        (dataset / name).unlink()
    faults = verify(dataset).faults
    assert "train-000002.npy: it does not match the manifest" in faults
    assert all(
        any(fault.startswith(f"{name}: No such file") for fault in faults) for name in gone
    ), faults


def test_a_label_that_differs_between_shard_and_index_is_found_though_the_hashes_agree(
    dataset: Path,
) -> None:
    index = np.load(dataset / "train-000002.npy")
    index[3, 2] = (index[3, 2] + 1) % 8
    replace_index(dataset, index, shard=2)
    faults = verify(dataset).faults
    assert faults == [
        "train-000002.tar train-000002-000003: the index does not point at this image",
        "split train: the class counts of its shards differ from the manifest",
    ]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"splits.train.shards.1.num_samples": 1}, "train-000001.npy: it has shape (64, 3)"),
        (
            {"splits.train.shards.1.num_bytes": 1},
            "train-000001.tar: size differs from the manifest",
        ),
        (
            {"splits.val.class_counts.0": 1},
            "split val: the class counts of its shards differ from the manifest",
        ),
        ({"num_read": 1}, "manifest: 313 inputs read, but"),
        ({"num_read": 1, "num_written": 1}, "manifest: 313 samples written"),
        ({"num_read": 1, "num_rejected": 1}, "rejected.jsonl: "),
        ({"image_size": 1}, "(16, 16) pixels, (17, 17) expected"),
        ({"splits.train.shards.1.name": "train-000000"}, "manifest: 2 shards "),
        ({"classes": None}, "label 7 is not one of 7 classes"),
    ],
)
def test_a_manifest_that_says_otherwise_is_found(
    dataset: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], fault: str
) -> None:
    """Numbers increase, words are replaced, lists lose their last entry."""

    def change(manifest: dict[str, Any]) -> None:
        for path, value in changes.items():
            node: Any = manifest
            *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
            for key in above:
                node = node[key]
            node[last] = (
                node[last][:-1]
                if value is None
                else value
                if isinstance(value, str)
                else node[last] + value
            )

    change_manifest(dataset, change)
    assert verify_command(dataset) == 1
    assert fault in capsys.readouterr().out


@soaked
def test_every_flipped_byte_is_found_by_verify_and_by_readers(tmp_path: Path, salt: int) -> None:
    """Training does not check pixels, so readers skip the tars."""
    source = write_classes(tmp_path / "source", {"ant": 3, "bee": 2})
    write_files(source, {"ant/text.jpg": b"no", "bee/empty.png": b""})
    out = tmp_path / "out"
    assert build(source, out, "encoding=jpeg", "max_reject_fraction=1", "image_size=8") == 0
    assert verify(out).faults == []

    def read() -> None:
        manifest = load_manifest(out)
        load_rejected(out, manifest)
        for name in manifest.splits:
            with closing(open_split(out, manifest, name)) as reader:
                reader.names(np.arange(reader.num_samples))
                reader.images(np.arange(reader.num_samples))

    def is_found(check: Callable[[], object]) -> bool:
        try:
            return bool(check())
        except DatasetError:
            return True

    random = np.random.default_rng(8 + salt)
    files, missed = files_of(out), []
    assert len(files) == 6  # manifest, rejects, tar, index, paths, and what wids reads
    for name, content in files.items():
        for place in random.integers(
            len(content), size=400 if name == "manifest.json" else 60
        ).tolist():
            flipped = bytearray(content)
            flipped[place] ^= 1 << int(random.integers(8))
            (out / name).write_bytes(flipped)
            by_reader = name.endswith((".tar", "wids.json")) or is_found(read)
            if not by_reader or not is_found(lambda: verify(out).num_faults):
                missed.append((name, place, flipped[place]))
        (out / name).write_bytes(content)
    assert missed == []
    read()


# ---- the command


def test_what_lies_about_is_a_note_and_no_fault(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(
        dataset,
        {"old.tar": b"", ".tmp-train-000009.tar": b"", f"{PARTS}/x.json": b"", "mine.txt": b""},
    )
    found = verify(dataset)
    assert found.faults == []
    assert [note.split(":")[0] for note in found.notes] == [
        ".tmp-train-000009.tar",
        "old.tar",
        PARTS,
    ]
    capsys.readouterr()
    assert verify_command(dataset) == 0
    assert "note: old.tar: it is not in the manifest" in capsys.readouterr().out


def test_twenty_faults_are_printed_and_the_others_counted(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_manifest(dataset, lambda manifest: manifest.update(image_size=17))
    capsys.readouterr()
    assert verify_command(dataset) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 292 more"
    assert verify_command(dataset, "--json") == 1
    assert json.loads(capsys.readouterr().out)["num_faults"] == 312


@pytest.mark.processes
def test_any_number_of_workers_finds_the_same(dataset: Path) -> None:
    flip_byte(dataset, name="train-000003.tar", place=600)
    (dataset / "train-000001.npy").unlink()
    alone = verify(dataset)
    assert len(alone.faults) == 3
    assert verify(dataset, num_workers=2) == alone


def test_a_dataset_that_cannot_be_written_to_can_be_verified(dataset: Path) -> None:
    before = files_of(dataset)
    for path in (*dataset.iterdir(), dataset):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert verify(dataset).faults == []
    finally:
        dataset.chmod(0o755)
    assert files_of(dataset) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nowhere", "[missing-path]"),
        (None, ("[unfinished]")),
        (b"{", "no manifest"),
        (b"[]", "no manifest"),
        (b"\xff{}", "no manifest"),
        (b'{"schema_version": 3}', "its content does not match its own hash"),
        (b'{"schema_version": 2}', "[unsupported]"),
    ],
)
def test_without_a_readable_manifest_there_is_one_clear_line(
    dataset: Path, refused: Refused, content: bytes | str | None, message: str
) -> None:
    (dataset / "manifest.json").unlink()
    if content == "nowhere":
        shutil.rmtree(dataset)
    elif isinstance(content, bytes):
        (dataset / "manifest.json").write_bytes(content)
    refused(verify_command(dataset), message)
