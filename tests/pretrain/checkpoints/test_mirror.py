"""A mirror is as whole as a run directory, whoever dies at whatever moment; what a node lacks it is
given, and the newest start alone changes anything.
"""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import remote
from data_prep.errors import SettingsError, UserError
from data_prep.publish import Superseded
from data_prep.remote import RemoteError
from data_prep.settings import dump
from pretrain.checkpoints import files, mirror
from pretrain.checkpoints.card import CheckpointError
from pretrain.checkpoints.checkpoint import Checkpoint, fault_of
from pretrain.checkpoints.files import Best, Retention
from pretrain.checkpoints.mirror import Mirror
from pretrain.checkpoints.run import list_checkpoints, step_of
from pretrain.checkpoints.writer import CheckpointWriter
from pretrain.config import PretrainSettings
from pretrain.loop import train
from pretrain.ranks.world import World
from tests.moments import wait_until
from tests.pretrain.checkpoints.test_checkpoint import FILES, Crash, save, state, steps, submitted
from tests.ranks import run_ranks

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
            self.record("config.yaml", dump(settings).encode())
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
    found = [
        path.parent for path in sorted((store / "checkpoints").glob("step-*[0-9]/sha256.json"))
    ]
    assert [fault_of(path, needed=FILES) for path in found] == [None] * len(found)
    return [step_of(path) for path in found]


def test_another_disk_goes_on_from_what_the_store_holds(tmp_path: Path) -> None:
    """And from there it knows config, journal, identity and the best; what the rules keep stays, as
    in the run's directory."""
    node = Node(tmp_path / "a", tmp_path / "store")
    writer = node.writer(Retention(keep_last=2, keep_every_steps=30))
    own_copy = tmp_path / "store" / "checkpoints" / "step-00000010.bak" / "sha256.json"
    own_copy.parent.mkdir(parents=True)
    own_copy.touch()
    node.record(
        "tracking/identity.json", json.dumps({"uri": f"sqlite:///{tmp_path}/a/mlflow.db"}).encode()
    )
    best = None
    for step in range(10, 101, 10):
        best = {20: Best(20, 0.4), 70: Best(70, 0.5)}.get(step, best)
        node.record("tracking/journal.jsonl", b"line\n" * step)
        node.record("tracking/delivered.json", json.dumps({"offset": 5 * step}).encode())
        submitted(writer, step, best=best)
        if step == 60:
            writer.wait(20)
            assert whole(tmp_path / "store")[-1] == 60 and {20, 30, 60} <= {
                *whole(tmp_path / "store")
            }
    writer.finish(best)
    assert writer.mirror is not None and writer.mirror.wait(20)
    writer.tidy()
    writer.mirror.close(finished=True)
    assert steps(node.run_dir) == [30, 60, 70, 90, 100]
    assert {30, 60, 70, 100} <= {*whole(tmp_path / "store")} and len(whole(tmp_path / "store")) == 5
    assert json.loads((tmp_path / "store" / "checkpoints" / "best.json").read_text()) == asdict(
        Best(70, 0.5)
    )
    other = Node(tmp_path / "b", tmp_path / "store")
    assert steps(other.run_dir) == [70, 100] and own_copy.exists()
    for name in ("tracking/journal.jsonl", "tracking/delivered.json"):
        assert (other.run_dir / name).read_bytes() == (node.run_dir / name).read_bytes()
    assert json.loads((other.run_dir / "tracking/identity.json").read_text()) == {
        "uri": f"sqlite:///{tmp_path}/b/mlflow.db"
    }
    found = Checkpoint.newest(other.run_dir)
    assert found is not None and files.load_state(found.directory)[1].step == 100


WRITES = ("upload", "write_bytes", "remove")


def test_a_crash_between_any_two_writes_leaves_the_newest_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies before the n-th write to the store, for every n, while a checkpoint appears there and
    the one before it goes."""
    for crash_at in range(100):
        store = tmp_path / str(crash_at) / "store"
        node, retention = Node(store.parent / "a", store), Retention(1)
        place = save(node.run_dir, 1, keep_last=1)
        node.mirror.push(place)
        calls = 0
        node.record("tracking/journal.jsonl", b"line\n" * 2)
        node.record("tracking/delivered.json", b'{"offset": 10}')
        place = save(node.run_dir, 2, keep_last=1, best=Best(2, 0.5))

        def counted(original: Callable[..., Any], crash_at: int = crash_at) -> Callable[..., Any]:
            def wrapped(first: Any, *arguments: Any, **options: Any) -> Any:
                nonlocal calls
                for each in (
                    [[url] for url in first] if isinstance(first, list) else [first]
                ):  # what is removed goes one by one
                    calls += 1
                    if calls > crash_at:
                        raise Crash
                    original(each, *arguments, **options)

            return wrapped

        with monkeypatch.context() as patch:
            for name in WRITES:
                patch.setattr(mirror, name, counted(getattr(mirror, name)))
            try:
                node.mirror.push(place)
                node.mirror.settle(retention)
                has_crashed = False
            except Crash:
                has_crashed = True
        other = Node(store.parent / "b", store)
        newest = Checkpoint.newest(other.run_dir)
        assert newest is not None and step_of(newest.directory) == max(whole(store))
        if step_of(newest.directory) == 2:  # its journal has come before it
            assert (other.run_dir / "tracking/journal.jsonl").read_bytes() == b"line\n" * 2
        delivered = other.run_dir / "tracking/delivered.json"
        assert (
            not delivered.exists()
            or (other.run_dir / "tracking/journal.jsonl").stat().st_size >= 10
        )
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
            assert crash_at > 12 and step_of(newest.directory) == 2 and whole(store) == [2, 3]
            return
    raise AssertionError("the crash point never moved past the end")


def test_damage_in_the_store_falls_back_to_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path / "a", tmp_path / "store")
    for step in (1, 2):
        node.mirror.push(save(node.run_dir, step))
    weights = tmp_path / "store" / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    other = Node(tmp_path / "b", tmp_path / "store")
    assert steps(other.run_dir) == [1] and not list(other.run_dir.rglob(".tmp-*"))
    said = capsys.readouterr().err
    assert (
        f"checkpoint.mirror: file://{tmp_path}/store: the checkpoint of step 2 is damaged there"
        " (model.safetensors has" in said
    )
    found = other.mirror.newest(is_first=True)
    assert found is not None and step_of(found.directory) == 1
    writer = submitted(
        other.writer(Retention(2)), 2, state(2.0)
    )  # trained once more to the same bits, it mends what is damaged
    writer.finish(None)
    assert (
        writer.mirror is not None and writer.mirror.wait(20) and whole(tmp_path / "store") == [1, 2]
    )


def test_a_run_does_not_begin_anew_where_all_is_damaged(tmp_path: Path) -> None:
    node = Node(tmp_path / "a", tmp_path / "store")
    node.mirror.push(save(node.run_dir, 1))
    (tmp_path / "store/checkpoints/step-00000001/trainer.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint there is whole; put it back"):
        Node(tmp_path / "b", tmp_path / "store").mirror.newest(is_first=True)


def test_what_no_rule_keeps_is_not_brought_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on with a smaller keep_last has it on its disk until its next checkpoint."""
    node, really, brought = Node(tmp_path / "a", tmp_path / "store"), mirror.upload, []
    for step in (1, 2):
        save(node.run_dir, step)
    monkeypatch.setattr(
        mirror,
        "upload",
        lambda place, url, **how: (brought.append(place), really(place, url, **how)),
    )
    writer = node.writer(Retention(1)).mirror
    assert writer is not None and writer.wait(20) and whole(tmp_path / "store") == [2]
    before = len(brought)
    writer.offer()
    assert writer.wait(20) and len(brought) == before


def test_what_could_not_be_removed_is_removed_before_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, really, faults = (
        Node(tmp_path / "a", tmp_path / "store"),
        mirror.Mirror.settle,
        [OSError("down")],
    )
    half = tmp_path / "store/checkpoints/step-00000009/model.safetensors"
    half.parent.mkdir(parents=True)
    half.touch()
    save(node.run_dir, 1)
    monkeypatch.setattr(mirror, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(
        mirror.Mirror, "settle", lambda *how: really(*how) if not faults else raised(faults.pop())
    )
    writer = node.writer(Retention(1)).mirror
    assert writer is not None
    wait_until(lambda: not half.exists())
    assert not faults and whole(tmp_path / "store") == [1]


def raised(error: Exception) -> None:
    raise error


def test_a_disk_that_is_ahead_of_the_store_keeps_what_it_has(tmp_path: Path) -> None:
    """Of three starts on two disks the last, on the first disk again: its own checkpoint was never
    brought there."""
    first = Node(tmp_path / "a", tmp_path / "store")
    first.mirror.push(save(first.run_dir, 1))
    save(first.run_dir, 5)
    first.record("tracking/journal.jsonl", b"five")
    second = Node(tmp_path / "b", tmp_path / "store")
    second.record("tracking/journal.jsonl", b"two")
    second.mirror.push(save(second.run_dir, 2))
    again = Node(tmp_path / "a", tmp_path / "store")
    assert (
        steps(again.run_dir) == [1, 5]
        and (again.run_dir / "tracking/journal.jsonl").read_bytes() == b"five"
    )
    writer = again.writer(Retention(1))
    assert writer.mirror is not None and writer.mirror.wait(20)
    assert (
        whole(tmp_path / "store") == [5]
        and (tmp_path / "store/tracking/journal.jsonl").read_bytes() == b"five"
    )


def test_a_run_whose_checkpoints_were_removed_does_not_begin_anew_with_other_settings(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path / "a", tmp_path / "store")
    node.mirror.push(save(node.run_dir, 1))
    shutil.rmtree(node.run_dir / "checkpoints")
    with pytest.raises(SettingsError, match=r"optimizer\.lr: 0\.5"):
        Node(tmp_path / "a", tmp_path / "store", optimizer={"lr": 0.5})
    assert steps(node.run_dir) == [1]


def test_what_is_damaged_on_the_disk_comes_from_the_store(tmp_path: Path) -> None:
    node = Node(tmp_path / "a", tmp_path / "store")
    for step in (1, 2):
        node.mirror.push(save(node.run_dir, step))
    for place in list_checkpoints(node.run_dir):
        (place / "model.safetensors").write_bytes(b"")
    found = node.mirror.newest(is_first=True)
    assert (
        found is not None
        and step_of(found.directory) == 2
        and fault_of(found.directory, needed=FILES) is None
    )


def test_two_runs_to_one_mirror_are_a_line_each(tmp_path: Path) -> None:
    """Whoever was first keeps it; what the second has on its disk stays as it is."""
    store = tmp_path / "store"
    first = Node(tmp_path / "a", store)
    with pytest.raises(
        SettingsError,
        match=(
            r"belongs to a run with other settings \(optimizer\.lr: 0\.5, was 0\.0001; start 1, of"
        ),
    ):
        Node(tmp_path / "b", store, optimizer={"lr": 0.5})
    assert not (tmp_path / "b" / "run" / "config.yaml").exists()
    save(tmp_path / "c" / "run", 7)
    with pytest.raises(
        SettingsError,
        match=r"belongs to another run \(start 1, of .*\) than .*; name another mirror",
    ):
        Node(tmp_path / "c", store)
    assert steps(tmp_path / "c" / "run") == [7]
    second = Node(tmp_path / "d", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.copytree(store, tmp_path / "elsewhere")
    with pytest.raises(
        SettingsError, match="belongs to another run"
    ):  # its own has gone, another's is there
        mirror.bring(settings_of(second.run_dir, tmp_path / "elsewhere"), FIRST)
    racing = Mirror.of(settings_of(tmp_path / "e" / "run", store))
    assert racing is not None
    with pytest.raises(Superseded, match="another start has begun meanwhile"):
        racing.begin()  # which has found nothing there, a moment ago
    first.mirror.push(save(first.run_dir, 1))
    assert whole(store) == [1]


def test_an_older_start_that_wakes_up_changes_nothing_and_ends(tmp_path: Path) -> None:
    old = Node(tmp_path / "a", tmp_path / "store")
    old.mirror.push(save(old.run_dir, 1))
    new = Node(tmp_path / "b", tmp_path / "store")
    new.mirror.push(save(new.run_dir, 2))
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    writer = submitted(
        old.writer(Retention(1)), 2, state(7.0)
    )  # of the same step, with other bytes
    wait_until(lambda: writer.mirror is not None and writer.mirror.defect is not None)
    with pytest.raises(
        Superseded,
        match=(
            r"a newer start has taken over \(start 2, of .*b/run by process \d+ on .*\); this one"
            r" changes"
        ),
    ):
        writer.make_room(timeout_s=20)
    after = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert after == before and whole(tmp_path / "store") == [1, 2]


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> threading.Event:
    """A store that takes nothing from now on, until the event is set."""
    is_back, really = threading.Event(), mirror.upload

    def upload(place: Path, url: str, *, storage: dict[str, Any], **how: Any) -> None:
        if not is_back.is_set():
            raise error
        really(place, url, storage=storage, **how)

    monkeypatch.setattr(mirror, "upload", upload)
    monkeypatch.setattr(mirror, "_FIRST_PAUSE_S", 0.05)
    return is_back


FAULTS = [
    RemoteError("s3://x: cannot be written after 4 attempts (503)"),
    UserError("s3://x: access is refused; give credentials"),
]


@pytest.mark.parametrize("error", FAULTS, ids=["down", "expired"])
def test_a_store_that_refuses_costs_training_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """It is warned of once, tried again, and is up to date when it is back."""
    is_back, node = refusing(monkeypatch, error), Node(tmp_path / "a", tmp_path / "store")
    writer = node.writer(Retention(2))
    for step in (1, 2, 3):
        submitted(writer, step)
    writer.finish(None)
    assert steps(node.run_dir) == [2, 3] and writer.mirror is not None
    wait_until(lambda: writer.news().get("usage/mirror_failures", 0) >= 3)
    is_back.set()
    assert writer.mirror.wait(20) and whole(tmp_path / "store") == [2, 3]
    said = capsys.readouterr().err
    assert said.count(f"{error}. Training goes on, and it is tried again\n") == 1
    assert said.endswith("it is up to date again\n")
    writer.mirror.close(finished=True)


def test_a_run_whose_mirror_is_not_complete_ends_with_an_error_and_the_same_command_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back, node = refusing(monkeypatch, FAULTS[0]), Node(tmp_path / "a", tmp_path / "store")
    monkeypatch.setattr(mirror, "FINAL_S", 0.2)
    writer = submitted(node.writer(Retention(2)), 9)
    writer.finish(None)
    assert writer.mirror is not None
    writer.mirror.catch_up(None)
    node.record("result.json", b'{"step": 9}')
    with pytest.raises(
        CheckpointError,
        match=r"it is not complete \(s3://x: cannot be written .*; the same command brings",
    ):
        writer.mirror.close(finished=True)
    assert not (tmp_path / "store" / "result.json").exists()
    is_back.set()
    mirror.bring(settings_of(node.run_dir, tmp_path / "store"), FIRST)
    assert (
        whole(tmp_path / "store") == [9]
        and (tmp_path / "store" / "result.json").read_bytes() == b'{"step": 9}'
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_who_is_stopped_waits_for_the_store_no_longer_than_it_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_late: bool,
) -> None:
    node, really, go_on = Node(tmp_path / "a", tmp_path / "store"), mirror.upload, threading.Event()
    writer = submitted(node.writer(Retention(2)), 1)
    assert writer.mirror is not None
    wait_until(lambda: whole(tmp_path / "store") == [1])

    def slow(place: Path, url: str, *, storage: dict[str, Any], stop: threading.Event) -> None:
        while not go_on.wait(0.01):
            if stop.is_set():
                raise remote.StoppedError
        really(place, url, storage=storage)

    monkeypatch.setattr(mirror, "upload", slow)
    submitted(writer, 2)
    writer.finish(None)
    looks = iter(range(5, -1, -1) if is_late else (5,) * 1000)
    if not is_late:
        threading.Timer(0.3, go_on.set).start()
    writer.mirror.catch_up(lambda: next(looks))
    writer.mirror.close(finished=False)
    said = capsys.readouterr().err
    assert whole(tmp_path / "store") == ([1] if is_late else [1, 2])
    assert (
        ": the checkpoint of step 2 is not whole there, so that of step 1 counts"
        " (checkpoint.grace_s has passed)" in said
    ) == is_late


def agreed(world: World, folder: str, store: str, given: list[list[int]]) -> list[str]:
    """What each of two nodes has, once all have agreed; each begins with checkpoints of its own."""
    torch.distributed.init_process_group("gloo")
    node = World(world.rank, 0, world.num_ranks)
    settings = settings_of(Path(folder) / str(world.rank), Path(store))
    found = Mirror.of(settings)
    assert found is not None
    if world.is_first:
        found.begin()
    for step in given[world.rank]:
        save(found.run_dir, step, best=Best(step, world.rank / 2))  # with other bytes on each node
    torch.distributed.barrier()
    newest = train.agreed_checkpoint(found.run_dir, node, device=torch.device("cpu"), mirror=found)
    assert newest is not None
    return [newest.directory.name, json.dumps(newest.hashes)]


@pytest.mark.parametrize("given", [[[3], []], [[], [4]], [[3], [3]], [[2, 3], [3, 5]]], ids=str)
def test_nodes_with_disks_of_their_own_agree_and_are_given_what_they_lack(
    tmp_path: Path, given: list[list[int]]
) -> None:
    """The newest of all counts, of equal ones that of the first rank; the store had none of it."""
    first, second = run_ranks(agreed, str(tmp_path), str(tmp_path / "store"), given, num_ranks=2)
    step = max(given[0] + given[1])
    assert first == second and first[0] == f"step-{step:08d}"
    assert whole(tmp_path / "store") == [step]
    holder = next(rank for rank in (0, 1) if step in given[rank])
    trainer = json.loads(
        (tmp_path / str(1 - holder) / "checkpoints" / first[0] / "trainer.json").read_text()
    )
    assert trainer["best"]["score"] == holder / 2
