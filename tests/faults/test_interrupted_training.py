"""A run that is killed, stopped or moved to another number of ranks ends where an undisturbed run ends."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import list_checkpoints
from tests.moments import Strike, wait_until
from tests.soak import soaked
from tests.training import (
    Run,
    final_state,
    finish,
    kill,
    start,
    start_command,
    step_of,
    stop_while_it_waits,
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


def both(strike: Strike) -> dict[int, Strike]:
    return {0: strike, 1: strike}


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "train" in child.cmdline()]


@soaked
@pytest.mark.parametrize(("precision", "num_kills", "num_steps"), [("fp32", 8, 80), ("bf16", 5, 48)])
def test_killed_at_any_moment_it_ends_at_the_same_bits(
    config: Path, undisturbed: Path, tmp_path: Path, precision: str, num_kills: int, num_steps: int, salt: int
) -> None:
    """Every third kill may come while it starts, each of the others eight steps further; one rank is killed, or both. Checkpoints
    are so frequent that many a kill comes while one is written."""
    run_dir, generator, words = tmp_path / "run", random.Random(salt or num_kills), ["checkpoint.every=2 steps"]
    if precision == "bf16":
        words += [*BF16, f"train.duration={num_steps} steps"]
        undisturbed = tmp_path / "undisturbed"
        finish(start(config, undisturbed, *words))
    assert num_kills * 8 < num_steps
    for life in range(num_kills):
        victim, starts = generator.randrange(2), life % 3 == 2
        # of every two steps the first rank, which writes the checkpoint, has some forty moments, and the other one seven
        moment = generator.randint(1, (60, 12)[victim])
        strike = Strike(run_dir, moment, step=0 if starts else 1 + 8 * life)
        process = start(config, run_dir, *words, strikes={victim: strike})
        wait_until(lambda: process.ranks[victim].exitcode is not None, timeout_s=300)  # noqa: B023
        assert process.ranks[victim].exitcode == -signal.SIGKILL, process.said()
        alone = not starts and generator.randrange(3) > 0
        if not alone:  # while ranks start, it is the launcher that ends the others
            process.ranks[1 - victim].kill()
        output, _ = process.communicate()
        if alone:
            assert f"rank {victim} (node " in output and "Traceback" not in output, output
        assert not (run_dir / "result.json").exists()
    output = finish(start(config, run_dir, *words))
    assert "going on from step-" in output and "OMP_NUM_THREADS" not in output
    assert_same_bits(run_dir, undisturbed)
    assert json.loads((run_dir / "result.json").read_text())["step"] == num_steps
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


def test_a_start_that_froze_is_taken_over_and_changes_nothing_when_it_wakes_up(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = ("engine.lock_wait_s=0.2", "tracking.enabled=true", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    finish(start(config, undisturbed, *words, ranks=1))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    frozen = start(config, run_dir, *words, ranks=1, strikes={0: Strike(run_dir, 1, step=22, signal=signal.SIGSTOP)})
    wait_until(lambda: is_stopped(frozen), lives=lambda: frozen.poll() is None)
    try:
        twin = start(config, run_dir, *words, ranks=1)  # SLURM knows of no other start of that job
        said, _ = twin.communicate()
        holder = f"start 1 of this run holds it (process {frozen.ranks[0].pid} on {socket.gethostname()}, job 17, start 1, since 2"
        assert twin.returncode == 75 and holder in said and "has not let go within 0 s" in said, said
        stop_while_it_waits(start(config, run_dir, *words[1:], ranks=2))
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert "SLURM reports that it is over" in finish(start(config, run_dir, *words, ranks=1))
        before = contents(run_dir)
    finally:
        frozen.send_signal(signal.SIGCONT)
    said, _ = frozen.communicate()
    assert frozen.returncode == 1 and "a newer start has taken over" in said, said
    assert contents(run_dir) == before
    assert_same_bits(run_dir, undisturbed)
    ours, theirs = (points(each) for each in (run_dir, undisturbed))
    assert ours == theirs and len(ours) == len({*ours}) > 1
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("select name, status from runs order by name").fetchall() == [
            ("run", "FINISHED"), ("undisturbed", "FINISHED"),
        ]  # fmt: skip


def is_stopped(process: Run) -> bool:
    return psutil.Process(process.ranks[0].pid).status() == psutil.STATUS_STOPPED


def contents(run_dir: Path) -> dict[Path, bytes]:
    """Of all but the words for people."""
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.parent.name != "logs"]
    return {path: path.read_bytes() for path in files if path.suffix != ".log"}


def points(run_dir: Path) -> list[tuple[int, float]]:
    """The steps and losses that the journal has."""
    events = map(json.loads, (run_dir / "tracking" / "journal.jsonl").read_text().splitlines())
    lines = [each for each in events if each["event"] == "metrics" and "train/loss" in each["values"]]
    return [(line["step"], line["values"]["train/loss"]) for line in lines]


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
    run_dir = tmp_path / "run"
    for step, number in ((10, signal.SIGTERM), (20, signal.SIGUSR2), (45, signal.SIGINT)):
        output = finish(start(config, run_dir, strikes=both(Strike(run_dir, 1, step=step, signal=number))))
        assert "stopped with a checkpoint" in output
        assert not (run_dir / "result.json").exists()
        assert step <= step_of(list_checkpoints(run_dir)[-1]) <= step + 2
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


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_the_journal_closes_is_named(config: Path, tmp_path: Path, victim: int) -> None:
    """The first rank behind its result.json, which takes three moments, or the other one as soon as it has nothing left to do."""
    strike = Strike(tmp_path / "run", (4, 1)[victim], stage="closing its journal")
    process = start(config, tmp_path / "run", "train.duration=4 steps", strikes={victim: strike})
    output, _ = process.communicate()
    assert [rank.exitcode for rank in process.ranks] == [[-signal.SIGKILL, 1], [1, -signal.SIGKILL]][victim], output
    named = f"rank {victim} (node {socket.gethostname()}, pid {process.ranks[victim].pid}) is gone; the run stops"
    assert output.count(named) == 1 and "Traceback" not in output, output


def test_a_frozen_rank_ends_the_others(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir, "train.duration=100000 steps", "engine.heartbeat_timeout_s=10")
    wait_for_checkpoint(run_dir, process)
    os.kill(process.ranks[1].pid or 0, signal.SIGSTOP)
    process.ranks[0].join(90)
    assert process.ranks[0].exitcode == 1
    kill(process)
    assert f"pid {process.ranks[1].pid}) was not heard of for 10 s (frozen" in process.output


HELD = """
import os, pathlib, time
while "RANK" in os.environ and not (pathlib.Path(__file__).parent / "go").exists():
    time.sleep(0.01)
"""


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_anything_has_begun(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    """By the real command, whose ranks do not import anything yet: they are held until the signal was sent."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    process = start_command(config, tmp_path / "run", "train.duration=100000 steps", PYTHONPATH=path_with(tmp_path))
    wait_until(lambda: len(ranks_of(process)) == 2, lives=lambda: process.poll() is None)
    os.killpg(process.pid, number)
    (tmp_path / "go").touch()
    output = finish(process)
    assert "stopped before its first checkpoint; the same command begins anew" in output and "Traceback" not in output
    assert list_checkpoints(tmp_path / "run") == []


def test_other_numbers_of_ranks_continue_the_same_training(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    """2 ranks, then 1 at another stage with other threads: the same batches, and weights that differ by rounding alone."""
    run_dir = tmp_path / "run"
    finish(start(config, run_dir, strikes=both(Strike(run_dir, 1, step=8, signal=signal.SIGTERM))))
    assert step_of(list_checkpoints(run_dir)[-1]) <= 10
    output = finish(start_command(config, run_dir, "engine.zero_stage=1", ranks=1, OMP_NUM_THREADS="2"))
    assert output.count("WARNING: OMP_NUM_THREADS: was 1 and is 2 now: ") == 1
    assert json.loads((list_checkpoints(run_dir)[-1] / "trainer.json").read_text())["num_cpu_threads"] == 2
    mine, theirs = final_state(run_dir), final_state(undisturbed)
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_damaged_newest_checkpoint_is_passed_over(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir, strikes=both(Strike(run_dir, 1, step=22)))  # with the checkpoints of steps 7 and 14
    process.communicate()
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
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False)
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
    where = str(run_dir)
    subprocess.run(["mount", "--bind", where, where], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", where], check=True)
    wait_for_word(process, "Read-only file system); make it writable again. Training goes on")
    subprocess.run(["umount", "--lazy", where], check=True)
    wait_for_checkpoint(run_dir, process, beyond_step=step)
    process.send_signal(signal.SIGTERM)
    assert "stopped with a checkpoint" in finish(process)
    newest = Checkpoint.newest(run_dir)
    assert newest is not None and newest.directory == list_checkpoints(run_dir)[-1]


def wait_for_word(process: Run, word: str) -> None:
    wait_until(lambda: word in process.said(), lives=lambda: process.poll() is None)


def test_the_best_checkpoint_is_known_after_an_evaluation_that_was_given_up(config: Path, tmp_path: Path) -> None:
    """Stopped again and again, wherever it is, it judges and keeps what an undisturbed run does."""
    words = ["checkpoint={every: 20 steps, keep_best: true, keep_last: 1}", "train.eval_every=2 steps", "train.duration=24 steps"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    finish(start(config, whole, *words, ranks=1))
    for step, moment, owes in ((2, 8, True), (9, 1, False)):  # while it evaluates its third batch; in a step
        strike = Strike(run_dir, moment, step=step, signal=signal.SIGTERM)
        finish(start(config, run_dir, *words, ranks=1, strikes={0: strike}))
        assert json.loads((list_checkpoints(run_dir)[-1] / "trainer.json").read_text())["owes_evaluation"] == owes
    finish(start(config, run_dir, *words, ranks=1))
    best = [json.loads((place / "checkpoints" / "best.json").read_text()) for place in (whole, run_dir)]
    assert best[0] == best[1]
    assert [path.name for path in list_checkpoints(run_dir)] == [path.name for path in list_checkpoints(whole)]
    assert_same_bits(run_dir, whole)
