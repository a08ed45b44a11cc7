"""What TensorBoard and Weights & Biases read is what the journal holds, by the checksums and the
messages of their own makers."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image

from pretrain.tracking.delivery import deliver_while_training, write_sinks
from pretrain.tracking.sinks import Sinks
from pretrain.tracking.tracker import Journal, RunIdentity
from tests.moments import wait_until

FIELD = descriptor_pb2.FieldDescriptorProto
EVENT = {
    "Image": {
        "height": (1, FIELD.TYPE_INT32),
        "width": (2, FIELD.TYPE_INT32),
        "encoded_image_string": (4, FIELD.TYPE_BYTES),
    },
    "Value": {
        "tag": (1, FIELD.TYPE_STRING),
        "simple_value": (2, FIELD.TYPE_FLOAT),
        "image": (4, "Image"),
    },
    "Summary": {"value": (1, ["Value"])},
    "Event": {
        "wall_time": (1, FIELD.TYPE_DOUBLE),
        "step": (2, FIELD.TYPE_INT64),
        "file_version": (3, FIELD.TYPE_STRING),
        "summary": (5, "Summary"),
    },
}
"""As far as it is read here, of tensorflow/core/util/event.proto and framework/summary.proto."""


def event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="tests", syntax="proto3")
    for name, fields in EVENT.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            is_many = isinstance(kind, list)
            label = FIELD.LABEL_REPEATED if is_many else FIELD.LABEL_OPTIONAL
            if isinstance(kind, int):
                message.field.add(name=field, number=number, type=kind, label=label)
            else:
                of = f".tests.{kind[0] if is_many else kind}"
                message.field.add(
                    name=field, number=number, type=FIELD.TYPE_MESSAGE, type_name=of, label=label
                )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tests.Event"))


def masked(content: bytes) -> int:
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(path: Path) -> Iterator[Any]:
    event, content = event_class(), path.read_bytes()
    while content:
        length, length_crc = struct.unpack("<QI", content[:12])
        assert length_crc == masked(content[:8])
        message, (crc,) = (
            content[12 : 12 + length],
            struct.unpack("<I", content[12 + length : 16 + length]),
        )
        assert crc == masked(message)
        yield event.FromString(message)
        content = content[16 + length :]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    RunIdentity.of(run_dir, experiment="tests", uri="file-of-nobody")
    journal = Journal(run_dir / "tracking" / "journal.jsonl")
    Image.new("RGB", (4, 3), "red").save(tmp_path / "first.png")
    journal.append({"event": "start", "params": {"optimizer.lr": 0.1}, "tags": {}})
    for step in (1, 300):
        journal.append(
            {"event": "metrics", "step": step, "values": {"train/loss": 1 / step, "train/lr": 0.5}}
        )
    journal.append(
        {"event": "image", "path": str(tmp_path / "first.png"), "key": "first", "step": 7}
    )
    journal.append(
        {"event": "metrics", "step": 2, "values": {"system/gpu": 5.0}}
    )  # numbered for itself
    journal.append({"event": "end", "status": "FINISHED"})
    assert journal.close(timeout_s=30)
    return run_dir


def test_tensorboard_finds_every_figure_and_picture_however_often_it_is_written(
    run_dir: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert write_sinks(run_dir, "tensorboard") == 6
    (path,) = (run_dir / "tracking/tensorboard").iterdir()
    version, *events = read_events(path)
    assert version.file_version == "brain.Event:2"
    found = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
        if not value.image.ByteSize()
    ]
    assert found == [
        (1, "train/loss", 1.0),
        (1, "train/lr", 0.5),
        (300, "train/loss", pytest.approx(1 / 300)),
        (300, "train/lr", 0.5),
        (2, "system/gpu", 5.0),
    ]
    (picture,) = (
        value.image for event in events for value in event.summary.value if value.image.ByteSize()
    )
    assert (picture.width, picture.height) == (4, 3)
    assert picture.encoded_image_string == (tmp_path / "first.png").read_bytes()


def test_what_comes_later_is_added(run_dir: Path) -> None:
    journal_path = run_dir / "tracking/journal.jsonl"
    lines = journal_path.read_bytes().splitlines(keepends=True)
    journal_path.write_bytes(b"".join(lines[:2]) + lines[2][:9])  # a line on its way
    sinks = Sinks(run_dir, ["tensorboard"])
    assert sinks.write() == 2
    journal_path.write_bytes(b"".join(lines))
    assert [sinks.write(), sinks.write()] == [4, 0]
    sinks.close()
    (path,) = (run_dir / "tracking/tensorboard").iterdir()
    assert [event.step for event in read_events(path)] == [0, 1, 300, 7, 2]


def test_a_dead_store_holds_up_no_sink(run_dir: Path, tmp_path: Path) -> None:
    with open(tmp_path / "ended", "wb"):
        pass
    with open(tmp_path / "ended", "rb") as trainer:
        assert (
            deliver_while_training(run_dir, trainer, close_timeout_s=0, sinks=["tensorboard"]) == 1
        )
    (path,) = (run_dir / "tracking/tensorboard").iterdir()
    assert len(list(read_events(path))) == 5


@pytest.mark.processes
def test_wandb_holds_every_figure_in_an_offline_run(run_dir: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(2):
        assert write_sinks(run_dir, "wandb") == 6
    (path,) = (run_dir / "tracking/wandb").rglob("*.wandb")

    def read() -> list[Any]:
        return [Record.FromString(content) for content in read_records(path)]

    wait_until(
        lambda: any(record.HasField("exit") for record in read())
    )  # its service writes in a process of its own
    records = read()
    runs = [
        record.run for record in records if record.HasField("run")
    ]  # it may come again, with more
    assert {(run.project, run.display_name) for run in runs} == {("tests", "run")}
    rows = []
    for record in records:
        if record.HasField("history"):
            row = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows.append(
                {name: float(value) for name, value in row.items() if not name.startswith("_")}
            )
    assert rows == [
        {"train/loss": 1.0, "train/lr": 0.5, "step": 1},
        {"train/loss": 1 / 300, "train/lr": 0.5, "step": 300},
        {"system/gpu": 5.0, "step": 2},
    ]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def read_records(path: Path) -> Iterator[bytes]:
    """Of LevelDB's log format: blocks of 32 kB, of records in parts (1 whole, 2 first, 3 middle, 4
    last)."""
    content, position, record = path.read_bytes(), 7, b""  # after the header
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
