"""Every benchmark runs at its smallest size, with all its peers. The figures of such a run mean
nothing and are not read."""

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
    "gpu": ["--quick", "--names", "profile-mixer-z1-eager"],
    "listing": ["--dry-run"],
    "loader": ["--dry-run"],
    "loader_decoders": ["--dry-run"],
    "models": ["--dry-run"],
    "order": ["--dry-run"],
    "prep": ["--dry-run"],
    "sparse": ["--dry-run"],
    "stores": ["--dry-run"],
    "train": ["--dry-run"],
    "train_ranks": ["--dry-run"],
    "transfer": ["--dry-run"],
}
ELSEWHERE = {"findings", "transfer_probe", "transfer_tune", "transfer_evaluate"}
"""Benchmarks that a test in tests/configs, or another benchmark, runs."""
PROCESSES = {
    "loader_ours",
    "loader_peers",
    "loader_formats",
    "prep_peers",
    "stores_ours",
    "stores_peers",
    "stores_link",
}
"""Processes that benchmarks start."""


def test_no_benchmark_is_missing() -> None:
    scripts = {
        path.stem
        for path in (REPOSITORY / "benchmarks").glob("*.py")
        if "__main__" in path.read_text()
    }
    assert scripts == {*DRY_RUNS, *ELSEWHERE, *PROCESSES}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, f"benchmarks/{name}.py", *DRY_RUNS[name]]
    if name == "gpu":
        command += ["--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    missing = re.findall(r"^(.*): (?:no row|could not be installed)", said, re.MULTILINE)
    assert missing == [] or (
        {"ffcv", "FFCV"} >= {*missing} and not os.environ.get("REQUIRE_FFCV")
    ), said
