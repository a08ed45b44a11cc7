"""The progress of each rank: its last mark, and the time since the last sign of progress.

The loop marks each stage (`PROGRESS.mark`). Long work within a stage reports progress (`touch`).
Both methods take no lock and do not wait for a device.

All ranks pass the same marks in the same order. The ranks with the fewest marks lag, and the other
ranks wait for them. The run hangs if no lagging rank progresses. The watchdog sends each rank's
standing to the first rank, which looks for a hang (`Standings`).
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from pretrain.ranks.world import Peer

_CONFIRMATIONS = 2


class Standing(NamedTuple):
    """Last mark of a rank, and the seconds without progress since this mark or its last `touch`."""

    number: int
    step: int
    stage: str
    stalled_s: float

    def __str__(self) -> str:
        return f"at step {self.step:,}, {self.stage}" if self.step else self.stage


class Progress:
    """Marks of this process. Each attribute is one value, so threads read it without a lock."""

    def __init__(self) -> None:
        self._mark = (0, 0, "starting")
        """Number of the mark, step and stage."""
        self._touched_s: float | None = None
        """Time of the last progress, minus `_paused_s`. None before the first mark."""
        self._num_trusted = 0
        self._paused_s = 0.0
        """Seconds in which this process was suspended. Only the watchdog writes this attribute."""

    def mark(self, stage: str, *, step: int | None = None) -> None:
        """Begin the next stage. `step`: current step, from 1 on (default: unchanged)."""
        number, before, _ = self._mark
        self._mark = number + 1, before if step is None else step, stage
        self.touch()

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """Mark a wait for lagging ranks, as a stage within the current stage."""
        before = self._mark[2]
        self.mark(stage)
        yield
        self.mark(before)

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Do not count time inside the block toward a hang. Use it for work with its own time
        limit, for example a transfer."""
        self._num_trusted += 1
        try:
            yield
        finally:
            self._num_trusted -= 1
            self.touch()

    def touch(self) -> None:
        """Report progress of the current stage, from any thread."""
        self._touched_s = time.monotonic() - self._paused_s

    def excuse(self, pause_s: float) -> None:
        """Do not count `pause_s` toward a hang, because this process was suspended for that
        long."""
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
    """Reason for ending all ranks. The watchdog sends the reason to all ranks and prints it."""

    peer: Peer
    why: Literal["gone", "silent", "failed", "hangs", "waits"]
    detail: str = ""

    def __str__(self) -> str:
        what = {
            "gone": "is gone",
            "silent": f"sent nothing for {self.detail} s (frozen, or its node is lost)",
            "failed": f"has failed ({self.detail})",
            "hangs": self.detail,
            "waits": "waits for data, and all ranks were told to stop",
        }[self.why]
        # a repeated command may fail again
        resume = "" if self.why == "failed" else ". Run the same command to resume"
        return f"{self.peer} {what}; the run stops{resume}"

    @property
    def wants_stacks(self) -> bool:
        """True if the stacks of all ranks help to find the cause: a rank hangs or is silent."""
        return self.why in ("silent", "hangs")

    def as_message(self) -> dict[str, Any]:
        return {"verdict": asdict(self)}

    @staticmethod
    def of(message: dict[str, Any]) -> "Verdict":
        return Verdict(**message["verdict"] | {"peer": Peer(**message["verdict"]["peer"])})


class Standings:
    """Last standing that each rank reported to the first rank."""

    def __init__(self) -> None:
        self._known: dict[Peer, Standing] = {}
        self._suspects: dict[Peer, int] = {}
        """Ranks that may hang, with the number of their last mark."""
        self._num_reports: Counter[Peer] = Counter()
        """Number of reports by each rank since the suspects last changed."""

    def note(self, peer: Peer, standing: Standing) -> None:
        self._known[peer] = standing
        self._num_reports[peer] += 1

    def forget(self, peer: Peer) -> None:
        self._known.pop(peer, None)

    def find_hang(self, timeout_s: float) -> Verdict | None:
        """Return a verdict if no lagging rank has progressed for `timeout_s`.

        Each lagging rank must have reported twice since it became a suspect. Otherwise a rank that
        only waited for a late rank could seem to lag, until its own next report arrives.
        """
        behind = self._behind()
        if any(standing.stalled_s <= timeout_s for standing in behind.values()):
            behind = {}
        suspects = {peer: standing.number for peer, standing in behind.items()}
        if suspects != self._suspects:
            self._suspects, self._num_reports = suspects, Counter()
        if not suspects or any(self._num_reports[peer] < _CONFIRMATIONS for peer in suspects):
            return None
        others = Counter(str(self._known[peer]) for peer in self._known.keys() - suspects.keys())
        further = f"; the others are {others.most_common(1)[0][0]}" if others else ""
        peer, standing = next(iter(behind.items()))
        alike = f" (with {len(behind) - 1} more ranks)" if len(behind) > 1 else ""
        stalled = f"has made no progress for {standing.stalled_s:,.0f} s, {standing}{alike}"
        return Verdict(peer, "hangs", stalled + further)

    def _behind(self) -> dict[Peer, Standing]:
        """Return the lagging ranks (with the fewest marks), the longest stalled first."""
        lowest = min((standing.number for standing in self._known.values()), default=0)
        found = [each for each in self._known.items() if each[1].number == lowest]
        return dict(sorted(found, key=lambda each: (-each[1].stalled_s, each[0].rank)))
