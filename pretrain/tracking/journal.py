"""A run's journal: one event a line, appended by a thread of its own, so that training waits for no disk.

Lines leave in the order in which they came, from whatever thread. Where the disk will not take them (full, read-only, gone) they
wait in memory and go out when it is back: a write that stopped in the middle of a line goes on from there, so no line is ever half
but the last, and that one only until the disk is back. Each start goes on in a copy of the file, in its place, without the half
line that a kill may have left: an earlier start that wakes up again appends to a file that nobody finds any more.

The events: start (params, tags, datasets), params, metrics, artifact, image, version, end. Each has the time at which it happened,
which is what makes a second delivery harmless.
"""

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from data_prep.publish import atomic_file

RETRY_S = 1.0
WARN_AGAIN_S = 600.0


class Journal:
    def __init__(self, path: Path):
        self.path = path
        whole = _whole_lines(path)
        with atomic_file(path) as file:
            file.write(whole)
            file.flush()
            self._descriptor = os.dup(file.fileno())
        self.last_steps = _last_steps(whole)
        """Of each metric and picture, from earlier starts."""
        self._waiting = bytearray()
        self._changed, self._closing = threading.Condition(), False
        self._warned_s: float | None = None
        self._is_behind = False
        self._writer = threading.Thread(target=self._write_until_closed, name="journal", daemon=True)
        self._writer.start()
        atexit.register(self.close, timeout_s=2.0)  # a process that forgets to close has still said what it knew

    def append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event | {"time_ms": int(time.time() * 1000)}).encode() + b"\n"
        with self._changed:
            self._waiting += line
            self._changed.notify()

    def close(self, *, timeout_s: float) -> bool:
        """Whether all lines are in the file now."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(timeout_s)
        atexit.unregister(self.close)
        with self._changed:
            return not self._waiting

    def _write_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                lines = bytes(self._waiting)
            try:
                written = os.write(self._descriptor, lines)  # perhaps not all of it: the rest goes next
            except OSError as error:
                self._complain(error)
                time.sleep(RETRY_S)
                continue
            with self._changed:
                del self._waiting[:written]
                self._rejoice(all_out=not self._waiting)
        os.close(self._descriptor)

    def _complain(self, error: OSError) -> None:
        self._is_behind = True
        if self._warned_s is None or time.monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            print(
                f"tracking: {self.path} cannot be written ({error.strerror}); training goes on, the lines wait in memory",
                file=sys.stderr,
            )

    def _rejoice(self, *, all_out: bool) -> None:
        if self._is_behind and all_out:
            self._is_behind = False
            print(f"tracking: {self.path} is written again, nothing was lost", file=sys.stderr)


def readable_events(lines: list[bytes]) -> list[dict[str, Any]]:
    """The events of the journal's lines; one that a crash of the machine has garbled is worth a word, not the run."""
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            print(f"tracking: a damaged line of the journal is left out: {line[:60]!r}", file=sys.stderr)
    return events


def image_name(key: str) -> str:
    """What a picture is called among the last steps, where metrics have their own names."""
    return f"image:{key}"


def _whole_lines(path: Path) -> bytes:
    """Of a journal left by an earlier start; a line cut by a kill is no line."""
    found = path.read_bytes() if path.exists() else b""
    return found[: found.rfind(b"\n") + 1]


def _last_steps(whole: bytes) -> dict[str, int]:
    last: dict[str, int] = {}
    for event in readable_events(whole.splitlines()):
        if event["event"] == "metrics":
            last.update(dict.fromkeys(event["values"], event["step"]))
        elif event["event"] == "image":
            last[image_name(event["key"])] = event["step"]
    return last
