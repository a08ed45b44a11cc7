"""What tells a hang from work that takes its time: where each rank stands in its training, and since when.

The loop marks each stage (`PROGRESS.mark`); long work within a stage reports that it progresses (`touch`). Both cost a moment, take
no lock and do not wait for a device, so a mark says where Python is, not what a GPU has finished.

All ranks pass the same marks in the same order, so those with the fewest marks are behind, whatever the clocks say, and the others
wait for them. While one of those progresses there is no hang; `touch` reports that and does not count as a mark. One process trains
one run at a time: hence `PROGRESS`. The heartbeat carries each rank's standing to the first rank, which judges (`HangWatch`).
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pretrain.ranks.stacks import Stacks
from pretrain.ranks.world import Peer, World

Why = Literal["gone", "silent", "failed", "hangs", "waits"]
BEHIND_S = 20.0
"""A rank that has stood still for less, when another failed, is not called behind: it may just have waited for that one."""
ARMED_SHARE = 0.75
"""Of the time after which a rank counts as silent: then its stacks are dumped, if they still can be."""
_MOST_NAMED, _CONFIRMATIONS = 3, 2


class Standing(NamedTuple):
    """The last mark of a rank, and for how long nothing has happened since."""

    number: int
    step: int
    stage: str
    stalled_s: float

    @property
    def place(self) -> str:
        return f"at step {self.step:,}, {self.stage}" if self.step else self.stage


@dataclass
class Progress:
    _mark: tuple[int, int, str] = (0, 0, "starting")
    """Its number, the step and the stage: one value, as another thread reads it."""
    _touched_s: float | None = None
    """When something last happened; None: nothing has begun, and nothing can stall."""
    _excused: tuple[float | None, float] = (None, 0.0)
    """How long this process could not run since then; only the watching thread writes it."""

    def mark(self, stage: str, *, step: int | None = None) -> None:
        """The next stage begins; `step`: the one that is worked on, from 1 on, by default still the one before."""
        number, before, _ = self._mark
        self._mark = number + 1, before if step is None else step, stage
        self._touched_s = time.monotonic()

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """A stage within another: for other ranks, which are behind until they come here, too."""
        before = self._mark[2]
        self.mark(stage)
        yield
        self.mark(before)

    def touch(self) -> None:
        """From any thread: the work of this stage progresses."""
        self._touched_s = time.monotonic()

    def excuse(self, pause_s: float) -> None:
        """From the watching thread: the whole process stood still for so long, through no fault of its own."""
        since_s, (before_since_s, before_s) = self._touched_s, self._excused
        self._excused = (since_s, pause_s + (before_s if before_since_s == since_s else 0.0))

    def standing(self) -> Standing:
        mark, since_s, (excused_since_s, excused_s) = self._mark, self._touched_s, self._excused
        stalled_s = 0.0 if since_s is None else time.monotonic() - since_s
        if excused_since_s == since_s:
            stalled_s -= excused_s
        return Standing(*mark, max(0.0, round(stalled_s, 3)))


PROGRESS = Progress()


@dataclass(frozen=True)
class Verdict:
    """Why training ends: what the heartbeat finds, sends to all ranks, and prints as one line."""

    peer: Peer
    why: Why
    detail: str = ""
    behind: str = ""
    """Which rank was behind, if the fault may be that rank's and not the peer's."""

    def __str__(self) -> str:
        what = {
            "gone": "is gone",
            "silent": f"was not heard of for {self.detail} s (frozen, or its node is lost)",
            "failed": f"has failed ({self.detail})",
            "hangs": self.detail,
            "waits": "waits for data, and all were told to stop",
        }[self.why]
        behind = f"; {self.behind}" if self.behind else ""
        return f"{self.peer} {what}{behind}; the run stops; the same command goes on with it"

    @property
    def wants_stacks(self) -> bool:
        """A rank that died or failed by itself has said why; the stacks of the others would add nothing."""
        return self.why in ("silent", "hangs") or bool(self.behind)

    def as_message(self) -> dict[str, Any]:
        return {"verdict": asdict(self)}

    @staticmethod
    def of(message: dict[str, Any]) -> "Verdict":
        found = message["verdict"]
        return Verdict(Peer.of(found["peer"]), found["why"], str(found["detail"]), str(found["behind"]))


@dataclass
class Standings:
    """Where each rank stood at its last beat, as the first rank knows it."""

    _known: dict[int, tuple[Peer, Standing]] = field(default_factory=dict)
    _num_noted: Counter[int] = field(default_factory=Counter)
    _suspects: dict[int, tuple[int, int]] = field(default_factory=dict)
    """rank -> (number of its mark, how often it was noted by then); of those that may hang."""

    def note(self, peer: Peer, standing: Standing) -> None:
        self._known[peer.rank] = peer, standing
        self._num_noted[peer.rank] += 1

    def forget(self, peer: Peer) -> None:
        self._known.pop(peer.rank, None)

    def hang(self, timeout_s: float) -> Verdict | None:
        """If none of the ranks that are behind, and so hold the others up, has progressed for so long. Each of them must have
        reported that twice since it was first seen. Otherwise ranks that have waited for another one for as long would look behind,
        in the moment between its report that it has come and theirs that they go on."""
        known = list(self._known.values())
        last = _behind(known)
        if any(standing.stalled_s <= timeout_s for _, standing in last):
            last = []
        before, numbers = self._suspects, {peer.rank: standing.number for peer, standing in last}
        if {rank: number for rank, (number, _) in before.items()} != numbers:
            self._suspects = {rank: (number, self._num_noted[rank]) for rank, number in numbers.items()}
            return None
        if not last or any(self._num_noted[rank] < count + _CONFIRMATIONS for rank, (_, count) in before.items()):
            return None
        others = [standing.place for _, standing in known if standing.number > last[0][1].number]
        detail = _described(last)
        if others:
            ((place, _),) = Counter(others).most_common(1)
            further = "the other rank is" if len(others) == 1 else f"{len(others)} others are further, such as"
            detail += f"; {further} {place}"
        return Verdict(last[0][0], "hangs", detail)

    def behind(self, peer: Peer) -> str:
        """Who held the others up, when this peer failed or went; empty if it did so itself, or nobody did."""
        last = _behind(list(self._known.values()))
        ranks = {each.rank for each, _ in last}
        if not ranks or peer.rank in ranks or len(ranks) == len(self._known) or last[0][1].stalled_s < BEHIND_S:
            return ""
        return f"{last[0][0]} {_described(last)}"


def _behind(known: list[tuple[Peer, Standing]]) -> list[tuple[Peer, Standing]]:
    """Those with the fewest marks; the one that has stood there for longest comes first."""
    fewest = min((standing.number for _, standing in known), default=0)
    found = [each for each in known if each[1].number == fewest]
    return sorted(found, key=lambda each: (-each[1].stalled_s, each[0].rank))


def _described(last: list[tuple[Peer, Standing]]) -> str:
    standing, more = last[0][1], [str(peer.rank) for peer, _ in last[1:]]
    alike = f"{len(more)} others" if len(more) > _MOST_NAMED else f"rank{'s' if len(more) > 1 else ''} {', '.join(more)}"
    found = f"has made no progress for {standing.stalled_s:,.0f} s, {standing.place}"
    return f"{found}, like {alike}" if more else found


class HangWatch:
    """What the heartbeat's thread does about hangs: it reports its rank, judges (on the first rank), and leaves stacks."""

    def __init__(self, directory: Path, world: World, me: Peer, *, timeout_s: float, armed_s: float):
        self.directory, self._world, self._me = directory, world, me
        self._timeout_s, self._armed_s = timeout_s, armed_s
        self._stacks, self._standings = Stacks(directory, me).open(), Standings()
        self._stacks.arm(self._armed_s)  # the next beat may never come
        PROGRESS.mark("starting", step=0)

    def beat(self) -> Standing:
        """Where this rank stands, for the first one."""
        self._stacks.arm(self._armed_s)
        standing = PROGRESS.standing()
        if self._world.is_first:
            self._standings.note(self._me, standing)
        return standing

    def received(self, peer: Peer, standing: list[Any]) -> None:
        number, step, stage, stalled_s = standing
        self._standings.note(peer, Standing(int(number), int(step), str(stage)[:200], float(stalled_s)))

    def left(self, peer: Peer) -> None:
        """Its work is done; the others go on."""
        self._standings.forget(peer)

    def judge(self) -> Verdict | None:
        return self._standings.hang(self._timeout_s) if self._timeout_s else None

    def with_cause(self, verdict: Verdict) -> Verdict:
        """A rank that failed, or was ended by its watchdog, may have waited for another one that never came."""
        return replace(verdict, behind=self._standings.behind(verdict.peer))

    def leave_stacks(self, verdict: Verdict) -> None:
        """The last output of this rank; one rank of its node describes a silent one, too."""
        self._stacks.dump(f"{PROGRESS.standing().place}; {verdict}")
        first_here = self._world.rank - self._world.local_rank
        describer = 1 if verdict.peer.rank == first_here else 0
        if verdict.why == "silent" and self._world.local_rank == describer:
            found = self._stacks.describe(verdict.peer)
            if found is not None:
                os.write(2, f"{found}\n".encode())

    def close(self) -> None:
        self._stacks.close()
