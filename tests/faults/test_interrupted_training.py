"""A run that is killed, stopped or moved to another number of ranks ends like an uninterrupted
run."""

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
from pretrain.checkpoints.run import list_checkpoints, step_of
from pretrain.cli import main
from tests.errors import printed_errors
from tests.moments import Strike, wait_until
from tests.soak import soaked
from tests.training import (
    Run,
    final_state,
    finish,
    start,
    start_command,
    stop_while_it_waits,
    wait_for_checkpoint,
    write_config,
)

pytestmark = pytest.mark.processes

NUM_STEPS = 40


@pytest.fixture(scope="module")
def config(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_config(tmp_path_factory.mktemp("config"), dataset=shapes)
    path.write_text(path.read_text().replace("duration: 80 steps", f"duration: {NUM_STEPS} steps"))
    return path


JOURNAL = ("tracking.enabled=true", "tracking.peak_teraflops=1")
BF16 = ("engine.precision=bf16", "engine.zero_stage=3", *JOURNAL)
"""The peak is given, because measuring it in bf16 takes long on a CPU."""


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(config, run_dir, *JOURNAL, journal_only=True))
    return run_dir


def assert_same_bits(run_dir: Path, other: Path) -> None:
    mine, theirs = final_state(run_dir), final_state(other)
    assert mine.keys() == theirs.keys() and mine
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "train" in child.cmdline()]


@soaked
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_at_any_moment_it_ends_at_the_same_bits(
    config: Path, undisturbed: Path, tmp_path: Path, precision: str, salt: int
) -> None:
    """Every second kill may come during the start, the others 16 steps later each time, of one rank
    or both. Some kills hit the frequent checkpoints. Finally the newest checkpoint is damaged, and
    skipped.
    """
    run_dir, generator, words = (
        tmp_path / "run",
        random.Random(salt or 8),
        ["checkpoint.every=2 steps", *JOURNAL],
    )
    num_kills = {"fp32": 4, "bf16": 2}[precision]
    if precision == "bf16":
        words += [*BF16, "train.duration=24 steps"]
        undisturbed = tmp_path / "undisturbed"
        finish(start(config, undisturbed, *words, journal_only=True))
    for life in range(num_kills):
        victim, starts = generator.randrange(2), life % 2 == 1
        # in two steps the first rank, which writes the checkpoint, has about 40 moments, the other
        # 7
        moment = generator.randint(1, (60, 12)[victim])
        strike = Strike(run_dir, moment, step=0 if starts else 9 + 8 * life)
        process = start(config, run_dir, *words, strikes={victim: strike}, journal_only=True)
        wait_until(lambda: process.ranks[victim].exitcode is not None, timeout_s=300)  # noqa: B023
        assert process.ranks[victim].exitcode == -signal.SIGKILL, process.said()
        alone = not starts and generator.randrange(3) > 0
        if not alone:  # while ranks start, the launcher ends the others
            process.ranks[1 - victim].kill()
        output, _ = process.communicate()
        if alone:
            assert f"rank {victim} (node " in output and "Traceback" not in output, output
        assert not (run_dir / "result.json").exists()
    newest = list_checkpoints(run_dir)[-1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + bytes([newest.read_bytes()[-1] ^ 1]))
    output = finish(start(config, run_dir, *words, journal_only=True))
    assert "is damaged (model.safetensors has changed); trying" in output
    assert "resuming from step-" in output and "OMP_NUM_THREADS" not in output
    assert_same_bits(run_dir, undisturbed)
    last = {"fp32": NUM_STEPS, "bf16": 24}[precision]
    assert json.loads((run_dir / "result.json").read_text())["step"] == last
    found, wanted = logged_losses(run_dir), logged_losses(undisturbed)
    assert (
        found.items() <= wanted.items() and last in found
    )  # a kill may come before its step is logged
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


def test_a_start_that_froze_is_taken_over_and_changes_nothing_when_it_wakes_up(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = (
        "engine.lock_wait_s=0.2",
        "tracking.enabled=true",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )
    finish(start(config, undisturbed, *words, ranks=1, journal_only=True))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    frozen = start(
        config,
        run_dir,
        *words,
        ranks=1,
        strikes={0: Strike(run_dir, 1, step=22, signal=signal.SIGSTOP)},
    )
    wait_until(lambda: is_stopped(frozen), lives=lambda: frozen.poll() is None)
    try:
        twin = start(config, run_dir, *words, ranks=1)  # without SLURM's start number
        said, _ = twin.communicate()
        holder = (
            f"(process {frozen.ranks[0].pid} on {socket.gethostname()}, job 17, attempt 1, since"
        )
        assert twin.returncode == 75 and holder in said, said
        assert printed_errors(said) == [(str(run_dir), "busy")], said
        stop_while_it_waits(start(config, run_dir, *words[1:], ranks=2))
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert "SLURM reports that the attempt is over" in finish(
            start(config, run_dir, *words, ranks=1)
        )
        before = contents(run_dir)
    finally:
        frozen.send_signal(signal.SIGCONT)
    said, _ = frozen.communicate()
    assert frozen.returncode == 1 and "a newer attempt has taken over" in said, said
    assert contents(run_dir) == before
    assert_same_bits(run_dir, undisturbed)
    assert logged_losses(run_dir) == logged_losses(undisturbed)
    assert list(logged_losses(run_dir)) == [10, 20, 30, 40]
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute(
            "select name, status from runs where name not like '% pictures'"
        ).fetchall() == [("run", "FINISHED")]


def is_stopped(process: Run) -> bool:
    return psutil.Process(process.ranks[0].pid).status() == psutil.STATUS_STOPPED


def contents(run_dir: Path) -> dict[Path, bytes]:
    """Return the published files, without logs."""
    files = (
        path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.suffix != ".log"
    )
    published = (path for path in files if path.parent.name != "logs" and ".tmp-" not in str(path))
    return {path: path.read_bytes() for path in published}


def logged_losses(run_dir: Path) -> dict[int, float]:
    """Return losses by step. The event log has each step once."""
    events = map(json.loads, (run_dir / "tracking" / "journal.jsonl").read_text().splitlines())
    told = [
        each for each in events if each["event"] == "metrics" and "train/loss" in each["values"]
    ]
    losses = {each["step"]: each["values"]["train/loss"] for each in told}
    assert len(losses) == len(told)
    return losses


def test_permutations_and_dropout_go_on_as_they_were(config: Path, tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    model = (
        "model={kind: mixer, patch_size: 8, num_channels: 6, depth: 2, permuted_blocks: [1],"
        " dropout: 0.2}"
    )
    words = [model, "train.duration=8 steps", "checkpoint={every: 4 steps, keep_last: 9}"]
    words += ["data.pixel_permutation=3", "data.permute=before"]
    finish(start(config, run_dir, *words))
    shutil.copytree(run_dir, whole)
    early, late = list_checkpoints(run_dir)
    shutil.rmtree(late)
    (run_dir / "result.json").unlink()
    permutation = "blocks.1.before_tokens.index"
    assert load_file(early / "model.safetensors")[permutation].dtype == torch.int32
    card = Checkpoint.open(early).card
    assert (card.pixel_permutation, card.permute) == (3, "before")
    assert "resuming from step-00000004" in finish(start(config, run_dir, *words))
    assert_same_bits(run_dir, whole)


def test_a_stop_of_any_rank_makes_a_checkpoint_and_a_clean_exit_with_staged_data_too(
    config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir, scratch = tmp_path / "run", tmp_path / "scratch"
    for step, rank, number in (
        (6, 1, signal.SIGUSR2),
        (13, 1, signal.SIGHUP),
        (20, 0, signal.SIGINT),
    ):
        strikes = {rank: Strike(run_dir, 1, step=step, signal=number)}
        output = finish(
            start(config, run_dir, f"data.stage_dir={scratch / str(step)}", strikes=strikes)
        )
        assert (
            output.count("\nstaged ") == 1
            and f" MB to {scratch / str(step)} ({socket.gethostname()}) in " in output
        )
        assert "stopped with a checkpoint" in output and "WARNING" not in output
        answer = (
            "\npretrain: stopping; the checkpoint of the next step is saved first; Ctrl-C again"
            " ends the command at once\n"
        )
        assert output.count(answer) == (number == signal.SIGINT)
        assert not (run_dir / "result.json").exists()
        assert step <= step_of(list_checkpoints(run_dir)[-1]) <= step + 2
    finish(start(config, run_dir))
    assert_same_bits(run_dir, undisturbed)


def test_one_killed_rank_ends_the_others_and_is_named(config: Path, tmp_path: Path) -> None:
    """The launcher and the first surviving rank name the killed rank, without a traceback (the real
    command)."""
    run_dir = tmp_path / "run"
    process = start_command(
        config, run_dir, "train.duration=100000 steps", "checkpoint.every=7 steps"
    )
    wait_for_checkpoint(run_dir, process)
    victim = ranks_of(process)[1]
    victim.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL
    assert "launch: rank 1 ended with SIGKILL" in output and "Traceback" not in output
    assert (
        output.count(
            f"rank 1 (node {socket.gethostname()}, pid {victim.pid}) is gone; the run stops"
        )
        == 1
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        assert victim.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_the_journal_closes_is_named(
    config: Path, tmp_path: Path, victim: int
) -> None:
    """The kill comes after the first rank's result.json (three moments), or when the other rank has
    finished."""
    strike = Strike(tmp_path / "run", (4, 1)[victim], stage="closing its event log")
    process = start(config, tmp_path / "run", "train.duration=4 steps", strikes={victim: strike})
    output, _ = process.communicate()
    assert [rank.exitcode for rank in process.ranks] == [
        [-signal.SIGKILL, 1],
        [1, -signal.SIGKILL],
    ][victim], output
    named = (
        f"rank {victim} (node {socket.gethostname()}, pid {process.ranks[victim].pid}) is gone; the"
        " run stops"
    )
    assert output.count(named) == 1 and "Traceback" not in output, output


HELD = """
import os, pathlib, time
while "RANK" in os.environ and not (pathlib.Path(__file__).parent / "go").exists():
    time.sleep(0.01)
"""


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_a_stop_before_anything_has_begun(config: Path, tmp_path: Path) -> None:
    """The real command receives the signal while its rank waits before any import."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    process = start_command(config, tmp_path / "run", ranks=1, PYTHONPATH=path_with(tmp_path))
    wait_until(lambda: len(ranks_of(process)) == 1, lives=lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    output = finish(process)
    assert (
        "stopped before its first checkpoint. The same command restarts it" in output
        and "Traceback" not in output
    )
    assert list_checkpoints(tmp_path / "run") == []


def test_other_numbers_of_ranks_continue_the_same_training(
    config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """2 ranks, then 1 rank with another stage and more threads: the same batches, and weights equal
    up to rounding."""
    run_dir = tmp_path / "run"
    strike = Strike(run_dir, 1, step=8, signal=signal.SIGTERM)
    finish(start(config, run_dir, strikes={0: strike, 1: strike}))
    assert step_of(list_checkpoints(run_dir)[-1]) <= 10
    output = finish(start(config, run_dir, "engine.zero_stage=1", ranks=1, threads=2))
    assert output.count("WARNING: OMP_NUM_THREADS: it was 1 and is now 2") == 1
    assert (
        json.loads((list_checkpoints(run_dir)[-1] / "trainer.json").read_text())["num_cpu_threads"]
        == 2
    )
    mine, theirs = final_state(run_dir), final_state(undisturbed)
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_finished_run_changes_nothing_and_another_config_may_not_go_on_there(
    config: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(undisturbed.rglob("*"))}
    words = ["train", str(config), f"run_dir={undisturbed}", "--ranks", "2"]
    assert main(words) == 0 and f"finished before, at step {NUM_STEPS}" in capsys.readouterr().out
    assert main([*words, "optimizer.lr=0.5"]) == 2
    said = capsys.readouterr().err
    assert printed_errors(said) == [("run_dir", "exists")] and "optimizer.lr" in said
    assert {path: path.stat().st_mtime_ns for path in sorted(undisturbed.rglob("*"))} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root, and is forbidden here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_training_outlives_a_full_and_a_read_only_disk(config: Path, small_disk: Path) -> None:
    """The disk of the checkpoints is full, then read-only, during training. Each problem is
    reported, and training continues after its fix."""
    run_dir = small_disk / "run"
    process = start(config, run_dir, "train.duration=100000 steps", ranks=1)
    step = wait_for_checkpoint(run_dir, process)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    wait_for_word(process, "could not be written (No space left on device)")
    filler.unlink()
    step = wait_for_checkpoint(
        run_dir, process, beyond_step=max(step, *map(step_of, list_checkpoints(run_dir)))
    )
    where = str(run_dir)
    subprocess.run(["mount", "--bind", where, where], check=True)
    read_only = ["mount", "-o", "remount,ro,bind", where]  # fails while the trainer writes
    wait_until(lambda: subprocess.run(read_only, capture_output=True, check=False).returncode == 0)
    wait_for_word(process, "could not be written (Read-only file system)")
    subprocess.run(["umount", "--lazy", where], check=True)
    wait_for_checkpoint(run_dir, process, beyond_step=step)
    process.send_signal(signal.SIGTERM)
    assert "stopped with a checkpoint" in finish(process)
    newest = Checkpoint.newest(run_dir)
    assert newest is not None and newest.directory == list_checkpoints(run_dir)[-1]


def wait_for_word(process: Run, word: str) -> None:
    wait_until(lambda: word in process.said(), lives=lambda: process.poll() is None)


def test_the_best_checkpoint_is_known_after_an_evaluation_that_was_given_up(
    config: Path, tmp_path: Path
) -> None:
    """Repeated stops at any point do not change the evaluations and the kept checkpoints."""
    words = [
        "checkpoint={every: 20 steps, keep_best: true, keep_last: 1}",
        "train.eval_every=2 steps",
        "train.duration=24 steps",
    ]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    finish(start(config, whole, *words, ranks=1))
    for step, moment, owes in (
        (2, 8, True),
        (9, 1, False),
        (24, 8, True),
    ):  # during an evaluation's third batch; during a step; during the last evaluation
        strike = Strike(run_dir, moment, step=step, signal=signal.SIGTERM)
        finish(start(config, run_dir, *words, ranks=1, strikes={0: strike}))
        assert (
            json.loads((list_checkpoints(run_dir)[-1] / "trainer.json").read_text())[
                "owes_evaluation"
            ]
            == owes
        )
    finish(start(config, run_dir, *words, ranks=1))
    best = [
        json.loads((place / "checkpoints" / "best.json").read_text()) for place in (whole, run_dir)
    ]
    assert best[0] == best[1]
    assert [path.name for path in list_checkpoints(run_dir)] == [
        path.name for path in list_checkpoints(whole)
    ]
    assert_same_bits(run_dir, whole)
