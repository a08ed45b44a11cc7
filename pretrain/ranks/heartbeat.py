"""Knows within seconds when a rank is dead or frozen, and ends all others with one clear line instead of their tracebacks.

A thread of each rank holds a TCP connection to the first rank's, whichever launcher started them. Who speaks without the token of
this run is ignored. 1. Each end beats. 2. A connection that closes without a goodbye is a dead rank; one that is silent for
`timeout_s`, a frozen rank or a lost node; a rank that fails by itself says so before it goes. 3. The first rank tells all, and
prints the line; every rank ends with 1, wherever its main thread hangs. If it is the first rank that is gone, all see it by
themselves, and the first survivor of each node says it. 4. A rank that is to stop, but waits for data in vain, ends all with 0.
5. `watch`: beats carry where a rank stands (headway.py); if one makes no headway for too long, all hang, and the one that is behind
is named. Ranks that end because of a hang leave their stacks (stacks.py). A world of one has this alone, and no connection.

The verdict is over what has been read: a thread that was kept from running first reads what has come meanwhile. Ranks are looked
over once per beat, not per message. Beats may carry a small dict (`tell`) to the first rank (`heard`); neither may block.
"""

import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.ranks.hang_watch import HangWatch
from pretrain.ranks.headway import HEADWAY
from pretrain.ranks.heartbeat_wire import Garbage, Message, Peer, Wire, encoded, listen
from pretrain.ranks.verdict import Verdict, may_be_others_fault
from pretrain.ranks.world import World

FAILED_GRACE_S = 1.0
"""After a rank has failed: for those that meet the same error by themselves, and say it in their own words."""
VAIN_WAIT_S = 30.0
"""For data, by a rank that was told to stop: ranks that get theirs in time save, and what ends a job leaves it minutes for that."""
BLAME_S = 3.0
"""How long a failed exchange waits for news of a rank that is gone."""
_HELLO_S, _CONNECT_S = 10.0, 20.0


@dataclass
class _Connection:
    wire: Wire
    heard_s: float
    peer: Peer | None = None


class Heartbeat:
    """Use `start` on all ranks together, and `stop` when this rank's work is done. A world of one has nothing but `watch`."""

    def __init__(
        self,
        world: World,
        *,
        timeout_s: float,
        at_end: Callable[[bool], None] = lambda stopped: None,
        waits_in_vain_s: Callable[[], float] = lambda: 0.0,
        tell: Callable[[], dict[str, Any]] = dict,
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
        self._is_alone = world.num_ranks == 1
        self._watch: HangWatch | None = None
        self._thread: threading.Thread | None = None
        self._woken, self._waker = os.pipe()
        self._files = selectors.DefaultSelector()  # epoll: it costs the same for one connection and for a thousand
        self._files.register(self._woken, selectors.EVENT_READ)

    def start(self, announce: Callable[[list[int]], list[int]]) -> "Heartbeat":
        """`announce` gives all ranks the numbers of the first one."""
        if self._is_alone:
            return self
        address = os.environ["MASTER_ADDR"]
        if self._world.is_first:
            self._listener = listen(address, is_one_node=self._world.is_one_node)
            self._listener.setblocking(False)
            self._files.register(self._listener, selectors.EVENT_READ)
        facts = (
            [self._listener.getsockname()[1], secrets.randbits(62), secrets.randbits(62)] if self._listener else [0] * 3
        )
        port, *token = announce(facts)
        self._token = "-".join(map(str, token))
        if not self._world.is_first:
            self._connect(address, port)
        os.register_at_fork(after_in_child=self._forget)  # or a child would hold the connection of a dead rank open
        self._begin()
        return self

    def watch(self, directory: Path, *, hang_timeout_s: float | None) -> None:
        """From now on this rank has to make headway, unless the timeout is 0 or None; stacks go to `directory`. Once is enough."""
        if self._watch is None and (self._thread is not None or (self._is_alone and hang_timeout_s)):
            self._watch = HangWatch(
                directory, self._world, self._me, hang_timeout_s=hang_timeout_s, silence_timeout_s=self._timeout_s
            )
            if self._thread is None:
                self._begin()

    def _begin(self) -> None:
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._guarded, name="heartbeat", daemon=True)
        self._thread.start()

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
        if not self._is_alone and may_be_others_fault(error) and self._verdict.wait(BLAME_S):
            time.sleep(600)  # the thread ends this process
        self._leave({"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"})

    def _leave(self, message: Message) -> None:
        with self._lock:
            if self._thread is None or self._is_ending:
                return
            self._is_ending = True
            if self._world.is_first and "failed" in message:
                message = self._with_cause(Verdict(self._me, "failed", message["failed"])).as_message()
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
        if self._watch is not None:
            self._watch.close()

    def _work(self) -> None:
        beat_s = 0.0
        while not self._is_ending:
            self._mind_a_pause()
            judges = time.monotonic() >= beat_s
            if judges:
                beat_s = time.monotonic() + self._interval_s
                self._beat()
            ready = [key.fd for key, _ in self._files.select(0 if judges else max(0.0, beat_s - time.monotonic()))]
            with self._lock:
                verdict = None if self._is_ending else self._look(ready, judges=judges)
            if verdict is not None:
                self._end(verdict)

    def _send_all(self, message: Message) -> None:
        line = encoded(message)
        for connection in self._connections.values():
            if connection.peer is not None:
                connection.wire.send_line(line)

    def _beat(self) -> None:
        at = {"at": self._watch.beat()} if self._watch else {}
        if self._is_alone:
            return
        said = self._tell()
        if self._world.is_first and said:
            self._heard(0, said)
        message: Message = {"beat": {}} if self._world.is_first else {"beat": said} | at  # the first one judges
        if self._waits_in_vain_s() > VAIN_WAIT_S:
            message = Verdict(self._me, "waits").as_message()
        with self._lock:
            self._send_all(message)
        if "verdict" in message and self._world.is_first:
            self._end(Verdict(self._me, "waits"))

    def _look(self, ready: list[int], *, judges: bool) -> Verdict | None:
        """Reads everything that has come, and only then judges."""
        self._mind_a_pause()
        for file in ready:
            if self._listener is not None and file == self._listener.fileno():
                self._accept(self._listener)
            elif file in self._connections and (verdict := self._read(file)) is not None:
                return verdict
        return self._judged() if judges else None

    def _read(self, key: int) -> Verdict | None:
        connection = self._connections[key]
        try:
            for message in connection.wire.receive():
                connection.heard_s = time.monotonic()
                if (verdict := self._understood(connection, message)) is not None:
                    return verdict
        except (Garbage, KeyError, TypeError, ValueError):
            connection.wire.is_open = False
        return None if connection.wire.is_open else self._dropped(key)

    def _dropped(self, key: int) -> Verdict | None:
        """Without a goodbye it is a dead rank's."""
        connection = self._connections.pop(key)
        self._files.unregister(connection.wire.socket)
        connection.wire.close()
        return None if connection.peer is None else self._with_cause(Verdict(connection.peer, "gone"))

    def _judged(self) -> Verdict | None:
        for key, connection in list(self._connections.items()):
            silent_s = time.monotonic() - connection.heard_s
            if not connection.wire.is_open or (connection.peer is None and silent_s > _HELLO_S):
                if (verdict := self._dropped(key)) is not None:
                    return verdict
            elif connection.peer is not None and silent_s > self._timeout_s:
                return Verdict(connection.peer, "silent", f"{self._timeout_s:g}")
        return self._watch.judge() if self._watch else None

    def _with_cause(self, verdict: Verdict) -> Verdict:
        return self._watch.with_cause(verdict) if self._watch else verdict

    def _mind_a_pause(self) -> None:
        """While a whole job is suspended nobody beats, and nobody can be blamed: after a pause of our own, time begins anew."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._interval_s:
            HEADWAY.excuse(now_s - self._looked_s)
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
            return Verdict.of(message)
        elif "failed" in message:
            return self._with_cause(Verdict(connection.peer, "failed", str(message["failed"])))
        elif "bye" in message:
            if self._watch:
                self._watch.left(connection.peer)
            connection.peer = None
            connection.wire.is_open = False
        else:
            if self._watch and "at" in message:
                self._watch.heard(connection.peer, message["at"])
            if message["beat"]:
                self._heard(connection.peer.rank, message["beat"])
        return None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._add(_Connection(Wire(connection), time.monotonic()))

    def _add(self, connection: _Connection) -> None:
        self._connections[connection.wire.socket.fileno()] = connection
        self._files.register(connection.wire.socket, selectors.EVENT_READ)

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
        self._add(_Connection(wire, time.monotonic(), Peer(0, address, 0)))

    def _end(self, verdict: Verdict) -> None:
        """Ends this process, unless it is about to end in its own way."""
        self._verdict.set()
        with self._lock:
            if self._world.is_first:
                self._send_all(verdict.as_message())
        if verdict.why == "failed":
            time.sleep(FAILED_GRACE_S)
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        watch = self._watch if verdict.wants_stacks else None
        if self._speaks(verdict):
            line = f"{verdict}; stacks of all ranks: {watch.directory}\n" if watch else f"{verdict}\n"
            os.write(2, ("\n" + line if sys.stderr.isatty() else line).encode())
        if watch:
            watch.leave_stacks(verdict)
        self._at_end(verdict.why == "waits")
        os._exit(0 if verdict.why == "waits" else 1)

    def _speaks(self, verdict: Verdict) -> bool:
        if verdict.peer.rank != 0 or verdict.why in ("waits", "hangs"):
            return self._world.is_first
        return self._world.local_rank == (1 if verdict.peer.node == self._me.node else 0)

    def _forget(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections.values():
            connection.wire.socket.close()
        self._connections = {}
