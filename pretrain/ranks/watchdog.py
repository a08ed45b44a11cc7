"""End all ranks with one clear line, within seconds, if a rank is dead, frozen or hangs.

A thread of each rank holds a TCP connection to the first rank, for any launcher. The connection
carries JSON objects, one per line. Messages without the token of this run are ignored.

1. Each end sends heartbeats ("beats"). A connection that closes without a goodbye is a dead rank. A
   connection that is silent for `heartbeat_timeout_s` is a frozen rank or a lost node. A rank that
   fails reports its error.
2. The first rank sends the verdict to all ranks and prints it. Every rank ends with exit code 1. If
   the first rank itself is lost, the first survivor of each node prints the line.
3. If a rank still waits for data STUCK_WAIT_S after a stop request, all ranks end with exit code 0.
4. After `watch`, beats carry the standing of a rank (hangs.py). If no lagging rank progresses for
   `hang_timeout_s`, the run hangs. A run of one rank has only this check, and no connection.
5. Ranks that end because of a hang or a silent rank append their stacks to RUN/stacks/rank-N.txt.
   If the next beat is late, a thread of faulthandler writes the stacks without Python's lock. A
   process that dies of a signal also writes its stacks.
6. Then these ranks write their last collectives (torch's flight recorder) to
   RUN/stacks/flight-recorder-N.

A beat may carry a small dict from another rank's callback `report` to the first rank's callback
`received`. Neither callback may block.
"""

import faulthandler
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from data_prep.console import write_error
from data_prep.publish import write_atomic
from pretrain.ranks.collectives import all_sum
from pretrain.ranks.hangs import PROGRESS, Standing, Standings, Verdict
from pretrain.ranks.launch import report_joined
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.starts import has_lost_run
from pretrain.ranks.world import Peer, World

FAILED_GRACE_S = 1.0
"""Seconds in which other ranks with the same error can print their own message."""
STUCK_WAIT_S = 30.0
"""Seconds that a rank may wait for data after a stop request."""
BLAME_S = 3.0
"""Seconds that a rank whose collective failed waits for the news that another rank is lost."""
ARMED_FRACTION = 0.75
"""Fraction of `heartbeat_timeout_s` without a beat after which faulthandler writes the stacks."""
WRITE_S = 10.0
"""Seconds allowed for writing the stacks."""
LONGEST_LINE = 1 << 16
_HELLO_S, _CONNECT_S = 10.0, 20.0
Message = dict[str, Any]


@contextmanager
def watched(world: World, ranks: RanksSettings, *, device: torch.device) -> "Iterator[Watchdog]":
    """End all ranks if a rank is lost, freezes or fails inside the block. All ranks enter the block
    after they have joined the process group."""
    watchdog = Watchdog(world, ranks)
    watchdog.start(lambda numbers: all_sum(torch.tensor(numbers, device=device)).tolist())
    report_joined()
    try:
        yield watchdog
    except BaseException as error:
        watchdog.blame(error)
        raise
    watchdog.stop()


class Wire:
    """A connection and its peer. Reading and sending do not block."""

    def __init__(self, connection: socket.socket, peer: Peer | None = None):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer, self.is_open = connection, peer, True
        self.heard_s = time.monotonic()
        self._buffer = b""

    def send(self, line: bytes) -> None:
        """Send a line. If the peer does not read, drop the line: the watchdog will notice the
        peer's silence."""
        try:
            self.is_open &= self.socket.send(line) == len(line)
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False

    def receive(self) -> Iterator[Message]:
        """Yield all complete messages. Raise ValueError if a line is not valid. Clear `is_open` at
        the end of the connection."""
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
                raise ValueError("the line is too long")
            if len(data) < LONGEST_LINE:
                break  # if the connection has ended, too, the next call notices


def encoded(message: Message) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    assert len(line) <= LONGEST_LINE, len(line)
    return line


def listen(address: str, *, is_one_node: bool) -> socket.socket:
    """Listen on the interface of the address. Listen on all interfaces if the address does not
    resolve, or is a loopback address and there are several nodes."""
    with suppress(OSError):
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if is_one_node or not str(place[0]).startswith(("127.", "::1")):
            return socket.create_server(place, family=family, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


class Watchdog:
    """Watchdog of one rank. Call `start` on all ranks together, and `stop` when this rank's work is
    done."""

    def __init__(self, world: World, ranks: RanksSettings):
        self._world, self._timeout_s = world, ranks.heartbeat_timeout_s
        self._hang_timeout_s = ranks.hang_timeout_s or 0.0
        self._interval_s = min(2.0, self._timeout_s / 4)
        self._is_alone = world.num_ranks == 1
        self._me = Peer(world.rank, socket.gethostname(), os.getpid())
        self._token = ""
        self._listener: socket.socket | None = None
        self._wires: dict[int, Wire] = {}
        self._standings = Standings()
        self._stacks: Path | None = None
        """File for this rank's stacks, or None before `watch`."""
        self._stacks_file, self._armed_s = -1, 0.0
        self._looked_s = time.monotonic()
        self._lock = threading.RLock()
        """Lock of the connections, because the main thread also sends messages."""
        self._is_ending, self._has_verdict = False, threading.Event()
        self._thread: threading.Thread | None = None
        self._woken, self._waker = os.pipe()
        self._files = selectors.DefaultSelector()  # epoll: its cost does not grow with connections
        self._files.register(self._woken, selectors.EVENT_READ)
        self.attend()

    def attend(
        self,
        *,
        at_end: Callable[[bool], None] = lambda stopped: None,
        stuck_wait_s: Callable[[], float] = lambda: 0.0,
        report: Callable[[], dict[str, Any]] = dict,
        received: Callable[[dict[str, Any]], None] = lambda report: None,
    ) -> None:
        """Set callbacks. `at_end(stopped)`: short work before a verdict ends this process.
        `stopped`: True after a stop request. `stuck_wait_s`: returns the seconds that this rank has
        waited since the stop request."""
        self._at_end, self._stuck_wait_s = at_end, stuck_wait_s
        self._report, self._received = report, received

    def start(self, announce: Callable[[list[int]], list[int]]) -> "Watchdog":
        """Connect the ranks. `announce`: returns the first rank's numbers (port, token) on every
        rank."""
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
        # a child would keep the connection of a dead rank open
        os.register_at_fork(after_in_child=self._close_connections)
        self._begin()
        return self

    def watch(self, directory: Path) -> None:
        """From now on, expect progress of this rank, unless `hang_timeout_s` is 0 or null. Write
        stacks to the directory."""
        armed_s = self._hang_timeout_s if self._is_alone else ARMED_FRACTION * self._timeout_s
        if not armed_s:
            return
        PROGRESS.mark("starting", step=0)
        self._stacks, self._armed_s = directory / f"rank-{self._me.rank:04}.txt", armed_s
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._stacks_file = os.open(self._stacks, flags, 0o644)
            if not faulthandler.is_enabled():
                faulthandler.enable(self._stacks_file)
            faulthandler.dump_traceback_later(armed_s, file=self._stacks_file)
        if self._is_alone:
            self._begin()

    def stop(self) -> None:
        """Send a goodbye, so that this rank can end without an alarm."""
        self._leave({"bye": True})

    def blame(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks. If the error may come from a collective
        whose partner is lost (a RuntimeError), first wait for the verdict on the partner."""
        if self._thread is None or self._is_ending:
            return
        names = {kind.__name__ for kind in type(error).__mro__}
        own = {"OutOfMemoryError", "NotImplementedError", "RecursionError"}
        is_own = not isinstance(error, RuntimeError) or names & own
        if not self._is_alone and not is_own and self._has_verdict.wait(BLAME_S):
            time.sleep(600)  # the watchdog's thread ends this process
        self._leave({"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"})

    def _leave(self, message: Message) -> None:
        with self._lock:
            if self._thread is None or self._is_ending:
                return
            self._is_ending = True
            if self._world.is_first and "failed" in message:
                message = Verdict(self._me, "failed", message["failed"]).as_message()
            self._send_all(message)
        os.write(self._waker, b"x")
        self._thread.join(2 * self._interval_s)

    # ---- the thread

    def _begin(self) -> None:
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._guard, name="watchdog", daemon=True)
        self._thread.start()

    def _guard(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 (`report` and `received` may raise anything)
            write_error(f"WARNING: rank {self._me.rank}: the watchdog has stopped ({error!r})\n")
            with self._lock:
                self._is_ending = True
                self._send_all({"bye": True})
        self._close_connections()
        if self._stacks and self._stacks_file >= 0:
            self._close_stacks(self._stacks)

    def _work(self) -> None:
        beat_s = 0.0
        while not self._is_ending:
            self._excuse_pause()
            is_beat = time.monotonic() >= beat_s
            if is_beat:
                beat_s = time.monotonic() + self._interval_s
                self._beat()
            wait_s = 0 if is_beat else max(0.0, beat_s - time.monotonic())
            ready = [key.fd for key, _ in self._files.select(wait_s)]
            with self._lock:
                verdict = None if self._is_ending else self._look(ready, is_beat=is_beat)
            if verdict is not None:
                self._end(verdict)

    def _beat(self) -> None:
        standing = None
        if self._stacks:
            standing = PROGRESS.standing()
            if self._stacks_file >= 0:
                faulthandler.dump_traceback_later(self._armed_s, file=self._stacks_file)
            if self._world.is_first:
                self._standings.note(self._me, standing)
        if self._is_alone:
            return
        message: Message = {"beat": {}}
        if not self._world.is_first:
            message = {"beat": self._report(), "at": standing}
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

    def _look(self, ready: list[int], *, is_beat: bool) -> Verdict | None:
        self._excuse_pause()
        for file in ready:
            if self._listener is not None and file == self._listener.fileno():
                with suppress(OSError):  # raised once no connection is left to accept
                    while True:
                        self._add(Wire(self._listener.accept()[0]))
            elif file in self._wires and (verdict := self._read(file)) is not None:
                return verdict
        if not is_beat:
            return None
        for file, wire in list(self._wires.items()):
            silent_s = time.monotonic() - wire.heard_s
            if not wire.is_open or (wire.peer is None and silent_s > _HELLO_S):
                if (verdict := self._drop(file)) is not None:
                    return verdict
            elif wire.peer is not None and silent_s > self._timeout_s:
                return Verdict(wire.peer, "silent", f"{self._timeout_s:g}")
        watches = self._stacks and self._hang_timeout_s
        return self._standings.find_hang(self._hang_timeout_s) if watches else None

    def _read(self, file: int) -> Verdict | None:
        wire = self._wires[file]
        try:
            for message in wire.receive():
                wire.heard_s = time.monotonic()
                if (verdict := self._process(wire, message)) is not None:
                    return verdict
        except (KeyError, TypeError, ValueError):
            wire.is_open = False
        return None if wire.is_open else self._drop(file)

    def _process(self, wire: Wire, message: Message) -> Verdict | None:
        if wire.peer is None or "token" in message:
            if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                raise ValueError("the token is wrong")
            wire.peer = Peer(message["rank"], message["node"], message["pid"])
            if self._world.is_first:
                wire.send(self._hello())
        elif "verdict" in message:
            return Verdict.of(message)
        elif "failed" in message:
            return Verdict(wire.peer, "failed", message["failed"])
        elif "bye" in message:
            self._standings.forget(wire.peer)
            wire.peer, wire.is_open = None, False
        else:
            if message.get("at"):
                self._standings.note(wire.peer, Standing(*message["at"]))
            if message["beat"]:
                self._received(message["beat"])
        return None

    def _drop(self, file: int) -> Verdict | None:
        """Close a connection. Without a goodbye, return the verdict that its rank is gone."""
        wire = self._wires.pop(file)
        self._files.unregister(wire.socket)
        wire.socket.close()
        return None if wire.peer is None else Verdict(wire.peer, "gone")

    def _excuse_pause(self) -> None:
        """Restart all waits after a pause of this process: a suspended job sends no beats."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._interval_s:
            if has_lost_run():
                write_error(
                    f"{self._me}: a newer attempt has taken over the run; this attempt ends\n"
                )
                os._exit(1)
            PROGRESS.excuse(now_s - self._looked_s)
            for wire in self._wires.values():
                wire.heard_s = now_s
        self._looked_s = now_s

    def _connect(self, address: str, port: int) -> None:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError as error:
            print(
                f"WARNING: rank {self._me.rank}: cannot reach the first rank at {address}:{port}"
                f" ({error}). If a rank dies, the others notice it only after engine.timeout_s",
                file=sys.stderr,
            )
            return
        wire = Wire(connection, Peer(0, address, 0))
        wire.send(self._hello())
        self._add(wire)

    def _hello(self) -> bytes:
        return encoded(asdict(self._me) | {"token": self._token})

    def _add(self, wire: Wire) -> None:
        self._wires[wire.socket.fileno()] = wire
        self._files.register(wire.socket, selectors.EVENT_READ)

    def _end(self, verdict: Verdict) -> None:
        """End this process, unless it is about to end by itself."""
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
        is_printer = self._world.is_first
        # the first rank cannot print
        if verdict.peer.rank == 0 and verdict.why not in ("waits", "hangs"):
            is_first_node = self._world.rank == self._world.local_rank
            is_printer = self._world.local_rank == int(is_first_node)
        if is_printer:
            line = f"{verdict}; stacks of all ranks: {stacks.parent}" if stacks else f"{verdict}"
            write_error("\n" * sys.stderr.isatty() + line + "\n")
        if stacks:
            self._dump_stacks(stacks, verdict)
        self._at_end(verdict.why == "waits")
        if stacks:
            self._dump_collectives(stacks.with_name(f"flight-recorder-{self._me.rank:04}"))
        os._exit(0 if verdict.why == "waits" else 1)

    def _dump_stacks(self, path: Path, verdict: Verdict) -> None:
        """Collect the stacks in memory, and append them to the file. Print the stacks if the file
        cannot be written, because failed storage may be the cause of the hang."""
        memory = os.memfd_create("stacks")
        faulthandler.dump_traceback(memory, all_threads=True)
        stacks = os.pread(memory, 1 << 20, 0).decode(errors="replace")
        head = f"== {time.strftime('%F %T %z')}  {self._me}: {PROGRESS.standing()}; {verdict}"
        text, is_written = f"{head}\n{stacks}\n", threading.Event()

        def write() -> None:
            with suppress(OSError), open(path, "a") as file:
                file.write(text)
                file.close()
                is_written.set()

        threading.Thread(target=write, daemon=True).start()
        if not is_written.wait(WRITE_S):
            write_error(f"{path}: cannot be written in {WRITE_S:g} s:\n{text[:20_000]}\n")

    def _dump_collectives(self, path: Path) -> None:
        """Write the last collectives. Torch may hold Python's lock while it waits for a device, so
        a thread of faulthandler ends this process after `WRITE_S`."""
        if self._stacks_file < 0 or not dist.is_initialized():
            return
        faulthandler.dump_traceback_later(WRITE_S, exit=True, file=self._stacks_file)
        with suppress(Exception):
            kind = "nccl" if "nccl" in str(dist.get_backend()) else "fr"
            write_atomic(path, getattr(c10d, f"_dump_{kind}_trace")())

    def _close_stacks(self, path: Path) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        with suppress(OSError):
            os.close(self._stacks_file)
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # succeeds only on the last rank

    def _close_connections(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for wire in self._wires.values():
            wire.socket.close()
        self._wires = {}
