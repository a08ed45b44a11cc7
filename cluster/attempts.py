"""The attempts of a job in jobs/JOB/attempts.jsonl, and the limit of attempts without progress.
Imports only the standard library.

Each attempt has two lines: {"event": "begin", "restart", "mark", "nodes", "time"} and {"event":
"end", "restart", "mark", "how", "seconds", "time"}. `mark` is a checksum of the run's progress, or
"unknown". An attempt that does not change the mark made no progress. `how`: finished, failed,
refused (exit code 2), stopped, bad-node, or busy (the run was locked, which is no failure). If the
line "end" is missing, the node was lost.
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
        is_cut = file.read() not in (b"", b"\n")  # a line cut by a lost node
        file.write(("\n" * is_cut + json.dumps(line) + "\n").encode())


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Return a dict for each attempt, in order: `began` (mark at the start), `restart`, `how`."""
    attempts: list[dict[str, Any]] = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError):  # an incomplete line
            each = json.loads(line)
            if each["event"] == "begin":
                attempts.append({"began": each["mark"], "restart": each["restart"], "how": "lost"})
            elif attempts and attempts[-1]["restart"] == each["restart"]:
                attempts[-1]["how"] = each["how"]
    return attempts


def has_trained(attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if ranks ran in an attempt: its recorded end is not bad-node or busy, or a later
    attempt began with another mark."""
    is_new = len({each["began"] for each in attempts if each["began"] != UNKNOWN}) > 1
    return is_new or any(each["how"] not in ("bad-node", "busy", "lost") for each in attempts)


def give_up_reason(attempts: Sequence[Mapping[str, Any]], *, mark: str, limit: int) -> str | None:
    """Return the reason to give up after `limit` failures, or 3 x `limit` attempts, that began with
    `mark` or an unknown mark. Return None if the job may start again."""
    idle: list[str] = []
    for each in reversed(attempts):
        if each["began"] not in (mark, UNKNOWN):
            break
        idle.append(each["how"])
    failed, busy = idle.count("failed"), idle.count("busy")
    if failed >= limit:
        count = f"failed {failed} times without a new checkpoint (MAX_IDLE_STARTS={limit})"
    elif len(idle) >= 3 * limit:
        count = f"{len(idle)} attempts made no new checkpoint (3 x MAX_IDLE_STARTS)"
        count += f": {failed} failed, {busy} found the run locked"
    else:
        return None
    return f"{count}; not requeued. To resume, submit the job again"
