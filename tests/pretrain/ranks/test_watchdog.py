"""All ranks notice a rank that is gone, frozen or failing, and it is named once. Strangers,
goodbyes and busy ranks cause no alarm."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.watchdog import LONGEST_LINE, Watchdog, Wire, encoded, listen
from pretrain.ranks.world import Peer, World, read_world
from tests.forked import begin, environments, wait
from tests.moments import wait_until

LATE_S = 120


def announce(world: World, place: Path, numbers: list[int]) -> list[int]:
    """Give the first rank's numbers to all ranks."""
    if world.is_first:
        (place / "tmp").write_text(json.dumps(numbers))
        (place / "tmp").rename(place / "facts")
    wait_until((place / "facts").exists)
    return list(json.loads((place / "facts").read_text()))


def rank(folder: str, timeout_s: float, plans: dict[int, str]) -> None:
    """Run a rank whose main thread hangs as in a collective, unless `plans` has another task."""
    world, place = read_world(), Path(folder)
    loads = set[int]()
    waits = plans.get(world.rank) == "waits"
    heartbeat = Watchdog(world, RanksSettings(heartbeat_timeout_s=timeout_s))
    heartbeat.attend(
        at_end=lambda stopped: print(f"rank {world.rank} ends, stopped {stopped}", flush=True),
        stuck_wait_s=lambda: 99.0 if waits and (place / "go").exists() else 0.0,
        report=lambda: {"load": world.rank * 10},
        received=lambda report: loads.add(report["load"]),
    )
    heartbeat.start(partial(announce, world, place))
    if world.is_first:
        wait_until(lambda: loads == {rank * 10 for rank in range(1, world.num_ranks)})
    (place / f"ready-{world.rank}").write_text(str(os.getpid()))
    wait_until((place / "go").exists)
    match plans.get(world.rank, "hangs"):
        case "ends":
            heartbeat.stop()
            os._exit(0)
        case "fails":
            heartbeat.blame(ValueError("rank two gives up\nfor many reasons"))
            os._exit(3)
        case "has a broken collective":
            heartbeat.blame(RuntimeError("Connection closed by peer"))
            print("a traceback that nobody wants to see", flush=True)
            os._exit(1)
        case "holds Python's lock":
            ctypes.PyDLL(None).usleep(2_500_000)
            heartbeat.stop()
            os._exit(0)
        case "ends when told":
            wait_until((place / "end").exists)
            heartbeat.stop()
            os._exit(0)
    time.sleep(LATE_S)


def started(
    folder: Path, num_ranks: int, *, timeout_s: float = 60, plans: Sequence[str] = ()
) -> list[ForkServerProcess]:
    """Start ranks. Return them when all have reported, and begin to follow `plans`."""
    words = (
        "tests.pretrain.ranks.test_watchdog:rank",
        str(folder),
        timeout_s,
        dict(enumerate(plans)),
    )
    ranks = [
        begin(*words, environment=each, output=folder / "output")
        for each in environments(num_ranks)
    ]
    alive = lambda: all(rank.exitcode is None for rank in ranks)  # noqa: E731
    wait_until(lambda: len(list(folder.glob("ready-*"))) == num_ranks, lives=alive)
    (folder / "go").write_text("")
    return ranks


def said(folder: Path) -> list[str]:
    """Return the output's lines without this machine's facts."""
    text = re.sub(
        rf"\(node {re.escape(socket.gethostname())}, pid \d+\)",
        "(NODE)",
        (folder / "output").read_text(),
    )
    return sorted(text.splitlines())


STOPS = "the run stops"
GOES_ON = f"{STOPS}. Run the same command to resume"


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LOCK, BROKEN = "holds Python's lock", "has a broken collective"
SILENT = "sent nothing for 2 s (frozen, or its node is lost)"
FAILED, STUCK = (
    "has failed (ValueError: rank two gives up)",
    "waits for data, and all ranks were told to stop",
)


class Case(NamedTuple):
    plans: list[str]
    codes: list[int]
    """Exit codes of the ranks without a signal."""
    line: str | None
    struck: tuple[int, int] | None = None
    timeout_s: float = 60


CASES = {
    "the first is killed": Case(
        ["hangs", BROKEN, "hangs"], [1, 1], "rank 0 (NODE) is gone", (0, KILL)
    ),
    "another is killed": Case(
        ["hangs", BROKEN, "hangs"], [1, 1], "rank 2 (NODE) is gone", (2, KILL)
    ),
    "the first is frozen": Case(
        ["hangs", "hangs"], [1], f"rank 0 (NODE) {SILENT}", (0, STOP), timeout_s=2
    ),
    "another is frozen": Case(
        ["hangs", "hangs"], [1], f"rank 1 (NODE) {SILENT}", (1, STOP), timeout_s=2
    ),
    "one fails": Case(["hangs", "hangs", "fails"], [1, 1, 3], f"rank 2 (NODE) {FAILED}"),
    "all fail alike and print their own messages": Case(["fails", "fails"], [3, 3], None),
    "goodbyes, and ranks that compute": Case([LOCK, "ends", LOCK], [0, 0, 0], None, timeout_s=10),
    "a stop that cannot wait for data": Case(["hangs", "waits"], [0, 0], f"rank 1 (NODE) {STUCK}"),
}


@pytest.fixture(scope="module")
def begun(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Path, list[ForkServerProcess]]]]:
    """Start the ranks of all cases at once, because they mostly wait."""
    found: dict[str, tuple[Path, list[ForkServerProcess]]] = {}
    try:
        for name, case in CASES.items():
            folder = tmp_path_factory.mktemp("ranks")
            found[name] = (
                folder,
                started(folder, len(case.plans), timeout_s=case.timeout_s, plans=case.plans),
            )
            if case.struck is not None:
                victim, number = case.struck
                os.kill(found[name][1][victim].pid or 0, number)
        yield found
    finally:
        for _, ranks in found.values():
            for rank in ranks:
                rank.kill()


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_who_is_gone_frozen_or_fails_is_named_once_and_ends_all(
    begun: dict[str, tuple[Path, list[ForkServerProcess]]], name: str
) -> None:
    """Ranks that end by a verdict finish their last duties."""
    (folder, ranks), case = begun[name], CASES[name]
    left = {
        number: rank
        for number, rank in enumerate(ranks)
        if case.struck is None or number != case.struck[0]
    }
    assert wait(left.values(), timeout_s=LATE_S) == case.codes
    ended = [number for number in left if case.line is not None and case.plans[number] != "fails"]
    ends = [f"rank {number} ends, stopped {case.codes[0] == 0}" for number in ended]
    assert said(folder) == sorted(
        [
            *([f"{case.line}; {STOPS if FAILED in case.line else GOES_ON}"] if case.line else []),
            *ends,
        ]
    )


@pytest.mark.processes
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """After `scontrol suspend` and `resume`, or Ctrl-Z and `fg`, no rank has reports, because no
    rank ran."""
    ranks = started(tmp_path, 2, timeout_s=3, plans=["ends when told"] * 2)
    for number, pause_s in ((signal.SIGSTOP, 3.5), (signal.SIGCONT, 1)):
        for each in ranks:
            os.kill(each.pid or 0, number)
        time.sleep(pause_s)
    (tmp_path / "end").write_text("")
    assert wait(ranks, timeout_s=LATE_S) == [0, 0] and said(tmp_path) == []


def test_a_wait_counts_from_the_signal_or_from_its_own_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait began long before the stop: a rank that gets data a second later still saves."""
    stop, clock = StopFlag(), [100.0]
    monkeypatch.setattr("pretrain.ranks.preemption.time.monotonic", lambda: clock[0])
    with stop.waiting():
        clock[0] = 500.0
        assert stop.stuck_wait_s() == 0
        stop._raise(signal.SIGTERM, None)
        clock[0] = 507.0
        stop._raise(signal.SIGUSR2, None)  # a second signal has no effect
        clock[0] = 510.0
        assert stop.stuck_wait_s() == 10
    assert stop.stuck_wait_s() == 0
    with stop.waiting():
        clock[0] = 512.0
        assert stop.stuck_wait_s() == 2


def test_only_a_rank_that_is_alone_gives_up_a_wait_and_an_errors_own_timeout_is_no_end_of_ours() -> (
    None
):
    stop, never, late = StopFlag(), Future[int](), Future[int]()
    threading.Timer(0.3, lambda: late.set_exception(TimeoutError("of the store"))).start()
    with stop.waiting(), pytest.raises(TimeoutError, match="of the store"):
        stop.result(late)
    stop.is_alone = True
    threading.Timer(0.3, lambda: stop._raise(signal.SIGTERM, None)).start()
    with pytest.raises(Interrupted), stop.waiting():
        stop.result(never)


@pytest.mark.processes
def test_strangers_are_ignored(tmp_path: Path) -> None:
    ranks = started(tmp_path, 2)
    port = json.loads((tmp_path / "facts").read_text())[0]
    hello = encoded(asdict(Peer(1, "x", 1)) | {"token": "0-0"})
    for words in (
        hello,
        b'{"verdict": "gone"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"x" * 3 * LONGEST_LINE,
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # it hangs up
    assert [rank.exitcode for rank in ranks] == [None, None] and said(tmp_path) == []
    for rank in ranks:
        rank.kill()


def test_a_line_that_comes_in_pieces_is_one_message() -> None:
    with (
        listen("127.0.0.1", is_one_node=True) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
    ):
        ours, _ = listener.accept()
        wire = Wire(ours)
        theirs.sendall(b'{"beat": {"a"')
        assert list(wire.receive()) == []
        theirs.sendall(b': 1}}\n{"bye": true}\n{"be')
        assert list(wire.receive()) == [{"beat": {"a": 1}}, {"bye": True}] and wire.is_open
        theirs.close()
        assert list(wire.receive()) == [] and not wire.is_open
        ours.close()


def test_a_name_that_means_loopback_here_is_not_where_other_nodes_look() -> None:
    with (
        listen("localhost", is_one_node=True) as here,
        listen("localhost", is_one_node=False) as everywhere,
    ):
        assert (
            here.getsockname()[0] in ("127.0.0.1", "::1")
            and everywhere.getsockname()[0] == "0.0.0.0"
        )
    with listen("a-name-that-does-not-exist.invalid", is_one_node=False) as anywhere:
        assert anywhere.getsockname()[0] == "0.0.0.0"


def test_a_world_of_one_starts_nothing() -> None:
    before = threading.active_count()
    heartbeat = Watchdog(read_world({}), RanksSettings()).start(lambda numbers: numbers)
    assert threading.active_count() == before
    heartbeat.blame(ValueError("x"))
    heartbeat.stop()
