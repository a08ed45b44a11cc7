"""Every benchmark runs at its smallest size with all its comparisons. The resulting numbers are not
checked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

pytestmark = [pytest.mark.benchmarks, pytest.mark.processes]

DRY_RUNS = {
    "checkpoint": ["--dry-run"],
    "gpu": ["--quick", "--only", "profile-mixer-z1-eager"],
    "listing": ["--dry-run"],
    "loader": ["--dry-run"],
    "models": ["--dry-run"],
    "nodes": ["--dry-run"],
    "order": ["--dry-run"],
    "prep": ["--dry-run"],
    "sparse": ["--dry-run"],
    "stores": ["--dry-run"],
    "train": ["--dry-run"],
    "train_ranks": ["--dry-run"],
    "transfer_evaluate": ["--dry-run"],
    "transfer_probe": ["--dry-run"],
}
ELSEWHERE = {"fashion", "findings", "gpu_profile", "images", "ours", "peers", "stores_link"}
"""Tables that tests in tests/configs check, commands of benchmarks/gpu.py, and programs that
benchmarks start."""


def test_no_benchmark_is_missing() -> None:
    scripts = {
        path.stem
        for path in (REPOSITORY / "benchmarks").glob("*.py")
        if "__main__" in path.read_text()
    }
    assert scripts == {*DRY_RUNS, *ELSEWHERE}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, f"benchmarks/{name}.py", *DRY_RUNS[name]]
    if name == "gpu":
        command += ["--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    missing = re.findall("^(.*): the peer failed", said, re.MULTILINE)
    may_miss = set() if os.environ.get("REQUIRE_FFCV") else {"FFCV", "FFCV, mixed by torch"}
    assert {*missing} <= may_miss, said
