"""A run's journal for other tools, in RUN/tracking/TOOL/: TensorBoard's event files, Weights &
Biases' offline folders.

Each is made anew from the journal whenever a sink is opened, and then takes what comes: so nothing
is doubled, whatever was killed. Figures go to both; pictures to TensorBoard, parameters to Weights
& Biases. Their times are the journal's.
"""

import os
import shutil
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

from PIL import Image

from pretrain.tracking.tracker import RunIdentity, image_name, readable_events


class Sink(Protocol):
    def write(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Of one run, as far as the journal has been read."""

    def __init__(self, run_dir: Path, names: Iterable[str]):
        self._journal, self._offset = run_dir / "tracking" / "journal.jsonl", 0
        self._sinks = [open_sink(name, run_dir) for name in names]

    def write(self) -> int:
        """What the journal has more by now; the number of its events."""
        if not self._sinks or not self._journal.exists():
            return 0
        with open(self._journal, "rb") as file:
            file.seek(self._offset)
            lines = [line for line in file if line.endswith(b"\n")]
        events = readable_events(lines)
        for sink in self._sinks:
            for event in events:
                sink.write(event)
        self._offset += sum(map(len, lines))
        return len(events)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_sink(name: str, run_dir: Path) -> Sink:
    folder = run_dir / "tracking" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return (
        TensorBoard(folder) if name == "tensorboard" else Wandb(folder, RunIdentity.known(run_dir))
    )


class TensorBoard:
    """Records of an event file: length, its checksum, a protocol buffer `Event`, its checksum.
    Written by hand, since the package `tensorboard` would bring a second PIL."""

    def __init__(self, folder: Path):
        # a reader that is open now must not take it for the file that it knows
        self._file: IO[bytes] = open(
            folder / f"events.out.tfevents.{time.time_ns()}.wide-mlps", "wb"
        )
        self._record(time.time(), 0, _field(3, b"brain.Event:2"))

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] == "metrics":
            values = [
                _field(1, name.encode()) + b"\x15" + struct.pack("<f", value)
                for name, value in event["values"].items()
            ]
        elif event["event"] == "image" and Path(event["path"]).exists():
            with Image.open(event["path"]) as picture:
                width, height = picture.size
            image = (
                b"\x08"
                + _varint(height)
                + b"\x10"
                + _varint(width)
                + _field(4, Path(event["path"]).read_bytes())
            )
            values = [
                _field(1, image_name(event["key"]).replace(":", "/").encode()) + _field(4, image)
            ]
        else:
            return
        summary = b"".join(_field(1, value) for value in values)
        self._record(event["time_ms"] / 1000, event["step"], _field(5, summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _record(self, wall_time_s: float, step: int, what: bytes) -> None:
        message = b"\x09" + struct.pack("<d", wall_time_s) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))


def _field(number: int, content: bytes) -> bytes:
    """Of a protocol buffer: bytes with their length before them."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _table() -> list[int]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        rows.append(value)
    return rows


_CRC32C = _table()


def _checksum(content: bytes) -> bytes:
    """CRC-32C, masked as TensorFlow's records have it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC32C[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class Wandb:
    """An offline run: `wandb sync RUN/tracking/wandb/wandb/offline-run-*` sends it, again under the
    same id."""

    def __init__(self, folder: Path, identity: RunIdentity | None):
        assert identity is not None
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run: Any = wandb.init(
            mode="offline",
            dir=folder,
            project=identity.experiment,
            name=identity.name,
            id=identity.run_key,
            settings=wandb.Settings(
                console="off", x_disable_stats=True, disable_git=True, x_save_requirements=False
            ),
        )
        self._run.define_metric(
            "*", step_metric="step"
        )  # its own counter refuses to go back, as a node's figures may
        self._code = 0

    def write(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start" | "params":
                self._run.config.update(event["params"], allow_val_change=True)
            case "metrics":
                self._run.log(
                    event["values"] | {"step": event["step"], "_timestamp": event["time_ms"] / 1000}
                )
            case "end":
                self._code = int(event["status"] != "FINISHED")

    def close(self) -> None:
        self._run.finish(exit_code=self._code)
