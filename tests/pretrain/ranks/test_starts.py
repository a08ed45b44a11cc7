"""Only the newest start of a run changes anything: an older one may freeze at any moment and wake
up again."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep import publish
from data_prep.errors import UserError
from data_prep.publish import Busy, Holder, Superseded, withdraw, workspace_of
from pretrain.checkpoints.files import Best
from pretrain.checkpoints.run import checkpoints_dir, save_result
from pretrain.ranks import starts
from pretrain.ranks.preemption import StopFlag, entered
from pretrain.ranks.starts import started
from pretrain.tracking.tracker import Journal
from tests.forked import begin, new_output, wait
from tests.pretrain.checkpoints.test_checkpoint import save, wait_until

NOT_NOTICED = 7
OPERATIONS = [
    (publish.os, "rename"),
    (publish.os, "replace"),
    (publish.os, "fsync"),
    (Path, "mkdir"),
    (publish.shutil, "rmtree"),
]


def run_and_freeze(folder: str) -> int:
    """Starts of one run after another, stopped by a signal: the n-th right before its n-th
    operation on files."""
    num_done = freeze_at = 0

    def freezing(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*words: Any, **more: Any) -> Any:
            nonlocal num_done
            num_done += 1
            if num_done == freeze_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*words, **more)

        return wrapped

    os.fsync = os.fdatasync = lambda _descriptor: None  # no power is cut
    for where, name in OPERATIONS:
        setattr(where, name, freezing(getattr(where, name)))
    for number in range(1, 200):
        run_dir, freeze_at = Path(folder) / str(number), 0
        with started(run_dir, lock_wait_s=0):
            journal = Journal(run_dir / "journal.jsonl")
            journal.append({"event": "metrics", "step": 1, "values": {"loss": 1.0}})
            save(run_dir, 1, best=Best(1, 0.5))
            save(run_dir, 2, best=Best(1, 0.5))
            num_done, freeze_at = 0, number
            try:
                save(
                    run_dir, 2, best=Best(2, 0.6), keep_last=1
                )  # in the place of another, with another to be removed
                save_result(run_dir, {"by": "the frozen one"})
                withdraw(checkpoints_dir(run_dir) / "best.json")
                return 0 if num_done < number else NOT_NOTICED
            except Superseded:
                journal.append({"event": "metrics", "step": 2, "values": {"loss": 2.0}})
                assert journal.close(timeout_s=20)
            (run_dir / "woken").touch()
    return NOT_NOTICED


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}


def is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # it ended since its exit code was asked for
        return False


def test_frozen_at_any_file_operation_it_changes_nothing_when_it_wakes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    old = begin(
        "tests.pretrain.ranks.test_starts:run_and_freeze",
        str(tmp_path),
        environment=os.environ,
        output=new_output(),
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _descriptor: None)
    process, number = psutil.Process(old.pid), 0
    while (number := number + 1) < 200:
        run_dir = tmp_path / str(number)
        wait_until(lambda: old.exitcode is not None or is_stopped(process))
        if old.exitcode is not None:
            break
        try:
            with started(run_dir, lock_wait_s=0):
                found = [path.name for path in checkpoints_dir(run_dir).glob("*")]
                assert "step-00000002" in found and not [
                    name for name in found if name.startswith(".")
                ], found
                Journal(run_dir / "journal.jsonl").close(timeout_s=20)
                save(run_dir, 1, best=Best(1, 0.5))
                save(run_dir, 3, best=Best(3, 0.7))
            before = contents(run_dir)
        finally:
            process.send_signal(signal.SIGCONT)
        woken = run_dir / "woken"
        wait_until(lambda woken=woken: old.exitcode is not None or woken.exists())
        woken.unlink()
        assert contents(run_dir) == before
        assert [path.name for path in (run_dir / "starts").iterdir()] == ["0002"]
        lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1]
    assert number > 20 and old.exitcode == 0


def enter_alone(run_dir: str) -> int:
    with started(Path(run_dir), lock_wait_s=60):
        mark = Path(run_dir) / "inside"
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        mark.unlink()
    return 0


def test_of_many_starts_at_once_each_has_its_turn_and_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [
        begin(
            "tests.pretrain.ranks.test_starts:enter_alone",
            str(tmp_path),
            environment=os.environ,
            output=new_output(),
        )
        for _ in range(4)
    ]
    assert wait(many, timeout_s=300) == [0] * 4
    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["0004"]


GONE = "slurm_load_jobs error: Invalid job id specified"


@pytest.mark.parametrize(
    ("restart", "cluster", "job", "node", "is_over"),
    [
        (0, "a", "JobState=RUNNING Restarts=0", "State=IDLE", False),
        (0, "a", "JobState=COMPLETING Restarts=0", "State=ALLOCATED", False),
        (0, "a", "JobState=RUNNING Restarts=0", "State=DOWN*+DRAIN", True),
        (0, "a", "JobState=RUNNING Restarts=0", "State=DOWN", True),
        (0, "a", "JobState=RUNNING Restarts=0", "State=DOWN$+MAINTENANCE", True),
        (0, "a", "JobState=RUNNING Restarts=0", "State=ALLOCATED+POWER_DOWN_ASAP", False),
        (0, "a", "JobState=RUNNING Restarts=0", "State=POWERED_DOWN", False),
        (0, "a", "JobState=RUNNING Restarts=1", "State=ALLOCATED", True),
        (1, "a", "JobState=RUNNING Restarts=1", "State=ALLOCATED", False),
        (0, "a", "JobState=NODE_FAIL Restarts=0", "State=IDLE", True),
        (0, "a", GONE, "State=IDLE", True),
        (0, "b", GONE, "State=DOWN", False),  # of another cluster on the same file system
        (0, "a", "slurm_load_jobs error: Unable to contact slurm controller", "", False),
    ],
)
def test_another_jobs_start_is_over_when_slurm_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restart: int,
    cluster: str,
    job: str,
    node: str,
    is_over: bool,
) -> None:
    stand_in = tmp_path / "bin" / "scontrol"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/sh\n[ "$2 $3" = "show job" ] && echo "JobId=$4 {job}" || echo "NodeName=$4'
        f' {node}"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "a")
    holder = Holder(
        node="n7", pid=123, job="17", cluster=cluster, restart=restart, since="2026-11-22 01:02:03"
    )
    monkeypatch.setattr(starts, "is_held", lambda workspace: (True, holder))
    (tmp_path / "run" / "starts" / "0004").mkdir(parents=True)
    if is_over:
        with started(tmp_path / "run", lock_wait_s=0):
            return
    said = (
        f"start 4 of this run holds it \\(process 123 on n7, job 17, start {restart + 1}, since"
        " 2026-11-22 01:02:03\\)"
    )
    with pytest.raises(Busy, match=said), started(tmp_path / "run", lock_wait_s=0):
        pass


def test_a_start_that_waits_heeds_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, stop = tmp_path / "starts" / "0001", StopFlag()

    def is_held(
        _: Path,
    ) -> tuple[bool, None]:  # to the end; what tells it to stop comes as it waits
        stop.raised_by = "SIGTERM"
        return True, None

    workspace.mkdir(parents=True)
    monkeypatch.setattr(starts, "is_held", is_held)
    with entered(started(tmp_path, lock_wait_s=1, stop=stop)):
        assert workspace_of(tmp_path) is None
    assert list(workspace.parent.iterdir()) == [workspace]


@pytest.mark.parametrize("name", ["checkpoints", "tracking"])
def test_a_run_on_two_file_systems_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_dir, scratch, rename = tmp_path / "run", tmp_path / "scratch", os.rename

    def between_two(source: Path, target: Path) -> None:
        if source.resolve().is_relative_to(scratch) != target.parent.resolve().is_relative_to(
            scratch
        ):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    for place in (run_dir, scratch):
        place.mkdir()
    with started(run_dir, lock_wait_s=0):
        (run_dir / name).symlink_to(scratch)
    monkeypatch.setattr(os, "rename", between_two)
    said = f"run/{name}: lies on another file system.*let .*run itself be the link"
    with pytest.raises(UserError, match=said), started(run_dir, lock_wait_s=0):
        pass
    assert not list(scratch.iterdir())
    monkeypatch.setattr(os, "rename", rename)
    with started(run_dir, lock_wait_s=0):
        assert not list(scratch.iterdir())


def test_a_file_system_without_locks_is_named_by_the_run_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    (old := tmp_path / "old").mkdir()
    with started(old, lock_wait_s=0):
        monkeypatch.setattr("fcntl.flock", no_locks)
    for run_dir, named in ((tmp_path / "new", tmp_path / "new"), (old, old / "starts" / "0001")):
        with (
            pytest.raises(UserError, match=f"^{named}: its file system has no locks"),
            started(run_dir, lock_wait_s=0),
        ):
            pass
    assert [path.name for path in tmp_path.rglob(".tmp-*")] == []


def test_a_desk_that_another_start_sweeps_away_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, swept = publish.make_directory, []

    def sweeping(directory: Path) -> None:
        original(directory)
        if directory.name.startswith(".tmp-") and not swept:
            swept.append(directory)
            directory.rmdir()

    monkeypatch.setattr(publish, "make_directory", sweeping)
    with started(tmp_path, lock_wait_s=0):
        assert [path.name for path in (tmp_path / "starts").iterdir()] == ["0001"] and swept


def test_a_start_that_froze_before_its_fence_changes_nothing_when_it_wakes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, lock, fence_off = (
        tmp_path / "starts" / "0001",
        tmp_path / "tracking" / ".lock",
        starts._fence_off,
    )
    (older / ".tmp-replaced-x").mkdir(parents=True)
    lock.parent.mkdir()
    lock.touch()

    def after_another(older: Path, **more: Path) -> None:
        more["behind"].rename(older.with_name("0003"))
        fence_off(older, **more)

    monkeypatch.setattr(starts, "_outwaits", lambda *_, **__: True)
    monkeypatch.setattr(starts, "_fence_off", after_another)
    with pytest.raises(Superseded), started(tmp_path, lock_wait_s=0):
        pass
    assert lock.exists() and not (tmp_path / "x").exists()


def test_what_a_start_had_not_put_back_when_it_died_the_next_one_does(tmp_path: Path) -> None:
    replaced = (
        tmp_path / "starts" / "0002" / ".tmp-0001" / ".tmp-replaced-checkpoints%2Fstep-00000001"
    )
    for place in (replaced, tmp_path / "checkpoints"):
        place.mkdir(parents=True)
    with started(tmp_path, lock_wait_s=0):
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_who_publishes_after_the_block_is_behind_the_fence_still(tmp_path: Path) -> None:
    with started(tmp_path, lock_wait_s=0):
        pass
    publish.write_atomic(tmp_path / "x", b"1")
    publish.shutil.rmtree(tmp_path / "starts" / "0001")
    with pytest.raises(Superseded):
        publish.write_atomic(tmp_path / "x", b"2")


def test_one_thread_may_begin_a_start_while_another_one_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def while_another_begins(self: Path, other: Path) -> bool:
        publish.use_workspace(tmp_path / "workspace", under=tmp_path / str(len(workspaces)))
        return is_relative_to(self, other)

    monkeypatch.setattr(publish, "_WORKSPACES", workspaces := {})
    is_relative_to = Path.is_relative_to
    publish.use_workspace(tmp_path / "0001", under=tmp_path)
    monkeypatch.setattr(Path, "is_relative_to", while_another_begins)
    assert workspace_of(tmp_path / "x") == tmp_path / "0001"


def test_a_directory_within_another_has_its_own_desk(tmp_path: Path) -> None:
    outer, inner = tmp_path / "a", tmp_path / "a" / "seed-1"
    with started(outer, lock_wait_s=0), started(inner, lock_wait_s=0):
        publish.write_atomic(inner / "x", b"1")
        publish.shutil.rmtree(inner / "starts" / "0001")
        with pytest.raises(Superseded):
            publish.write_atomic(inner / "x", b"2")
        publish.write_atomic(outer / "x", b"3")
    assert ((inner / "x").read_bytes(), (outer / "x").read_bytes()) == (b"1", b"3")
