"""After a worker dies at any moment, its work is repeated, or the command ends with a one-line
error."""

import os
import signal
import sys
import threading
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from data_prep.archives.inventory import Container, Entries, Outline
from data_prep.build.build import write_planned
from data_prep.build.shards import ShardRecord
from data_prep.build.workplan import _entries
from data_prep.workers import Pool, sweep
from tests.data_prep.samples import build, files_of, write_classes
from tests.errors import fails, printed_errors

pytestmark = pytest.mark.processes

CUT = ("samples_per_shard=4", "num_workers=2")


def dying_first(deaths: Path, times: int, death: int, *job: Any) -> ShardRecord:
    """Write a shard in a worker that dies in its first `times` attempts."""
    if job[-1].name.endswith("0") and len([*deaths.iterdir()]) < times:
        (deaths / str(os.getpid())).touch()
        (job[0].directory / f".tmp-{os.getpid()}.tar").touch()
        os.kill(os.getpid(), death)
    return write_planned(*job)


def deaths_in(said: str) -> list[str]:
    """Return the error lines, without progress."""
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


def start_another() -> int | None:
    process = get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    return process.exitcode


def test_what_runs_in_a_worker_may_start_processes() -> None:
    """Other projects' datasets start processes to load ahead."""
    with Pool(2) as pool:
        assert pool.submit(start_another).result() == 3


def test_workers_that_die_before_a_job_is_submitted_are_replaced() -> None:
    with Pool(2) as pool:
        with pytest.raises(BrokenProcessPool):
            pool.submit(os._exit, 1).result()
        assert dict(pool.map(abs, [-1, -2])) == {0: 1, 1: 2}


class DyingSource:
    def __init__(self, deaths: Path, times: int) -> None:
        self.deaths, self.times = deaths, times

    def entries(self, container: Container) -> Entries:
        if container.path == "b" and len([*self.deaths.iterdir()]) < self.times:
            (self.deaths / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Entries.of([(container.path, 0, 1)], label=0)


@pytest.mark.parametrize("times", [1, 9])
def test_a_worker_that_dies_during_the_listing_is_replaced_once(tmp_path: Path, times: int) -> None:
    containers = tuple(Container(path=name, split="train") for name in "abcde")
    outline, dying = Outline(classes=(), containers=containers), DyingSource(tmp_path, times)
    with Pool(2) as pool:
        found = _entries(dying, outline, pool, ahead=3)  # type: ignore[arg-type]
        if times == 1:
            assert [entries.names for entries in found] == [[name] for name in "abcde"]
        else:
            with fails("no-space", "num_workers"):
                list(found)


def fail(path: Path) -> None:
    path.read_bytes()


def test_an_error_in_a_worker_keeps_its_traceback_and_the_worker_continues(tmp_path: Path) -> None:
    with Pool(2) as pool:
        for _ in range(3):
            with pytest.raises(FileNotFoundError, match="nowhere") as found:
                pool.submit(fail, tmp_path / "nowhere").result()
            assert "in fail" in str(found.value.__cause__)
        assert pool.submit(os.getpid).result() != os.getpid()


# ---- sweeps


def is_in_this_thread(_: int) -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(("num_jobs", "num_workers"), [(3, 1), (1, 4)])
def test_a_single_worker_is_this_thread_where_ctrl_c_ends_its_job(
    num_jobs: int, num_workers: int
) -> None:
    jobs = range(num_jobs)
    assert all(sweep(is_in_this_thread, jobs, title="", unit="", workers=num_workers))
