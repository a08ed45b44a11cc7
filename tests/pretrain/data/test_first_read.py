"""A byte that is flipped in a shard after the build ends a run before it saves what it learned; no shard is hashed twice."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_prep.manifest import DatasetError, load_manifest
from data_prep.publish import sha256_of
from pretrain.config import DataSettings
from pretrain.data import first_read
from pretrain.data.datasets import Part, load_training_data
from pretrain.data.first_read import FirstRead
from pretrain.data.store.directory import StoreDirectory
from pretrain.data.store.store import ShardStore
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from tests.data_prep.samples import files_of
from tests.forked import begin, environments, wait
from tests.ranks import run_ranks
from tests.training import finish, main, start, write_config

CPU = torch.device("cpu")
FLIPPED = "train-000002.tar"


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shapes, tmp_path / "shapes"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is hashed."""
    found: list[str] = []

    def counted(path: Path, *, after_each_piece: Callable[[], None]) -> str:
        found.append(path.name)
        return sha256_of(path, after_each_piece=after_each_piece)

    monkeypatch.setattr(first_read, "sha256_of", counted)
    return found


def parts_of(dataset: Path) -> tuple[Part, ...]:
    return load_training_data(DataSettings(dataset=str(dataset))).read_parts


def flip(dataset: Path) -> None:
    """A bit of a picture, which decodes as before."""
    data = bytearray((dataset / FLIPPED).read_bytes())
    data[700] ^= 1
    (dataset / FLIPPED).write_bytes(data)


def hash_all(parts: tuple[Part, ...], run_dir: Path, *, ranks: int = 1) -> None:
    """As a start of the run does, rank by rank."""
    for rank in range(ranks):
        thread = FirstRead(parts, run_dir=run_dir, world=World(rank, rank, ranks), device=CPU)
        thread.start()
        assert thread.wait(StopFlag())


def test_a_flipped_byte_ends_the_run_before_it_saves_anything(dataset: Path, tmp_path: Path) -> None:
    config, run_dir = write_config(tmp_path, dataset=dataset), tmp_path / "run"
    flip(dataset)
    run = start(config, run_dir, "train.duration=10 steps", ranks=2)
    output, _ = run.communicate()
    assert {rank.exitcode for rank in run.ranks} == {1}
    assert f"{FLIPPED}: its bytes are not those of the manifest" in output and "data_prep verify" in output
    assert not list((run_dir / "checkpoints").glob("step-*")) and not (run_dir / "result.json").exists()
    assert "Traceback" not in output
    flip(dataset)  # the remedy: the same command goes on
    assert "finished" in finish(start(config, run_dir, "train.duration=10 steps", ranks=2))


def train(case: Callable[[list[str]], int], run_dir: Path, *words: str, ranks: int = 1) -> tuple[list[int | None], str]:
    """Exit codes and output of a training by a function of this file."""
    target, output = f"{__name__}:{case.__name__}", run_dir.with_suffix(".log")
    words = ("train", words[0], f"run_dir={run_dir}", *words[1:])
    begun = [begin(target, list(words), environment=each, output=output) for each in environments(ranks)]
    return wait(begun, timeout_s=300), output.read_text()


def train_held(words: list[str], *, is_stopped: bool = False) -> int:
    """No shard is hashed before the trainer waits for it."""
    waits, patch, join = threading.Event(), pytest.MonkeyPatch(), FirstRead.join

    def held(path: Path, *, after_each_piece: Callable[[], None]) -> str:
        waits.wait()
        return sha256_of(path, after_each_piece=after_each_piece)

    def waited(thread: FirstRead, timeout: float | None = None) -> None:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            waits.set()
        join(thread, timeout)

    patch.setattr(FirstRead, "join", waited)
    patch.setattr(first_read, "sha256_of", held)
    patch.setattr(first_read, "LAST_WRITE_S", 0.0)
    return main("pretrain", words)


def train_held_and_stopped(words: list[str]) -> int:
    """And then it is told to stop, and may wait no longer."""
    return train_held(words, is_stopped=True)


def test_a_fault_that_is_found_when_all_steps_are_done_leaves_no_checkpoint(dataset: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flip(dataset)
    codes, output = train(train_held, run_dir, str(write_config(tmp_path, dataset=dataset)), "train.duration=4 steps")
    assert codes == [1] and f"{FLIPPED}: its bytes are not those of the manifest" in output, output
    assert not list((run_dir / "checkpoints").glob("step-*")) and not (run_dir / "result.json").exists()


def test_told_to_stop_before_its_last_checkpoint_a_run_is_not_finished(dataset: Path, tmp_path: Path) -> None:
    config, run_dir = write_config(tmp_path, dataset=dataset), tmp_path / "run"
    codes, output = train(train_held_and_stopped, run_dir, str(config), "train.duration=4 steps")
    assert codes == [0] and output.count("the checkpoint of step 4 is left out") == 1, output
    assert not list((run_dir / "checkpoints").glob("step-*")) and not (run_dir / "result.json").exists()
    said = finish(start(config, run_dir, "train.duration=4 steps", ranks=1))
    assert ": finished\n" in said and (run_dir / "result.json").exists()
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000004"]


def wait_for(world: World, dataset: str, run_dir: str) -> str:
    torch.distributed.init_process_group("gloo")
    thread = FirstRead(parts_of(Path(dataset)), run_dir=Path(run_dir), world=world, device=CPU)
    thread.start()
    try:
        return str(thread.wait(StopFlag()))
    except DatasetError as error:
        return f"{type(error).__name__}, {error}"


def test_no_rank_takes_for_right_what_another_found_wrong(dataset: Path, tmp_path: Path) -> None:
    assert run_ranks(wait_for, str(dataset), str(tmp_path), num_ranks=2) == ["True", "True"]
    flip(dataset)
    found = run_ranks(wait_for, str(dataset), str(tmp_path), num_ranks=2)
    assert sorted(each.partition(",")[0] for each in found) == ["DatasetError", "WrongElsewhere"]
    assert sum(FLIPPED in each for each in found) == 1


def test_each_shard_is_hashed_once_in_a_run_and_again_when_it_was_touched(dataset: Path, tmp_path: Path, hashed: list[str]) -> None:
    parts, shards = parts_of(dataset), sorted(path.name for path in dataset.glob("*.tar"))
    assert len(shards) == 6 and len(parts) == 2
    hash_all(parts, tmp_path / "run", ranks=2)
    assert sorted(hashed) == shards, "shared out: each by one rank"
    hashed.clear()
    for ranks in (2, 1, 3):
        hash_all(parts, tmp_path / "run", ranks=ranks)
    assert hashed == []
    os.utime(dataset / FLIPPED)
    hash_all(parts, tmp_path / "run", ranks=3)
    hash_all(parts, tmp_path / "run", ranks=2)
    assert hashed == [FLIPPED]
    hash_all(parts, tmp_path / "other", ranks=1)
    assert sorted(hashed) == sorted([*shards, FLIPPED]), "another run trusts its own hashes alone"


def test_what_a_killed_rank_left_half_written_is_hashed_again(dataset: Path, tmp_path: Path, hashed: list[str]) -> None:
    hash_all(parts_of(dataset), tmp_path)
    (memory,) = (tmp_path / "checked").iterdir()
    memory.write_bytes(memory.read_bytes()[:-20])
    last, _ = hashed[-1], hashed.clear()
    hash_all(parts_of(dataset), tmp_path)
    assert hashed == [last]


def test_what_was_hashed_where_it_arrived_is_not_hashed_again(dataset: Path, tmp_path: Path, hashed: list[str]) -> None:
    copy = StoreDirectory(tmp_path / "store", setting="data.stage_dir", max_bytes=None)
    manifest = load_manifest(dataset)
    split = manifest.splits["train"]
    far = [shard.model_copy(update={"file": f"http://127.0.0.1/{shard.file}"}) for shard in split.shards]
    remote = manifest.model_copy(update={"splits": {"train": split.model_copy(update={"shards": tuple(far)})}})
    hash_all(tuple(replace(part, staged=copy) for part in parts_of(dataset)), tmp_path)
    hash_all((Part(dataset, remote, "train"),), tmp_path)
    assert hashed == []


def train_without_room_on_one(words: list[str]) -> int:
    if os.environ["RANK"] == "1":  # stands for another node
        pytest.MonkeyPatch().setattr(ShardStore, "hold_all_there", lambda *unused: False)
    return main("pretrain", words)


def test_where_only_some_nodes_have_staged_the_shards_all_hash_those_that_the_others_read(dataset: Path, tmp_path: Path) -> None:
    words = (str(write_config(tmp_path, dataset=dataset)), "train.duration=4 steps", f"data.stage_dir={tmp_path / 'scratch'}")
    codes, output = train(train_without_room_on_one, tmp_path / "run", *words, ranks=2)
    assert codes == [0, 0], output
    lists = [path.read_text().splitlines() for path in (tmp_path / "run" / "checked").iterdir()]
    assert [len(lines) for lines in lists] == [3, 3], "shared out"
    hashed = [json.loads(line)[0] for lines in lists for line in lines]
    assert sorted(hashed) == sorted(map(str, dataset.glob("*.tar")))


@pytest.mark.parametrize("told_at_s", [0.0, 200.0])
def test_whoever_is_told_to_stop_waits_as_long_as_a_write_may_and_once(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_at_s: float
) -> None:
    """Before it waits, or while it does."""
    stop, thread = StopFlag(), FirstRead(parts_of(dataset), run_dir=tmp_path, world=World(0, 0, 1), device=CPU)
    now_s, is_under_way = 0.0, True

    def passes(timeout: float = 0) -> None:
        nonlocal now_s
        now_s += 10
        if now_s == told_at_s:
            stop._raise(signal.SIGTERM, None)

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(thread, "is_alive", lambda: is_under_way)
    monkeypatch.setattr(thread, "join", passes)
    if told_at_s == 0:
        stop._raise(signal.SIGTERM, None)
        now_s = 100.0
    began_s = max(told_at_s, now_s)
    assert thread.wait(stop) is False
    assert now_s == began_s + 40, "the first look beyond 30 s"
    assert thread.wait(stop) is False and now_s == began_s + 40
    is_under_way = False
    assert thread.wait(stop) is True, "all is hashed meanwhile: nothing is lost"


def test_a_shard_that_cannot_be_read_is_named_and_a_memory_that_cannot_be_written_is_not(dataset: Path, tmp_path: Path) -> None:
    parts, before = parts_of(dataset), files_of(dataset)
    (tmp_path / "run").write_bytes(b"")  # no directory: nothing can be remembered
    hash_all(parts, tmp_path / "run")
    (dataset / FLIPPED).unlink()
    with pytest.raises(DatasetError, match=rf"{FLIPPED}: cannot be read \(No such file.*data_prep verify"):
        hash_all(parts, tmp_path / "run")
    assert before.keys() - files_of(dataset).keys() == {FLIPPED}
