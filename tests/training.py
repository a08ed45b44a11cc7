"""Small training runs in their own processes: forks by default, or the real command."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from data_prep.interrupts import INTERRUPTED
from pretrain.checkpoints.run import list_checkpoints, step_of
from tests.forked import begin, environments, new_output, wait
from tests.moments import Strike, wait_until

CONFIG = """
model: {kind: mlp, depth: 2, width: 32, expansion: 2}
augment: {crop_scale: [0.6, 1.0], mixup_alpha: 0.8}
optimizer: {name: adamw, lr: 1e-3, weight_decay: 0.05}
schedule: {warmup: 3 steps}
train: {duration: 80 steps, global_batch_size: 16, local_batch_size: 4, label_smoothing: 0.1, eval_every: 20 steps}
engine: {zero_stage: 2, precision: fp32, gradient_clip_norm: 1.0, timeout_s: 60}
checkpoint: {every: 7 steps}
tracking: {enabled: false}
"""


_COMMANDS: list[subprocess.Popen[str]] = []


def write_config(folder: Path, *, dataset: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(CONFIG + f"data: {{dataset: {dataset}}}\n")
    return path


class Run:
    """A training run on forked ranks (see forked.py), like the real command without eight seconds
    of imports."""

    def __init__(
        self,
        words: list[str],
        *,
        ranks: int,
        threads: int = 1,
        program: str = "pretrain",
        strikes: Mapping[int, Strike] | None = None,
        journal_only: bool = False,
        target: str = "tests.training:main",
    ):
        """`threads`: per rank. `strikes`: signals that ranks send themselves. `journal_only`: no
        deliverer, because importing mlflow takes longer than the run (a test may call `sync`).
        `target`: function that replaces `main` below.
        """
        self._output = new_output()
        self.returncode: int | None = None
        self.output = ""
        how = {"OMP_NUM_THREADS": str(threads)} | ({"JOURNAL_ONLY": "1"} if journal_only else {})
        self.ranks = [
            begin(
                target,
                program,
                words,
                (strikes or {}).get(rank),
                environment=environment,
                output=self._output,
            )
            for rank, environment in enumerate(environments(ranks, **how))
        ]

    def said(self) -> str:
        return self._output.read_text()

    def poll(self) -> int | None:
        codes = [rank.exitcode for rank in self.ranks]
        failed = [code for code in codes if code]
        return failed[0] if failed else (None if None in codes else 0)

    def heeds(self, number: int) -> bool:
        """True if every rank catches the signal, which would end it earlier."""
        caught = [
            re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{rank.pid}/status").read_text())
            for rank in self.ranks
        ]
        return all(mask is not None and int(mask[1], 16) >> (number - 1) & 1 for mask in caught)

    def send_signal(self, number: int) -> None:
        for rank in self.ranks:
            assert rank.pid is not None
            if rank.exitcode is None:
                os.kill(rank.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        codes = wait(self.ranks, timeout_s=timeout)
        self.returncode = next((code for code in codes if code != 0), 0)
        self.output = self.said()
        assert None not in codes, f"a rank hung: {codes}\n{self.output}"
        return self.output, None


def main(program: str, words: list[str], strike: Strike | None = None) -> int:
    """Run a training command in this fork. `program`: pretrain or finetune."""
    if strike is not None:
        strike.arm()
    if "JOURNAL_ONLY" in os.environ:
        sys.executable = "/bin/true"  # the deliverer's program
    sys.argv = [program, *words]
    torch.set_num_threads(
        int(os.environ["OMP_NUM_THREADS"])
    )  # torch has read the variable at its import
    return int(importlib.import_module(f"{program}.__main__").main(words))


def start(config: Path, run_dir: Path, *overrides: str, ranks: int = 2, **how: Any) -> Run:
    return Run(["train", str(config), f"run_dir={run_dir}", *overrides], ranks=ranks, **how)


def start_tuning(config: Path, run_dir: Path, *overrides: str, ranks: int = 1, **how: Any) -> Run:
    return Run(
        ["tune", str(config), f"run_dir={run_dir}", *overrides],
        ranks=ranks,
        program="finetune",
        **how,
    )


def start_command(
    config: Path, run_dir: Path, *overrides: str, ranks: int = 2, **environment: str
) -> subprocess.Popen[str]:
    """Start `pretrain train ... --ranks N` like a user, in its own process group, so that a test
    can kill it."""
    words = [
        "pretrain",
        "train",
        str(config),
        f"run_dir={run_dir}",
        *overrides,
        "--ranks",
        str(ranks),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | environment,
    )
    _COMMANDS.append(process)
    return process


def end_commands() -> None:
    """End the processes of a failed test."""
    for process in _COMMANDS:
        if process.poll() is None:
            kill(process)
    _COMMANDS.clear()


AnyRun = Run | subprocess.Popen[str]


def finish(process: AnyRun, *, timeout_s: float = 300, code: int = 0) -> str:
    """Return the output of a run that must end with that exit code."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, output
    return output


def kill(process: AnyRun) -> None:
    """Kill all ranks at once."""
    if isinstance(process, Run):
        process.send_signal(signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def stop_while_it_waits(waiting: Run, said: str = ": stopped") -> str:
    """Stop a run that waits for another attempt, and return its output. In a SLURM job its first
    rank exits with 130."""
    wait_until(
        lambda: "waiting up to" in waiting.said() and waiting.heeds(signal.SIGTERM),
        lives=lambda: waiting.poll() is None,
    )
    waiting.send_signal(signal.SIGTERM)
    output = finish(waiting, code=INTERRUPTED if "SLURM_JOB_ID" in os.environ else 0)
    assert said in output, output
    return output


def wait_for_checkpoint(run_dir: Path, process: AnyRun, *, beyond_step: int = 0) -> int:
    """Return the step of the first published checkpoint after `beyond_step`."""
    deadline_s = time.monotonic() + 150
    while time.monotonic() < deadline_s and process.poll() is None:
        steps = [step_of(path) for path in list_checkpoints(run_dir)]
        if steps and steps[-1] > beyond_step:
            return steps[-1]
        time.sleep(0.005)
    said = process.communicate()[0] if process.poll() is not None else "too slow"
    raise AssertionError(f"no checkpoint beyond step {beyond_step}: {said}")


def final_state(run_dir: Path) -> dict[str, Tensor]:
    """Return weights and optimizer state of the newest checkpoint."""
    newest = list_checkpoints(run_dir)[-1]
    return load_file(newest / "model.safetensors") | load_file(newest / "optimizer.safetensors")
