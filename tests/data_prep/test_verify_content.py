"""`verify` where every hash agrees: order, labels, numbers and annotations are held against each
other; and shards far away."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.build.merge import write_annotation
from data_prep.check.verify import verify
from data_prep.manifest import load_manifest
from tests.data_prep.samples import (
    build,
    change_manifest,
    encoded,
    files_of,
    picture,
    replace_index,
    write_classes,
)
from tests.data_prep.stock import index, sample, web, write_stock, write_tar
from tests.data_prep.test_verify import flip_byte


def forge(directory: Path, number: int, *, tar: bytes | None = None, **files: bytes) -> None:
    """Replaces files of a train shard and lets the manifest vouch for them."""
    name = f"train-{number:06d}"
    forged: dict[str, object] = {}
    if tar is not None:
        (directory / f"{name}.tar").write_bytes(tar)
        forged = {"sha256": hashlib.sha256(tar).hexdigest(), "num_bytes": len(tar)}
    for kind, data in files.items():
        (directory / f"{name}.{kind}").write_bytes(data)
        forged[{"npy": "index_sha256", "paths": "paths_sha256"}[kind]] = hashlib.sha256(
            data
        ).hexdigest()
    change_manifest(
        directory, lambda manifest: manifest["splits"]["train"]["shards"][number].update(forged)
    )


def sample_blocks(content: bytes) -> list[bytes]:
    """The first samples of a raw shard of 16 px: header, 781 bytes in two blocks, header, label."""
    return [content[start : start + 2560] for start in range(0, 5 * 2560, 2560)]


def test_samples_in_another_order_are_found(dataset: Path) -> None:
    content = (dataset / "train-000001.tar").read_bytes()
    blocks = sample_blocks(content)
    swapped = content[:2560] + blocks[2] + blocks[1] + content[3 * 2560 :]
    forge(dataset, 1, tar=swapped)
    faults = verify(dataset).faults
    assert (
        "train-000001.tar train-000001-000001: is not after train-000001-000002; keys must"
        " ascend" in faults
    )


def test_a_sample_too_many_is_found(dataset: Path) -> None:
    content = (dataset / "train-000001.tar").read_bytes()
    end = 64 * 2560
    more = sample_blocks(content)[0].replace(b"train-000001-000000", b"train-000001-000099")
    headers = [bytearray(more[place : place + 512]) for place in (0, 1536)]
    for header in headers:
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    forge(
        dataset,
        1,
        tar=content[:end] + headers[0] + more[512:1536] + headers[1] + more[2048:] + content[end:],
    )
    faults = verify(dataset).faults
    assert faults == [
        "train-000001.tar train-000001-000099: the index does not point at this image",
        "train-000001.tar: 65 samples, 64 expected",
    ]


def test_index_rows_that_go_backwards_or_point_elsewhere_are_found(dataset: Path) -> None:
    rows = np.load(dataset / "train-000001.npy")
    replace_index(dataset, rows[[0, 2, 1, *range(3, 64)]], shard=1)
    assert (
        verify(dataset).faults[0]
        == "train-000001.npy: the offset does not increase from row 1 to 2"
    )
    rows[3, 1] -= 1
    rows[5, 0] += 512
    replace_index(dataset, rows, shard=1)
    assert verify(dataset).faults == [
        "train-000001.tar train-000001-000003: the index does not point at this image",
        "train-000001.tar train-000001-000005: the index does not point at this image",
        "train-000001.tar: row 5 of train-000001.npy points at no image",
    ]


@pytest.mark.parametrize("data", [b'"one"\n', b'"one"\n' * 63 + b"two\n"])
def test_damaged_paths_are_found(dataset: Path, data: bytes) -> None:
    forge(dataset, 1, paths=data)
    (fault,) = verify(dataset).faults
    assert fault.startswith("train-000001.paths: ")


def test_an_annotation_that_is_missing_changed_or_of_other_samples_is_found(dataset: Path) -> None:
    for name, rows in {"good": 240, "short": 239, "changed": 240}.items():
        annotation = write_annotation(dataset, f"train-{name}", np.ones((rows, 5), np.bool_))
        change_manifest(
            dataset,
            lambda manifest, name=name, annotation=annotation: manifest["splits"]["train"][
                "annotations"
            ].update({name: annotation.model_dump()}),
        )
    flip_byte(dataset, name="train-changed.npy", place=140)
    gone = {"file": "gone.npy", "sha256": "0", "num_columns": 5}
    change_manifest(
        dataset, lambda manifest: manifest["splits"]["val"]["annotations"].update(gone=gone)
    )
    faults = verify(dataset).faults
    assert len(faults) == 3
    names = sorted(fault.partition(":")[0] for fault in faults)
    assert names == ["gone.npy", "train-changed.npy", "train-short.npy"]


@pytest.mark.parametrize(("num_without", "num_faults"), [(64, 0), (63, 1)])
def test_a_split_is_labeled_throughout_or_not_at_all(
    tmp_path: Path, num_without: int, num_faults: int
) -> None:
    assert build(write_classes(tmp_path / "source", {"ant": 64}), tmp_path / "out") == 0
    out = tmp_path / "out"
    content, rows = (out / "train-000000.tar").read_bytes(), np.load(out / "train-000000.npy")
    blocks = [content[start : start + 2560] for start in range(0, 64 * 2560, 2560)]
    blocks = [
        unlabeled(block) if number < num_without else block for number, block in enumerate(blocks)
    ]
    rows[:num_without, 2] = -1
    buffer = io.BytesIO()
    np.save(buffer, rows)
    forge(out, 0, tar=b"".join(blocks) + content[64 * 2560 :], npy=buffer.getvalue())
    change_manifest(
        out, lambda manifest: manifest["splits"]["train"].update(class_counts=[64 - num_without])
    )
    found = verify(out)
    assert (found.num_faults > 0) == (num_faults > 0)
    assert any("63 samples have no label" in fault for fault in found.faults) == (num_faults > 0)


def unlabeled(block: bytes) -> bytes:
    """The sample with the label -1."""
    header = bytearray(block[1536:2048])
    header[124:136] = b"%011o\0" % 2
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return block[:1536] + bytes(header) + b"-1".ljust(512, b"\0")


def test_remote_shards_are_fetched_checked_and_removed(dataset: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for tar in dataset.glob("*.tar"):
        tar.rename(elsewhere / tar.name)
    with web(elsewhere) as (address, _):

        def move(manifest: dict[str, Any]) -> None:
            for split in manifest["splits"].values():
                for shard in split["shards"]:
                    shard["file"] = f"{address}/{shard['file']}"

        change_manifest(dataset, move)
        before = set(files_of(dataset))
        assert verify(dataset).faults == []
        flip_byte(elsewhere, name="train-000001.tar", place=600)
        (elsewhere / "val-000000.tar").unlink()
        faults = verify(dataset).faults
    assert len(faults) == 2
    assert faults[0].startswith(f"{address}/train-000001.tar: sha256 differs")
    assert faults[1].startswith(f"{address}/val-000000.tar: the file does not exist")
    assert set(files_of(dataset)) == before


@pytest.mark.parametrize("word", ["check=decode", "classes_file=NAMES"])
def test_labels_of_indexed_shards_are_held_against_their_cls(tmp_path: Path, word: str) -> None:
    (tmp_path / "names").write_text("a\nb\nc\nd\n")
    members = []
    for number in range(6):
        jpeg = encoded(picture(seed=number))
        members += [
            (f"{number}.jpg", jpeg),
            (f"README{number}", b""),
            (f"{number}.cls", b"%d" % (number % 3)),
        ]
    members[2:3] = []
    members.insert(1, ("0.CLS", b" 0\n"))
    write_tar(tmp_path / "in" / "a.tar", members)
    assert (
        index(
            tmp_path / "out",
            tmp_path / "in" / "a.tar",
            word.replace("NAMES", str(tmp_path / "names")),
        )
        == 0
    )
    assert verify(tmp_path / "out").faults == []
    rows = np.load(tmp_path / "out" / "train-000000.npy")
    rows[0, 2] = 2  # with all hashes and counts as if that were right
    replace_index(tmp_path / "out", rows)
    counts = np.bincount(
        rows[:, 2], minlength=len(load_manifest(tmp_path / "out").classes)
    ).tolist()
    change_manifest(
        tmp_path / "out", lambda manifest: manifest["splits"]["train"].update(class_counts=counts)
    )
    assert verify(tmp_path / "out").faults == [
        "../in/a.tar 0: the index does not point at this image"
    ]


def test_labels_that_come_from_json_are_not_held_against_a_cls(tmp_path: Path) -> None:
    samples = [sample(number, json={"class": number % 2}) for number in range(6)]
    write_stock(tmp_path / "in" / "a.tar", samples)
    assert index(tmp_path / "out", tmp_path / "in" / "a.tar", "label=json:class") == 0
    assert verify(tmp_path / "out").faults == []
