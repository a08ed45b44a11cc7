"""The attempts of a job in jobs/JOB/attempts.jsonl, and the limit of attempts without progress.
Imports only the standard library.

Each attempt has two lines: {"event": "begin", "restart", "mark", "nodes", "time"} and {"event":
"end", "restart", "mark", "how", "seconds", "time"}. `mark` is a checksum of the run's checkpoints,
or "unknown"; an attempt that does not change it made no progress. `how`: finished, failed, refused
(exit code 2), stopped, bad-node, or busy (another attempt held the run's lock, no failure). If an
attempt has no end, its node was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


def append_attempt(path: Path, line: Mapping[str, object]) -> None:
    with open(path, "ab+") as file:
        file.seek(max(0, file.tell() - 1))
        is_cut = file.read() not in (b"", b"\n")  # cut by the end of its node
        file.write(("\n" * is_cut + json.dumps(line) + "\n").encode())


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Return `began` (a mark), `restart`, `how` and `seconds` of each attempt, in order."""
    attempts: list[dict[str, Any]] = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError):  # cut by a kill
            each = json.loads(line)
            if each["event"] == "begin":
                attempts.append({"began": each["mark"], "restart": each["restart"], "how": "lost"})
            elif attempts and attempts[-1]["restart"] == each["restart"]:
                attempts[-1].update(how=each["how"], seconds=each["seconds"])
    return attempts


def has_trained(attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if an attempt had running ranks: they ended it, or a later attempt found more
    checkpoints."""
    is_new = len({each["began"] for each in attempts if each["began"] != UNKNOWN}) > 1
    return is_new or any(each["how"] not in ("bad-node", "busy", "lost") for each in attempts)


def give_up_reason(attempts: Sequence[Mapping[str, Any]], *, mark: str, limit: int) -> str | None:
    """Return None while the job may start again. Only the last attempts at this mark count."""
    idle: list[str] = []
    for each in reversed(attempts):
        if each["began"] not in (mark, UNKNOWN):
            break
        idle.append(each["how"])
    failed, busy = idle.count("failed"), idle.count("busy")
    if failed >= limit:
        count = f"failed {failed} times without a new checkpoint (MAX_IDLE_STARTS={limit})"
    elif len(idle) >= 3 * limit:
        count = f"{len(idle)} attempts without a new checkpoint (3 x MAX_IDLE_STARTS)"
        count += f", {failed} failed, {busy} met another attempt that holds the run"
    else:
        return None
    return f"{count}; not started again; submit it again to resume"
