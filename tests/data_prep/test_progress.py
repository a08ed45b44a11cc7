"""A progress line gives amount and speed: in a log file once per interval, on a terminal as a bar,
or not at all."""

import io
import sys
from types import SimpleNamespace

import pytest

from data_prep.progress import ProgressLine, in_words


class Clock:
    """A clock that tests advance, and the output since the last call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.now_s, self.capsys = 1000.0, capsys
        monkeypatch.setattr(
            "data_prep.progress.time", SimpleNamespace(monotonic=lambda: self.now_s)
        )

    def printed(self) -> str:
        out, err = self.capsys.readouterr()
        assert out == ""
        return err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Clock:
    return Clock(monkeypatch, capsys)


def test_a_log_file_gets_counts_speed_and_time_left_every_ten_seconds(clock: Clock) -> None:
    with ProgressLine("packing", total=4000, unit="images") as line:
        for seconds, count, expected in (
            (5, 500, ""),
            (5, 500, "packing  1,000/4,000 images  100/s  a.tar  eta 30 s\n"),
            (9, 900, ""),
            (6, 600, "packing  2,500/4,000 images  100/s  a.tar  eta 15 s\n"),
        ):
            clock.now_s += seconds
            line.advance(count, note="a.tar")
            assert clock.printed() == expected


def test_work_that_had_begun_before_is_no_speed(clock: Clock) -> None:
    with ProgressLine("training", total=1000, unit="images", start=500) as line:
        for expected in ("", "training  700/1,000 images  10/s  eta 30 s\n"):
            clock.now_s += 10
            line.advance(100)
            assert clock.printed().endswith(expected)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.9, ""), (2.0, "packing  8/8 images  4/s  in 2 s\n")]
)
def test_long_work_leaves_a_line(clock: Clock, seconds: float, expected: str) -> None:
    with ProgressLine("packing", total=8, unit="images") as line:
        clock.now_s += seconds
        line.advance(8)
    assert clock.printed() == expected


def test_interrupted_work_leaves_no_line(clock: Clock) -> None:
    with pytest.raises(KeyboardInterrupt), ProgressLine("packing", total=8, unit="images"):
        clock.now_s += 3
        raise KeyboardInterrupt
    assert clock.printed() == ""


def test_the_first_step_is_not_part_of_the_speed(clock: Clock) -> None:
    with ProgressLine("demo", total=100, unit="step") as line:
        clock.now_s += 20  # for example compilation
        line.advance()
        assert clock.printed() == "demo  step 1/100\n"
        for _ in range(10):
            clock.now_s += 1
            line.advance(note="loss 3.214  500 images/s")
        assert clock.printed() == "demo  step 11/100  loss 3.214  500 images/s  eta 1 min 29 s\n"


def test_after_ten_minutes_a_log_file_gets_a_line_a_minute(clock: Clock) -> None:
    counts = []
    with ProgressLine("packing", total=4000, unit="images") as line:
        for _ in range(20):
            for _ in range(60):
                clock.now_s += 1
                line.advance()
            counts.append(len(clock.printed().splitlines()))
    assert counts == [6] * 9 + [5] + [1] * 10


def test_a_line_within_a_line_is_not_logged(clock: Clock) -> None:
    with ProgressLine("packing", total=120, unit="images") as outer:
        clock.now_s += 20
        outer.advance()
        clock.printed()
        with ProgressLine("checking", total=5, unit="files") as inner:
            for _ in range(5):
                clock.now_s += 20
                inner.advance()
        assert clock.printed() == ""
        outer.advance()
        assert clock.printed().startswith("packing  2/120 images")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (720, "12 min"),
        (3599, "1 h"),
        (4321, "1 h 12 min"),
        (86_399, "1 d"),
        (183_600, "2 d 3 h"),
    ],
)
def test_times_are_in_human_units(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_a_disabled_line_counts_and_prints_nothing(clock: Clock) -> None:
    with ProgressLine("packing", total=8, unit="images", enabled=False) as line:
        clock.now_s += 100
        line.advance(3)
        assert line.done == 3
    assert clock.printed() == ""


def test_a_terminal_gets_a_bar_with_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock(monkeypatch, capsys)
    with ProgressLine("packing", total=4000, unit="images") as line:
        line.advance(1)
        assert terminal.getvalue() == ""
        clock.now_s += 10
        line.advance(999, note="a.tar")
        with ProgressLine("checking", total=5, unit="files") as inner:
            inner.advance()
            line._display.refresh()
    assert "1,000/4,000 images  100/s  a.tar" in terminal.getvalue()
    assert "checking  1/5 files" in terminal.getvalue()
