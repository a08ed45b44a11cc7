"""A contestant of a loader benchmark as a process of its own that answers requests, one JSON line
each way.

So every contestant runs in its own interpreter, stays warm between the rounds, and all of them can
be measured in turn in one run. Both sides are here; only the standard library is used, because the
peers' interpreter has nothing of ours.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What is to be delivered: shuffled batches of `kind`, from the first `num_samples` of the
    shards in `shards`."""

    kind: str
    """raw: stored pixels; recipe: the same, augmented and normalised as float32; jpeg: decoded
    pixels."""
    shards: str
    """Our dataset: a directory of tars."""
    peers: str
    """Where the peers' formats of it lie."""
    files: str
    """The picture files that the dataset was built from, in class folders."""
    num_samples: int
    image_size: int
    batch_size: int
    cores: int


class PeerFailed(SystemExit):
    """A contestant's process ended, or its files could not be written. Uncaught, it ends the
    benchmark with its message."""

    @property
    def reason(self) -> str:
        return str(self).strip().splitlines()[-1][-200:]


class Contestant:
    """One loader. `open` is all that has to happen before batches can be asked for; `batches` is
    one pass over the samples."""

    def open(self, task: Task, state: Any = None) -> Any:
        raise NotImplementedError

    def batches(self, loader: Any) -> Iterator[Any]:
        """Tensors of uint8, or float32 for the recipe."""
        return iter(loader)

    def state(self, loader: Any, num_consumed: int) -> Any:  # noqa: ARG002
        """What `open` needs to go on from here; None where there is no such thing."""
        return None

    def memory_bytes(self) -> int:
        """Private memory of this process: what is not the page cache's."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Desk:
    """Answers what a benchmark asks of one contestant."""

    def __init__(self, contestants: dict[str, Contestant]):
        self.contestants = contestants
        self.loaders: dict[tuple[Contestant, Task], Any] = {}

    def answer(self, name: str, task: dict[str, Any], do: str, **words: Any) -> dict[str, Any]:
        return getattr(self, do)(self.contestants[name], Task(**task), **words)  # type: ignore[no-any-return]

    def run(self, contestant: Contestant, task: Task, *, seconds: float) -> dict[str, Any]:
        """Whole passes until so many seconds are over."""
        loader = self._loader(contestant, task)
        count, began_s = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began_s < seconds:
            for batch in contestant.batches(loader):
                count += len(batch)
        return {"count": count, "seconds": time.perf_counter() - began_s}

    def cold(self, contestant: Contestant, task: Task, *, step_s: float = 0.0) -> dict[str, Any]:
        """One pass from nothing, with a pause after each batch, as a training would take it to
        compute; seconds until the first."""
        count, first_s, began_s = 0, 0.0, time.perf_counter()
        for batch in contestant.batches(contestant.open(task)):
            first_s = first_s or time.perf_counter() - began_s
            count += len(batch)
            if step_s:
                time.sleep(step_s * len(batch) / task.batch_size)
        return {"count": count, "seconds": time.perf_counter() - began_s, "first_s": first_s}

    def check(self, contestant: Contestant, task: Task) -> dict[str, Any]:
        """One pass, uncounted: how many pictures, of what shape and type, and the sum of their
        pixels."""
        count, total, form = 0, 0.0, ""
        for batch in contestant.batches(self._loader(contestant, task)):
            count += len(batch)
            if task.kind == "raw":
                total += int(batch.sum())
            form = f"{tuple(sorted(batch.shape[1:]))} {batch.dtype}"
        return {"count": count, "total": total, "form": form}

    def first(
        self, contestant: Contestant, task: Task, *, state: str | None = None
    ) -> dict[str, Any]:
        """From nothing, or from a state on file, to the first batch."""
        began_s = time.perf_counter()
        loader = contestant.open(task, json.loads(Path(state).read_text()) if state else None)
        batch = next(contestant.batches(loader))
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "batch": digest(batch)}

    def save(self, contestant: Contestant, task: Task, *, path: str) -> dict[str, Any]:
        """Half a pass, then the state to go on from; and what the next batch would have been."""
        loader = contestant.open(task)
        batches = contestant.batches(loader)
        count = 0
        while count < task.num_samples // 2:
            count += len(next(batches))
        Path(path).write_text(json.dumps(contestant.state(loader, count)))
        return {"batch": digest(next(batches))}

    def memory(self, contestant: Contestant, task: Task) -> dict[str, Any]:
        """Before anything is open, and after each batch of one epoch."""
        found = [contestant.memory_bytes()]
        loader = contestant.open(task)
        for _ in contestant.batches(loader):
            found.append(contestant.memory_bytes())
        return {"bytes": found}

    def _loader(self, contestant: Contestant, task: Task) -> Any:
        if (contestant, task) not in self.loaders:
            self.loaders[contestant, task] = contestant.open(task)
        return self.loaders[contestant, task]


def digest(batch: Any) -> str:
    return hashlib.sha256(batch.contiguous().numpy().tobytes()).hexdigest()


def serve(contestants: dict[str, Contestant]) -> None:
    """Until the other side hangs up. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    desk = Desk(contestants)
    answer: dict[str, Any] = {"ready": True}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            _end()
        answer = desk.answer(**json.loads(line))


def _end() -> None:
    """At once and with all worker processes, which libraries would wait for in their own clean-up,
    or leave behind."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


class Server:
    """The benchmark's side of one such process."""

    def __init__(self, command: list[str], *, log: Path):
        self.log = log
        self._began_s, self._is_ready = time.perf_counter(), False
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )  # a process group of its own, see `_end`

    def ready(self) -> float:
        """Waits for its imports; seconds since it was started, at the first call."""
        if not self._is_ready:
            self._read()
            self._is_ready = True
        return time.perf_counter() - self._began_s

    def ask(self, name: str, task: Task, do: str, **words: Any) -> dict[str, Any]:
        self.ready()
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"name": name, "task": asdict(task), "do": do, **words}) + "\n"
        )
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerFailed(
                f"{' '.join(map(str, self.process.args))}\n{self.log.read_text()[-3000:]}"
            )  # type: ignore[arg-type]
        return json.loads(line)  # type: ignore[no-any-return]
