"""The starts of a job: jobs/JOB/starts.jsonl, and when so many of them have led nowhere that it
gives up. Imports the standard library.

Two lines for each start: {"event": "begin", "restart", "mark", "nodes", "time"} and {"event":
"end", "restart", "mark", "how", "seconds"}. `mark` is a checksum of the run's checkpoints, or
"unknown": a start that left it as it found it led nowhere. `how`: finished, failed, refused (exit
code 2), stopped, bad-node, or busy: it waited for another start's lock, which is no failure. A
start without an end is one whose node was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


def read_starts(path: Path) -> list[dict[str, Any]]:
    """A record for each start, in order: of its end, too, where it has one."""
    starts: list[dict[str, Any]] = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError):  # a kill has cut it
            each = json.loads(line)
            if each["event"] == "begin":
                starts.append(
                    {"began": each["mark"], "restart": each["restart"], "how": "lost", "seconds": 0}
                )
            elif starts and starts[-1]["restart"] == each["restart"]:
                starts[-1].update(how=each["how"], seconds=each["seconds"])
    return starts


def has_trained(starts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of them got as far as its ranks."""
    return any(each["how"] not in ("bad-node", "busy", "lost") for each in starts)


def give_up_reason(
    starts: Sequence[Mapping[str, Any]], *, mark: str, limit: int, run_dir: str
) -> str | None:
    """None while the job may start again. Counted are the last starts that began at the present
    mark; and, as two jobs may share a run_dir, where the one fails as long as the other progresses,
    those that failed in a row within the hour at any mark.
    """
    idle = []
    for each in reversed(starts):
        if each["began"] not in (mark, UNKNOWN):
            break
        idle.append(each["how"])
    failed, busy, in_a_row = idle.count("failed"), idle.count("busy"), 0
    for each in reversed(starts):
        if each["how"] != "failed" or each["seconds"] >= 3600:
            break
        in_a_row += 1
    if failed >= limit:
        return (
            f"failed {failed} times without a new checkpoint (MAX_IDLE_STARTS={limit}); not started"
            " again; submit it again to go on"
        )
    if len(idle) >= 3 * limit:
        hint = "Is the time limit too short, or preemption too frequent for checkpoint.every?"
        if 2 * busy > len(idle) - failed:
            hint = (
                f"{busy} of them met another start that holds {run_dir}, see the log: end that one,"
                " or wait for its end."
            )
        return (
            f"{len(idle)} starts without a new checkpoint (3 x MAX_IDLE_STARTS), {failed} of them"
            f" failures; not started again. {hint} Submit it again to go on"
        )
    if in_a_row >= 3 * limit:
        return (
            f"failed {in_a_row} times in a row, though there were new checkpoints; not started"
            f" again. Does another job write {run_dir}?"
        )
    return None
