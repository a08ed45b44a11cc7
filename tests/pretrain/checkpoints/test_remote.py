"""A remote is as complete as a run directory whenever a process dies."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.errors import UserError
from data_prep.remote import RemoteError, StoppedError
from data_prep.settings import dump
from pretrain.checkpoints import files, remote, uploader
from pretrain.checkpoints.checkpoint import Checkpoint, fault_of
from pretrain.checkpoints.files import Best, Retention
from pretrain.checkpoints.remote import Remote, fetch_run
from pretrain.checkpoints.run import list_checkpoints, step_of
from pretrain.checkpoints.uploader import Uploader
from pretrain.checkpoints.writer import CheckpointWriter
from pretrain.config import PretrainSettings
from pretrain.loop import train
from pretrain.ranks.world import World
from tests.errors import fails
from tests.moments import wait_until
from tests.pretrain.checkpoints.test_checkpoint import (
    FILES,
    Crash,
    Log,
    save,
    state,
    steps,
    submitted,
)
from tests.ranks import run_ranks

FIRST = World(0, 0, 1)


def settings_of(run_dir: Path, store: Path, **more: Any) -> PretrainSettings:
    settings = {
        "run_dir": str(run_dir),
        "data": {"dataset": "data/none"},
        "model": {"kind": "mlp", "depth": 1, "width": 4},
        "train": {"duration": "9 steps", "global_batch_size": 4},
        "checkpoint": {"remote": f"file://{store}"},
    }
    return PretrainSettings.model_validate(settings | more)


class Node:
    """A machine with its own disk, on which a run begins or resumes."""

    def __init__(self, disk: Path, store: Path, *, world: World = FIRST, **more: Any):
        self.run_dir, self.log = disk / "run", Log()
        settings = settings_of(self.run_dir, store, **more)
        fetch_run(settings, world)
        found = Remote.of(settings)
        assert found is not None
        self.remote = found
        self.record("config.yaml", dump(settings).encode())
        if not (self.run_dir / "tracking/identity.json").exists():
            identity = {"run_key": str(disk), "uri": f"sqlite:///{disk}/mlflow.db"}
            self.record("tracking/identity.json", json.dumps(identity).encode())

    def record(self, name: str, content: bytes) -> None:
        place = self.run_dir / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def writer(self, retention: Retention) -> tuple[CheckpointWriter, Uploader]:
        uploads = Uploader(self.remote, retention, self.log)
        uploads.start()
        return CheckpointWriter(self.run_dir, retention, log=self.log, uploader=uploads), uploads


def complete(store: Path) -> list[int]:
    """Return the steps from which a run could resume."""
    found = [
        path.parent for path in sorted((store / "checkpoints").glob("step-*[0-9]/sha256.json"))
    ]
    assert [fault_of(path, needed=FILES) for path in found] == [None] * len(found)
    return [step_of(path) for path in found]


def test_another_disk_resumes_from_what_the_remote_has(tmp_path: Path) -> None:
    """The remote has config, event log, identity and the best checkpoint. Retention rules hold in
    the remote, too, and a user's copy stays."""
    node, store = Node(tmp_path / "a", tmp_path / "store"), tmp_path / "store"
    writer, uploads = node.writer(Retention(keep_last=2, keep_every_steps=30))
    own_copy = store / "checkpoints" / "step-00000010.bak" / "sha256.json"
    own_copy.parent.mkdir(parents=True)
    own_copy.touch()
    best = None
    for step in range(10, 101, 10):
        best = {20: Best(20, 0.4), 70: Best(70, 0.5)}.get(step, best)
        node.record("tracking/journal.jsonl", b"line\n" * step)
        node.record("tracking/delivered.json", json.dumps({"offset": 5 * step}).encode())
        submitted(writer, step, best=best)
    writer.finish()
    uploads.close(finished=True)
    assert steps(node.run_dir) == [30, 60, 70, 90, 100]
    assert {70, 90, 100} <= {*complete(store)} <= {30, 60, 70, 90, 100}
    assert json.loads((store / "checkpoints/best.json").read_text()) == asdict(Best(70, 0.5))
    shutil.rmtree(tmp_path / "a")
    other = Node(tmp_path / "b", store)
    assert steps(other.run_dir) == [70, 100] and own_copy.exists()
    assert (other.run_dir / "tracking/journal.jsonl").read_bytes() == b"line\n" * 100
    identity = json.loads((other.run_dir / "tracking/identity.json").read_text())
    assert identity == {"run_key": f"{tmp_path}/a", "uri": f"sqlite:///{tmp_path}/b/mlflow.db"}
    found = Checkpoint.newest(other.run_dir)
    assert found is not None and files.load_state(found.directory)[1].step == 100


def best_and_newest(disk: Path, store: Path) -> None:
    """Upload steps 20 (the best) and 100."""
    node = Node(disk, store)
    node.record("record.json", b"{}")
    writer, uploads = node.writer(Retention(1))
    for step in (20, 100):
        submitted(writer, step, best=Best(20, 0.4))
    writer.finish()
    uploads.close(finished=True)
    assert complete(store) == [20, 100]
    shutil.rmtree(disk)


def test_the_best_is_fetched_whichever_rank_fetched_the_newest(tmp_path: Path) -> None:
    store = tmp_path / "store"
    best_and_newest(tmp_path / "a", store)
    other = Node(tmp_path / "b", store, world=World(1, 1, 2))
    assert steps(other.run_dir) == [100] and (other.run_dir / "record.json").exists()
    assert steps(Node(tmp_path / "b", store).run_dir) == [20, 100]


def test_the_best_in_the_remote_stays_until_a_newer_one_is_complete_there(tmp_path: Path) -> None:
    store = tmp_path / "store"
    best_and_newest(tmp_path / "a", store)
    node = Node(tmp_path / "b", store)
    shutil.rmtree(node.run_dir / "checkpoints" / "step-00000020")
    writer, uploads = node.writer(Retention(1))
    submitted(writer, 110, best=Best(20, 0.4)).finish()
    uploads.offer()
    assert uploads.wait(20) and complete(store) == [20, 110]
    submitted(writer, 120, best=Best(120, 0.5)).finish()
    uploads.close(finished=True)
    assert complete(store) == [120]


def test_a_defect_of_the_upload_ends_training_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path / "a", tmp_path / "store")

    def has_defect(*_: object) -> int:
        raise AssertionError("our mistake")

    monkeypatch.setattr(Uploader, "_upload_all", has_defect)
    writer, uploads = node.writer(Retention(1))
    wait_until(lambda: uploads.defect is not None)
    with pytest.raises(AssertionError, match="our mistake"):
        writer.make_room(timeout_s=0)
    with pytest.raises(AssertionError, match="our mistake"):
        uploads.close(finished=True)


@pytest.mark.slow
def test_a_crash_between_any_two_writes_leaves_the_newest_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die before the n-th write to the bucket, for every n, while a checkpoint appears in it and
    the previous one is removed."""
    for crash_at in range(100):
        store = tmp_path / str(crash_at) / "store"
        node = Node(store.parent / "a", store)
        uploads = Uploader(node.remote, Retention(1), node.log)
        save(node.run_dir, 1, keep_last=1)
        uploads._upload_all()
        calls = 0
        node.record("tracking/journal.jsonl", b"line\n" * 2)
        node.record("tracking/delivered.json", b'{"offset": 10}')
        save(node.run_dir, 2, keep_last=1, best=Best(2, 0.5))

        def counted(original: Callable[..., Any], crash_at: int = crash_at) -> Callable[..., Any]:
            def wrapped(first: Any, *arguments: Any, **options: Any) -> Any:
                nonlocal calls
                for each in [[url] for url in first] if isinstance(first, list) else [first]:
                    calls += 1
                    if calls > crash_at:
                        raise Crash
                    original(each, *arguments, **options)

            return wrapped

        has_crashed = False
        with monkeypatch.context() as patch:
            for name in ("upload", "write_bytes", "remove"):
                patch.setattr(remote, name, counted(getattr(remote, name)))
            try:
                uploads._upload_all()
            except Crash:
                has_crashed = True
        other = Node(store.parent / "b", store)
        newest = Checkpoint.newest(other.run_dir)
        assert newest is not None and step_of(newest.directory) == max(complete(store))
        journal = other.run_dir / "tracking/journal.jsonl"
        if step_of(newest.directory) == 2:  # the event log was uploaded first
            assert journal.read_bytes() == b"line\n" * 2
        delivered = other.run_dir / "tracking/delivered.json"
        assert not delivered.exists() or journal.stat().st_size >= 10
        save(other.run_dir, 3, keep_last=1)
        Uploader(other.remote, Retention(1), other.log)._upload_all()
        assert complete(store)[-1] == 3
        assert {path.parent for path in (store / "checkpoints").glob("step-*/*")} == {
            path.parent for path in store.rglob("sha256.json")
        }
        if not has_crashed:
            assert crash_at > 12
            return
    raise AssertionError("the crash point never moved past the end")


def test_damage_in_the_remote_falls_back_and_is_uploaded_again(tmp_path: Path) -> None:
    node, store = Node(tmp_path / "a", tmp_path / "store"), tmp_path / "store"
    for step in (1, 2):
        node.remote.upload(save(node.run_dir, step))
    weights = store / "checkpoints/step-00000002/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    other = Node(tmp_path / "b", store)
    assert steps(other.run_dir) == [1] and not list(other.run_dir.rglob(".tmp-*"))
    found = other.remote.newest()
    assert found is not None and step_of(found.directory) == 1
    save(other.run_dir, 2)
    Uploader(other.remote, Retention(2), other.log)._upload_all()
    assert complete(store) == [1, 2]
    for place in list_checkpoints(other.run_dir):  # now the local copies are damaged
        (place / "model.safetensors").write_bytes(b"")
    found = other.remote.newest()
    assert found is not None and fault_of(found.directory, needed=FILES) is None


def test_a_run_does_not_begin_again_if_all_in_the_remote_is_damaged(tmp_path: Path) -> None:
    node = Node(tmp_path / "a", tmp_path / "store")
    node.remote.upload(save(node.run_dir, 1))
    (tmp_path / "store/checkpoints/step-00000001/trainer.json").write_bytes(b"")
    other = Node(tmp_path / "b", tmp_path / "store")
    with fails("damaged", "checkpoint.remote"):
        other.remote.newest()


def test_another_runs_remote_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = Node(tmp_path / "a", store)
    first.remote.upload(save(first.run_dir, 1))
    with fails("exists", "checkpoint.remote"):
        Node(tmp_path / "b", store, optimizer={"lr": 0.5})
    assert not (tmp_path / "b/run/config.yaml").exists()
    other = Node(tmp_path / "c", tmp_path / "elsewhere")
    save(other.run_dir, 7)
    with fails("exists", "checkpoint.remote"):
        Node(tmp_path / "c", store)
    with fails("exists", "checkpoint.remote"):  # this run began before the other one
        Remote(other.run_dir, f"file://{store}", {}).upload(list_checkpoints(other.run_dir)[0])
    assert steps(other.run_dir) == [7] and complete(store) == [1]


FAULTS = [
    RemoteError("s3://x", "it cannot be written after 4 attempts (503)", code="unreachable"),
    UserError("s3://x", "access is refused", "Give credentials", code="no-access"),
]


@pytest.mark.parametrize("error", FAULTS, ids=["down", "expired"])
def test_a_bucket_that_refuses_costs_training_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A finished run that is not complete in the bucket ends with an error, and the same command
    uploads the rest."""
    node, store, really = (
        Node(tmp_path / "a", tmp_path / "store"),
        tmp_path / "store",
        remote.upload,
    )

    def refuses(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(remote, "upload", refuses)
    monkeypatch.setattr(uploader, "FINAL_S", 0.2)
    writer, uploads = node.writer(Retention(2))
    for step in (7, 8, 9):
        submitted(writer, step)
    writer.finish()
    wait_until(lambda: node.log.values.get("usage/remote_failures", 0) >= 1)
    node.record("result.json", b'{"step": 9}')
    with fails("unreachable", "checkpoint.remote"):
        uploads.close(finished=True)
    assert steps(node.run_dir) == [8, 9] and not (store / "result.json").exists()
    monkeypatch.setattr(remote, "upload", really)
    fetch_run(settings_of(node.run_dir, store), FIRST)
    assert complete(store) == [8, 9] and (store / "result.json").exists()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stopped_run_waits_for_the_bucket_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    node, store, really = (
        Node(tmp_path / "a", tmp_path / "store"),
        tmp_path / "store",
        remote.upload,
    )
    go_on = threading.Event()

    def slow(place: Path, url: str, *, storage: dict[str, Any], stop: threading.Event) -> None:
        while not go_on.wait(0.01):
            if stop.is_set():
                raise StoppedError
        really(place, url, storage=storage)

    monkeypatch.setattr(remote, "upload", slow)
    writer, uploads = node.writer(Retention(2))
    submitted(writer, 2, state(2.0))
    writer.finish()
    if not is_late:
        go_on.set()
    uploads.close(finished=False, deadline_s=time.monotonic() + (-1 if is_late else 1000))
    assert complete(store) == ([] if is_late else [2])


def agreed(world: World, folder: str, store: str, given: list[list[int]]) -> list[str]:
    """Return each node's checkpoints after two nodes, which begin with different ones, have
    agreed."""
    torch.distributed.init_process_group("gloo")
    node = World(world.rank, 0, world.num_ranks)
    found = Remote.of(settings_of(Path(folder) / str(world.rank), Path(store)))
    assert found is not None
    for step in given[world.rank]:
        save(found.run_dir, step, best=Best(step, world.rank / 2))  # other bytes on each node
    torch.distributed.barrier()
    newest = train.agreed_checkpoint(found.run_dir, node, device=torch.device("cpu"), remote=found)
    assert newest is not None
    return [newest.directory.name, json.dumps(newest.hashes)]


@pytest.mark.processes
@pytest.mark.parametrize("given", [[[3], []], [[3], [3]], [[2, 3], [3, 5]]], ids=str)
def test_nodes_with_disks_of_their_own_agree_on_the_first_ranks_checkpoint(
    tmp_path: Path, given: list[list[int]]
) -> None:
    first, second = run_ranks(agreed, str(tmp_path), str(tmp_path / "store"), given, num_ranks=2)
    assert first == second and first[0] == "step-00000003"
    assert complete(tmp_path / "store") == [3]
    trainer = json.loads((tmp_path / "1/checkpoints" / first[0] / "trainer.json").read_text())
    assert trainer["best"]["score"] == 0
