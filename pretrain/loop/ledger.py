"""What each step came to, entered when it is queued and read one step later, when that costs no wait.

`settle` reads whatever is open; the trainer calls it before anything that must not be late (evaluation, checkpoint, the end). What
is decided from it (to stop, too many bad samples or skipped steps) is decided by all ranks at the same step, because all of them
read the same sums. A number that is logged for a step is that step's, however late it is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from data_prep.progress import ProgressLine
from pretrain.loop.evaluate import Scores
from pretrain.loop.meter import Meter, in_words
from pretrain.loop.skipped_steps import SkippedSteps
from pretrain.ranks.collectives import Agreed, Exchange
from pretrain.ranks.hangs import PROGRESS
from pretrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class Entry:
    step: int
    """How many steps were done with this one."""
    lr: float
    applied: bool
    exchange: Exchange


@dataclass
class Ledger:
    meter: Meter
    line: ProgressLine
    tracker: Tracker
    skipped: SkippedSteps
    check_bad: Callable[[int, int], None]
    """Stops the run where too many samples (bad, of how many) do not decode."""
    log_due: Callable[[int], bool]
    global_batch_size: int
    samples_per_epoch: int
    start_step: int
    stopping: bool = False
    """Whether a rank was told to stop, as all ranks know."""
    num_bad: int = 0
    _open: list[Entry] = field(default_factory=list)
    _reading: dict[str, float] = field(default_factory=dict)
    _scores: Scores | None = None

    def enter(self, entry: Entry) -> None:
        """Keeps the newest entry open and settles the one before."""
        self.settle()
        self._open.append(entry)

    def settle(self) -> None:
        while self._open:
            entry = self._open.pop(0)
            PROGRESS.mark("waiting for the end of the step on all ranks", step=entry.step)
            self._settle(entry, entry.exchange.read())

    def _settle(self, entry: Entry, agreed: Agreed) -> None:
        self.stopping = self.stopping or agreed.votes > 0
        self.skipped.note(entry.step, agreed, applied=entry.applied)
        self.num_bad += agreed.num_bad
        self.check_bad(self.num_bad, (entry.step - self.start_step) * self.global_batch_size)
        self.meter.count()
        if self.log_due(entry.step):
            self._log(entry, agreed)
        self.line.advance()

    def _log(self, entry: Entry, agreed: Agreed) -> None:
        reading = {
            "train/loss": agreed.loss,
            "train/gradient_norm": agreed.gradient_norm,
            "train/lr": entry.lr,
            "train/samples": float(entry.step * self.global_batch_size),
            "train/epoch": entry.step * self.global_batch_size / self.samples_per_epoch,
            "train/bad_samples": float(self.num_bad),
            "train/skipped_steps": float(self.skipped.total),
        }
        self._reading = reading | self.meter.reading()
        self.tracker.metrics(self._reading, step=entry.step)
        self.show(self._scores)

    def show(self, scores: Scores | None) -> None:
        """On the progress line, from now on; new scores have a line of their own in a log."""
        is_new, self._scores = scores is not self._scores, scores
        self.line.note = in_words(self._reading, scores)
        if is_new:
            self.line.tell()
