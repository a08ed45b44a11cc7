"""The examples of docs/python.md with other trainers, in a separate environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

TRAINERS = {
    "lightning": "lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities torchmetrics",
    "lightly": "lightly==1.6.0 pytorch-lightning==2.6.6 lightning-utilities torchmetrics hydra-core"
    " omegaconf antlr4-python3-runtime==4.9.3",
}
UV = [sys.executable, "-m", "uv", "--quiet"]


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_example_runs(trainer: str, shapes: Path, tmp_path: Path) -> None:
    """Our packages come from this environment, all others without their dependencies."""
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run([*UV, "venv", "--python", sys.executable, python.parent.parent], check=True)
    install = [*UV, "pip", "install", "--no-deps", "--python", str(python)]
    done = subprocess.run(
        [*install, *TRAINERS[trainer].split()], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{trainer} cannot be installed: {done.stderr[-200:]}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(shapes)
    page = (REPOSITORY / "docs" / "python.md").read_text()
    (block,) = re.findall(
        rf"```python\n((?:(?!```).)*?import {trainer}\n.*?)```", page, re.DOTALL
    ) or (re.findall(rf"```python\n((?:(?!```).)*?from {trainer}\..*?)```", page, re.DOTALL))
    paths = ":".join([str(REPOSITORY), *(path for path in sys.path if "site-packages" in path)])
    subprocess.run(
        [str(python), "-c", block], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, check=True
    )
