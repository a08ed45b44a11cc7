"""A checkpoint appears complete or not at all, wherever the writer dies. Damaged checkpoints are
never loaded."""

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors

from data_prep import publish
from pretrain.checkpoints import files
from pretrain.checkpoints.card import CheckpointError
from pretrain.checkpoints.checkpoint import Checkpoint, fault_of
from pretrain.checkpoints.files import Best, Retention, Snapshot, TrainerState, read_tensors
from pretrain.checkpoints.run import list_checkpoints, save_result, step_of
from pretrain.checkpoints.writer import CheckpointWriter, Saver
from pretrain.config import CheckpointSettings, TrackingSettings
from pretrain.engine.step import EngineState
from pretrain.loop import train
from pretrain.models.spec import MlpSpec
from pretrain.ranks.collectives import FailedElsewhere, on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag, entered
from pretrain.ranks.starts import hold_run
from pretrain.ranks.world import World
from pretrain.tracking.tracker import Tracker
from tests.errors import fails
from tests.moments import wait_until
from tests.pretrain.checkpoints.tiny import card_of
from tests.ranks import run_ranks

FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "trainer.json")
CARD = card_of(MlpSpec(kind="mlp", depth=1, width=4), image_size=8, num_classes=2)


def state(value: float) -> EngineState:
    return EngineState(
        {"w": torch.full((3,), value)}, {"exp_avg.w": torch.full((3,), -value)}, int(value)
    )


def save(run_dir: Path, step: int, *, keep_last: int = 2, best: Best | None = None) -> Path:
    trainer = TrainerState(step=step, samples_consumed=step * 16, best=best)
    snapshot = Snapshot(state(float(step)), trainer, CARD)
    files.publish(run_dir, snapshot)
    files.settle(run_dir, snapshot, Retention(keep_last))
    return snapshot.place(run_dir)


def restored(run_dir: Path) -> tuple[EngineState, TrainerState]:
    newest = Checkpoint.newest(run_dir)
    assert newest is not None
    return files.load_state(newest.directory)


def steps(run_dir: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run_dir)]


def test_what_is_saved_is_what_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 7)
    engine, trainer = restored(tmp_path)
    assert trainer == TrainerState(7, 112) and engine.num_updates == 7
    assert torch.equal(engine.weights["w"], torch.full((3,), 7.0))
    assert torch.equal(engine.optimizer["exp_avg.w"], torch.full((3,), -7.0))


class Crash(BaseException):
    """The end of the process: no code may catch it and continue."""


OPERATIONS = [
    (publish.os, "rename"),
    (publish.os, "replace"),
    (publish.os, "fsync"),
    (Path, "unlink"),
    (shutil, "rmtree"),
    (files, "write_tensors"),
]


def crashing(original: Any, tick: Callable[[], bool]) -> Any:
    def wrapped(first: Any, *arguments: Any, **options: Any) -> Any:
        if not tick():
            return original(first, *arguments, **options)
        if original is RMTREE and Path(first).is_dir():  # the crash interrupts the removal
            next(path for path in sorted(Path(first).rglob("*")) if path.is_file()).unlink()
        if original is WRITE_TENSORS:
            Path(first).write_bytes(b"half")
        raise Crash

    return wrapped


RMTREE, WRITE_TENSORS = shutil.rmtree, files.write_tensors


def test_a_crash_between_any_two_file_operations_leaves_the_newest_published_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every n, crash at the n-th operation of publishing the best checkpoint and removing the
    previous best."""
    for crash_at in range(200):
        run_dir = tmp_path / str(crash_at)
        save(run_dir, 1, best=Best(1, 0.5))
        save(run_dir, 2, best=Best(1, 0.5))
        calls, crashed = 0, False

        def tick(crash_at: int = crash_at) -> bool:
            nonlocal calls
            calls += 1
            return calls > crash_at

        with monkeypatch.context() as patch:
            for place, name in OPERATIONS:
                patch.setattr(place, name, crashing(getattr(place, name), tick))
            try:
                save(run_dir, 3, best=Best(3, 0.6), keep_last=1)
            except Crash:
                crashed = True
        published = steps(run_dir)
        with hold_run(run_dir, lock_wait_s=0):
            pass
        assert not list(run_dir.rglob(".tmp-*"))
        engine, trainer = restored(run_dir)
        assert trainer.step == float(engine.weights["w"][0]) == published[-1] and published[-1] in (
            2,
            3,
        )
        best = trainer.best
        assert best == (Best(1, 0.5) if trainer.step == 2 else Best(3, 0.6))
        assert fault_of(run_dir / "checkpoints" / f"step-{best.step:08d}", needed=FILES) is None
        save(run_dir, 4, best=best, keep_last=1)
        assert steps(run_dir) == [best.step, 4]
        assert json.loads((run_dir / "checkpoints" / "best.json").read_text()) == {
            "step": best.step,
            "score": best.score,
        }
        if not crashed:
            assert crash_at > 20 and trainer.step == 3
            return
    raise AssertionError("the crash point never moved past the end")


def test_what_stays_follows_the_rules(tmp_path: Path) -> None:
    log = Log()
    writer = CheckpointWriter(tmp_path, Retention(keep_last=2, keep_every_steps=30), log=log)
    bests = {10: Best(10, 0.1), 20: Best(20, 0.4), 90: Best(90, 0.5)}
    best = None
    for step in range(10, 101, 10):
        best = bests.get(step, best)
        submitted(writer, step, best=best)
        if step == 80:
            writer.finish()
            assert steps(tmp_path) == [20, 30, 60, 70, 80]
    writer.finish()
    assert steps(tmp_path) == [30, 60, 90, 100]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000100\n"
    assert log.values["usage/checkpoint_gb"] > 0


def test_only_step_plus_digits_is_a_checkpoint_and_numbers_are_sorted(tmp_path: Path) -> None:
    """A user may keep copies next to the checkpoints; nobody reads or removes these copies."""
    copies = ["step-00000020.bak", "step-old", "step-", "step-1e3", "step--1", "old-step-00000020"]
    for name in copies:
        shutil.copytree(save(tmp_path, 20), tmp_path / "checkpoints" / name)
    for step in (99_999_999, 100_000_001):
        save(tmp_path, step)
    assert steps(tmp_path) == [99_999_999, 100_000_001]
    assert restored(tmp_path)[1].step == 100_000_001
    opened, found = Checkpoint.open(tmp_path), Checkpoint.found(str(tmp_path))
    assert (
        found is not None and opened.directory == found.directory == list_checkpoints(tmp_path)[1]
    )
    assert all((tmp_path / "checkpoints" / name / "model.safetensors").exists() for name in copies)


class Log:
    """An event log in memory."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def metrics(self, values: dict[str, float], *, step: int) -> None:  # noqa: ARG002
        self.values |= values

    def sync(self) -> None: ...


def submitted(
    writer: CheckpointWriter, step: int, engine: EngineState | None = None, best: Best | None = None
) -> CheckpointWriter:
    assert writer.make_room(timeout_s=10)
    writer.submit(Snapshot(engine or state(step), TrainerState(step, step * 16, best), CARD))
    return writer


def saver_of(run_dir: Path, *, world: World, every: int, timeout_s: float = 600.0) -> Saver:
    """Return the saver of a run of 999 steps that keeps one checkpoint and the best."""
    settings: Any = SimpleNamespace(
        run_dir=run_dir,
        checkpoint=CheckpointSettings(every=f"{every} steps", keep_last=1, keep_best=True),
        train=SimpleNamespace(global_batch_size=16, duration="999 steps"),
        engine=SimpleNamespace(timeout_s=timeout_s),
    )
    data: Any = SimpleNamespace(steps=lambda length, **_batch: int(length.split()[0]))
    engine: Any = SimpleNamespace(device=torch.device("cpu"), export_state=lambda: state(1.0))
    return Saver(
        settings, data, engine=engine, world=world, card=CARD, log=Tracker(None, params={}, tags={})
    )


@pytest.mark.parametrize(
    ("scores", "refused", "slow", "left", "best"),
    [
        ((0.5, 0.6, 0.7, 0.4), (20, 30), 0, [10, 40], Best(10, 0.5)),
        ((0.5, 0.7, 0.6, 0.1), (20,), 0, [10, 40], Best(10, 0.5)),
        ((0.5, 0.7, 0.6, 0.8), (20,), 0, [40], Best(40, 0.8)),
        # step 30 is skipped while 20 is written, so it cannot be the best
        ((0.5, 0.6, 0.9, 0.7, 0.1), (), 20, [40, 50], Best(40, 0.7)),
    ],
)
def test_a_best_that_was_not_written_costs_no_other_best(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scores: list[float],
    refused: tuple[int, ...],
    slow: int,
    left: list[int],
    best: Best,
) -> None:
    """The disk rejects some steps, and one step is slow. best.json names the best existing
    checkpoint, and the next checkpoint replaces a failed one."""
    go_on, really = threading.Event(), files.publish

    def publish(run_dir: Path, snapshot: Snapshot) -> int:
        if snapshot.trainer.step in refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert snapshot.trainer.step != slow or go_on.wait(20)
        return really(run_dir, snapshot)

    monkeypatch.setattr("pretrain.checkpoints.writer.publish", publish)
    saver = saver_of(tmp_path, world=World(0, 0, 1), every=10, timeout_s=0.1)
    for number, score in enumerate(scores, 1):
        saver.judge(10 * number, top1=score)
        saver.save(TrainerState(10 * number, 160 * number, skipped_steps=5, skipped_in_a_row=2))
        if 10 * number > slow:
            go_on.set()
        if 10 * number != slow:
            assert saver.writer.make_room(timeout_s=20)
    saver.finish()
    assert steps(tmp_path) == left and saver.best == best
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == asdict(best)
    _, trainer = restored(tmp_path)
    assert (trainer.skipped_steps, trainer.skipped_in_a_row) == (5, 2)


def test_a_resume_saves_the_best_that_the_stopped_run_did_not_evaluate(tmp_path: Path) -> None:
    for step in (4, 8):
        save(tmp_path, step, best=Best(4, 0.15))
    saver = saver_of(tmp_path, world=World(0, 0, 1), every=4)
    saver.go_on(restored(tmp_path)[1])
    saver.judge(8, top1=0.175)
    saver.save(TrainerState(8, 128), is_last=True)
    saver.finish()
    assert saver.best == restored(tmp_path)[1].best == Best(8, 0.175)
    assert steps(tmp_path) == [8]


def test_the_event_log_is_synced_before_a_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume logs only the steps after its checkpoint: earlier events must be on disk, too."""
    journal, fsync, lines_at_rename, rename = (
        tmp_path / "tracking" / "journal.jsonl",
        os.fsync,
        [],
        os.rename,
    )
    synced = b""

    def noted_fsync(descriptor: int) -> None:
        nonlocal synced
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), journal.stat()):
            synced = journal.read_bytes()

    def noted_rename(source: Any, target: Any) -> None:
        rename(source, target)  # raises if no earlier directory exists
        lines_at_rename.append((Path(target).name, synced.count(b"loss")))

    journal.parent.mkdir()
    tracker = Tracker(tmp_path, params={}, tags={}, settings=TrackingSettings(enabled=False))
    monkeypatch.setattr("os.fsync", noted_fsync)
    monkeypatch.setattr("os.rename", noted_rename)
    writer = CheckpointWriter(tmp_path, Retention(2), log=tracker)
    for step in (1, 2):
        tracker.metrics({"loss": 1.0}, step=step)
        submitted(writer, step).finish()
    assert lines_at_rename == [("step-00000001", 1), ("step-00000002", 2)]
    tracker.close("FINISHED")


def waits(world: World, folder: str) -> list[Any]:
    """Return each rank's results while another rank reads or writes for longer than a collective
    may.

    The first rank verifies, the second loads. Then `finish` runs on a slow disk and on a disk that
    is full.
    """
    torch.distributed.init_process_group("gloo")
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    device = torch.device("cpu")

    def slow_newest(run_dir: Path) -> Checkpoint | None:
        time.sleep(4)
        return really_newest(run_dir)

    def refuses() -> None:
        raise CheckpointError("disk", "is full", code="no-space")

    really_newest, Checkpoint.newest = Checkpoint.newest, slow_newest  # type: ignore[method-assign, assignment]
    newest = train.agreed_checkpoint(Path(folder), world, device=device)
    found = [
        newest and newest.directory.name,
        on_all_ranks(lambda: time.sleep(4 * world.rank) or world.rank, device=device, field=""),
    ]
    for finish in (lambda: time.sleep(4), refuses):
        saver = saver_of(Path("unused"), world=world, every=1)
        saver.writer.finish = finish  # type: ignore[method-assign]
        try:
            saver.finish()
            found.append("done")
        except (CheckpointError, FailedElsewhere) as error:
            found.append([error.code, error.of_all_ranks])
    return found


@pytest.mark.processes
def test_ranks_wait_for_one_that_reads_or_writes_longer_than_any_collective_may_and_end_alike(
    tmp_path: Path,
) -> None:
    save(tmp_path, 7)
    first, second = run_ranks(waits, str(tmp_path), num_ranks=2)
    assert first == ["step-00000007", 0, "done", ["no-space", False]]
    assert second == ["step-00000007", 1, "done", ["another-rank", True]]


def disagree(world: World, folder: str) -> list[str]:
    """Return each rank's error if the ranks have separate run directories: first other bytes for
    the same step, then no checkpoint on rank 1."""
    torch.distributed.init_process_group("gloo")
    said = []
    for place in ("other bytes", "only the first"):
        with pytest.raises((CheckpointError, FailedElsewhere)) as found:
            train.agreed_checkpoint(
                Path(folder) / place / str(world.rank), world, device=torch.device("cpu")
            )
        said.append(found.value.code)
    return said


@pytest.mark.processes
def test_ranks_that_do_not_see_the_same_checkpoint_do_not_train(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / "other bytes" / str(rank), 7, best=Best(7, rank / 2))
    save(tmp_path / "only the first" / "0", 7)
    first, second = run_ranks(disagree, str(tmp_path), num_ranks=2)
    assert first == ["mismatch", "another-rank"] and second == ["mismatch", "missing-path"]


class SlowDisk:
    """A disk that accepts data at once, and flushes 1,000 bytes/s of the clock that detects
    hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.longest_stall_s, self._on_disk = 1000.0, 0.0, dict[int, int]()
        monkeypatch.setattr(
            "pretrain.ranks.hangs.time", SimpleNamespace(monotonic=lambda: self.now_s)
        )
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self.flush)

    def flush(self, descriptor: int) -> None:
        file = os.fstat(descriptor)
        if stat.S_ISREG(file.st_mode):
            self.now_s += (file.st_size - self._on_disk.get(file.st_ino, 0)) / 1000
            self._on_disk[file.st_ino] = file.st_size
        self.longest_stall_s = max(self.longest_stall_s, PROGRESS.standing().stalled_s)


def test_a_disk_that_is_slow_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr("pretrain.checkpoints.files.FLUSHED_BYTES", 16_000)
    monkeypatch.setattr("pretrain.checkpoints.files.PIECE_BYTES", 4_000)
    PROGRESS.mark("making a checkpoint")
    engine = EngineState(
        {"w": torch.zeros(100_000)}, {"m": torch.zeros(50_000), "v": torch.zeros(50_000)}, 1
    )
    files.publish(tmp_path, Snapshot(engine, TrainerState(1, 16), CARD))
    assert disk.now_s > 1800 and 16 <= disk.longest_stall_s < 25


def test_what_is_read_at_a_resume_reports_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors, each of ten hashed pieces and twenty loaded pieces."""
    tensors = {name: torch.arange(1000.0) for name in ("a", "b")}
    digest = WRITE_TENSORS(tmp_path / "t", tensors)
    (tmp_path / "sha256.json").write_text(json.dumps({"t": digest}))
    monkeypatch.setattr("data_prep.publish.HASHED_BYTES", 400)
    monkeypatch.setattr("pretrain.checkpoints.files.PIECE_BYTES", 200)
    touches = list[str]()
    monkeypatch.setattr(PROGRESS, "touch", lambda: touches.append(""))
    assert fault_of(tmp_path, needed=("t",)) is None and 20 <= len(touches) <= 22
    read = read_tensors(tmp_path / "t")
    assert len(touches) >= 60
    assert read.keys() == tensors.keys() and all(torch.equal(read[n], tensors[n]) for n in read)


def test_a_file_system_that_refuses_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in place of the directory blocks even root. The next checkpoint replaces a failed
    one."""
    taken = tmp_path / "checkpoints"
    taken.write_text("")
    log = Log()
    writer = CheckpointWriter(tmp_path, Retention(2), log=log)
    for step in (1, 2):
        submitted(writer, step)
        wait_until(
            lambda step=step: (
                f"the checkpoint of step {step} could not be written" in capsys.readouterr().err
            )
        )
    assert writer.make_room(timeout_s=10)
    assert log.values["usage/checkpoint_failures"] == 2
    taken.unlink()
    writer.submit(Snapshot(state(3), TrainerState(3, 48), CARD))
    writer.finish()
    assert steps(tmp_path) == [3]  # instead of 1 and 2


def test_a_run_does_not_end_well_without_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.checkpoints.writer.FINAL_S", 0)
    (tmp_path / "checkpoints").write_text("")
    writer = submitted(CheckpointWriter(tmp_path, Retention(2), log=Log()), 7)
    with fails("no-access", str(tmp_path / "checkpoints"), kind=CheckpointError):
        writer.finish()


def test_a_published_last_checkpoint_counts_and_only_the_steps_after_it_are_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def noted_publish(run_dir: Path, snapshot: Snapshot) -> int:
        calls.append("publish")
        return files.publish(run_dir, snapshot)

    def settle(*_: object) -> None:
        calls.append("settle")
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pretrain.checkpoints.writer.FINAL_S", 0)
    monkeypatch.setattr("pretrain.checkpoints.writer.publish", noted_publish)
    monkeypatch.setattr("pretrain.checkpoints.writer.settle", settle)
    submitted(CheckpointWriter(tmp_path, Retention(2), log=Log()), 7).finish()
    assert calls == ["publish", "settle", "settle"]
    assert steps(tmp_path) == [7] and "is complete" in capsys.readouterr().err


def test_a_start_that_has_lost_the_run_publishes_nothing(tmp_path: Path) -> None:
    with hold_run(tmp_path, lock_wait_s=0):
        writer = submitted(CheckpointWriter(tmp_path, Retention(2), log=Log()), 1)
        writer.finish()
        (tmp_path / "starts" / "0002").mkdir()
        submitted(writer, 2)
        with fails("busy", "run_dir"):
            writer.finish()
        with fails("busy", "run_dir"):
            save_result(tmp_path, {"step": 2})
    assert steps(tmp_path) == [1] and not (tmp_path / "result.json").exists()


def test_an_interrupted_wait_for_the_lock_writes_no_record(tmp_path: Path) -> None:
    stop = StopFlag()
    stop.raised_by = "SIGTERM"
    settings = SimpleNamespace(
        run_dir=str(tmp_path), engine=SimpleNamespace(lock_wait_s=60, timeout_s=600)
    )
    task: Any = SimpleNamespace(settings=settings, config=None, start=None)
    with hold_run(tmp_path, lock_wait_s=0), entered(train._claimed(task, stop)):
        assert [path.name for path in tmp_path.iterdir()] == ["starts"]


def test_a_defect_of_ours_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    odd = EngineState({"w": torch.zeros(2, dtype=torch.complex64)}, {}, 1)
    writer = submitted(CheckpointWriter(tmp_path, Retention(2), log=Log()), 1, odd)
    with pytest.raises(ValueError, match="complex64"):
        writer.finish()


def test_a_write_under_way_is_waited_for_and_no_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(path: Path, tensors: dict[str, torch.Tensor]) -> str:
        go_on.wait(20)
        return WRITE_TENSORS(path, tensors)

    monkeypatch.setattr(files, "write_tensors", slow)
    writer = submitted(CheckpointWriter(tmp_path, Retention(2), log=Log()), 1)
    wait_until(lambda: list((tmp_path / "checkpoints").glob(".tmp-*")) != [])
    assert not writer.make_room(timeout_s=0.05)
    go_on.set()
    assert writer.make_room(timeout_s=10)
    writer.finish()
    assert steps(tmp_path) == [1]


def test_the_file_is_what_safetensors_itself_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"ä.{n}": torch.rand(n, 5, generator=generator).to(kind) for n, kind in enumerate(KINDS)
    }
    tensors |= {
        "scalar": torch.tensor(3.0),
        "turned": torch.rand(4, 6, generator=generator).T,
        "flag": torch.ones(3) > 0,
    }
    expected = save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    monkeypatch.setattr("pretrain.checkpoints.files.PIECE_BYTES", 7)
    digest = WRITE_TENSORS(tmp_path / "a", tensors)
    assert (tmp_path / "a").read_bytes() == expected and digest == hashlib.sha256(
        expected
    ).hexdigest()


KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.int32, torch.uint8)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": lambda weights: weights.write_bytes(
        weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1])
    ),
    "cut": lambda weights: os.truncate(weights, weights.stat().st_size - 1),
    "remove": Path.unlink,
    "no hashes": lambda weights: weights.with_name("sha256.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    DAMAGES[damage](newest / "model.safetensors")
    assert fault_of(newest, needed=FILES) is not None
    assert restored(tmp_path)[1].step == 1
    assert "is damaged" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    assert (
        restored(tmp_path)[1].step == 1 and capsys.readouterr().err == ""
    )  # only the first rank reports


def test_training_never_silently_starts_over(tmp_path: Path) -> None:
    assert Checkpoint.newest(tmp_path) is None
    path = save(tmp_path, 1)
    (path / "trainer.json").write_text(json.dumps({}))
    with fails("damaged", str(tmp_path), kind=CheckpointError):
        Checkpoint.newest(tmp_path)
    assert (
        Checkpoint.open(tmp_path).directory == path
    )  # later stages need only the weights, which are complete
    (path / "model.safetensors").write_bytes(b"")
    with fails("damaged", str(tmp_path), kind=CheckpointError):
        Checkpoint.open(tmp_path)


def test_weights_that_were_copied_without_their_hashes_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for name in ("sha256.json", "optimizer.safetensors", "trainer.json"):
        (path / name).unlink()
    assert Checkpoint.open(tmp_path).directory == path
    with fails("damaged", str(tmp_path), kind=CheckpointError):
        Checkpoint.newest(tmp_path)


def test_an_abandoned_future_is_pruned_and_the_newest_stays(tmp_path: Path) -> None:
    """Step 100 is good, 200 is damaged, and training resumed from 100: pruning must keep 150."""
    save(tmp_path, 100)
    (save(tmp_path, 200) / "model.safetensors").write_bytes(b"")
    save(tmp_path, 150, keep_last=1)
    assert steps(tmp_path) == [150]
