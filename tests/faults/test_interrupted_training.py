"""A run that is killed, stopped or moved to another number of ranks ends where an undisturbed run ends."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pretrain.card import fault_of, list_checkpoints
from tests.training import (
    Run,
    final_state,
    finish,
    kill,
    start,
    start_command,
    step_of,
    wait_for_checkpoint,
    write_config,
)


@pytest.fixture(scope="module")
def config(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), dataset=shapes)


BF16 = ("engine.precision=bf16", "engine.zero_stage=3", "tracking.peak_teraflops=1")
"""The peak is given, as measuring it in bf16 takes a CPU longer than all else that a start does."""


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


@pytest.mark.timeout(1200)  # 3 to 4 minutes each where four others share two cores
@pytest.mark.parametrize(("precision", "num_kills", "num_steps"), [("fp32", 12, 80), ("bf16", 8, 48)])
def test_killed_at_random_moments_it_ends_at_the_same_bits(
    config: Path, undisturbed: Path, tmp_path: Path, precision: str, num_kills: int, num_steps: int
) -> None:
    """Every third kill may come while it starts, all others after some progress; one rank is killed, or both. Checkpoints are so
    frequent that many a kill comes while one is written."""
    run_dir, generator, words = tmp_path / "run", random.Random(num_kills), ["checkpoint.every=2 steps"]
    if precision == "bf16":
        words += [*BF16, f"train.duration={num_steps} steps"]
        undisturbed = tmp_path / "undisturbed"
        finish(start(config, undisturbed, *words))
    step = 0
    for life in range(num_kills):
        process = start(config, run_dir, *words)
        if life % 3 == 2:
            time.sleep(generator.uniform(0, 3))
        else:
            step = wait_for_checkpoint(run_dir, process, beyond_step=step)
            time.sleep(generator.uniform(0, 0.05))
        # while ranks start, it is the launcher that ends the others
        victims = [0, 1] if life % 3 == 2 else generator.choice([[0], [1], [0, 1]])
        for victim in victims:
            process.ranks[victim].kill()
        output, _ = process.communicate(timeout=150)
        assert not (run_dir / "result.json").exists(), "the test needs more steps"
        if len(victims) == 1:
            assert f"rank {victims[0]} (node " in output and "Traceback" not in output, output
        step = max([step, *map(step_of, list_checkpoints(run_dir))])
    assert "going on from step-" in finish(start(config, run_dir, *words))
    assert_same_bits(run_dir, undisturbed)
    assert json.loads((run_dir / "result.json").read_text())["step"] == num_steps
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


def test_data_that_was_staged_trains_to_the_same_bits(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir, scratch = tmp_path / "run", tmp_path / "scratch"
    output = finish(start(config, run_dir, f"data.stage_dir={scratch}"))
    assert output.count("\nstaged ") == 1 and f" MB to {scratch} ({socket.gethostname()}) in " in output
    assert_same_bits(run_dir, undisturbed)
    assert "WARNING" not in output and not (run_dir / "stacks").exists()


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
    """By the real command: the launcher names it, and so does the first survivor, and no traceback hides it."""
    run_dir = tmp_path / "run"
    process = start_command(config, run_dir, "train.duration=100000 steps", "checkpoint.every=7 steps")
    wait_for_checkpoint(run_dir, process)
    victim = ranks_of(process)[1]
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "launch: rank 1 ended with SIGKILL" in output and "Traceback" not in output
    assert output.count(f"rank 1 (node {socket.gethostname()}, pid {victim.pid}) is gone; the run stops") == 1
    assert psutil.pid_exists(victim.pid) is False or victim.status() == psutil.STATUS_ZOMBIE


def test_a_frozen_rank_ends_the_others(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir, "train.duration=100000 steps", "engine.heartbeat_timeout_s=10")
    wait_for_checkpoint(run_dir, process)
    os.kill(process.ranks[1].pid or 0, signal.SIGSTOP)
    process.ranks[0].join(90)
    assert process.ranks[0].exitcode == 1
    kill(process)
    assert f"pid {process.ranks[1].pid}) was not heard of for 10 s (frozen" in process.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_anything_has_begun(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    """By the real command, whose ranks are still importing, or do not even run yet."""
    process = start_command(config, tmp_path / "run", "train.duration=100000 steps")
    deadline_s = time.monotonic() + 60
    while len(ranks_of(process)) < 2:
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, number)
    output = finish(process)
    assert "stopped before its first checkpoint; the same command begins anew" in output and "Traceback" not in output
    assert list_checkpoints(tmp_path / "run") == []


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root, and is forbidden here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_training_outlives_a_full_and_a_read_only_disk(config: Path, small_disk: Path) -> None:
    """Two things go wrong with the place of the checkpoints while it trains; each is said, and mended it is as if nothing was."""
    run_dir = small_disk / "run"
    process = start(config, run_dir, "train.duration=100000 steps", ranks=1)
    step = wait_for_checkpoint(run_dir, process)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    wait_for_word(process, "No space left on device); free some space there. Training goes on")
    filler.unlink()
    step = wait_for_checkpoint(run_dir, process, beyond_step=max(step, *map(step_of, list_checkpoints(run_dir))))
    where = str(run_dir / "checkpoints")
    subprocess.run(["mount", "--bind", where, where], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", where], check=True)
    wait_for_word(process, "Read-only file system); make it writable again. Training goes on")
    subprocess.run(["umount", "--lazy", where], check=True)
    wait_for_checkpoint(run_dir, process, beyond_step=step)
    process.send_signal(signal.SIGTERM)
    assert "stopped with a checkpoint" in finish(process)
    assert fault_of(list_checkpoints(run_dir)[-1]) is None


def wait_for_word(process: Run, word: str) -> None:
    deadline_s = time.monotonic() + 60
    while word not in process.said():
        assert time.monotonic() < deadline_s and process.poll() is None, process.said()
        time.sleep(0.02)


def test_the_best_checkpoint_is_known_after_an_evaluation_that_was_given_up(config: Path, tmp_path: Path) -> None:
    """Stopped again and again, wherever it is, it judges and keeps what an undisturbed run does."""
    words = [
        "checkpoint={every: 20 steps, keep_best: true, keep_last: 1}",
        "train.eval_every=2 steps",
        "train.duration=24 steps",
    ]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    finish(start(config, whole, *words, ranks=1))
    step = 0
    for delay_s in (0.0, 0.03):
        process = start(config, run_dir, *words, ranks=1)
        wait_for_checkpoint(run_dir, process, beyond_step=step)
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        finish(process)
        step = step_of(list_checkpoints(run_dir)[-1])
    finish(start(config, run_dir, *words, ranks=1))
    best = [json.loads((place / "checkpoints" / "best.json").read_text()) for place in (whole, run_dir)]
    assert best[0] == best[1]
    assert [path.name for path in list_checkpoints(run_dir)] == [path.name for path in list_checkpoints(whole)]
    assert_same_bits(run_dir, whole)
