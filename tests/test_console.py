"""An unwritable console (a full disk, a pipe without a reader, closed descriptors) stops no
work."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.training import write_config

pytestmark = pytest.mark.processes

COMMANDS = {
    "train": "pretrain train {config} run_dir={out} train.duration=4_steps --ranks 2",
    "train alone": "pretrain train {config} run_dir={out} train.duration=4_steps",
    "build": (
        "data_prep build --source synthetic --out {out} source.num_train_per_class=9 image_size=16"
        " num_workers=2"
    ),
    "models": "pretrain models",
}
WRITES = {"train": "result.json", "train alone": "result.json", "build": "manifest.json"}
"""Last file that a command writes."""


@contextmanager
def console(kind: str) -> Iterator[dict[str, Any]]:
    if kind == "closed":
        yield {"preexec_fn": lambda: [os.close(number) for number in (1, 2)]}
        return
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    try:
        yield {"stdout": descriptor, "stderr": descriptor}
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("command", "kind", "code"),
    [
        ("train", "full", 0),
        ("train", "pipe", 0),
        ("train alone", "full", 0),
        ("build", "full", 1),
        ("build", "pipe", 0),
        ("build", "closed", 0),
        ("models", "full", 1),
        ("models", "pipe", 0),
        ("models", "closed", 0),
    ],
)
def test_a_command_ends_as_with_any_console(
    command: str, kind: str, code: int, shapes: Path, tmp_path: Path
) -> None:
    """Only interactive commands whose output a full disk lost fail, after finishing their work."""
    words = (
        COMMANDS[command]
        .format(config=write_config(tmp_path, dataset=shapes), out=tmp_path / "out")
        .split()
    )
    words = [sys.executable, "-m", *(word.replace("_steps", " steps") for word in words)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")
    }
    with console(kind) as streams:
        done = subprocess.run(words, env=environment, check=False, **streams)
    assert done.returncode == code
    assert command not in WRITES or (tmp_path / "out" / WRITES[command]).exists()


def test_a_character_that_the_terminal_lacks_is_escaped() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    program = "from data_prep import console; console.install(); print('\u03a9')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE
    )
    assert done.stdout == b"\\u03a9\n"
