"""A mirror is as whole as a run directory, whoever dies at whatever moment; what a node lacks it is given, and the newest start
alone changes anything.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoints import files, mirror
from pretrain.checkpoints.checkpoint import Checkpoint, fault_of
from pretrain.checkpoints.files import Best, Retention
from pretrain.checkpoints.mirror import Mirror
from pretrain.checkpoints.run import step_of
from pretrain.checkpoints.writer import CheckpointWriter
from pretrain.config import PretrainSettings
from pretrain.ranks.world import World
from tests.pretrain.checkpoints.test_checkpoint import FILES, Crash, save, steps, submitted

FIRST = World(0, 0, 1)


def settings_of(run_dir: Path, store: Path, **more: Any) -> PretrainSettings:
    settings = {
        "run_dir": str(run_dir),
        "data": {"dataset": "data/none"},
        "model": {"kind": "mlp", "depth": 1, "width": 4},
        "train": {"duration": "9 steps", "global_batch_size": 4},
        "checkpoint": {"mirror": f"file://{store}"},
    }
    return PretrainSettings.model_validate(settings | more)


class Node:
    """A machine with a disk of its own, on which a run begins, or goes on."""

    def __init__(self, disk: Path, store: Path, *, world: World = FIRST, **more: Any):
        self.run_dir, self.store = disk / "run", store
        settings = settings_of(self.run_dir, store, **more)
        mirror.bring(settings, world)
        found = Mirror.of(settings)
        assert found is not None
        self.mirror = found
        if world.is_first:
            self.record("config.yaml", mirror.dump(settings).encode())
            self.mirror.begin()

    def record(self, name: str, content: bytes) -> None:
        place = self.run_dir / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def writer(self, retention: Retention) -> CheckpointWriter:
        writer = CheckpointWriter(self.run_dir, retention, mirror=self.mirror)
        assert writer.mirror is not None
        writer.mirror.start()
        return writer


def whole(store: Path) -> list[int]:
    """Steps of what a start could go on from."""
    found = [path.parent for path in sorted((store / "checkpoints").glob("step-*/sha256.json"))]
    assert [fault_of(path, needed=FILES) for path in found] == [None] * len(found)
    return [step_of(path) for path in found]


def test_another_disk_goes_on_from_what_the_store_holds(tmp_path: Path) -> None:
    """And from there it knows config, journal, identity and the best; what the rules keep stays, as in the run's directory."""
    node = Node(tmp_path / "a", tmp_path / "store")
    writer = node.writer(Retention(keep_last=2, keep_every_steps=30))
    node.record("tracking/identity.json", json.dumps({"uri": f"sqlite:///{tmp_path}/a/mlflow.db"}).encode())
    best = None
    for step in range(10, 101, 10):
        best = {20: Best(20, 0.4), 70: Best(70, 0.5)}.get(step, best)
        node.record("tracking/journal.jsonl", b"line\n" * step)
        node.record("tracking/delivered.json", json.dumps({"offset": 5 * step}).encode())
        submitted(writer, step, best=best)
        if step == 60:
            writer.wait(20)
            assert whole(tmp_path / "store")[-1] == 60 and {20, 30, 60} <= {*whole(tmp_path / "store")}
    writer.finish(best)
    assert writer.mirror is not None and writer.mirror.wait(20)
    writer.mirror.close(finished=True)
    assert steps(node.run_dir) == [30, 60, 70, 90, 100] and whole(tmp_path / "store")[-1] == 100
    assert {*whole(tmp_path / "store")} <= {30, 60, 70, 90, 100} and {70, 100} <= {*whole(tmp_path / "store")}
    assert json.loads((tmp_path / "store" / "checkpoints" / "best.json").read_text()) == asdict(Best(70, 0.5))
    other = Node(tmp_path / "b", tmp_path / "store")
    assert steps(other.run_dir) == [70, 100]
    for name in ("tracking/journal.jsonl", "tracking/delivered.json"):
        assert (other.run_dir / name).read_bytes() == (node.run_dir / name).read_bytes()
    assert json.loads((other.run_dir / "tracking/identity.json").read_text()) == {"uri": f"sqlite:///{tmp_path}/b/mlflow.db"}
    found = Checkpoint.newest(other.run_dir)
    assert found is not None and files.load_state(found.directory)[1].step == 100


WRITES = ("upload", "write_bytes", "remove")


def test_a_crash_between_any_two_writes_leaves_the_newest_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dies before the n-th write to the store, for every n, while a checkpoint appears there and the one before it goes."""
    for crash_at in range(100):
        store = tmp_path / str(crash_at) / "store"
        node, retention = Node(store.parent / "a", store), Retention(1)
        place = save(node.run_dir, 1, keep_last=1)
        node.mirror.push(place)
        calls = 0
        node.record("tracking/journal.jsonl", b"line\n" * 2)
        node.record("tracking/delivered.json", b'{"offset": 10}')
        place = save(node.run_dir, 2, keep_last=1, best=Best(2, 0.5))

        def crashing(original: Callable[..., Any], crash_at: int = crash_at) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > crash_at:
                    raise Crash
                return original(*arguments, **options)

            return wrapped

        with monkeypatch.context() as patch:
            for name in WRITES:
                patch.setattr(mirror, name, crashing(getattr(mirror, name)))
            try:
                node.mirror.push(place)
                node.mirror.settle(place, retention)
                has_crashed = False
            except Crash:
                has_crashed = True
        other = Node(store.parent / "b", store)
        newest = Checkpoint.newest(other.run_dir)
        assert newest is not None and step_of(newest.directory) == max(whole(store))
        if step_of(newest.directory) == 2:  # its journal has come before it
            assert (other.run_dir / "tracking/journal.jsonl").read_bytes() == b"line\n" * 2
        delivered = other.run_dir / "tracking/delivered.json"
        assert not delivered.exists() or (other.run_dir / "tracking/journal.jsonl").stat().st_size >= 10
        writer = other.writer(retention)
        submitted(writer, 3, best=Best(2, 0.5) if max(whole(store)) == 2 else None)
        writer.finish(None)
        assert writer.wait(20) is None and writer.mirror is not None
        writer.mirror.close(finished=True)
        assert whole(store)[-1] == 3
        assert {path.parent for path in (store / "checkpoints").glob("step-*/*")} == {
            path.parent for path in store.rglob("sha256.json")
        }
        if not has_crashed:
            assert crash_at > 8 and step_of(newest.directory) == 2 and whole(store) == [2, 3]
            return
    raise AssertionError("the crash point never moved past the end")
