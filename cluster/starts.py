"""The starts of a job in jobs/JOB/starts.jsonl, and when they have led nowhere too often. Imports
only the standard library.

Each start has two lines: {"event": "begin", "restart", "mark", "nodes", "time"} and {"event":
"end", "restart", "mark", "how", "seconds", "time"}. `mark` is a checksum of the run's checkpoints,
or "unknown"; a start that does not change it led nowhere. `how`: finished, failed, refused (exit
code 2), stopped, bad-node, or busy (another start held the run's lock, which is no failure). The
node of a start without an end was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


def append_start(path: Path, line: Mapping[str, object]) -> None:
    with open(path, "ab+") as file:
        file.seek(max(0, file.tell() - 1))
        is_cut = file.read() not in (b"", b"\n")  # by the end of the node that wrote it
        file.write(("\n" * is_cut + json.dumps(line) + "\n").encode())


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return `began` (a mark), `restart`, `how` and `seconds` of each start, in order."""
    starts: list[dict[str, Any]] = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError):  # a kill has cut it
            each = json.loads(line)
            if each["event"] == "begin":
                starts.append({"began": each["mark"], "restart": each["restart"], "how": "lost"})
            elif starts and starts[-1]["restart"] == each["restart"]:
                starts[-1].update(how=each["how"], seconds=each["seconds"])
    return starts


def has_trained(starts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if one of them got as far as its ranks: it ended by them, or a later start found
    more checkpoints."""
    is_new = len({each["began"] for each in starts if each["began"] != UNKNOWN}) > 1
    return is_new or any(each["how"] not in ("bad-node", "busy", "lost") for each in starts)


def give_up_reason(starts: Sequence[Mapping[str, Any]], *, mark: str, limit: int) -> str | None:
    """Return None while the job may start again: the last starts at the present mark count."""
    idle: list[str] = []
    for each in reversed(starts):
        if each["began"] not in (mark, UNKNOWN):
            break
        idle.append(each["how"])
    failed, busy = idle.count("failed"), idle.count("busy")
    if failed >= limit:
        count = f"failed {failed} times without a new checkpoint (MAX_IDLE_STARTS={limit})"
    elif len(idle) >= 3 * limit:
        count = f"{len(idle)} starts without a new checkpoint (3 x MAX_IDLE_STARTS)"
        count += f", {failed} failed, {busy} met another start that holds the run"
    else:
        return None
    return f"{count}; not started again; submit it again to go on"
