"""The lock of a run: one process at a time writes to a run directory.

    RUN/starts/0003/.lock      held by the first rank of the run; names its node, process and job

1. An attempt locks the file with the highest number. If another attempt holds the lock, the new
   attempt waits (`lock_wait_s`).
2. If the lock is still held, the attempt asks SLURM. The holder's attempt is over if its job was
   requeued or has ended, or its node is down. Then the attempt locks the next number. Otherwise the
   attempt fails and names the holder.
3. An attempt that holds the highest number removes the lower numbers and all leftovers of
   killed writers.
4. A frozen attempt that wakes up ends if its lock is gone or no longer has the highest number
   (watchdog.py). It publishes no checkpoint and no result (`check_owner`).
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from data_prep.errors import UserError
from data_prep.publish import (
    REPLACED,
    TEMPORARY_PREFIX,
    Busy,
    Holder,
    is_held,
    remove_leftovers,
    sole_writer,
)
from pretrain.ranks.preemption import Interrupted, StopFlag

_LOOK_S = 0.5
_LEFTOVER_S = 3600.0
"""Age in seconds above which a temporary file in RUN/tracking is removed. A delivery may write
younger files without the run's lock."""
_LIVE_STATES = {
    *("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
}

_HELD: set[Path] = set()
"""Locks that this process holds."""


def has_lost_run() -> bool:
    """Return True if another attempt has taken over a run of this process."""
    return any(not lock.exists() or _is_superseded(lock) for lock in list(_HELD))


def check_owner() -> None:
    """Raise UserError if another attempt has taken over the run."""
    if has_lost_run():
        problem = "a newer attempt has taken over the run, so this attempt saves nothing more"
        raise UserError("run_dir", problem, "let the newer attempt finish", code="busy")


def is_at_work(run_dir: Path) -> bool:
    """Return True if a living process holds the run's lock."""
    return is_held(_newest_lock(run_dir))[0]


@contextmanager
def hold_run(run_dir: Path, *, lock_wait_s: float, stop: StopFlag | None = None) -> Iterator[None]:
    """Hold the run's lock inside the block. `stop`: flag that interrupts the wait for the lock."""
    with ExitStack() as stack:
        lock = _lock_newest(run_dir, stack, lock_wait_s=lock_wait_s, stop=stop)
        mark = TEMPORARY_PREFIX + REPLACED
        for place in (run_dir, run_dir / "checkpoints"):
            for replaced in place.glob(f"{mark}*"):  # a writer was killed between two renames
                if not (final := place / replaced.name.removeprefix(mark)).exists():
                    os.rename(replaced, final)
            remove_leftovers(place)
        _remove_old_leftovers(run_dir / "tracking")
        _HELD.add(lock)
        stack.callback(_HELD.discard, lock)
        yield


def _lock_newest(
    run_dir: Path, stack: ExitStack, *, lock_wait_s: float, stop: StopFlag | None
) -> Path:
    deadline_s, has_waited = time.monotonic() + lock_wait_s, False
    while True:
        lock = _newest_lock(run_dir)
        try:
            stack.enter_context(sole_writer(lock))
        except Busy:
            holder = is_held(lock)[1]
        else:
            if not _is_superseded(lock):
                _remove_lower(lock)
                if not _is_superseded(lock):
                    return lock
            stack.close()  # another attempt has taken over in the meantime
            continue
        who = f"{run_dir}: attempt {int(lock.name)} has locked this run ({holder or 'unknown'})"
        if not has_waited:
            print(f"{who}; waiting up to {lock_wait_s:,.0f} s", file=sys.stderr, flush=True)
            has_waited = True
        if stop is not None and stop.raised_by is not None:
            raise Interrupted
        if time.monotonic() < deadline_s:
            time.sleep(min(_LOOK_S, lock_wait_s))
        elif holder is not None and _is_over(holder):
            if is_held(lock)[1] != holder or _is_superseded(lock):
                continue  # another attempt got the lock while SLURM was asked
            print(
                f"{who}; SLURM reports that the attempt is over. Taking over",
                file=sys.stderr,
                flush=True,
            )
            lock.with_name(f"{int(lock.name) + 1:04}").mkdir(exist_ok=True)
        else:
            problem = f"attempt {int(lock.name)} has locked the run ({holder or 'unknown'})"
            raise Busy(str(run_dir), problem, "wait until the attempt ends, or end it", code="busy")


def _newest_lock(run_dir: Path) -> Path:
    numbers = [int(each.name) for each in (run_dir / "starts").glob("*") if each.name.isdigit()]
    return run_dir / "starts" / f"{max(numbers, default=1):04}"


def _is_superseded(lock: Path) -> bool:
    return int(_newest_lock(lock.parents[1]).name) > int(lock.name)


def _remove_lower(lock: Path) -> None:
    for each in lock.parent.iterdir():
        if each.name.isdigit() and int(each.name) < int(lock.name):
            shutil.rmtree(each, ignore_errors=True)


def _remove_old_leftovers(place: Path) -> None:
    for leftover in place.glob(TEMPORARY_PREFIX + "*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                leftover.unlink()


def _is_over(holder: Holder) -> bool:
    """Return True if SLURM reports that the holder's attempt is over. Within one job, compare
    restart counts. For another job, ask `scontrol`."""
    if not holder.job or holder.cluster != os.environ.get("SLURM_CLUSTER_NAME", ""):
        return False  # this cluster's SLURM does not know the holder's job
    if holder.job == os.environ.get("SLURM_JOB_ID"):
        return holder.restart < int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = _scontrol("job", holder.job)
    if "Invalid job id" in job:
        return True  # the job ended long ago
    state, restarts = _field("JobState", job), _field("Restarts", job)
    if state and (state not in _LIVE_STATES or int(restarts or 0) > holder.restart):
        return True
    node_state = _field("State", _scontrol("node", holder.node))
    return re.match(r"DOWN\b", node_state) is not None  # suffixes are flags, as in DOWN*+DRAIN


def _scontrol(*words: str) -> str:
    command = ["scontrol", "-o", "show", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _field(name: str, facts: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", facts)
    return found[1] if found else ""
