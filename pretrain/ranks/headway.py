"""Where this process stands in its training, and since when: what tells a hang from work that takes its time.

The trainer marks each stage of its loop (`mark`); long work within a stage says that it gets on (`touch`). Both cost a moment, take
no lock and do not wait for a device, so a mark says where Python stands, not what a GPU has finished.

All ranks pass the same marks in the same order, so those with the fewest are behind, whatever the clocks say, and the others wait
for them. While one of those gets on there is no hang; `touch` says that and does not count. One process trains one run at a time:
hence `HEADWAY`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Mark(NamedTuple):
    number: int
    step: int
    stage: str


class Standing(NamedTuple):
    """A mark as it is told to others, and for how long nothing has happened since."""

    number: int
    step: int
    stage: str
    stalled_s: float

    def as_message(self) -> dict[str, Any]:
        return {"number": self.number, "step": self.step, "stage": self.stage, "stalled_s": round(self.stalled_s, 3)}

    @staticmethod
    def of(message: dict[str, Any]) -> "Standing":
        return Standing(
            int(message["number"]), int(message["step"]), str(message["stage"])[:200], float(message["stalled_s"])
        )

    @property
    def place(self) -> str:
        return f"at step {self.step:,}, {self.stage}" if self.step else self.stage


@dataclass
class Headway:
    _mark: Mark = field(default_factory=lambda: Mark(0, 0, "starting"))
    _touched_s: float | None = None
    """When something last happened; None: nothing has begun, and nothing can stall."""
    _excused: tuple[float | None, float] = (None, 0.0)
    """How long this process could not run since then; of the watching thread alone."""

    def mark(self, stage: str, *, step: int | None = None) -> None:
        """The next stage begins; `step`: the one that is worked on, from 1 on, by default still the one before."""
        before = self._mark
        self._mark = Mark(before.number + 1, before.step if step is None else step, stage)
        self._touched_s = time.monotonic()

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """A stage within another: for others, which are behind until they come here, too."""
        before = self._mark.stage
        self.mark(stage)
        yield
        self.mark(before)

    def touch(self) -> None:
        """From any thread: what was begun gets on."""
        self._touched_s = time.monotonic()

    def excuse(self, pause_s: float) -> None:
        """The watching thread's: the whole process stood still for so long, through no fault of its own."""
        since_s, (before_since_s, before_s) = self._touched_s, self._excused
        self._excused = (since_s, pause_s + (before_s if before_since_s == since_s else 0.0))

    def standing(self) -> Standing:
        mark, since_s, (excused_since_s, excused_s) = self._mark, self._touched_s, self._excused
        stalled_s = 0.0 if since_s is None else time.monotonic() - since_s
        if excused_since_s == since_s:
            stalled_s -= excused_s
        return Standing(mark.number, mark.step, mark.stage, max(0.0, stalled_s))


HEADWAY = Headway()
