"""Run a contestant as a process that answers requests, one JSON line each way.

Every contestant has its own interpreter and keeps running between rounds, so one benchmark measures
all contestants in turn. This file has the code of both sides. It needs only the standard library,
because the peers' interpreter has no package of this repository.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

Answer = dict[str, Any]
PATIENCE_S = 240.0
"""Time limit of a request in seconds. A slower peer counts as hanging."""
CACHE_GB = 0.62
"""Cache size in GB for remote datasets. Our loader requests 32,768 samples in advance."""


@dataclass(frozen=True)
class Task:
    """A dataset, and the kind of batches that a contestant must deliver."""

    kind: str
    """raw: stored pixels. recipe: the same images augmented and normalized as float32. jpeg:
    decoded pixels. photographs: JPEG files of about 400 pixels, converted to squares."""
    files: str
    """Directory of image files in class folders."""
    num_samples: int
    image_size: int
    batch_size: int
    cores: int
    shards: str = ""
    """Dataset of the files, made by `data_prep build`."""
    url: str = ""
    """URL of the same dataset on the server stores_link.py; empty for the local dataset."""
    cache: str = ""
    """Initially empty directory for copies of remote shards."""
    shuffle: str = "full"

    def written_by(self, peer: str) -> Path:
        """Return the directory of the samples in the format of a peer."""
        return Path(f"{self.shards}-{peer}-{self.num_samples}")

    def items(self) -> list[tuple[str, int]]:
        """Return (path, label) of each file, in the order of the shards."""
        names = [
            json.loads(line)
            for path in sorted(Path(self.shards).glob("train-*.paths"))
            for line in path.read_text().splitlines()
        ] or sorted(str(path.relative_to(self.files)) for path in Path(self.files).rglob("*.jpg"))
        folders = sorted(path.name for path in Path(self.files).iterdir())
        return [
            (f"{self.files}/{name}", folders.index(name.split("/")[0]))
            for name in names[: self.num_samples]
        ]


class Passes:
    """Passes of one loader. `loader.open(task)` opens the loader once, and each
    `loader.batches(opened)` is a pass."""

    def __init__(self, loader: Any):
        self.loader, self.opened = loader, None

    def run(
        self, task: Task, *, seconds: float = 0.0, pause_s: float = 0.0, check: bool = False
    ) -> Answer:
        """Run complete passes for `seconds`, at least one pass. The time of the first request
        includes opening the loader. `pause_s`: pause after each batch, as for a training step.
        `check`: sum the pixels."""
        memory_mb, first_s = [private_mb()], 0.0
        count, total, began_s = 0, 0, time.perf_counter()
        self.opened = self.opened or self.loader.open(task)
        while count == 0 or time.perf_counter() - began_s < seconds:
            for batch in self.loader.batches(self.opened):
                first_s = first_s or time.perf_counter() - began_s
                count += len(batch)
                if check:
                    total += int(batch.sum())
                if pause_s:
                    time.sleep(pause_s * len(batch) / task.batch_size)
        took_s = time.perf_counter() - began_s
        memory_mb.append(private_mb())
        return {
            "count": count,
            "seconds": took_s,
            "first_s": first_s,
            "total": total,
            "memory_mb": memory_mb,
        }


def private_mb() -> float:
    """Return the memory of this process without the page cache."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def serve(actions: dict[str, Callable[..., Answer]]) -> None:
    """Answer requests until standard input closes. Output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer: Answer = {}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        if not (line := sys.stdin.readline()):
            return
        request = json.loads(line)
        answer = actions[request["do"]](Task(**request["task"]), **request["words"])


class PeerError(Exception):
    """A contestant's process ended or hung."""


class Server:
    """A contestant's process, as seen by the benchmark."""

    def __init__(self, *command: str | Path):
        self._log, self._is_ready = tempfile.TemporaryFile("w+"), False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # `close` ends its workers, too
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Wait until the process has imported its libraries."""
        if not self._is_ready:
            self._read()
            self._is_ready = True

    def ask(self, do: str, task: Task, **words: Any) -> Answer:
        self.ready()
        print(
            json.dumps({"do": do, "task": asdict(task), "words": words}),
            file=self.process.stdin,
            flush=True,
        )
        return self._read()

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._log.close()

    def _read(self) -> Answer:
        patience = Timer(PATIENCE_S, os.killpg, (self.process.pid, signal.SIGKILL))
        patience.start()
        try:
            line = self.process.stdout.readline()
        finally:
            patience.cancel()
        if not line:
            self._log.seek(0)
            reason = self._log.read().strip().splitlines() or [f"no answer in {PATIENCE_S:.0f} s"]
            raise PeerError(reason[-1][-200:])
        return json.loads(line)
