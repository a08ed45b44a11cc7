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

BENCHMARKS = (
    "checkpoint",
    "gpu",
    "listing",
    "loader",
    "models",
    "nodes",
    "order",
    "prep",
    "sparse",
    "stores",
    "train",
    "train_ranks",
    "transfer_evaluate",
    "transfer_probe",
)
ELSEWHERE = {"fashion", "findings", "gpu_profile", "images", "ours", "peers", "stores_link"}
"""Tables that tests in tests/configs check, commands of benchmarks/gpu.py, and programs that
benchmarks start."""


def test_no_benchmark_is_missing() -> None:
    scripts = {
        path.stem
        for path in (REPOSITORY / "benchmarks").glob("*.py")
        if "__main__" in path.read_text()
    }
    assert scripts == {*BENCHMARKS, *ELSEWHERE}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    words = ["--dry-run"]
    if name == "gpu":
        words = ["--quick", "--only", "profile-mixer-z1-eager", "--out", f"{tmp_path}/found.json"]
    command = [sys.executable, f"benchmarks/{name}.py", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    missing = re.findall("^(.*): the peer failed", said, re.MULTILINE)
    may_miss = set() if os.environ.get("REQUIRE_FFCV") else {"FFCV", "FFCV, mixed by torch"}
    assert {*missing} <= may_miss, said
