"""The event log accepts every line at once, loses none, and has an incomplete line only at its end,
whatever the disk does."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from pretrain.tracking.tracker import Journal, image_name


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_a_disk_that_is_full_for_a_while_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk takes a few bytes of a line, then none, then a few, and finally all."""
    real, room = os.write, [5, 0, 0, 11, 0]

    def write(descriptor: int, data: bytes) -> int:
        if not room:
            return real(descriptor, data)
        count = room.pop(0)
        if count == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:count])

    monkeypatch.setattr("pretrain.tracking.tracker.JOURNAL_RETRY_S", 0.01)
    monkeypatch.setattr("pretrain.tracking.tracker.os.write", write)
    journal = Journal(tmp_path / "journal.jsonl")
    for number in range(50):
        journal.append({"event": "x", "number": number})
    assert journal.close(timeout_s=30)
    assert not room and numbers(journal.path) == list(range(50))
    said = capsys.readouterr().err
    assert (
        said.count("cannot be written (No space left on device)") == 1
        and said.count("nothing was lost") == 1
    )


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, hangs, free = os.write, threading.Event(), threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        hangs.set()
        assert free.wait(60)
        return real(descriptor, data)

    monkeypatch.setattr("pretrain.tracking.tracker.os.write", write)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append({"event": "x", "number": 0})
    assert hangs.wait(60)
    for number in range(1, 1000):  # would not end if it waited for the disk
        journal.append({"event": "x", "number": number})
    assert not journal.close(timeout_s=0.05)  # the end of the run does not wait for ever, either
    free.set()
    journal._writer.join(60)
    assert numbers(journal.path) == list(range(1000))


def test_lines_of_many_threads_are_whole_and_in_each_ones_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")

    def tell(who: int) -> None:
        for count in range(200):
            journal.append({"event": "x", "number": 1000 * who + count, "filler": "ä" * who * 50})

    threads = [threading.Thread(target=tell, args=(who,)) for who in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert journal.close(timeout_s=30)
    found = numbers(journal.path)
    assert [[number for number in found if number // 1000 == who] for who in range(5)] == [
        [1000 * who + count for count in range(200)] for who in range(5)
    ]


def test_a_next_start_knows_the_last_steps_and_removes_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = [
        {"event": "metrics", "step": 3, "values": {"loss": 1.0, "lr": 0.1}},
        {"event": "metrics", "step": 5, "values": {"loss": 0.5}},
        {"event": "image", "step": 4, "key": "first", "path": "x.png"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "metr')
    journal = Journal(path)
    assert journal.last_steps == {"loss": 5, "lr": 3, image_name("first"): 4}
    journal.append({"event": "end"})
    assert journal.close(timeout_s=30)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "metrics",
        "metrics",
        "image",
        "end",
    ]
