"""Every shell file of the repository is shellcheck clean."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
    "shellcheck"
)


def shell_files() -> list[str]:
    """By extension or first line, of what git has or would take."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        name
        for name in sorted(set(names))
        if (REPOSITORY / name).is_file() and is_shell(REPOSITORY / name)
    ]


def is_shell(path: Path) -> bool:
    with open(path, "rb") as file:
        first = file.readline(100)
    interpreter = (
        first.split()[-1].rpartition(b"/")[2] if first.startswith(b"#!") and len(first) > 2 else b""
    )
    return path.suffix in (".sh", ".slurm") or interpreter in (b"sh", b"bash")


def test_shell_files_are_clean() -> None:
    names = shell_files()
    assert {
        "install.sh",
        ".ci/run",
        "cluster/submit",
        "cluster/pretrain.slurm",
        "tests/slurm/lab.sh",
    } <= set(names)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed (Debian: apt-get install shellcheck)")
    words = [SHELLCHECK, "--external-sources", "--format=gcc"]
    for files in ([*words, *names], [*words, "--shell=bash", "cluster/site.env"]):
        done = subprocess.run(files, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
