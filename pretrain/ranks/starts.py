"""The starts of a run, numbered: only the newest one changes anything, even if an older one wakes
up again.

    RUN/starts/0003/           the workspace of start 3: what is to appear in RUN is made here, what goes is moved here (publish.py)
    RUN/starts/0003/.lock      held while that start's first rank is alive; says who that is

A start begins so:
1. If the newest workspace's lock is held, it waits for that lock (`lock_wait_s`). If the lock is
   still held then, its holder works or is frozen. If SLURM reports that the holder's start is over
   (the job was requeued or has ended, or the node is down), the new start goes on all the same;
   otherwise it ends, and names the holder.
2. It makes a workspace under a temporary name, takes its lock, and renames it to the next number. A
   rename onto an existing workspace fails: of two starts one gets the number, and the other begins
   at 1 again.
3. The fence: it moves all older workspaces into its own and removes them. Whatever an older start
   publishes, it renames out of its workspace; whatever it removes, it renames into it. Without the
   workspace these renames fail, in the file system itself: so there is no moment between a check
   and an act in which an older start could be frozen, and no reader has to know of numbers. The
   workspace is removed, not only moved, because a node that knows it by its NFS handle would find
   it anywhere.
4. Only now it reads what there is: checkpoints, and the journal, which it continues in a copy
   (tracker.py).

Protected in this way: checkpoints, `latest`, best.json, result.json, config.yaml, micro_batch.json,
pictures and files of evaluations, the journal, and what the deliverer keeps and sends. The
deliverer checks the fence after it has read lines, and before it sends a status (a request that is
on its way then may arrive late; figures that arrive twice are stored once). Not protected: text for
people, to which anybody may append (logs/, stacks/, bad_samples/, skipped_steps/, jobs/); the lines
of checked/ (first_read.py), which are appended and right for every reader, since each names the
file, its size and its time; and what is named by its content (cached features). All that is
protected is on one file system.
"""  # noqa: E501 (a table)

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote
from uuid import uuid4

from data_prep.errors import UserError
from data_prep.publish import (
    LOCK,
    REPLACED,
    TEMPORARY_PREFIX,
    Busy,
    Holder,
    is_held,
    make_directory,
    sole_writer,
    unless_superseded,
    use_workspace,
    withdraw,
)
from pretrain.ranks.preemption import Interrupted, StopFlag

_LOOK_S = 0.5
_LIVE_STATES = (
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
)


def is_at_work(run_dir: Path) -> bool:
    """Whether a start of it is alive."""
    return any(is_held(workspace)[0] for workspace in _workspaces(run_dir)[-1:])


@contextmanager
def started(run_dir: Path, *, lock_wait_s: float, stop: StopFlag | None = None) -> Iterator[None]:
    """While the block runs, this process is the run's newest start, and uses its workspace. `stop`
    interrupts the wait."""
    make_directory(run_dir / "starts")
    while True:
        before = _workspaces(run_dir)[-1:]
        was_frozen = any(
            _outwaits(workspace, run_dir, lock_wait_s=lock_wait_s, stop=stop)
            for workspace in before
        )
        made = run_dir / "starts" / f"{TEMPORARY_PREFIX}{uuid4().hex}"
        workspace = made.with_name(f"{1 + max((int(each.name) for each in before), default=0):04d}")
        with ExitStack() as until_end:
            try:
                until_end.enter_context(sole_writer(made))
            except FileNotFoundError:  # another start that has just begun has swept it away
                continue
            except UserError as error:  # no locks
                shutil.rmtree(made, ignore_errors=True)
                raise UserError(str(error).replace(str(made), str(run_dir))) from None
            if not _renamed(made, workspace) or _workspaces(run_dir)[-1] != workspace:
                shutil.rmtree(made, ignore_errors=True)
                continue
            use_workspace(workspace, under=run_dir)
            with unless_superseded(run_dir):  # it may have been frozen since it had its number
                for older in _workspaces(run_dir):
                    if int(older.name) < int(workspace.name):
                        _fence_off(older, behind=workspace, run_dir=run_dir)
                for leftover in workspace.parent.glob(
                    f"{TEMPORARY_PREFIX}*"
                ):  # of a start that came no further
                    shutil.rmtree(leftover, ignore_errors=True)
                _check_one_file_system(workspace, run_dir)
            if (
                was_frozen and (run_dir / "tracking" / LOCK).exists()
            ):  # so may be its deliverer, who holds this one
                withdraw(run_dir / "tracking" / LOCK)
            yield
            return


def _workspaces(run_dir: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in (run_dir / "starts").glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def _renamed(made: Path, workspace: Path) -> bool:
    """Not, where another start has that number, or has swept this one's away."""
    try:
        os.rename(made, workspace)
    except OSError:
        if made.exists() and not workspace.exists():
            raise
        return False
    return True


def _check_one_file_system(workspace: Path, run_dir: Path) -> None:
    """The user learns it before training, not from its first checkpoint."""
    probe = workspace / f"{TEMPORARY_PREFIX}probe"
    for place in (run_dir / "checkpoints", run_dir / "tracking"):
        if not place.is_dir():
            continue
        probe.touch()
        try:
            os.rename(probe, place / probe.name)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise UserError(
                f"{place}: lies on another file system than {workspace.parent}, out of which its"
                f" files are renamed; put all of {run_dir} on one file system, and let {run_dir}"
                " itself be the link"
            ) from None
        (place / probe.name).unlink()


def _fence_off(older: Path, *, behind: Path, run_dir: Path) -> None:
    moved = behind / f"{TEMPORARY_PREFIX}{older.name}"
    os.rename(older, moved)
    mark = TEMPORARY_PREFIX + REPLACED
    # it died between the two renames that replace a directory; or one before it, and it before it
    # had put that back
    for replaced in [*moved.rglob(f"{mark}*")]:
        place = run_dir / unquote(replaced.name.removeprefix(mark))
        if not place.exists():
            os.rename(replaced, place)
    for _ in range(10):  # another node may be writing there
        shutil.rmtree(moved, ignore_errors=True)
        if not moved.exists():
            break


def _outwaits(workspace: Path, run_dir: Path, *, lock_wait_s: float, stop: StopFlag | None) -> bool:
    """Waits for the workspace's lock. True: it is held still, by a start that is over."""
    deadline_s, has_said = time.monotonic() + lock_wait_s, False
    while True:
        held, holder = is_held(workspace)
        if not held:
            return False
        who = f"{run_dir}: start {int(workspace.name)} of this run holds it ({holder or 'unknown'})"
        if not has_said:
            print(f"{who}; waiting up to {lock_wait_s:,.0f} s", file=sys.stderr, flush=True)
            has_said = True
        if stop is not None and stop.raised_by is not None:
            raise Interrupted
        if time.monotonic() >= deadline_s:
            break
        time.sleep(min(_LOOK_S, lock_wait_s))
    if holder is None or not _is_over(holder):
        raise Busy(f"{who}, and has not let go within {lock_wait_s:,.0f} s; end it, or wait for it")
    print(
        f"{who}; SLURM reports that it is over, so this start takes over from it",
        file=sys.stderr,
        flush=True,
    )
    return True


def _is_over(holder: Holder) -> bool:
    """Whether SLURM reports that the holder's start is over. Within the same job the number of
    restarts shows it; about another job `scontrol` is asked, where there is one (not in a
    container)."""
    if not holder.job or holder.cluster != os.environ.get("SLURM_CLUSTER_NAME", ""):
        return False  # this cluster's SLURM does not know that job
    if holder.job == os.environ.get("SLURM_JOB_ID"):
        return holder.restart < int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = _asked("job", holder.job)
    if "Invalid job id" in job:
        return True  # it has ended long ago
    state, restarts = _field("JobState", job), _field("Restarts", job)
    if state and (state not in _LIVE_STATES or int(restarts or 0) > holder.restart):
        return True
    return (
        re.match(r"DOWN\b", _field("State", _asked("node", holder.node))) is not None
    )  # a suffix is a flag, as in DOWN*+DRAIN


def _asked(*words: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "-o", "show", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _field(name: str, answer: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", answer)
    return found[1] if found else ""
