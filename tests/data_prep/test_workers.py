"""Workers that die at their work, wherever they are in it: what they did is done again, or the
command ends with one line."""

import os
import signal
import sys
import threading
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from data_prep.build.build import write_planned
from data_prep.build.shards import ShardRecord
from data_prep.workers import Pool, sweep
from tests.data_prep.samples import build, files_of, write_classes
from tests.errors import fails, printed_errors

pytestmark = pytest.mark.processes

CUT = ("samples_per_shard=4", "num_workers=2")


def dying_first(deaths: Path, times: int, death: int, *job: Any) -> ShardRecord:
    """In a worker: the first `times` attempts at every shard die."""
    if job[-1].name.endswith("0") and len([*deaths.iterdir()]) < times:
        (deaths / str(os.getpid())).touch()
        (job[0].directory / f".tmp-{os.getpid()}.tar").touch()
        os.kill(os.getpid(), death)
    return write_planned(*job)


def deaths_in(said: str) -> list[str]:
    """Without what a slow machine says of its progress."""
    return [line for line in said.splitlines() if line.startswith("data_prep: ")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("workers") / "source", {"ant": 7, "bee": 5})


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSEGV])
def test_the_work_of_a_killed_worker_is_done_again_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, death: int
) -> None:
    assert build(source, tmp_path / "whole" / "animals", *CUT) == 0
    for times, code in ((1, 0), (9, 2)):
        deaths, out = tmp_path / f"deaths{times}", tmp_path / f"killed{times}"
        deaths.mkdir()
        with monkeypatch.context() as patch:
            work = partial(dying_first, deaths, times, death)
            patch.setattr("data_prep.build.build.write_planned", work)
            assert build(source, out / "animals", *CUT) == code
        assert code or not [*(out / "animals").glob(".tmp-*")]
        said = capfd.readouterr().err
        assert len(deaths_in(said)) == 1 + (code > 0)
        assert printed_errors(said) == [("num_workers", "no-space")] * (code > 0)
        assert build(source, out / "animals", *CUT) == 0
        assert files_of(out) == files_of(tmp_path / "whole")


# ---- the pool
# ------------------------------------------------------------------------------------------------


def start_another(_: int) -> int | None:
    process = get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    return process.exitcode


def test_what_runs_in_a_worker_may_start_processes() -> None:
    """As datasets of others do that load ahead."""
    with Pool(2) as pool:
        assert dict(pool.map(start_another, [0])) == {0: 3}


def dies_at(marks: Path, times: int, job: int) -> int:
    if job == 1 and len([*marks.iterdir()]) < times:
        (marks / str(os.getpid())).touch()
        os._exit(1)
    return -job


def test_workers_that_have_died_are_replaced_once(tmp_path: Path) -> None:
    """Also if they died before the next jobs are submitted."""
    jobs = [0, 1, 2]
    with Pool(2) as pool:
        assert dict(pool.map(partial(dies_at, tmp_path, 1), jobs)) == {0: 0, 1: -1, 2: -2}
        with fails("no-space", "num_workers"):
            dict(pool.map(partial(dies_at, tmp_path, 9), jobs))


def fail(path: Path) -> None:
    path.read_bytes()


def test_an_error_in_a_worker_keeps_its_traceback_and_the_workers_continue(tmp_path: Path) -> None:
    with Pool(2) as pool:
        for _ in range(3):
            with pytest.raises(FileNotFoundError, match="nowhere") as found:
                dict(pool.map(fail, [tmp_path / "nowhere"]))
            assert "in fail" in str(found.value.__cause__)
        assert dict(pool.map(abs, [-1, -2])) == {0: 1, 1: 2}


# ---- sweeps
# ------------------------------------------------------------------------------------------------


def is_in_this_thread(_: int) -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(("num_jobs", "num_workers"), [(3, 1), (1, 4)])
def test_a_single_worker_is_this_thread_where_ctrl_c_ends_its_job(
    num_jobs: int, num_workers: int
) -> None:
    jobs = range(num_jobs)
    assert all(sweep(is_in_this_thread, jobs, title="", unit="", workers=num_workers))
