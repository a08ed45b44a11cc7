"""How a hang differs from work that takes its time: where each rank stands in its training, and
since when.

The loop marks each stage (`PROGRESS.mark`); long work within a stage reports that it progresses
(`touch`). Both cost a moment, take no lock and do not wait for a device, so a mark says where
Python is, not what a GPU has finished.

All ranks pass the same marks in the same order, so those with the fewest marks are behind, whatever
the clocks say, and the others wait for them. While one of those progresses there is no hang;
`touch` reports that and does not count as a mark. One process trains one run at a time: hence
`PROGRESS`. The heartbeat carries each rank's standing to the first rank, which judges
(`Standings`).
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from pretrain.ranks.world import Peer

BEHIND_S = 20.0
"""A rank that has stood still for less, when another failed, is not called behind: it may just have
waited for that one."""
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


class Progress:
    """Other threads read it without a lock, so each attribute is one value."""

    def __init__(self) -> None:
        self._mark = (0, 0, "starting")
        """Its number, the step and the stage."""
        self._touched_s: float | None = None
        """When something last happened, without all pauses until then; None: nothing has begun, and
        nothing can stall."""
        self._num_trusted = 0
        self._paused_s = 0.0
        """How long this process could not run in all; only the watching thread writes it."""

    def mark(self, stage: str, *, step: int | None = None) -> None:
        """The next stage begins; `step`: the one that is worked on, from 1 on, by default still the
        one before."""
        number, before, _ = self._mark
        self._mark = number + 1, before if step is None else step, stage
        self.touch()

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """A stage within another: for other ranks, which are behind until they come here, too."""
        before = self._mark[2]
        self.mark(stage)
        yield
        self.mark(before)

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Work that has a time limit of its own, such as a transfer: no hang while it lasts."""
        self._num_trusted += 1
        try:
            yield
        finally:
            self._num_trusted -= 1
            self.touch()

    def touch(self) -> None:
        """From any thread: the work of this stage progresses."""
        self._touched_s = time.monotonic() - self._paused_s

    def excuse(self, pause_s: float) -> None:
        """From the watching thread: the whole process stood still for so long, through no fault of
        its own."""
        self._paused_s += pause_s

    def standing(self) -> Standing:
        mark, touched_s = self._mark, self._touched_s
        stalled_s = 0.0
        if touched_s is not None and not self._num_trusted:
            stalled_s = time.monotonic() - self._paused_s - touched_s
        return Standing(*mark, max(0.0, round(stalled_s, 3)))


PROGRESS = Progress()


@dataclass(frozen=True)
class Verdict:
    """Why training ends: what the heartbeat finds, sends to all ranks, and prints as one line."""

    peer: Peer
    why: Literal["gone", "silent", "failed", "hangs", "waits"]
    detail: str = ""
    behind: str = ""
    """Which rank was behind, if the fault may be that rank's and not the peer's."""

    def __str__(self) -> str:
        what = {
            "gone": "is gone",
            "silent": f"sent nothing for {self.detail} s (frozen, or its node is lost)",
            "failed": f"has failed ({self.detail})",
            "hangs": self.detail,
            "waits": "waits for data, and all were told to stop",
        }[self.why]
        behind = f"; {self.behind}" if self.behind else ""
        resumes = (
            "" if self.why == "failed" else "; the same command goes on with it"
        )  # an error may come again
        return f"{self.peer} {what}{behind}; the run stops{resumes}"

    @property
    def wants_stacks(self) -> bool:
        """A rank that died or failed by itself has said why; the stacks of the others would add
        nothing."""
        return self.why in ("silent", "hangs") or bool(self.behind)

    def as_message(self) -> dict[str, Any]:
        return {"verdict": asdict(self)}

    @staticmethod
    def of(message: dict[str, Any]) -> "Verdict":
        return Verdict(**message["verdict"] | {"peer": Peer(**message["verdict"]["peer"])})


class Standings:
    """Where each rank stood at its last beat, as the first rank knows it."""

    def __init__(self) -> None:
        self._known: dict[Peer, Standing] = {}
        self._suspects: dict[Peer, int] = {}
        """The ranks that may hang, and the number of their mark."""
        self._num_reports: Counter[Peer] = Counter()
        """Of each rank since these are the suspects."""

    def note(self, peer: Peer, standing: Standing) -> None:
        self._known[peer] = standing
        self._num_reports[peer] += 1

    def forget(self, peer: Peer) -> None:
        """Its work is done; the others go on."""
        self._known.pop(peer, None)

    def hang(self, timeout_s: float) -> Verdict | None:
        """If none of the ranks that are behind, and so hold the others up, has progressed for so
        long. Each of them must have reported that twice since they are the suspects. Otherwise
        ranks that have waited for another one for as long would look behind, in the moment between
        its report that it has come and theirs that they go on."""
        behind = self._behind()
        if any(standing.stalled_s <= timeout_s for standing in behind.values()):
            behind = {}
        suspects = {peer: standing.number for peer, standing in behind.items()}
        if suspects != self._suspects:
            self._suspects, self._num_reports = suspects, Counter()
        if not suspects or any(self._num_reports[peer] < _CONFIRMATIONS for peer in suspects):
            return None
        first = next(iter(behind))
        detail = _described(behind)
        others = Counter(
            standing.place for standing in self._known.values() if standing.number > suspects[first]
        )
        if others:
            ((place, _),) = others.most_common(1)
            further = (
                "the other rank is"
                if others.total() == 1
                else f"{others.total()} others are further, such as"
            )
            detail += f"; {further} {place}"
        return Verdict(first, "hangs", detail)

    def behind(self, peer: Peer) -> str:
        """Which rank held the others up, when this peer failed or went, or was ended by its
        watchdog, and may have waited for one that never came; empty if it did so itself, or nobody
        did."""
        behind = self._behind()
        if not behind or peer in behind or len(behind) == len(self._known):
            return ""
        first = next(iter(behind))
        return f"{first} {_described(behind)}" if behind[first].stalled_s >= BEHIND_S else ""

    def _behind(self) -> dict[Peer, Standing]:
        """Those with the fewest marks; the one that has stood there for longest comes first."""
        known = sorted(
            self._known.items(), key=lambda each: (each[1].number, -each[1].stalled_s, each[0].rank)
        )
        return {peer: standing for peer, standing in known if standing.number == known[0][1].number}


def _described(behind: dict[Peer, Standing]) -> str:
    standing, more = next(iter(behind.values())), [str(peer.rank) for peer in behind][1:]
    alike = (
        f"{len(more)} others"
        if len(more) > _MOST_NAMED
        else f"rank{'s' if len(more) > 1 else ''} {', '.join(more)}"
    )
    found = f"has made no progress for {standing.stalled_s:,.0f} s, {standing.place}"
    return f"{found}, like {alike}" if more else found
