"""A run that is killed, stopped or moved to another number of ranks ends where an undisturbed run ends."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pretrain.card import list_checkpoints
from tests.training import (
    final_state,
    finish,
    kill,
    start,
    step_of,
    wait_for_checkpoint,
    write_config,
)


@pytest.fixture(scope="module")
def config(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), dataset=shapes)


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(config, run_dir))
    return run_dir


def assert_same_bits(run_dir: Path, other: Path) -> None:
    mine, theirs = final_state(run_dir), final_state(other)
    assert mine.keys() == theirs.keys() and mine
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "train" in child.cmdline()]


def test_killed_twice_and_restarted_ends_at_the_same_bits(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir, generator, step = tmp_path / "run", random.Random(5), 0
    for _ in range(2):
        process = start(config, run_dir)
        step = wait_for_checkpoint(run_dir, process, beyond_step=step)
        time.sleep(generator.random() * 0.2)
        kill(process)
    output = finish(start(config, run_dir))
    assert "going on from step-" in output
    assert_same_bits(run_dir, undisturbed)
    assert json.loads((run_dir / "result.json").read_text())["step"] == 80


def test_permutations_and_dropout_go_on_as_they_were(config: Path, tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    model = "model={kind: mixer, patch_size: 8, num_channels: 6, depth: 2, permuted_blocks: [1], dropout: 0.2}"
    words = [model, "train.duration=8 steps", "checkpoint={every: 4 steps, keep_last: 9}"]
    finish(start(config, run_dir, *words))
    shutil.copytree(run_dir, whole)
    early, late = list_checkpoints(run_dir)
    shutil.rmtree(late)
    (run_dir / "result.json").unlink()
    permutation = "blocks.1.before_tokens.index"
    assert load_file(early / "model.safetensors")[permutation].dtype == torch.int32
    assert "going on from step-00000004" in finish(start(config, run_dir, *words))
    assert_same_bits(run_dir, whole)


def test_every_stop_signal_makes_a_checkpoint_and_a_clean_exit(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir, step = tmp_path / "run", 0
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        process = start(config, run_dir)
        wait_for_checkpoint(run_dir, process, beyond_step=step)
        process.send_signal(number)
        output = finish(process)
        assert "stopped with a checkpoint" in output
        assert not (run_dir / "result.json").exists()
        step = step_of(list_checkpoints(run_dir)[-1])
        assert step < 80
    finish(start(config, run_dir))
    assert_same_bits(run_dir, undisturbed)


def test_one_killed_rank_ends_the_others_and_is_named(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir, "train.duration=100000 steps", "checkpoint.every=7 steps")
    wait_for_checkpoint(run_dir, process)
    victim = ranks_of(process)[1]
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "rank 1 ended with SIGKILL" in output
    assert psutil.pid_exists(victim.pid) is False or victim.status() == psutil.STATUS_ZOMBIE


def test_other_numbers_of_ranks_continue_the_same_training(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    """2 ranks, then 1 at another stage: the same batches, and weights that differ by rounding alone."""
    run_dir = tmp_path / "run"
    process = start(config, run_dir, ranks=2)
    wait_for_checkpoint(run_dir, process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert step_of(list_checkpoints(run_dir)[-1]) < 80
    finish(start(config, run_dir, "engine.zero_stage=1", ranks=1))
    mine, theirs = final_state(run_dir), final_state(undisturbed)
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_damaged_newest_checkpoint_is_passed_over(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    wait_for_checkpoint(run_dir, process, beyond_step=7)
    kill(process)
    newest = list_checkpoints(run_dir)[-1] / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    output = finish(start(config, run_dir))
    assert "is damaged (model.safetensors has changed)" in output
    assert_same_bits(run_dir, undisturbed)


def test_a_finished_run_returns_at_once_and_changes_nothing(config: Path, undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(undisturbed.rglob("*"))}
    assert "finished before, at step 80" in finish(start(config, undisturbed))
    assert {path: path.stat().st_mtime_ns for path in sorted(undisturbed.rglob("*"))} == before


def test_another_config_may_not_go_on_in_the_same_directory(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_bytes((undisturbed / "config.yaml").read_bytes())
    process = start(config, run_dir, "optimizer.lr=0.5")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "belongs to a run with other settings" in output and "optimizer.lr" in output
