"""Writes checkpoints in the background, one at a time, while training goes on; a full disk costs a checkpoint, never the run.

A snapshot's way: 1. `make_room` waits until none is being written, and holds back one whose writing failed; 2. the ranks make
the snapshot (which may reuse the memory of the one before); 3. `submit` hands it over, in place of a failed one; 4. the thread
publishes it, and tries again, with growing pauses, as long as the file system refuses.

`finish` waits for the last one, within reason, and may be called again and again. Metrics wait in `news` for the trainer's thread,
which alone speaks to the tracker.
"""

import errno
import math
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoints.card import CheckpointError
from pretrain.checkpoints.files import Best, Retention, Snapshot, publish, published_best, settle, write_best
from pretrain.checkpoints.run import checkpoints_dir
from pretrain.ranks.hangs import PROGRESS

_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EROFS: "make it writable again",
    errno.EACCES: "make it writable again",
    errno.EPERM: "make it writable again",
    errno.ENOTDIR: "put the directory back in its place",
    errno.EEXIST: "put the directory back in its place",
    errno.EXDEV: "let all of the run lie on one file system",
}


@dataclass(frozen=True)
class Patience:
    first_pause_s: float = 2.0
    """After the first failure; it doubles with each."""
    longest_pause_s: float = 60.0
    final_s: float = 120.0
    """How long the end of training waits for a file system that refuses. One that is merely slow has all the time it needs."""


class CheckpointWriter:
    def __init__(self, run_dir: Path, retention: Retention, *, patience: Patience | None = None):
        self._run_dir, self._retention, self._patience = run_dir, retention, patience or Patience()
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        """What is still to be written, or is being written."""
        self._is_writing = False
        self._held_back = False
        self._is_published = False
        """Of the snapshot's steps the first two are done, though a later one failed."""
        self._num_tries = self._num_failures = 0
        self._try_at_s = 0.0
        self._give_up_at_s: float | None = None
        """At the end of training."""
        self._fault: OSError | None = None
        self._defect: Exception | None = None
        self._news: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def make_room(self, *, timeout_s: float) -> bool:
        """Waits until the last snapshot is written, or has failed. False: neither yet, and a new one has to be left out."""
        with self._changed:
            self._held_back = self._changed.wait_for(self._has_room, timeout_s)
            self._raise_defect()
            return self._held_back

    @property
    def held_back_step(self) -> int | None:
        """Of the checkpoint that could not be written, and that the next `submit` takes the place of."""
        with self._changed:
            held = self._snapshot if self._held_back and not self._is_published else None
            return None if held is None else held.trainer.step

    def submit(self, snapshot: Snapshot) -> None:
        """In place of the one that is held back, if any."""
        with self._changed:
            assert self._held_back and self._has_room()
            self._snapshot, self._held_back, self._is_published = snapshot, False, False
            self._num_tries, self._try_at_s, self._fault = 0, 0.0, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> dict[str, float]:
        """Metrics of what has happened since the last call."""
        if not self._news:
            return {}
        with self._changed:
            found, self._news = self._news, {}
            return found

    def wait(self, timeout_s: float) -> None:
        """For a write that is under way, before the process ends for another reason."""
        with self._changed:
            self._changed.wait_for(self._has_room, timeout_s)

    def finish(self, best: Best | None, *, timeout_s: float = math.inf) -> bool:
        """Whether the last snapshot is on disk by now; an error where it cannot be brought there."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            if self._give_up_at_s is None:
                self._give_up_at_s = time.monotonic() + self._patience.final_s
                self._held_back = False
                self._try_at_s = 0.0  # at once: what made it fail may be mended
                self._changed.notify_all()
            while self._snapshot is not None and self._defect is None:
                if time.monotonic() >= until_s:
                    return False
                self._changed.wait(0.2)
                if self._fault is not None and not self._is_writing and time.monotonic() > self._give_up_at_s:
                    step, self._snapshot = self._snapshot.trainer.step, None
                    raise CheckpointError(
                        f"{checkpoints_dir(self._run_dir)}: the last checkpoint (step {step}) could not "
                        f"be written ({_reason(self._fault)}); {_remedy(self._fault)}, and the same command goes on from the "
                        "one before"
                    )
            self._raise_defect()
        if best is not None:
            write_best(self._run_dir, published_best(self._run_dir, best))
        return True

    def _has_room(self) -> bool:
        return not self._is_writing and (self._snapshot is None or self._fault is not None)

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._is_due():
                    self._changed.wait(self._pause_s())
                snapshot, self._is_writing = self._snapshot, True
            assert snapshot is not None
            try:
                began_s = time.monotonic()
                if not self._is_published:
                    num_bytes = publish(self._run_dir, snapshot)
                    self._is_published = True
                    self._tell({"checkpoint/write_s": time.monotonic() - began_s, "checkpoint/gb": num_bytes / 1e9})
                settle(self._run_dir, snapshot, self._retention)
            except OSError as error:
                self._failed(snapshot, error)
            except Exception as error:  # noqa: BLE001 (it belongs to the trainer, who meets it at the next checkpoint)
                self._end(defect=error)
            else:
                self._end()

    def _is_due(self) -> bool:
        return self._snapshot is not None and not self._held_back and time.monotonic() >= self._try_at_s

    def _pause_s(self) -> float | None:
        waits = self._snapshot is not None and not self._held_back
        return max(0.01, self._try_at_s - time.monotonic()) if waits else None

    def _tell(self, news: dict[str, float]) -> None:
        with self._changed:
            self._news |= news

    def _end(self, *, defect: Exception | None = None) -> None:
        with self._changed:
            self._snapshot, self._fault, self._defect, self._is_writing = None, None, defect, False
            self._changed.notify_all()

    def _failed(self, snapshot: Snapshot, error: OSError) -> None:
        PROGRESS.touch()
        with self._changed:
            self._num_tries += 1
            self._num_failures += 1
            pause_s = min(self._patience.longest_pause_s, self._patience.first_pause_s * 2 ** (self._num_tries - 1))
            self._fault, self._try_at_s, self._is_writing = error, time.monotonic() + pause_s, False
            self._news["checkpoint/failures"] = float(self._num_failures)
            self._changed.notify_all()
        where, step = checkpoints_dir(self._run_dir), snapshot.trainer.step
        print(
            f"WARNING: {where}: the checkpoint of step {step} could not be written ({_reason(error)}); {_remedy(error)}. "
            f"Training goes on, and it is tried again in {pause_s:,.0f} s",
            file=sys.stderr,
            flush=True,
        )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "see what is wrong with that file system")
