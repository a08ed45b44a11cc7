"""A whole checkout in an empty directory, whose SLURM is stand-ins: what cluster's shell files need."""

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import REPOSITORY


def whole_checkout(place: Path) -> Path:
    for floor in ("data_prep", "pretrain", "finetune", "analysis", "cluster", "configs"):
        (place / floor).symlink_to(REPOSITORY / floor)
    (place / ".venv").symlink_to(sys.prefix)
    return place


def stand_in(root: Path, name: str, does: str) -> None:
    (root / name).write_text(f"#!/bin/sh\n{does}\n")
    (root / name).chmod(0o755)


def run(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = outer | {"PATH": f"{root}:{os.environ['PATH']}"} | environment
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)
