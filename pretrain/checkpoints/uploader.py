"""The thread of the first rank that keeps the remote of a run up to date (`checkpoint.remote`).

Each round uploads the checkpoints that the retention rules keep, newest first, removes the remote's
other checkpoints, and uploads the records. A round begins when a checkpoint has appeared in RUN,
and every RECORDS_S seconds. If the bucket fails, training continues, and the next round tries
again. Any other exception ends the thread, and stops training at the next checkpoint.
"""

import math
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from data_prep.errors import UserError
from data_prep.remote import StoppedError
from pretrain.checkpoints.card import CheckpointError
from pretrain.checkpoints.checkpoint import HASHES
from pretrain.checkpoints.files import Retention, read_best, superfluous
from pretrain.checkpoints.remote import FIELD, Remote
from pretrain.checkpoints.run import checkpoint_dir, list_checkpoints, step_of
from pretrain.ranks.hangs import PROGRESS

RECORDS_S = 60.0
_RECORDS_BYTES = 8 << 20
"""Size of the records above which the pause between uploads grows in proportion."""
FINAL_S = 120.0
"""Seconds that the end of training waits for a failing bucket."""
_LOOK_S = 1.0


class EventLog(Protocol):
    """Event log of a run. Any thread may write to it."""

    def metrics(self, values: dict[str, float], *, step: int) -> None: ...
    def sync(self) -> None: ...


class Uploader:
    def __init__(self, remote: Remote, retention: Retention, log: EventLog):
        self._remote, self._retention, self._log = remote, retention, log
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._is_offered = self._is_working = False
        self._fault, self._num_failures = "", 0
        self.defect: Exception | None = None
        """Unexpected error of this thread. Training raises it at the next checkpoint."""
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)

    def start(self) -> None:
        self.offer()
        self._thread.start()

    def offer(self) -> None:
        """Begin a round of uploads of RUN's new files."""
        with self._changed:
            self._is_offered = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the remote is up to date. Return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._is_offered or self._is_working or self._fault),
                timeout_s if self._thread.is_alive() else 0,
            )

    def close(self, *, finished: bool, deadline_s: float | None = None) -> None:
        """Wait for the last uploads until `deadline_s`, or for FINAL_S if the bucket fails. If they
        are not complete, raise CheckpointError if training has `finished`, otherwise warn."""
        self.offer()
        began_s = time.monotonic()
        while not self.wait(_LOOK_S) and self._thread.is_alive():
            PROGRESS.touch()
            limit_s = began_s + FINAL_S if self._fault else math.inf
            if time.monotonic() > (limit_s if deadline_s is None else deadline_s):
                break
            if self._fault:
                self.offer()
        self._stop.set()
        if self.defect is not None:
            raise self.defect
        if self.wait(0):
            return
        problem = f"the last upload failed: {self._fault or 'the bucket is too slow'}"
        if finished:
            fix = "Run the same command again to upload the rest"
            raise CheckpointError(FIELD, problem, fix, code="unreachable")
        steps = ", ".join(map(str, self._remote.complete)) or "none"
        self._warn(f"{problem}. Steps in the bucket: {steps}. Resume the run to upload the rest")

    def _work(self) -> None:
        try:
            self._do_rounds()
        except Exception as error:  # noqa: BLE001 (the trainer raises it at the next checkpoint)
            self.defect = error

    def _do_rounds(self) -> None:
        pause_s = 0.0
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._is_offered, pause_s)
                self._is_offered, self._is_working = False, True
            fault, pause_s = "", RECORDS_S
            try:
                pause_s *= max(1.0, self._upload_all() / _RECORDS_BYTES)
            except (OSError, UserError, StoppedError) as error:
                fault = str(error) or "the upload was stopped"
            with self._changed:
                self._note(fault)
                self._is_working = False
                self._changed.notify_all()

    def _upload_all(self) -> int:
        """Do one round of uploads. Return the size of the records in bytes."""
        remote, places = self._remote, list_checkpoints(self._remote.run_dir)
        if not places:
            return remote.send_records()
        names, newest = remote.list_complete(), places[-1]
        for place in reversed(self._kept(places, newest)):
            self._upload(place)
        complete = [checkpoint_dir(remote.run_dir, step) for step in sorted(remote.complete)]
        if newest in complete:  # remove all other checkpoints, complete or not; hashes first
            kept = {
                path.name for path in (*self._kept(complete, newest), *self._best_there(newest))
            }
            gone = [name for name in names if name.split("/")[0] not in kept]
            gone.sort(key=lambda name: not name.endswith(HASHES))
            remote.remove(*(f"checkpoints/{name}" for name in gone))
        return remote.send_records()

    def _kept(self, places: list[Path], newest: Path) -> list[Path]:
        best = read_best(self._remote.run_dir)
        gone = superfluous(places, newest=newest, retention=self._retention, best=best)
        return [place for place in places if place not in gone]

    def _best_there(self, newest: Path) -> list[Path]:
        """Return the checkpoint in the remote's best.json, which RUN may lack. Return [] if the
        remote also has a newer best checkpoint of RUN."""
        remote, step = self._remote, self._remote.best_step()
        if step not in remote.complete or step > step_of(newest):  # later steps were abandoned
            return []
        best = read_best(remote.run_dir)
        if best is not None and best.step > step and best.step in remote.complete:
            return []
        return [checkpoint_dir(remote.run_dir, step)]

    def _upload(self, place: Path) -> None:
        began_s = time.monotonic()
        try:
            is_new = self._remote.upload(place, stop=self._stop)
        except FileNotFoundError:
            if place.exists():
                raise
            return  # a newer checkpoint has replaced it
        if is_new:
            took_s = time.monotonic() - began_s
            self._log.metrics({"usage/remote_upload_s": took_s}, step=step_of(place))

    def _note(self, fault: str) -> None:
        if fault:
            self._num_failures += 1
            steps = [0, *map(step_of, list_checkpoints(self._remote.run_dir))]
            failures = {"usage/remote_failures": float(self._num_failures)}
            self._log.metrics(failures, step=steps[-1])
        if fault and not self._fault:
            self._warn(f"{fault}. Training continues, and the upload is tried again")
        elif self._fault and not fault:
            self._warn("uploads work again")
        self._fault = fault

    def _warn(self, text: str) -> None:
        print(f"WARNING: {self._remote}: {text}", file=sys.stderr, flush=True)
