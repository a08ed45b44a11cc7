"""Checkouts in an empty directory with stand-ins for SLURM, and runs that look finished without
training."""

import os
import re
import subprocess
import sys
from pathlib import Path

from cluster.work import Work
from data_prep.settings import dump
from pretrain.checkpoints.run import CONFIG_FILE, save_result
from tests.ranks import REPOSITORY


def whole_checkout(place: Path) -> Path:
    for floor in ("data_prep", "pretrain", "finetune", "analysis", "cluster", "configs"):
        (place / floor).symlink_to(REPOSITORY / floor)
    (place / ".venv").symlink_to(sys.prefix)
    return place


def stand_in(root: Path, name: str, does: str) -> None:
    """Write a program of shell commands. A link of this name is replaced."""
    (root / name).unlink(missing_ok=True)
    (root / name).write_text(f"#!/bin/sh\n{does}\n")
    (root / name).chmod(0o755)


def run(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = outer | {"PATH": f"{root}:{os.environ['PATH']}"} | environment
    return subprocess.run(
        words, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def finish(work: Work) -> None:
    """Write the files that `pretrain train` leaves, with the run's settings."""
    run_dir = Path(work.writes)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / CONFIG_FILE).write_text(dump(work.settings))
    save_result(run_dir, {"step": 1})


def has_error(output: str, field: str, code: str) -> bool:
    """Return True if a program printed this error. The code "" matches any code. A field may have
    several words, such as `small.yaml: pretrain: member 1`."""
    lines = [re.sub("^(wide-mlps|cluster/submit): ", "", line) for line in output.splitlines()]
    return any(
        line.startswith(f"{field}: ") and line.endswith(f"[{code}]" * bool(code)) for line in lines
    )
