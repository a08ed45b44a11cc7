"""One calm progress line with speed and time left: a live bar on a terminal, a line now and then in
a log file.

    packing  1,000/4,000 images  100/s  train-000001.tar  eta 30 s
    demo-mlp  step 1,200/9,000  loss 3.214  top-1 41.2 %  12,345 images/s  MFU 54 %  eta 1 h 12 min

In a log file that is a line every ten seconds at first, and every minute after ten minutes.
Starting a line is free; work that ends within a second leaves none. A line within a line (the
evaluation during a training) takes the outer one's place while it lasts. The outer one's speed does
not count that time; its time left does, in the share that it had so far.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

LOG_INTERVAL_S = 10.0
SELDOM_AFTER_S, SELDOM_TIMES = 600.0, 6
RECENT_S = 60.0
SILENT_S = 1.5
"""So long nothing is said of work that has begun."""
_BAR, _NARROWEST = 24, 8

_open_lines: list["ProgressLine"] = []
"""The outermost first; only it draws."""


class ProgressLine:
    """`advance` counts finished work; `note` is free text behind it (file name; loss and speed)."""

    def __init__(self, title: str, *, total: int, unit: str, start: int = 0, enabled: bool = True):
        self.title, self.total, self.unit, self.done, self.note = title, total, unit, start, ""
        self._start, self._started_s, self._logged_s = start, time.monotonic(), time.monotonic()
        self._elsewhere_s = 0.0
        self._recent = deque([(0.0, start)])
        """(seconds of work, done), for the speed of the last minute."""
        self._bar: Progress | None = None
        self._enabled = enabled
        self._outer = _open_lines[-1] if enabled and _open_lines else None
        self.silence = doing(lambda: self._text(""), enabled=enabled and self._outer is None)

    def advance(self, count: int = 1, *, note: str | None = None) -> None:
        self.done += count
        self.note = self.note if note is None else note
        self.silence.end()
        if not self._enabled:
            return
        now_s = self._worked_s()
        if self.unit == "step" and len(self._recent) == 1 and self._recent[0][1] == self._start:
            self._recent[0] = (
                now_s,
                self.done,
            )  # the first step warms everything up: the others are faster
        if now_s - self._recent[-1][0] >= RECENT_S / 60:
            self._recent.append((now_s, self.done))
        while len(self._recent) > 1 and self._recent[1][0] <= now_s - RECENT_S:
            self._recent.popleft()
        if sys.stderr.isatty():
            (_open_lines[0] if self._outer else self)._draw(self, self._left())
            return
        seldom = time.monotonic() - self._started_s >= SELDOM_AFTER_S
        if time.monotonic() - self._logged_s >= LOG_INTERVAL_S * (SELDOM_TIMES if seldom else 1):
            self._log(self._left())

    def log_now(self) -> None:
        """Logs a line at once for what has just been found; a terminal's bar shows it anyway."""
        if self._enabled and not sys.stderr.isatty():
            self._log(self._left())

    def close(self, *, failed: bool = False) -> None:
        """Shows the last state, once; after a failure, which has a line of its own, only the bar
        ends."""
        took_s = time.monotonic() - self._started_s
        self.silence.end()
        if self._outer is not None:
            self._outer._elsewhere_s += took_s
        elif self._bar is not None:
            if not failed:
                self._draw(self, f"in {in_words(took_s)}")
            self._bar.stop()
        elif self._enabled and not failed and took_s >= 1.0:
            self._log(f"in {in_words(took_s)}")
        self._enabled = False

    def rate(self) -> float:
        """Of the last minute, without what other lines took."""
        before_s, before = self._recent[0]
        return (self.done - before) / max(self._worked_s() - before_s, 1e-9)

    def _worked_s(self) -> float:
        return time.monotonic() - self._started_s - self._elsewhere_s

    def _left(self) -> str:
        rate = self.rate()
        if rate <= 0 or self.done >= self.total:
            return ""
        share_of_others = 1 + self._elsewhere_s / max(self._worked_s(), 1e-9)
        return f"eta {in_words((self.total - self.done) / rate * share_of_others)}"

    def _draw(self, line: "ProgressLine", ending: str) -> None:
        """This line's bar, with the text of `line`, which is this one or one within it."""
        if self._bar is None:
            if time.monotonic() - self._started_s < 0.5:
                return
            self._column = BarColumn(bar_width=_BAR, table_column=Column(no_wrap=True))
            text = TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            )
            self._bar = Progress(
                self._column, text, console=Console(stderr=True), refresh_per_second=4
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total)
        before = "" if line is self else f"{self.title}  "
        width = self._bar.console.width - 1
        shown = before + line._text(ending, width=width - _NARROWEST - len(before))
        self._column.bar_width = max(_NARROWEST, min(_BAR, width - len(shown)))
        self._bar.update(self._task, completed=self.done, total=self.total, description=shown)

    def _log(self, ending: str) -> None:
        self._logged_s = time.monotonic()
        print(self._text(ending), file=sys.stderr, flush=True)

    def _text(self, ending: str, *, width: int | None = None) -> str:
        """Where it is too long, the last parts of the note go."""
        counts = f"{self.done:,}/{self.total:,}"
        counts = (
            f"step {counts}"
            if self.unit == "step"
            else f"{counts} {self.unit}  {self.rate():,.0f}/s"
        )
        notes = self.note.split("  ")
        while True:
            text = "  ".join(part for part in [self.title, counts, *notes, ending] if part)
            if width is None or len(text) <= width or not notes:
                return text
            notes.pop()


def in_words(seconds: float) -> str:
    """45 s, 3 min 20 s, 12 min, 1 h 12 min, 2 d 3 h."""
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


class doing:  # noqa: N801 (it is used as a function)
    """Says what is being done, if it takes longer than a moment."""

    def __init__(self, what: str | Callable[[], str], *, enabled: bool = True):
        self._what, self._timer = what, threading.Timer(SILENT_S, self._say) if enabled else None

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _say(self) -> None:
        print(
            self._what if isinstance(self._what, str) else self._what(), file=sys.stderr, flush=True
        )


@contextmanager
def progress(
    title: str, *, total: int, unit: str, start: int = 0, enabled: bool = True
) -> Iterator[ProgressLine]:
    """Work whose unit is "step" gives its speed in its note."""
    line = ProgressLine(title, total=total, unit=unit, start=start, enabled=enabled)
    failed = False
    if enabled:
        _open_lines.append(line)
        line.silence.begin()
    try:
        yield line
    except Exception:
        failed = True
        raise
    finally:
        if enabled:
            _open_lines.remove(line)
        line.close(failed=failed)
