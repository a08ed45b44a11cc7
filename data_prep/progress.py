"""Progress lines with speed and time left: a live bar on a terminal, occasional lines in a log
file.

    packing  1,000/4,000 images  100/s  train-000001.tar  eta 30 s
    demo-mlp  step 1,200/9,000  loss 3.214  top-1 41.2 %  12,345 images/s  MFU 54 %  eta 1 h 12 min

A log file gets a line every ten seconds at first, and every minute after ten minutes. Work that
ends within a second leaves no line. Nested progress (an evaluation during a training) is a second
bar, and is not logged.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

LOG_INTERVAL_S = 10.0
SELDOM_AFTER_S, SELDOM_INTERVAL_S = 600.0, 60.0
SPEED_S = 600.0
"""Time in seconds over which speed is measured (at most the last 1,000 calls of `advance`)."""
SILENT_S = 1.5
"""Time in seconds after which work without progress prints its first line."""
DRAWN_AFTER_S = 0.5

_open_lines: list["ProgressLine"] = []


class ProgressLine:
    """A progress line, as a context manager. `note` is free text, such as a file name or a loss. If
    the unit is "step", the note must contain the speed."""

    def __init__(self, title: str, *, total: int, unit: str, start: int = 0, enabled: bool = True):
        self.title, self.total, self.unit, self.done, self.note = title, total, unit, start, ""
        self._start, self._enabled, self._logged_s = start, enabled, time.monotonic()
        self._is_inner = bool(_open_lines)
        self._display: Progress = _open_lines[0]._display if _open_lines else _new_display()
        self._display.add_task("", total=total, completed=start, line=self)
        self._task = self._display.tasks[-1]
        self._silence = threading.Timer(SILENT_S, self._print)
        self._silence.daemon = True
        if enabled:
            _open_lines.append(self)
            if not self._is_inner:
                self._silence.start()

    def advance(self, count: int = 1, *, note: str | None = None) -> None:
        self.done += count
        self.note = self.note if note is None else note
        self._silence.cancel()
        if not self._enabled:
            return
        self._display.update(self._task.id, completed=self.done)
        elapsed_s = self._task.elapsed or 0.0
        interval_s = LOG_INTERVAL_S if elapsed_s < SELDOM_AFTER_S else SELDOM_INTERVAL_S
        if not self._display.disable:
            if elapsed_s >= DRAWN_AFTER_S:
                self._display.start()
        elif not self._is_inner and time.monotonic() - self._logged_s >= interval_s:
            self.log_now()

    def log_now(self) -> None:
        """Log a line now, unless the end of the block will log the same state."""
        if self._enabled and self._display.disable and self.done < self.total:
            self._logged_s = time.monotonic()
            self._print(self.eta(self._task))

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the bar. Finished work that took at least a second leaves its last state on the
        screen."""
        took_s = self._task.elapsed or 0.0
        self._silence.cancel()
        self._display.remove_task(self._task.id)
        if not self._enabled:
            return
        _open_lines.remove(self)
        if not self._is_inner:
            self._display.stop()
            if kind is None and took_s >= 1.0:
                self._print(f"in {in_words(took_s)}")

    def eta(self, task: Task) -> str:
        left_s = task.time_remaining
        return f"eta {in_words(left_s)}" if left_s and self.done < self.total else ""

    def text(self, task: Task) -> str:
        counts = f"{self.done:,}/{self.total:,}"
        if self.unit == "step":
            counts = f"step {counts}"
        else:
            mean = (self.done - self._start) / max(task.elapsed or 0.0, 1e-9)
            counts = f"{counts} {self.unit}  {task.speed or mean:,.0f}/s"
        return "  ".join(filter(None, [self.title, counts, self.note]))

    def _print(self, ending: str = "") -> None:
        print("  ".join(filter(None, [self.text(self._task), ending])), file=sys.stderr, flush=True)


class _Words(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["line"].text(task), no_wrap=True, overflow="ellipsis")


class _Eta(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["line"].eta(task), no_wrap=True)


def _new_display() -> Progress:
    return Progress(
        BarColumn(bar_width=24),
        _Words(Column(no_wrap=True, overflow="ellipsis")),
        _Eta(Column(no_wrap=True)),
        console=Console(stderr=True),
        refresh_per_second=4,
        speed_estimate_period=SPEED_S,
        transient=True,
        get_time=time.monotonic,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def doing(what: str, *, enabled: bool = True) -> Iterator[None]:
    """Print `what` if the block takes longer than SILENT_S."""
    silence = threading.Timer(SILENT_S, print, [what], {"file": sys.stderr, "flush": True})
    silence.daemon = True
    if enabled:
        silence.start()
    try:
        yield
    finally:
        silence.cancel()


def in_words(seconds: float) -> str:
    """Return a duration in words: 45 s, 3 min 20 s, 12 min, 1 h 12 min, 2 d 3 h."""
    if seconds < 59.5:
        return f"{round(seconds)} s"
    if 599.5 <= seconds < 3570:
        return f"{round(seconds / 60)} min"
    units = (
        (1, 60, "min", "s")
        if seconds < 3570
        else (60, 60, "h", "min")
        if seconds < 86_370
        else (3600, 24, "d", "h")
    )
    unit_s, size, large, small = units
    whole, rest = divmod(round(seconds / unit_s), size)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
