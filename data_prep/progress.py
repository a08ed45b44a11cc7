"""One calm progress line with rate and time left: a live bar on a terminal, a line every ten seconds in a log file.

Starting a bar is free; it draws nothing for work that ends within a second.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LOG_INTERVAL_S = 10.0


class ProgressLine:
    """`advance` counts finished work; `note` is free text behind the bar (loss, file name)."""

    def __init__(self, title: str, *, total: int, unit: str, start: int = 0, enabled: bool = True):
        self.title, self.total, self.unit, self.done, self.note = title, total, unit, start, ""
        self._start, self._started_s, self._said_s = start, time.monotonic(), time.monotonic()
        self._bar: Progress | None = None
        self._enabled = enabled

    def advance(self, count: int = 1, *, note: str | None = None) -> None:
        self.done += count
        if note is not None:
            self.note = note
        if not self._enabled:
            return
        if sys.stderr.isatty():
            self._draw()
        elif time.monotonic() - self._said_s >= LOG_INTERVAL_S:
            self._say()

    def close(self, *, failed: bool = False) -> None:
        """Says the last state, once; after a failure, which has a line of its own, only the bar ends."""
        if failed:
            self._enabled = False
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled and time.monotonic() - self._started_s >= 1.0:
            self._say()

    def rate(self) -> float:
        return (self.done - self._start) / max(time.monotonic() - self._started_s, 1e-9)

    def _draw(self) -> None:
        if self._bar is None:
            if time.monotonic() - self._started_s < 0.5:
                return
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, text="")
        self._bar.update(self._task, completed=self.done, text=self._text())

    def _say(self) -> None:
        self._said_s = time.monotonic()
        rate = self.rate()
        left = f"  {(self.total - self.done) / rate:.0f} s left" if rate > 0 else ""
        print(f"{self.title}  {self._text()}{left}", file=sys.stderr, flush=True)

    def _text(self) -> str:
        return f"{self.done:,}/{self.total:,} {self.unit}  {self.rate():,.0f}/s  {self.note}"


@contextmanager
def progress(title: str, *, total: int, unit: str, start: int = 0, enabled: bool = True) -> Iterator[ProgressLine]:
    line = ProgressLine(title, total=total, unit=unit, start=start, enabled=enabled)
    try:
        yield line
    except Exception:
        line.close(failed=True)
        raise
    finally:
        line.close()
