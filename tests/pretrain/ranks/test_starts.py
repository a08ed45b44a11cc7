"""Only one attempt at a run writes at a time. SLURM decides if another attempt may take over."""

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from data_prep.publish import LOCK, Holder, sole_writer
from pretrain.ranks.preemption import StopFlag, entered
from pretrain.ranks.starts import has_lost_run, hold_run, is_at_work
from tests.errors import fails
from tests.forked import begin, new_output, wait


def enter_alone(run_dir: str) -> int:
    with hold_run(Path(run_dir), lock_wait_s=60):
        mark = Path(run_dir) / "inside"
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        mark.unlink()
    return 0


@pytest.mark.processes
def test_of_many_starts_at_once_each_has_its_turn(tmp_path: Path) -> None:
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
    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["0001"]


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
        (0, "b", GONE, "State=DOWN", False),  # in another cluster with the same file system
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
    holder = Holder("n7", 123, "17", cluster, restart, since="2026-11-22 01:02:03")
    lock = tmp_path / "run" / "starts" / "0004"
    with sole_writer(lock):
        (lock / LOCK).write_text(json.dumps(asdict(holder)))
        if not is_over:
            with (
                fails("busy", str(tmp_path / "run")) as caught,
                hold_run(tmp_path / "run", lock_wait_s=0),
            ):
                pass
            assert str(holder) in str(caught.value)
            return
        with hold_run(tmp_path / "run", lock_wait_s=0):
            assert [path.name for path in lock.parent.iterdir()] == ["0005"]
            with fails("busy"), hold_run(tmp_path / "run", lock_wait_s=0):
                pass  # the new holder is alive


def test_a_start_that_waits_heeds_a_stop(tmp_path: Path) -> None:
    stop, has_entered = StopFlag(), False
    stop.raised_by = "SIGTERM"
    with hold_run(tmp_path, lock_wait_s=0), entered(hold_run(tmp_path, lock_wait_s=60, stop=stop)):
        has_entered = True
    assert has_entered and not is_at_work(tmp_path)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with fails("unsupported"), hold_run(tmp_path, lock_wait_s=0):
        pass


def test_a_start_restores_or_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for name in ("replaced-step-00000001", "replaced-step-00000002", "withdrawn-x", "1"):
        (checkpoints / f".tmp-{name}").mkdir(parents=True)
    (checkpoints / "step-00000002").mkdir()
    (tmp_path / ".tmp-result.json").touch()
    tracked = [tmp_path / "tracking" / f".tmp-{name}" for name in ("old", "new")]
    tracked[0].parent.mkdir()
    for path in tracked:
        path.touch()
    os.utime(tracked[0], (0, 0))
    with hold_run(tmp_path, lock_wait_s=0):
        names = sorted(path.name for path in checkpoints.iterdir())
        assert names == ["step-00000001", "step-00000002"]
        assert not (tmp_path / ".tmp-result.json").exists()
        assert [path.exists() for path in tracked] == [False, True]


def test_a_start_takes_over_only_from_the_holder_that_it_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the request to SLURM, another attempt gets the lock."""
    lock = tmp_path / "starts" / "0004"
    asked: list[Holder] = []

    def is_over(holder: Holder) -> bool:
        asked.append(holder)
        (lock / LOCK).write_text(json.dumps(asdict(Holder(node="n8"))))
        return len(asked) == 1

    monkeypatch.setattr("pretrain.ranks.starts._is_over", is_over)
    with sole_writer(lock), fails("busy"), hold_run(tmp_path, lock_wait_s=0):
        pass
    assert len(asked) == 2 and [path.name for path in lock.parent.iterdir()] == ["0004"]


def test_a_start_removes_only_lower_numbers_and_has_lost_the_run_to_a_higher_one(
    tmp_path: Path,
) -> None:
    starts = tmp_path / "starts"
    for name in ("0001", "0002"):
        (starts / name).mkdir(parents=True)
    with hold_run(tmp_path, lock_wait_s=0):
        assert [path.name for path in starts.iterdir()] == ["0002"] and not has_lost_run()
        (starts / "0003").mkdir()
        assert has_lost_run()
