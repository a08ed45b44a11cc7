"""A run in which all ranks live, but none gets on, is ended: the rank that is behind is named, and all leave their stacks."""

import ctypes
import os
import re
import signal
import socket
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

import pytest

from pretrain.augment.feed import Fed, Feed
from pretrain.ranks.hangs import PROGRESS, Progress, Standing, Standings, Verdict
from pretrain.ranks.heartbeat import Heartbeat
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.world import Peer, read_world
from tests import training
from tests.forked import begin, environments, wait
from tests.moments import wait_until
from tests.training import write_config

PEERS = [Peer(rank, f"n{rank // 2}", 100 + rank) for rank in range(8)]


def never_gets_its_data(_feed: Feed) -> Fed:
    PROGRESS._touched_s = time.monotonic() - 1000  # so that the test need not wait so long
    time.sleep(600)
    raise AssertionError


def train_with_one_stuck_rank(words: list[str]) -> int:
    real, given = Feed.__next__, 0

    def following(feed: Feed) -> Fed:
        nonlocal given
        given += 1
        return never_gets_its_data(feed) if given == 9 and os.environ["RANK"] == "1" else real(feed)

    Feed.__next__ = following  # type: ignore[method-assign]
    return training.main("pretrain", words)


def test_a_training_that_hangs_names_the_rank_that_is_behind_and_shows_where_each_is(shapes: Path, tmp_path: Path) -> None:
    """Rank 1 never comes to the exchange of gradients of the fifth step (two micro-batches each), in which rank 0 waits."""
    config, run_dir = write_config(tmp_path, dataset=shapes), tmp_path / "run"
    words = ["train", str(config), f"run_dir={run_dir}", "engine.hang_timeout_s=500", "train.eval_every=99 epochs"]
    target = "tests.pretrain.ranks.test_hang:train_with_one_stuck_rank"
    ranks = [begin(target, words, environment=each, output=tmp_path / "output") for each in environments(2, TMPDIR=str(tmp_path))]
    assert wait(ranks, timeout_s=120) == [1, 1]
    output = (tmp_path / "output").read_text()
    (line,) = re.findall("^rank 1 .* has made no progress.*$", output, re.MULTILINE)
    where = r"at step 5, waiting for data; the other rank is at step [45], (computing|waiting for the end of the step .*)"
    ends = f"; the run stops; the same command goes on with it; stacks of all ranks: {re.escape(str(run_dir))}/stacks"
    facts = rf"\(node {re.escape(socket.gethostname())}, pid {ranks[1].pid}\)"
    assert re.fullmatch(rf"rank 1 {facts} has made no progress for 1,0\d\d s, {where}{ends}", line), line
    waiting, stuck = ((run_dir / "stacks" / f"rank-{rank:04}.txt").read_text() for rank in (0, 1))
    assert "in never_gets_its_data" in stuck and "heartbeat.py" in stuck
    assert f"rank 1 (node {socket.gethostname()}, pid {ranks[1].pid}): at step 5, waiting for data; rank 1" in stuck
    assert re.search("in (all_reduce|wait|read)", waiting) and "in never_gets_its_data" not in waiting


def holds_the_lock() -> None:
    ctypes.PyDLL(None).sleep(60)


def rank(folder: str, plan: str, silence_timeout_s: float, hang_timeout_s: float) -> NoReturn:
    """The first of two ranks mostly does nothing; the other one, or one that is alone, does what `plan` says."""
    world, place = read_world(), Path(folder)

    def announce(numbers: list[int]) -> list[int]:
        if world.is_first:
            (place / "tmp").write_text(" ".join(map(str, numbers)))
            (place / "tmp").rename(place / "facts")
        while not (place / "facts").exists():
            time.sleep(0.01)
        return [int(word) for word in (place / "facts").read_text().split()]

    settings = RanksSettings(heartbeat_timeout_s=silence_timeout_s, hang_timeout_s=hang_timeout_s)
    heartbeat = Heartbeat(world, settings).start(announce)
    heartbeat.watch(place / "stacks")
    PROGRESS.mark("waiting for data", step=1234)
    (place / f"ready-{world.rank}").touch()
    while len(list(place.glob("ready-*"))) < world.num_ranks:
        time.sleep(0.01)
    if plan == "wait for each other":
        take_turns(world.rank, place)
        heartbeat.stop()
        os._exit(0)
    if world.rank == world.num_ranks - 1:
        if plan == "holds Python's lock":
            holds_the_lock()
        if plan == "progresses":
            for step in range(50):
                PROGRESS.mark("computing", step=step) if step % 2 else PROGRESS.touch()
                time.sleep(0.1)
            heartbeat.stop()
            os._exit(0)
    time.sleep(60)
    raise AssertionError


def take_turns(rank: int, place: Path) -> None:
    """Long work of one of two ranks, which gets on, and for which the other waits; then the other way round."""
    for turn in (0, 1):
        PROGRESS.mark("working")
        if rank == turn:
            for _ in range(50):
                PROGRESS.touch()
                time.sleep(0.1)
        with PROGRESS.waiting("waiting for the other ranks"):
            (place / f"done-{turn}-{rank}").touch()
            while len(list(place.glob(f"done-{turn}-*"))) < 2:
                time.sleep(0.01)
        for _ in range(30):  # some beats, in which each hears where the other was
            PROGRESS.touch()
            time.sleep(0.1)


def begun(folder: Path, plan: str, *, num_ranks: int, silent_s: float, hangs_s: float) -> list[ForkServerProcess]:
    words = ("tests.pretrain.ranks.test_hang:rank", str(folder), plan, silent_s, hangs_s)
    ranks = [begin(*words, environment=each, output=folder / "output") for each in environments(num_ranks)]
    wait_until(lambda: len(list(folder.glob("ready-*"))) == num_ranks)
    return ranks


@pytest.mark.parametrize("plan", ["holds Python's lock", "is stopped"])
def test_a_frozen_rank_leaves_its_stack_or_is_described_by_its_neighbour(tmp_path: Path, plan: str) -> None:
    ranks = begun(tmp_path, plan, num_ranks=2, silent_s=2, hangs_s=0)
    if plan == "is stopped":
        os.kill(ranks[1].pid or 0, signal.SIGSTOP)
    try:
        ranks[0].join(120)
        assert ranks[0].exitcode == 1
    finally:
        ranks[1].kill()
    found, output = (tmp_path / "stacks" / "rank-0001.txt").read_text(), (tmp_path / "output").read_text()
    assert f"as rank 0 sees it in /proc\nrank 1 (node {socket.gethostname()}, pid {ranks[1].pid}): " in found
    assert f"  thread {ranks[1].pid} (" in found and "(heartbeat)" not in found.split("thread")[1]
    if plan == "is stopped":
        assert "its process is stopped, by SIGSTOP or a debugger (T (stopped))" in output and "Timeout" not in found
    else:
        assert "its process is alive (S (sleeping)), but kept its heartbeat from running" in output
        assert "Timeout (" in found and "in holds_the_lock" in found
    assert f"; stacks of all ranks: {tmp_path}/stacks\n" in output
    assert " in rank\n" in (tmp_path / "stacks" / "rank-0000.txt").read_text()


def test_a_rank_that_is_alone_is_watched_too(tmp_path: Path) -> None:
    (process,) = begun(tmp_path, "hangs", num_ranks=1, silent_s=2, hangs_s=1)
    assert wait([process], timeout_s=120) == [1]
    assert re.search(
        r"rank 0 \(.*\) has made no progress for \d+ s, at step 1,234, waiting for data; the run stops",
        (tmp_path / "output").read_text(),
    )
    assert " in rank\n" in (tmp_path / "stacks" / "rank-0000.txt").read_text()


def test_progress_is_no_alarm_and_leaves_no_file(tmp_path: Path) -> None:
    """Five seconds of short steps and pieces of work; three without any would be a hang."""
    (process,) = begun(tmp_path, "progresses", num_ranks=1, silent_s=2, hangs_s=3)
    assert wait([process], timeout_s=120) == [0]
    assert (tmp_path / "output").read_text() == "" and not (tmp_path / "stacks").exists()


def test_a_long_wait_for_another_rank_is_no_hang(tmp_path: Path) -> None:
    ranks = begun(tmp_path, "wait for each other", num_ranks=2, silent_s=60, hangs_s=3)
    assert wait(ranks, timeout_s=120) == [0, 0], (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text() == ""


def test_what_stands_still_with_the_whole_process_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended job: the time in which nobody could run does not count, until the next mark."""
    clock, progress = [100.0], Progress()
    monkeypatch.setattr("pretrain.ranks.hangs.time.monotonic", lambda: clock[0])
    clock[0] = 9_000.0
    assert progress.standing() == Standing(0, 0, "starting", 0.0)  # nothing counts before the first mark
    progress.mark("computing", step=7)
    clock[0] += 4_010
    progress.excuse(3_000)
    progress.excuse(1_000)
    assert progress.standing() == Standing(1, 7, "computing", 10.0)
    progress.mark("evaluating batch 1")
    clock[0] += 5
    assert progress.standing() == Standing(2, 7, "evaluating batch 1", 5.0)
    clock[0] += 5
    progress.touch()
    clock[0] += 1
    assert progress.standing() == Standing(2, 7, "evaluating batch 1", 1.0)


def table(*standings: Standing, after: Standings | None = None) -> Standings:
    found = after or Standings()
    for peer, standing in zip(PEERS, standings, strict=False):
        found.note(peer, standing)
    return found


def hang(timeout_s: float, *standings: Standing) -> Verdict | None:
    """Once they have all been told three times, and no sooner."""
    found = table(*standings)
    for _ in range(2):
        assert found.hang(timeout_s) is None
        table(*standings, after=found)
    return found.hang(timeout_s)


def test_who_is_behind_is_told_by_marks_and_not_by_clocks() -> None:
    computes, waits = Standing(41, 9, "computing", 500.5), Standing(40, 9, "waiting for data", 500.0)
    assert hang(500.2, computes, waits) is None  # the one that is ahead merely waits
    assert hang(499, computes, waits, computes) == Verdict(
        PEERS[1],
        "hangs",
        "has made no progress for 500 s, at step 9, waiting for data; 2 others are further, such as at step 9, computing",
    )
    both = hang(400, waits, computes, waits)
    assert both is not None and both.detail.startswith(
        "has made no progress for 500 s, at step 9, waiting for data, like rank 2; the other rank is at step 9, computing"
    )
    assert hang(400, computes, waits, waits._replace(stalled_s=3)) is None  # one of those that are behind gets on
    assert hang(400, computes, waits._replace(stalled_s=3)) is None
    all_alike = hang(400, *[waits] * 8)
    assert all_alike is not None and all_alike.detail.endswith("waiting for data, like 7 others")


def test_who_has_just_been_waited_for_is_no_hang() -> None:
    """It comes at last, and all go on: the others' word of that comes a beat later than its own."""
    waits, works = Standing(41, 0, "waiting", 600), Standing(40, 0, "writing", 0.1)
    goes_on = Standing(42, 0, "training", 0.1)
    found = table(works, waits, waits)
    assert found.hang(500) is None
    for standings in ((goes_on, waits, waits), (goes_on, waits, waits), (goes_on, goes_on, waits)):
        for peer, standing in zip(PEERS, standings, strict=False):
            found.note(peer, standing) if standing is not waits else None  # nothing new of these
            assert found.hang(500) is None
    assert table(goes_on, goes_on, goes_on, after=found).hang(500) is None


def test_a_collective_that_times_out_is_laid_to_the_rank_that_did_not_come() -> None:
    computes, waits = Standing(41, 9, "computing", 600.5), Standing(40, 9, "waiting for data", 600.0)
    found = table(computes, waits)
    assert found.behind(PEERS[0]) == f"{PEERS[1]} has made no progress for 600 s, at step 9, waiting for data"
    assert found.behind(PEERS[1]) == ""  # it failed by itself
    assert table(computes, waits._replace(stalled_s=2)).behind(PEERS[0]) == ""  # just now: it may wait for that one
    assert table(waits, waits).behind(PEERS[0]) == "" and table().behind(PEERS[0]) == ""
    verdict = Verdict(PEERS[0], "failed", "RuntimeError: timed out", found.behind(PEERS[0]))
    assert verdict.wants_stacks and Verdict.of(verdict.as_message()) == verdict
    assert not Verdict(PEERS[0], "failed", "ValueError: x").wants_stacks
