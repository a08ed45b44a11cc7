"""Workers that die at their work, wherever they are in it: what they did is done again, or the
command ends with one line."""

import os
import signal
import sys
import threading
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from data_prep.build.build import write_planned
from data_prep.build.shards import ShardRecord
from data_prep.workers import Pool, Tally, sweep, worker_pool
from tests.data_prep.samples import build, files_of, write_classes

CUT = ("samples_per_shard=4", "num_workers=2")


class Deadly:
    """Slots whose second writer dies in the middle of it, as when a worker is killed inside
    `Tally.add`."""

    def __init__(self, death: int):
        self.death, self.counted = death, 0

    def __getitem__(self, number: int) -> int:
        return self.counted

    def __setitem__(self, number: int, value: int) -> None:
        if self.counted:
            os.kill(os.getpid(), self.death)
        self.counted = value


def dying(deaths: Path, times: int, death: int, *job: Any) -> ShardRecord:
    """In a worker: the first `times` attempts at every shard die while they count."""
    attempts = deaths / job[-1].name
    with open(attempts, "ab") as file:
        file.write(b".")
    if attempts.stat().st_size <= times:
        Tally.connect(Deadly(death), 0)  # type: ignore[arg-type]
    return write_planned(*job)


def deaths_in(said: str) -> list[str]:
    """Without what a slow machine says of its progress."""
    return [line for line in said.splitlines() if line.startswith("data_prep: ")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("workers") / "source", {"ant": 7, "bee": 5})


@pytest.mark.parametrize(
    ("death", "words"),
    [(9, "was killed (signal 9), most likely for want of memory"), (11, "signal 11")],
)
def test_workers_killed_while_they_count_are_named_and_their_work_is_done_again(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    death: int,
    words: str,
) -> None:
    assert build(source, tmp_path / "whole" / "animals", *CUT) == 0
    (tmp_path / "deaths").mkdir()
    monkeypatch.setattr(
        "data_prep.build.build.write_planned", partial(dying, tmp_path / "deaths", 1, death)
    )
    assert build(source, tmp_path / "killed" / "animals", *CUT) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "deaths").iterdir()} == {
        f"train-00000{number}": b".." for number in range(3)
    }
    said = deaths_in(capfd.readouterr().err)
    assert len(said) == 3 and all(
        words in line and line.endswith("its work is done again") for line in said
    )
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_workers_that_die_twice_at_the_same_work_end_the_build_with_one_line(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "killed" / "animals"
    (tmp_path / "deaths").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(
            "data_prep.build.build.write_planned",
            partial(dying, tmp_path / "deaths", 2, signal.SIGKILL),
        )
        assert build(source, out, *CUT) == 1
    *before, line = deaths_in(capfd.readouterr().err)
    assert before and all(each.endswith("its work is done again") for each in before)
    assert line.startswith("data_prep: worker ") and line.endswith(
        "was killed (signal 9), most likely for want of memory, like the one before it at the same"
        " work; give more memory, or take fewer workers; what is finished is kept, the same command"
        " goes on from there"
    )
    assert build(source, out, *CUT) == 0
    assert build(source, tmp_path / "whole" / "animals", *CUT) == 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


# ---- the pool
# -----------------------------------------------------------------------------------------------------


def answer(mark: Path, number: int) -> bytes:
    """The first time, the worker is killed when half of the answer is in the pipe."""
    Tally.add(number)
    if not mark.exists():
        mark.touch()

        def half(pipe: Any, data: Any, *_: Any) -> None:
            os.write(pipe.fileno(), bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        Connection._send = half  # type: ignore[attr-defined]
    return bytes([number]) * 100_000


def test_a_worker_killed_in_the_middle_of_its_answer_holds_up_nobody_and_counts_once(
    tmp_path: Path,
) -> None:
    """The pool of the standard library waits for ever for the other half."""
    with worker_pool(2) as pool:
        found = list(pool.map(answer, [tmp_path / str(number) for number in range(5)], range(5)))
    assert found == [bytes([number]) * 100_000 for number in range(5)]
    assert pool.tally.taken() == 0 + 1 + 2 + 3 + 4
    assert pool.tally.taken() == 0


def test_workers_hear_ctrl_c_where_the_builder_does() -> None:
    """`data_prep build ... &` leaves it to those in the foreground."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the tests themselves may run in the background
    try:
        with worker_pool(2) as pool, pytest.raises(KeyboardInterrupt):
            pool.submit(signal.raise_signal, signal.SIGINT).result()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with worker_pool(2) as pool:
            pool.submit(signal.raise_signal, signal.SIGINT).result()
    finally:
        signal.signal(signal.SIGINT, before)


def start_another() -> int | None:
    process = get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    return process.exitcode


def test_what_runs_in_a_worker_may_start_processes() -> None:
    """As datasets of others do that load ahead."""
    with worker_pool(2) as pool:
        assert pool.submit(start_another).result() == 3


def fail(path: Path) -> None:
    path.read_bytes()


def test_what_goes_wrong_in_a_worker_is_raised_with_its_traceback_and_the_worker_goes_on(
    tmp_path: Path,
) -> None:
    with worker_pool(2) as pool:
        for _ in range(3):
            with pytest.raises(FileNotFoundError, match="nowhere") as found:
                pool.submit(fail, tmp_path / "nowhere").result()
            assert "in fail" in found.value.__notes__[0]
        assert pool.submit(os.getpid).result() == pool.submit(os.getpid).result() != os.getpid()
        with pytest.raises(BrokenExecutor, match="ended with exit code 3, like the one before it"):
            pool.submit(os._exit, 3).result()


# ---- sweeps
# --------------------------------------------------------------------------------------------------------


def counted_here(number: int) -> bool:
    Tally.add(1)
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(("num_jobs", "num_workers"), [(3, 1), (1, 4)])
def test_a_single_worker_is_this_thread_where_ctrl_c_ends_its_job(
    monkeypatch: pytest.MonkeyPatch, num_jobs: int, num_workers: int
) -> None:
    line = MagicMock(done=0)
    monkeypatch.setattr("data_prep.workers.progress", lambda *_, **__: nullcontext(line))
    assert all(
        sweep(
            counted_here,
            range(num_jobs),
            title="",
            unit="images",
            total=num_jobs,
            num_workers=num_workers,
        )
    )
    line.advance.assert_called_with(num_jobs, note=f"{num_jobs}/{num_jobs} shards")


def test_no_job_begins_after_the_first_failure_though_an_earlier_one_goes_on() -> None:
    begun, is_over = set[int](), threading.Event()

    def work(number: int) -> None:
        begun.add(number)
        if number == 1:
            raise ZeroDivisionError
        assert is_over.wait(5)

    with Pool([0], max_workers=2) as pool:
        with pytest.raises(ZeroDivisionError):
            list(sweep(work, range(5), title="", unit="shards", pool=pool))
        is_over.set()
    assert begun == {0, 1, 2}
