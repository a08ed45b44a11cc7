"""Knows within seconds when a rank is dead or frozen, and ends all others with one clear line
instead of their tracebacks.

A thread of each rank holds a TCP connection to the first rank's, whichever launcher started them;
it carries JSON objects, one per line, never pickle. Messages without the token of this run are
ignored.
1. Each end beats. A connection that closes without a goodbye is a dead rank; one that is silent for
   `heartbeat_timeout_s` is a frozen rank or a lost node; a rank that fails by itself reports that
   before it goes.
2. The first rank sends the verdict to all, and prints the line; every rank ends with exit code 1,
   wherever its main thread hangs. If the first rank itself is gone, all see it by themselves, and
   the first survivor of each node prints the line.
3. A rank that was told to stop, but waits for data that does not come, ends all with exit code 0.
4. `watch`: beats carry where a rank stands (hangs.py); if the ranks that are behind make no
   progress for too long, the run hangs, and one of them is named. Ranks that end because of a hang
   leave their stacks (stacks.py). A single rank has this alone, and no connection.

A verdict follows from what has been read: a thread that was kept from running first reads what has
come meanwhile. Ranks are checked once per beat, not per message. Beats may carry a small dict
(`report`) to the first rank (`received`); neither may block.
"""

import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.console import write_error
from pretrain.ranks.collectives import all_sum
from pretrain.ranks.hangs import PROGRESS, Standing, Standings, Verdict
from pretrain.ranks.launch import report_joined
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.stacks import Stacks
from pretrain.ranks.world import Peer, World

FAILED_GRACE_S = 1.0
"""After a rank has failed: for those that meet the same error by themselves, and print their own
message."""
STUCK_WAIT_S = 30.0
"""For data, by a rank that was told to stop: ranks that get theirs in time save, and what ends a
job leaves it minutes for that."""
BLAME_S = 3.0
"""How long a failed exchange waits for news of a rank that is gone."""
ARMED_SHARE = 0.75
"""Of the time after which a rank counts as silent: then its stacks are dumped, if they still can
be."""
LONGEST_LINE = 1 << 16
_HELLO_S, _CONNECT_S = 10.0, 20.0
Message = dict[str, Any]


@contextmanager
def watched(world: World, ranks: RanksSettings, *, device: torch.device) -> "Iterator[Heartbeat]":
    """Entered by all ranks when they have joined: if one of them is gone, frozen or fails, the
    others end and name it."""
    heartbeat = Heartbeat(world, ranks)
    heartbeat.start(lambda numbers: all_sum(torch.tensor(numbers, device=device)).tolist())
    report_joined()
    try:
        yield heartbeat
    except BaseException as error:
        heartbeat.blame(error)
        raise
    heartbeat.stop()


class Wire:
    """One connection, and who is at its other end. Reading never blocks; a message is small, so
    sending one blocks neither."""

    def __init__(self, connection: socket.socket, peer: Peer | None = None):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer, self.heard_s, self.is_open = (
            connection,
            peer,
            time.monotonic(),
            True,
        )
        self._buffer = b""

    def send(self, line: bytes) -> None:
        """What does not fit is left out whole: the other end is frozen or gone, as its silence will
        show."""
        try:
            if self.socket.send(line) < len(line):
                self.is_open = False
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False

    def receive(self) -> Iterator[Message]:
        """All whole lines that have come; `is_open` says whether more may. ValueError: this is no
        line of ours."""
        while True:
            try:
                data = self.socket.recv(LONGEST_LINE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                break
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            yield from map(json.loads, lines)
            if len(self._buffer) > LONGEST_LINE:
                raise ValueError("a line without end")
            if len(data) < LONGEST_LINE:
                break  # that was all; if the end has come, too, the next call sees it


def encoded(message: Message) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    assert len(line) <= LONGEST_LINE, len(line)
    return line


def listen(address: str, *, is_one_node: bool) -> socket.socket:
    """On a free port of the interface that `address` names, or of all, where the name means
    something else on other nodes."""
    with suppress(
        OSError
    ):  # a name that only the others can resolve, or an address that is translated on the way here
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if is_one_node or not str(place[0]).startswith(("127.", "::1")):
            return socket.create_server(place, family=family, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


class Heartbeat:
    """Call `start` on all ranks together, and `stop` when this rank's work is done. A single rank
    has nothing but `watch`."""

    def __init__(self, world: World, ranks: RanksSettings):
        self._world, self._timeout_s, self._hang_timeout_s = (
            world,
            ranks.heartbeat_timeout_s,
            ranks.hang_timeout_s or 0.0,
        )
        self._interval_s = min(2.0, self._timeout_s / 4)
        self._is_alone, self._me = (
            world.num_ranks == 1,
            Peer(world.rank, socket.gethostname(), os.getpid()),
        )
        self._token = ""
        self._listener: socket.socket | None = None
        self._wires: dict[int, Wire] = {}
        self._standings = Standings()
        self._stacks: Stacks | None = None
        """From `watch` on."""
        self._looked_s = time.monotonic()
        self._lock = threading.RLock()
        """Of the connections: the main thread says goodbye itself."""
        self._is_ending, self._has_verdict = False, threading.Event()
        self._thread: threading.Thread | None = None
        self._woken, self._waker = os.pipe()
        self._files = (
            selectors.DefaultSelector()
        )  # epoll: it costs the same for one connection and for a thousand
        self._files.register(self._woken, selectors.EVENT_READ)
        self.attend()

    def attend(
        self,
        *,
        at_end: Callable[[bool], None] = lambda stopped: None,
        stuck_wait_s: Callable[[], float] = lambda: 0.0,
        report: Callable[[], dict[str, Any]] = dict,
        received: Callable[[int, dict[str, Any]], None] = lambda rank, report: None,
    ) -> None:
        """What else it does from now on. `at_end(stopped)`: what must still be done, within bounds,
        when a verdict ends this process; `stuck_wait_s`: for how long this rank has waited since it
        was told to stop."""
        self._at_end, self._stuck_wait_s, self._report, self._received = (
            at_end,
            stuck_wait_s,
            report,
            received,
        )

    def start(self, announce: Callable[[list[int]], list[int]]) -> "Heartbeat":
        """`announce` gives all ranks the numbers of the first one."""
        if self._is_alone:
            return self
        address, facts = os.environ["MASTER_ADDR"], [0] * 3
        if self._world.is_first:
            self._listener = listen(address, is_one_node=self._world.is_one_node)
            self._listener.setblocking(False)
            self._files.register(self._listener, selectors.EVENT_READ)
            facts = [self._listener.getsockname()[1], secrets.randbits(62), secrets.randbits(62)]
        port, *token = announce(facts)
        self._token = "-".join(map(str, token))
        if not self._world.is_first:
            self._connect(address, port)
        os.register_at_fork(
            after_in_child=self._forget
        )  # or a child would hold the connection of a dead rank open
        self._begin()
        return self

    def watch(self, directory: Path) -> None:
        """From now on this rank has to progress, unless hang_timeout_s is 0 or None; stacks go to
        `directory`."""
        armed_s = self._hang_timeout_s if self._is_alone else ARMED_SHARE * self._timeout_s
        if not armed_s:
            return
        PROGRESS.mark("starting", step=0)
        self._stacks = Stacks(directory, self._me, armed_s=armed_s)
        if self._is_alone:
            self._begin()

    def _begin(self) -> None:
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._guarded, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Says goodbye: from here on this rank may go without alarm."""
        self._leave({"bye": True})

    def blame(self, error: BaseException) -> None:
        """On the way out with an error: returns if it is this rank's own, and then the others know.
        A collective whose partner is gone raises RuntimeError, or a subclass of
        torch.distributed's."""
        if self._thread is None or self._is_ending:
            return
        names = {kind.__name__ for kind in type(error).__mro__}
        is_own = not isinstance(error, RuntimeError) or names & {
            "OutOfMemoryError",
            "NotImplementedError",
            "RecursionError",
        }
        if not self._is_alone and not is_own and self._has_verdict.wait(BLAME_S):
            time.sleep(600)  # the thread ends this process
        self._leave({"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"})

    def _leave(self, message: Message) -> None:
        with self._lock:
            if self._thread is None or self._is_ending:
                return
            self._is_ending = True
            if self._world.is_first and "failed" in message:
                message = self._with_cause(
                    Verdict(self._me, "failed", message["failed"])
                ).as_message()
            self._send_all(message)
        os.write(self._waker, b"x")
        self._thread.join(2 * self._interval_s)

    # ---- the thread
    # ----------------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 (of `report` or `received`: no reason to end training, nor to look dead)
            print(
                f"WARNING: rank {self._me.rank}: the heartbeat has stopped ({error!r})",
                file=sys.stderr,
                flush=True,
            )
            with self._lock:
                self._is_ending = True
                self._send_all({"bye": True})
        self._forget()
        if self._stacks:
            self._stacks.close()

    def _work(self) -> None:
        beat_s = 0.0
        while not self._is_ending:
            self._excuse_a_pause()
            judges = time.monotonic() >= beat_s
            if judges:
                beat_s = time.monotonic() + self._interval_s
                self._beat()
            ready = [
                key.fd
                for key, _ in self._files.select(
                    0 if judges else max(0.0, beat_s - time.monotonic())
                )
            ]
            with self._lock:
                verdict = None if self._is_ending else self._look(ready, judges=judges)
            if verdict is not None:
                self._end(verdict)

    def _beat(self) -> None:
        standing = None
        if self._stacks:
            self._stacks.arm()
            standing = PROGRESS.standing()
            if self._world.is_first:
                self._standings.note(self._me, standing)
        if self._is_alone:
            return
        report = self._report()
        message: Message = {"beat": report, "at": standing}
        if self._world.is_first:
            message = {"beat": {}}  # it judges itself
            if report:
                self._received(0, report)
        if self._stuck_wait_s() > STUCK_WAIT_S:
            stuck = Verdict(self._me, "waits")
            if self._world.is_first:
                self._end(stuck)
            message = stuck.as_message()
        with self._lock:
            self._send_all(message)

    def _send_all(self, message: Message) -> None:
        line = encoded(message)
        for wire in self._wires.values():
            if wire.peer is not None:
                wire.send(line)

    def _look(self, ready: list[int], *, judges: bool) -> Verdict | None:
        """Reads everything that has come, and only then judges."""
        self._excuse_a_pause()
        for file in ready:
            if self._listener is not None and file == self._listener.fileno():
                with suppress(OSError):  # until there are no more
                    while True:
                        self._add(Wire(self._listener.accept()[0]))
            elif file in self._wires and (verdict := self._read(file)) is not None:
                return verdict
        if not judges:
            return None
        for file, wire in list(self._wires.items()):
            silent_s = time.monotonic() - wire.heard_s
            if not wire.is_open or (wire.peer is None and silent_s > _HELLO_S):
                if (verdict := self._dropped(file)) is not None:
                    return verdict
            elif wire.peer is not None and silent_s > self._timeout_s:
                return Verdict(wire.peer, "silent", f"{self._timeout_s:g}")
        return (
            self._standings.hang(self._hang_timeout_s)
            if self._stacks and self._hang_timeout_s
            else None
        )

    def _read(self, file: int) -> Verdict | None:
        wire = self._wires[file]
        try:
            for message in wire.receive():
                wire.heard_s = time.monotonic()
                if (verdict := self._understood(wire, message)) is not None:
                    return verdict
        except (KeyError, TypeError, ValueError):
            wire.is_open = False
        return None if wire.is_open else self._dropped(file)

    def _understood(self, wire: Wire, message: Message) -> Verdict | None:
        if wire.peer is None or "token" in message:
            if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                raise ValueError("a stranger")
            wire.peer = Peer(message["rank"], message["node"], message["pid"])
            if self._world.is_first:
                wire.send(self._hello())
        elif "verdict" in message:
            return Verdict.of(message)
        elif "failed" in message:
            return self._with_cause(Verdict(wire.peer, "failed", message["failed"]))
        elif "bye" in message:
            self._standings.forget(wire.peer)
            wire.peer, wire.is_open = None, False
        else:
            if message.get("at"):
                self._standings.note(wire.peer, Standing(*message["at"]))
            if message["beat"]:
                self._received(wire.peer.rank, message["beat"])
        return None

    def _dropped(self, file: int) -> Verdict | None:
        """Without a goodbye it is a dead rank's."""
        wire = self._wires.pop(file)
        self._files.unregister(wire.socket)
        wire.socket.close()
        return None if wire.peer is None else self._with_cause(Verdict(wire.peer, "gone"))

    def _with_cause(self, verdict: Verdict) -> Verdict:
        return replace(verdict, behind=self._standings.behind(verdict.peer))

    def _excuse_a_pause(self) -> None:
        """While a whole job is suspended nobody beats, and nobody is to blame: after a pause of our
        own, time begins anew."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._interval_s:
            PROGRESS.excuse(now_s - self._looked_s)
            for wire in self._wires.values():
                wire.heard_s = now_s
        self._looked_s = now_s

    def _connect(self, address: str, port: int) -> None:
        try:
            wire = Wire(
                socket.create_connection((address, port), timeout=_CONNECT_S), Peer(0, address, 0)
            )
        except OSError as error:
            print(
                f"WARNING: rank {self._me.rank}: no heartbeat, as {address}:{port} cannot be"
                f" reached ({error}); if a rank dies, the others notice only after timeout_s of the"
                " settings",
                file=sys.stderr,
            )
            return
        wire.send(self._hello())
        self._add(wire)

    def _hello(self) -> bytes:
        return encoded(asdict(self._me) | {"token": self._token})

    def _add(self, wire: Wire) -> None:
        self._wires[wire.socket.fileno()] = wire
        self._files.register(wire.socket, selectors.EVENT_READ)

    def _end(self, verdict: Verdict) -> None:
        """Ends this process, unless it is about to end in its own way."""
        self._has_verdict.set()
        with self._lock:
            if self._world.is_first:
                self._send_all(verdict.as_message())
        if verdict.why == "failed":
            time.sleep(FAILED_GRACE_S)
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        stacks = self._stacks if verdict.wants_stacks else None
        by_first = verdict.peer.rank != 0 or verdict.why in ("waits", "hangs")
        first_here = self._world.rank - self._world.local_rank
        is_survivor = self._world.local_rank == (1 if verdict.peer.rank == first_here else 0)
        if self._world.is_first if by_first else is_survivor:
            line = (
                f"{verdict}; stacks of all ranks: {stacks.directory}\n"
                if stacks
                else f"{verdict}\n"
            )
            write_error("\n" + line if sys.stderr.isatty() else line)
        if stacks:
            stacks.dump(f"{PROGRESS.standing().place}; {verdict}")
            if (
                verdict.why == "silent"
                and is_survivor
                and (found := stacks.describe(verdict.peer)) is not None
            ):
                write_error(f"{found}\n")
        self._at_end(verdict.why == "waits")
        os._exit(0 if verdict.why == "waits" else 1)

    def _forget(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for wire in self._wires.values():
            wire.socket.close()
        self._wires = {}
