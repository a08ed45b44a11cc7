"""The files of a pre-flight: what was found in this job, whom the next start avoids, and what the whole fleet is like.

JOB_DIR/bad-nodes        NODE<TAB>reason, one line for each bad node; the job script excludes them when it requeues
JOB_DIR/preflight.jsonl  one line per rank and start, with all figures and how that start's pre-flight ended
FLEET.jsonl              one line per rank and start of all jobs: the history that medians are taken of

All are only appended to, in one write each: jobs share the fleet's file, and a killed one may leave a cut line.
"""

import datetime
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.preflight.figures import Figures, figures_from

BAD_NODES, LOG = "bad-nodes", "preflight.jsonl"
FLEET_AGE = datetime.timedelta(days=30)
"""Older figures are of other drivers and other cables."""
FLEET_BYTES = 8 * 2**20
"""Of the file's end, some 20,000 lines, are read."""


# ---- the job's -------------------------------------------------------------------------------------------------------


class Start:
    """This start of the job in JOB_DIR/preflight.jsonl, where also a rank that came too late finds how it ended."""

    def __init__(self, job_dir: Path, environment: Mapping[str, str] = os.environ):
        self._job_dir, self._log = job_dir, job_dir / LOG
        if "SLURM_STEP_ID" in environment:
            names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
            self._name, self._from_byte = ".".join(environment.get(name, "0") for name in names), 0
        else:  # other launchers may use an address again; what was there before is not ours
            self._name = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
            self._from_byte = self._log.stat().st_size if self._log.exists() else 0

    def outcome(self) -> int | None:
        """The exit code that was written for this start; None if nothing was."""
        for line in _lines_of_end(self._log, 2**20, from_byte=self._from_byte):
            if line.get("start") == self._name and isinstance(line.get("exit"), int):
                return int(line["exit"])
        return None

    def write(self, *, found: Sequence[Figures], bad: Mapping[str, Sequence[str]], code: int) -> None:
        """First the names, then the lines that tell waiting ranks that all is said."""
        about = {"time": _now().isoformat(timespec="seconds"), "start": self._name, "exit": code}
        if bad:
            reasons = {node: " ".join("; ".join(why).split()) for node, why in sorted(bad.items())}
            _append(self._job_dir / BAD_NODES, "".join(f"{node}\t{reason}\n" for node, reason in reasons.items()))
        lines = [about | figures.as_json() for figures in found] or [about]
        _append(self._log, "".join(json.dumps(line) + "\n" for line in lines))

    def name_unheard(self, node: str, *, reason: str, code: int) -> int:
        """For a rank that rank 0 never answered: the first of these speaks for all, unless rank 0 has spoken. The exit code."""
        with open(self._job_dir / f".{LOG}.lock", "w") as lock:
            with suppress(OSError):  # where the file system has no locks, a name may stand there twice
                fcntl.flock(lock, fcntl.LOCK_EX)
            said = self.outcome()
            if said is None:
                print(f"preflight: {node} is bad: {reason}", flush=True)
                self.write(found=(), bad={node: [reason]}, code=code)
        return code if said is None else said


def named_before(job_dir: Path) -> set[str]:
    """The bad nodes of this job's earlier starts, whoever named them."""
    try:
        lines = (job_dir / BAD_NODES).read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line.partition("\t")[0] for line in lines if line.strip()}


# ---- the fleet's -----------------------------------------------------------------------------------------------------


def append_to_fleet(path: Path, found: Sequence[Figures], *, is_part: bool = False) -> None:
    """`is_part`: of nodes of which the job has only some GPUs, whose bandwidth says nothing about other GPUs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"time": _now().isoformat(timespec="seconds")}
    left_out = ("rank", "faults", *(["node_gb_per_s"] if is_part else []))
    lines = [about | {k: v for k, v in figures.as_json().items() if k not in left_out} for figures in found]
    _append(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_fleet(path: Path) -> list[Figures]:
    """The newest figure of each kind of each (node, local rank), apart by how many ranks the node had. A line that is cut, foreign
    or too old counts as none."""
    newest: dict[tuple[str, int, int], dict[str, Any]] = {}
    for line in _lines_of_end(path, FLEET_BYTES):
        with suppress(KeyError, TypeError, ValueError):
            if _now() - datetime.datetime.fromisoformat(line["time"]) > FLEET_AGE:
                continue
            figures_from(line | {"rank": 0})
            key = (line["node"], line["local_rank"], line["num_local_ranks"])
            before = newest.get(key, {})
            if before.get("device") != line["device"]:
                before = {}
            newest[key] = before | {name: value for name, value in line.items() if value not in (None, {}, [])}
    return [figures_from(values | {"rank": 0}) for values in newest.values()]


def _lines_of_end(path: Path, num_bytes: int, *, from_byte: int = 0) -> Iterator[dict[str, Any]]:
    """The whole lines within so many bytes of the end that are JSON objects."""
    try:
        with open(path, "rb") as file:
            file.seek(max(from_byte, os.fstat(file.fileno()).st_size - num_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _append(path: Path, text: str) -> None:
    """After another writer's cut line ours begins anew."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * is_cut + text).encode())
    finally:
        os.close(descriptor)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
