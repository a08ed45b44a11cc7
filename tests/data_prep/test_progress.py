"""A progress line says what is done and how fast: in a log file once per interval, on a terminal as
a bar, nothing if disabled."""

import io
import sys
from types import SimpleNamespace

import pytest

from data_prep.progress import ProgressLine, in_words, progress


class Clock:
    """Seconds that pass when a test says so, and what has been reported since it was asked last."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str] | None = None
    ):
        self.now_s, self.capsys = 1000.0, capsys
        monkeypatch.setattr(
            "data_prep.progress.time", SimpleNamespace(monotonic=lambda: self.now_s)
        )

    def said(self) -> str:
        assert self.capsys is not None
        out, err = self.capsys.readouterr()
        assert out == ""
        return err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Clock:
    return Clock(monkeypatch, capsys)


def test_a_log_file_gets_a_line_with_counts_rate_and_time_left_every_ten_seconds(
    clock: Clock,
) -> None:
    line = ProgressLine("packing", total=4000, unit="images")
    clock.now_s += 5
    line.advance(500)
    assert clock.said() == ""
    clock.now_s += 5
    line.advance(500, note="train-000001.tar")
    assert clock.said() == "packing  1,000/4,000 images  100/s  train-000001.tar  eta 30 s\n"
    clock.now_s += 9
    line.advance(1)
    assert clock.said() == ""
    clock.now_s += 6
    line.advance(1499)
    assert clock.said() == "packing  2,500/4,000 images  100/s  train-000001.tar  eta 15 s\n"


def test_work_that_had_begun_before_counts_as_done_but_not_as_speed(clock: Clock) -> None:
    line = ProgressLine("training", total=1000, unit="steps", start=500)
    clock.now_s += 10
    line.advance(100)
    assert clock.said() == "training  600/1,000 steps  10/s  eta 40 s\n"


def test_the_end_of_long_work_is_told_and_of_short_work_is_not(clock: Clock) -> None:
    for seconds, expected in ((0.9, ""), (2.0, "packing  8/8 images  4/s  in 2 s\n")):
        with progress("packing", total=8, unit="images") as line:
            clock.now_s += seconds
            line.advance(8)
        assert clock.said() == expected


def test_work_that_ends_before_anything_is_done_promises_no_time(clock: Clock) -> None:
    with pytest.raises(KeyboardInterrupt), progress("packing", total=8, unit="images"):
        clock.now_s += 3
        raise KeyboardInterrupt
    assert clock.said() == "packing  0/8 images  0/s  in 3 s\n"


def test_steps_say_their_speed_themselves_and_the_first_of_them_does_not_count(
    clock: Clock,
) -> None:
    with progress("demo", total=100, unit="step") as line:
        clock.now_s += 20  # what the first step warms up
        line.advance()
        assert clock.said() == "demo  step 1/100\n"
        for _ in range(10):
            clock.now_s += 1
            line.advance(note="loss 3.214  500 images/s")
        assert clock.said() == "demo  step 11/100  loss 3.214  500 images/s  eta 1 min 29 s\n"


def test_after_ten_minutes_a_log_file_gets_a_line_a_minute(clock: Clock) -> None:
    line = ProgressLine("packing", total=4000, unit="images")
    counts = []
    for _ in range(20):
        for _ in range(60):
            clock.now_s += 1
            line.advance()
        counts.append(len(clock.said().splitlines()))
    assert counts == [6] * 9 + [5] + [1] * 10


def test_the_time_left_is_that_of_the_recent_speed(clock: Clock) -> None:
    line = ProgressLine("packing", total=10_000, unit="images")
    clock.now_s += 300
    line.advance(300)
    for _ in range(70):
        clock.now_s += 1
        line.advance(10)
    assert clock.said().splitlines()[-1] == "packing  1,000/10,000 images  10/s  eta 15 min"


def test_a_line_within_a_line_is_silent_where_it_is_short_and_spoils_no_speed(clock: Clock) -> None:
    with progress("packing", total=120, unit="images") as outer:
        for _ in range(20):
            clock.now_s += 1
            outer.advance()
        clock.said()
        with progress("checking", total=5, unit="files") as inner:
            for _ in range(5):
                clock.now_s += 1
                inner.advance()
        assert clock.said() == ""
        clock.now_s += 5
        outer.advance(5)
        # 1 a second; of 30 s a fifth went to checking, so what takes 95 s will take 114
        assert clock.said() == "packing  25/120 images  1/s  eta 1 min 54 s\n"


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
def test_times_are_said_in_human_units(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_a_disabled_line_counts_and_says_nothing(clock: Clock) -> None:
    with progress("packing", total=8, unit="images", enabled=False) as line:
        clock.now_s += 100
        line.advance(3)
        assert line.done == 3
    assert clock.said() == ""


def test_a_terminal_gets_a_bar_with_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        line = ProgressLine("packing", total=4000, unit="images")
        line.advance(1)
        assert terminal.getvalue() == ""
        clock.now_s += 10
        line.advance(999, note="train-000001.tar")
        line.close()
    assert "packing" in terminal.getvalue()
    assert "1,000/4,000 images  100/s  train-000001.tar" in terminal.getvalue()
