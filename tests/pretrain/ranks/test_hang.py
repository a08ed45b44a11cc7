"""A run whose ranks all live without progress is ended. The rank that is behind is named, and all
ranks write their stacks."""

import ctypes
import os
import pickle
import re
import socket
import time
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

import pytest

from pretrain.augment.feed import Fed, Feed
from pretrain.ranks.hangs import PROGRESS, Progress, Standing, Standings, Verdict
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.watchdog import Watchdog
from pretrain.ranks.world import Peer, read_world
from tests import training as trainings
from tests.forked import begin, environments, wait
from tests.moments import wait_until
from tests.pretrain.ranks.test_watchdog import announce
from tests.training import write_config

PEERS = [Peer(rank, f"n{rank // 2}", 100 + rank) for rank in range(8)]


def never_gets_its_data(_feed: Feed) -> Fed:
    PROGRESS._touched_s = time.monotonic() - 1000  # as if 1000 s had passed
    time.sleep(600)
    raise AssertionError


def train_with_one_stuck_rank(words: list[str]) -> int:
    real, given = Feed.__next__, 0

    def following(feed: Feed) -> Fed:
        nonlocal given
        given += 1
        return never_gets_its_data(feed) if given == 9 and os.environ["RANK"] == "1" else real(feed)

    Feed.__next__ = following  # type: ignore[method-assign]
    return trainings.main("pretrain", words)


@pytest.mark.processes
def test_a_training_that_hangs_names_the_rank_that_is_behind_and_shows_where_each_is(
    shapes: Path, tmp_path: Path
) -> None:
    """Rank 1 never reaches the gradient exchange of step 5 (two micro-batches each), in which rank
    0 waits."""
    config, run_dir = write_config(tmp_path, dataset=shapes), tmp_path / "run"
    words = [
        "train",
        str(config),
        f"run_dir={run_dir}",
        "engine.hang_timeout_s=500",
        "train.eval_every=99 epochs",
    ]
    target = "tests.pretrain.ranks.test_hang:train_with_one_stuck_rank"
    ranks = [
        begin(target, words, environment=each, output=tmp_path / "output")
        for each in environments(2, TMPDIR=str(tmp_path))
    ]
    assert wait(ranks, timeout_s=300) == [1, 1]
    output = (tmp_path / "output").read_text()
    (line,) = re.findall("^rank 1 .* has made no progress.*$", output, re.MULTILINE)
    where = (
        r"at step 5, waiting for data; the others are at step [45], (computing|waiting for the"
        r" end of the step .*)"
    )
    ends = (
        r"; the run stops\. Run the same command to resume; stacks of all ranks:"
        f" {re.escape(str(run_dir))}/stacks"
    )
    facts = rf"\(node {re.escape(socket.gethostname())}, pid {ranks[1].pid}\)"
    assert re.fullmatch(
        rf"rank 1 {facts} has made no progress for [\d,]+ s, {where}{ends}", line
    ), line
    waiting, stuck = ((run_dir / "stacks" / f"rank-{rank:04}.txt").read_text() for rank in (0, 1))
    assert "in never_gets_its_data" in stuck and "watchdog.py" in stuck
    assert (
        f"rank 1 (node {socket.gethostname()}, pid {ranks[1].pid}): at step 5, waiting for data;"
        " rank 1" in stuck
    )
    assert (
        re.search("in (all_reduce|wait|read)", waiting) and "in never_gets_its_data" not in waiting
    )
    files = [run_dir / "stacks" / f"flight-recorder-{rank:04}" for rank in (0, 1)]
    newest = [pickle.loads(each.read_bytes())["entries"][-1] for each in files]
    assert not newest[0]["retired"] and newest[1]["retired"], "rank 0 waits in a collective"
    assert newest[0]["profiling_name"].startswith("gloo:")


def holds_the_lock() -> None:
    ctypes.PyDLL(None).sleep(60)


def rank(folder: str, plan: str, silence_timeout_s: float) -> NoReturn:
    """Run a rank. The first of two ranks mostly does nothing; the other rank, or a single rank,
    follows `plan`."""
    world, place, hang, num_judged = read_world(), Path(folder), Standings.find_hang, 0

    def counted(standings: Standings, timeout_s: float) -> Verdict | None:
        nonlocal num_judged
        num_judged += 1
        return hang(standings, timeout_s)

    Standings.find_hang = counted  # type: ignore[method-assign]
    settings = RanksSettings(heartbeat_timeout_s=silence_timeout_s, hang_timeout_s=500)
    heartbeat = Watchdog(world, settings).start(partial(announce, world, place))
    heartbeat.watch(place / "stacks")
    PROGRESS.mark("waiting for data", step=1234)
    (place / f"ready-{world.rank}").touch()
    wait_until(lambda: len(list(place.glob("ready-*"))) == world.num_ranks)
    match plan if world.rank == world.num_ranks - 1 else "":
        case "holds Python's lock":
            holds_the_lock()
        case "hangs":
            time_passes(1000)
        case "progresses":
            for step in range(4):
                PROGRESS.mark("computing", step=step) if step % 2 else PROGRESS.touch()
                time_passes(400)
                enough = num_judged + 4
                wait_until(lambda enough=enough: num_judged >= enough)  # type: ignore[misc]
            heartbeat.stop()
            os._exit(0)
    time.sleep(60)
    raise AssertionError


def time_passes(seconds: float) -> None:
    """Move the time of the last progress back, so that tests need not wait."""
    assert PROGRESS._touched_s is not None
    PROGRESS._touched_s -= seconds


def begun(folder: Path, plan: str, *, num_ranks: int, silent_s: float) -> list[ForkServerProcess]:
    folder.mkdir()
    words = ("tests.pretrain.ranks.test_hang:rank", str(folder), plan, silent_s)
    ranks = [
        begin(*words, environment=each, output=folder / "output")
        for each in environments(num_ranks)
    ]
    wait_until(lambda: len(list(folder.glob("ready-*"))) == num_ranks)
    return ranks


@pytest.mark.processes
def test_a_rank_that_holds_pythons_lock_leaves_its_stack_and_the_others_theirs(
    tmp_path: Path,
) -> None:
    ranks = begun(tmp_path / "holds", "holds Python's lock", num_ranks=2, silent_s=2)
    try:
        assert wait(ranks[:1], timeout_s=300) == [1]
    finally:
        ranks[1].kill()
    stacks = tmp_path / "holds" / "stacks"
    held = (stacks / "rank-0001.txt").read_text()
    assert "Timeout (" in held and "in holds_the_lock" in held
    assert f"; stacks of all ranks: {stacks}\n" in (tmp_path / "holds" / "output").read_text()
    assert " in rank\n" in (stacks / "rank-0000.txt").read_text()


@pytest.mark.processes
def test_a_rank_that_is_alone_is_watched_too_and_progress_leaves_no_file(tmp_path: Path) -> None:
    (hangs,), (progresses,) = (
        begun(tmp_path / plan, plan, num_ranks=1, silent_s=1) for plan in ("hangs", "progresses")
    )
    assert wait([hangs], timeout_s=300) == [1] and wait([progresses], timeout_s=300) == [0]
    line = (
        r"rank 0 \(.*\) has made no progress for 1,0\d\d s, at step 1,234, waiting for data; the"
        r" run stops"
    )
    assert re.match(line, (tmp_path / "hangs" / "output").read_text())
    assert " in rank\n" in (tmp_path / "hangs" / "stacks" / "rank-0000.txt").read_text()
    assert (tmp_path / "progresses" / "output").read_text() == "" and not (
        tmp_path / "progresses" / "stacks"
    ).exists()


def test_long_work_of_one_rank_after_the_other_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait meanwhile. After the late rank arrives, their reports come later than
    its report."""
    clock, ranks, standings = [100.0], [Progress(), Progress(), Progress()], Standings()
    monkeypatch.setattr("pretrain.ranks.hangs.time.monotonic", lambda: clock[0])

    def judged(*reporting: int) -> Verdict | None:
        verdicts = []
        for number in reporting:
            standings.note(PEERS[number], ranks[number].standing())
            verdicts.append(standings.find_hang(10))
        return next(filter(None, verdicts), None)

    for number, works in enumerate(ranks):
        for each in ranks:
            each.mark("waiting" if each is not works else "working")
        for _ in range(100):
            clock[0] += 1
            works.touch()
            assert judged(0, 1, 2) is None
        for each in ranks:
            each.mark("training")
        assert judged(number, number, number, *{0, 1, 2} - {number}) is None
    clock[0] += 11
    verdict = judged(0, 1, 2, 0, 1, 2, 0, 1, 2)
    assert verdict is not None and verdict.why == "hangs"


def test_what_stands_still_with_the_whole_process_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of a job's suspension is not part of its stall time until the next mark."""
    clock, progress = [100.0], Progress()
    monkeypatch.setattr("pretrain.ranks.hangs.time.monotonic", lambda: clock[0])
    clock[0] = 9_000.0
    assert progress.standing() == Standing(
        0, 0, "starting", 0.0
    )  # nothing counts before the first mark
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
    """Return the verdict after the ranks' third report, and check that there is none before."""
    found = table(*standings)
    for _ in range(2):
        assert found.find_hang(timeout_s) is None
        table(*standings, after=found)
    return found.find_hang(timeout_s)


def test_who_is_behind_is_told_by_marks_and_not_by_clocks() -> None:
    computes, waits = (
        Standing(41, 9, "computing", 500.5),
        Standing(40, 9, "waiting for data", 500.0),
    )
    assert hang(500.2, computes, waits) is None  # the leading rank only waits
    assert hang(499, computes, waits, computes) == Verdict(
        PEERS[1],
        "hangs",
        "has made no progress for 500 s, at step 9, waiting for data; the others are at step 9,"
        " computing",
    )
    both = hang(400, waits, computes, waits)
    assert both is not None and both.peer == PEERS[0] and "(with 1 more ranks)" in both.detail
    assert (
        hang(400, computes, waits, waits._replace(stalled_s=3)) is None
    )  # one of the ranks behind makes progress
    assert hang(400, computes, waits._replace(stalled_s=3)) is None
    left = table(computes, waits)
    left.forget(PEERS[1])  # after its goodbye another rank's hang is still found
    for _ in range(3):
        verdict = left.find_hang(400)
        table(computes, after=left)
    assert verdict is not None and verdict.peer == PEERS[0]
    all_alike = hang(400, *[waits] * 8)
    assert all_alike is not None and all_alike.detail.endswith("(with 7 more ranks)")
