"""Knows within seconds when a rank is dead or frozen, and ends all others with one clear line instead of their tracebacks.

A thread of each rank holds a TCP connection to the first rank's, whichever launcher started them. Who speaks without the token of
this run is ignored. 1. Each end beats. 2. A connection that closes without a goodbye is a dead rank; one that is silent for
`timeout_s`, a frozen rank or a lost node; a rank that fails by itself says so before it goes. 3. The first rank tells all, and
prints the line; every rank ends with 1, wherever its main thread hangs. If it is the first rank that is gone, all see it by
themselves, and the first survivor of each node says it. 4. A rank that is to stop, but waits for data in vain, ends all with 0.

The verdict is over what has been read: a thread that was kept from running first reads what has come meanwhile. Beats may carry a
small dict (`tell`) to the first rank (`heard`); both are called in this thread, and may not block.
"""

import hmac
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pretrain.heartbeat_wire import Garbage, Message, Peer, Wire, listen
from pretrain.world import World

FAILED_GRACE_S = 1.0
"""After a rank has failed: for those that meet the same error by themselves, and say it in their own words."""
VAIN_WAIT_S = 30.0
"""For data, by a rank that was told to stop: ranks that get theirs in time save, and what ends a job leaves it minutes for that."""
BLAME_S = 3.0
"""How long a failed exchange waits for news of a rank that is gone."""
_HELLO_S, _CONNECT_S = 10.0, 20.0

Why = Literal["gone", "silent", "failed", "waits"]


@dataclass(frozen=True)
class Verdict:
    """Why training ends."""

    peer: Peer
    why: Why
    detail: str = ""

    def __str__(self) -> str:
        what = {
            "gone": "is gone; the run stops",
            "silent": f"was not heard of for {self.detail} s (frozen, or its node is lost); the run stops",
            "failed": f"has failed ({self.detail}); the run stops",
            "waits": "waits for data, and all were told to stop; the run stops",
        }[self.why]
        return f"{self.peer} {what}; the same command goes on with it"


def _nothing() -> dict[str, Any]:
    return {}


@dataclass
class _Connection:
    wire: Wire
    heard_s: float
    peer: Peer | None = None


class Heartbeat:
    """Use `start` on all ranks together, and `stop` when this rank's work is done. A world of one has none."""

    def __init__(
        self,
        world: World,
        *,
        timeout_s: float,
        at_end: Callable[[bool], None] = lambda stopped: None,
        waits_in_vain_s: Callable[[], float] = lambda: 0.0,
        tell: Callable[[], dict[str, Any]] = _nothing,
        heard: Callable[[int, dict[str, Any]], None] = lambda rank, said: None,
    ):
        """`at_end(stopped)` is what must still be done, within bounds, when a verdict ends this process."""
        self._world, self._timeout_s, self._at_end = world, timeout_s, at_end
        self._waits_in_vain_s, self._tell, self._heard = waits_in_vain_s, tell, heard
        self._interval_s = min(2.0, timeout_s / 4)
        self._me = Peer.myself(world.rank)
        self._token = ""
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._looked_s = time.monotonic()
        self._lock = threading.RLock()
        """Of the connections: the main thread says goodbye itself."""
        self._is_ending = False
        self._verdict = threading.Event()
        self._thread: threading.Thread | None = None
        self._woken, self._waker = os.pipe()

    def start(self, announce: Callable[[list[int]], list[int]]) -> "Heartbeat":
        """`announce` gives all ranks the numbers of the first one."""
        if self._world.num_ranks == 1:
            return self
        address = os.environ["MASTER_ADDR"]
        if self._world.is_first:
            self._listener = listen(address, is_one_node=self._world.is_one_node)
            self._listener.setblocking(False)
        facts = (
            [self._listener.getsockname()[1], secrets.randbits(62), secrets.randbits(62)] if self._listener else [0] * 3
        )
        port, *token = announce(facts)
        self._token = "-".join(map(str, token))
        if not self._world.is_first:
            self._connect(address, port)
        os.register_at_fork(after_in_child=self._forget)  # or a child would hold the connection of a dead rank open
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._guarded, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def attend(
        self,
        *,
        at_end: Callable[[bool], None],
        waits_in_vain_s: Callable[[], float],
        tell: Callable[[], dict[str, Any]],
        heard: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """What it is to do besides, from now on: ranks join before there is anything to be saved or told."""
        self._at_end, self._waits_in_vain_s, self._tell, self._heard = at_end, waits_in_vain_s, tell, heard

    def stop(self) -> None:
        """Says goodbye: from here on this rank may go without alarm."""
        self._leave({"bye": True})

    def blame(self, error: BaseException) -> None:
        """On the way out with an error: returns if it is this rank's own, and then the others know."""
        if self._thread is None or self._is_ending:
            return
        if _may_be_others_fault(error) and self._verdict.wait(BLAME_S):
            time.sleep(600)  # the thread ends this process
        self._leave({"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"})

    def _leave(self, message: Message) -> None:
        with self._lock:
            if self._thread is None or self._is_ending:
                return
            self._is_ending = True
            if self._world.is_first and "failed" in message:
                message = _as_message(Verdict(self._me, "failed", message["failed"]))
            self._send_all(message)
        os.write(self._waker, b"x")
        self._thread.join(2 * self._interval_s)

    # ---- the thread ----------------------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 (of `tell` or `heard`: no reason to end training, nor to look dead)
            print(f"WARNING: rank {self._me.rank}: the heartbeat has stopped ({error!r})", file=sys.stderr, flush=True)
            with self._lock:
                self._is_ending = True
                self._send_all({"bye": True})
        self._forget()

    def _work(self) -> None:
        beat_s = 0.0
        while not self._is_ending:
            if time.monotonic() >= beat_s:
                beat_s = time.monotonic() + self._interval_s
                self._beat()
            poll = select.poll()  # select() knows only the first 1,024 files of a process
            with self._lock:
                sockets = [each.wire.socket for each in self._connections.values()]
            for watched in [*sockets, *([self._listener] if self._listener else [])]:
                poll.register(watched, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            poll.poll(max(0.0, beat_s - time.monotonic()) * 1000)
            with self._lock:
                verdict = None if self._is_ending else self._look()
            if verdict is not None:
                self._end(verdict)

    def _send_all(self, message: Message) -> None:
        for connection in self._connections.values():
            if connection.peer is not None:
                connection.wire.send(message)

    def _beat(self) -> None:
        said = self._tell()
        if self._world.is_first and said:
            self._heard(0, said)
        message: Message = {"beat": {} if self._world.is_first else said}
        if self._waits_in_vain_s() > VAIN_WAIT_S:
            message = _as_message(Verdict(self._me, "waits"))
        with self._lock:
            self._send_all(message)
        if "verdict" in message and self._world.is_first:
            self._end(Verdict(self._me, "waits"))

    def _look(self) -> Verdict | None:
        """Reads everything that has come, and only then judges."""
        self._mind_a_pause()
        self._accept()
        for key, connection in list(self._connections.items()):
            try:
                for message in connection.wire.receive():
                    connection.heard_s = time.monotonic()
                    verdict = self._understood(connection, message)
                    if verdict is not None:
                        return verdict
            except (Garbage, KeyError, TypeError, ValueError):
                connection.wire.close()
            if connection.peer is None and time.monotonic() - connection.heard_s > _HELLO_S:
                connection.wire.close()
            if not connection.wire.is_open:
                connection.wire.close()
                del self._connections[key]
                if connection.peer is not None:
                    return Verdict(connection.peer, "gone")
        for connection in self._connections.values():
            if connection.peer is not None and time.monotonic() - connection.heard_s > self._timeout_s:
                return Verdict(connection.peer, "silent", f"{self._timeout_s:g}")
        return None

    def _mind_a_pause(self) -> None:
        """While a whole job is suspended nobody beats, and nobody can be blamed: after a pause of our own, time begins anew."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._interval_s:
            for connection in self._connections.values():
                connection.heard_s = now_s
        self._looked_s = now_s

    def _understood(self, connection: _Connection, message: Message) -> Verdict | None:
        if connection.peer is None or "token" in message:
            if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                raise Garbage("a stranger")
            connection.peer = Peer.of(message)
            if self._world.is_first:
                connection.wire.send(self._me.as_message() | {"token": self._token})
        elif "verdict" in message:
            return Verdict(Peer.of(message), message["verdict"], str(message["detail"]))
        elif "failed" in message:
            return Verdict(connection.peer, "failed", str(message["failed"]))
        elif "bye" in message:
            connection.peer = None
            connection.wire.close()
        elif message["beat"]:
            self._heard(connection.peer.rank, message["beat"])
        return None

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections[connection.fileno()] = _Connection(Wire(connection), time.monotonic())

    def _connect(self, address: str, port: int) -> None:
        try:
            wire = Wire(socket.create_connection((address, port), timeout=_CONNECT_S))
        except OSError as error:
            print(
                f"WARNING: rank {self._me.rank}: no heartbeat, as {address}:{port} cannot be reached ({error}); if a rank dies, "
                "the others notice only after timeout_s of the settings",
                file=sys.stderr,
            )
            return
        wire.send(self._me.as_message() | {"token": self._token})
        self._connections[wire.socket.fileno()] = _Connection(wire, time.monotonic(), Peer(0, address, 0))

    def _end(self, verdict: Verdict) -> None:
        """Ends this process, unless it is about to end in its own way."""
        self._verdict.set()
        with self._lock:
            if self._world.is_first:
                self._send_all(_as_message(verdict))
        if verdict.why == "failed":
            time.sleep(FAILED_GRACE_S)
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        if self._speaks(verdict):
            line = f"{verdict}\n" if not sys.stderr.isatty() else f"\n{verdict}\n"
            os.write(2, line.encode())
        self._at_end(verdict.why == "waits")
        os._exit(0 if verdict.why == "waits" else 1)

    def _speaks(self, verdict: Verdict) -> bool:
        if verdict.peer.rank != 0 or verdict.why == "waits":
            return self._world.is_first
        return self._world.local_rank == (1 if verdict.peer.node == self._me.node else 0)

    def _forget(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections.values():
            connection.wire.socket.close()
        self._connections = {}


def _as_message(verdict: Verdict) -> Message:
    return verdict.peer.as_message() | {"verdict": verdict.why, "detail": verdict.detail}


def _may_be_others_fault(error: BaseException) -> bool:
    """A collective whose partner is gone raises RuntimeError, or a subclass of torch.distributed's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, RuntimeError) and not names & {"OutOfMemoryError", "NotImplementedError", "RecursionError"}
