"""Where the ranks of a pre-flight talk: a TCPStore of rank 0, without a process group: one that never comes holds up nobody.

What a rank says stands under TOPIC/RANK, what rank 0 says to all under TOPIC. Rank 0 also shows its clock there, many times a
second: the smallest difference that another rank reads is how far its own clock is ahead.
"""

import datetime
import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cluster.preflight.worker import TICK_S
from pretrain.ranks.world import World

CLOCK = "clock"
NUM_CLOCK_READINGS = 40
ANSWER_S = 20.0
"""How long the store itself, on rank 0's node, may take for an answer."""


class LostError(Exception):
    """Rank 0 cannot be reached, or says nothing more."""


class Meeting:
    def __init__(self, world: World, *, address: str, port: int, timeout_s: float, is_over: Callable[[], bool]):
        """For rank 0, OSError if the port is taken. `is_over`: whether rank 0 has long judged; then there is no point in trying."""
        self._world, self._readings = world, list[float]()
        if not world.is_first:
            _knock(address, port, timeout_s=timeout_s, is_over=is_over)
        try:
            self._store = TCPStore(
                address,
                port,
                is_master=world.is_first,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=ANSWER_S),
            )
        except RuntimeError as error:
            if world.is_first:
                raise OSError(str(error).partition("\n")[0]) from None
            raise LostError(f"{address}:{port} does not answer") from error

    def say(self, topic: str, value: Any) -> None:
        self._set(f"{topic}/{self._world.rank}", value)

    def say_to_all(self, topic: str, value: Any) -> None:
        self._set(topic, value)

    def gather(self, topic: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, Any]:
        """What those ranks have said that spoke in time."""
        said: dict[int, Any] = {}
        missing, deadline_s = set(ranks), time.monotonic() + timeout_s
        while missing and time.monotonic() < deadline_s:
            self.tick()
            for rank in sorted(missing):
                value = self._get(f"{topic}/{rank}")
                if value is None:
                    break  # the others will be asked for when this one is there, or at the end
                said[rank] = value
            missing -= said.keys()
            time.sleep(TICK_S if missing else 0)
        late = {rank: self._get(f"{topic}/{rank}") for rank in missing}
        return said | {rank: value for rank, value in late.items() if value is not None}

    def wait_for(self, topic: str, *, timeout_s: float) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            value = self._get(topic)
            if value is not None:
                return value
            time.sleep(2 * TICK_S)
        raise LostError(f"rank 0 has said nothing for {timeout_s:g} s")

    def tick(self) -> None:
        """Shows the clock, or reads it: to be called often while there is nothing else to do."""
        if self._world.is_first:
            self._set(CLOCK, time.time())
        elif self._world.local_rank == 0 and len(self._readings) < NUM_CLOCK_READINGS:
            before_s, theirs_s = time.time(), self._get(CLOCK)
            if theirs_s is not None:
                self._readings.append((before_s + time.time()) / 2 - theirs_s)

    def clock_s(self) -> float | None:
        """How far this clock is ahead of rank 0's; known to the first rank of each node."""
        return 0.0 if self._world.is_first else min(self._readings, default=None)

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:  # all of torch's store errors are
            raise LostError("the connection to rank 0 is lost") from error

    def _get(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise LostError("the connection to rank 0 is lost") from error


def _knock(address: str, port: int, *, timeout_s: float, is_over: Callable[[], bool]) -> None:
    """Returns when the port is open: it opens when rank 0 has imported torch."""
    deadline_s, why = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline_s and not is_over():
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(0.2)
    raise LostError(f"no connection to rank 0 at {address}:{port} for {timeout_s:g} s ({why})")
