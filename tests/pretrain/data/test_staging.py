"""Shards on a node's own disk give the same samples as the dataset, and no fault of that disk ends
a run."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.cli import main as data_prep
from data_prep.publish import sha256_of
from pretrain.config import DataSettings
from pretrain.data import staging
from pretrain.data import store as module
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.reader import ShardReader
from pretrain.data.staging import files_to_stage, stage_data
from pretrain.data.store import File, ShardStore
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from tests.data_prep.samples import change_manifest
from tests.forked import begin, wait

CPU = torch.device("cpu")
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def data_of(dataset: Path, scratch: Path) -> TrainingData:
    return load_training_data(DataSettings(dataset=str(dataset), stage_dir=str(scratch)))


def stage(dataset: Path, scratch: Path, *, stop: StopFlag | None = None) -> TrainingData:
    data = data_of(dataset, scratch)
    return stage_data(data, world=World(0, 0, 1), device=CPU, stop=stop or StopFlag())


def everything(data: TrainingData) -> list[torch.Tensor]:
    """Return the images and labels of both splits."""
    evaluated, tensors = data.eval_part(), []
    assert evaluated is not None
    for part in (data.parts[0], evaluated):
        reader = ShardReader([part])
        ids = np.arange(reader.num_samples)
        tensors += [reader.images(ids), torch.from_numpy(reader.locate(ids).labels)]
    return tensors


def files(data: TrainingData) -> list[File]:
    return files_to_stage(data, World(0, 0, 1))


def place_of(data: TrainingData) -> Path:
    store = data.parts[0].staged
    assert store is not None
    return store.path


def test_the_samples_are_the_same_and_the_dataset_is_not_read_again(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    dataset, scratch = tmp_path / "data", tmp_path / "deep" / "scratch"
    shutil.copytree(shapes, dataset)
    change_manifest(
        dataset, lambda manifest: manifest.update(name="renamed", tool_version="later")
    )  # the content is unchanged
    before = everything(data_of(dataset, scratch))
    data = stage(dataset, scratch)
    assert capsys.readouterr().out.startswith("staged ")
    for file in [*dataset.glob("*.tar"), *dataset.glob("*.npy")]:
        file.unlink()
    after = everything(data)
    assert len(before) == len(after) == 4 and all(map(torch.equal, before, after))
    assert data.content_hash == data_of(shapes, scratch).content_hash
    again = stage(shapes, scratch)  # the copies are present
    assert place_of(again) == place_of(data) and capsys.readouterr().out == ""


def stage_and_die(dataset: str, scratch: str) -> None:
    """Stage a dataset, and be killed in its second tar."""
    real, tars = ShardStore._pieces, list[Path]()

    def pieces(store: ShardStore, source: Path) -> Iterator[memoryview]:
        tars.extend([source] if source.suffix == ".tar" else [])
        if len(tars) == 2:
            yield memoryview(bytes(1000))
            os.kill(os.getpid(), signal.SIGKILL)
        yield from real(store, source)

    staging.NUM_THREADS, ShardStore._pieces = 1, pieces  # type: ignore[method-assign]
    stage(Path(dataset), Path(scratch))


@pytest.mark.processes
def test_after_a_kill_staging_copies_only_what_is_absent(shapes: Path, tmp_path: Path) -> None:
    words = ("tests.pretrain.data.test_staging:stage_and_die", str(shapes), str(tmp_path))
    process = begin(*words, environment=dict(os.environ), output=tmp_path / "output")
    assert wait([process], timeout_s=60) == [-signal.SIGKILL]
    (place,) = tmp_path.glob("shards-*")
    before = {path.name: path.stat().st_ino for path in place.glob("*.tar")}
    assert before and list(place.glob("*.part"))
    data = stage(shapes, tmp_path)
    after = {path.name: path.stat().st_ino for path in place.glob("*.*[rny]")}
    assert place_of(data) == place and before.items() < after.items()
    assert after.keys() == {file.name for file in files(data)}
    assert all(sha256_of(path) == path.stem for path in place.glob("*.tar"))


def test_a_disk_that_is_too_small_or_not_usable_costs_a_warning(
    shapes: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    (tmp_path / "file").write_text("")
    assert stage(shapes, tmp_path / "file").parts[0].staged is None
    assert capsys.readouterr().err.count("WARNING") == 1
    monkeypatch.setattr(module, "_free_bytes", lambda path: 1000)
    data = stage(shapes, tmp_path)
    assert data.parts[0].staged is None and len(everything(data)[0]) == 240
    printed = capsys.readouterr().err
    assert printed.count("WARNING") == 1 and str(tmp_path) in printed
    assert not list(tmp_path.glob("shards-*/*.*[rny]")), "nothing was copied in vain"


def test_a_shard_that_differs_from_the_manifest_is_not_staged(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(shapes, tmp_path / "data")
    wrong = tmp_path / "data" / "train-000001.tar"
    wrong.write_bytes(bytes(wrong.stat().st_size))
    assert stage(tmp_path / "data", tmp_path / "scratch").parts[0].staged is None
    assert str(wrong) in capsys.readouterr().err
    assert not list(tmp_path.glob("scratch/*/*.part"))


def test_room_is_made_by_the_longest_unused_files_that_nobody_holds(
    shapes: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    held = stage(other_shapes, tmp_path)
    place = place_of(held)
    old, new = (place / f"{letter * 64}.tar" for letter in "ab")
    for path, age_s in ((old, 9_000), (new, 1_000)):
        path.write_bytes(bytes(3_000_000))
        os.utime(path, (time.time() - age_s,) * 2)
    for file in files(held):
        os.utime(place / file.name, ns=(0, 0))

    def occupied() -> int:
        return sum(path.stat().st_size for path in place.iterdir() if path.name != ".locks")

    room = 7_000_000
    monkeypatch.setattr(module, "_free_bytes", lambda path: room - occupied())
    need = sum(file.num_bytes for file in files(data_of(shapes, tmp_path)))
    assert occupied() + need > room > occupied() - 3_000_000 + need
    assert place_of(stage(shapes, tmp_path)) == place
    assert not old.exists() and new.exists()
    assert all((place / file.name).exists() for file in files(held))


def test_two_runs_that_stage_at_once_copy_once_and_a_stop_ends_the_wait(
    shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    real, copied, stop = ShardStore._pieces, Counter[Path](), StopFlag()

    def pieces(store: ShardStore, source: Path) -> Iterator[memoryview]:
        copied[source] += 1
        if len(copied) == 1:  # the first copy waits until the third run has been stopped
            stop.raised_by = "SIGTERM"
            assert stage(shapes, tmp_path, stop=stop).parts[0].staged is None
        yield from real(store, source)

    monkeypatch.setattr(ShardStore, "_pieces", pieces)
    monkeypatch.setattr(staging, "NUM_THREADS", 1)
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: stage(shapes, tmp_path), range(2)))
    assert all(each.parts[0].staged is not None for each in both)
    assert set(copied.values()) == {1} and len(copied) == len(files(both[0]))


def test_borrowed_shards_are_staged_and_remote_ones_left_to_their_store(
    shapes: Path, tmp_path: Path
) -> None:
    half, scratch = tmp_path / "half", tmp_path / "scratch"
    assert data_prep(["subset", str(shapes), "--out", str(half), "--fraction", "0.5"]) == 0
    data, copy = data_of(half, scratch), stage(half, scratch)
    assert any("/" in shard.file for shard in data.parts[0].content.shards)
    assert all(map(torch.equal, everything(data), everything(copy)))
    part = copy.parts[0]
    assert all(part.tar(shard).is_relative_to(scratch) for shard in part.content.shards)
    manifest = part.manifest
    train = manifest.splits["train"]
    shards = tuple(
        shard.model_copy(update={"file": f"https://x.invalid/{shard.name}.tar"})
        for shard in train.shards
    )
    splits = manifest.splits | {"train": train.model_copy(update={"shards": shards})}
    remote = replace(
        data.parts[0], manifest=manifest.model_copy(update={"splits": splits}), staged=None
    )
    names = {file.name for file in files(replace(data, parts=(remote,)))}
    assert names >= {f"{shard.index_sha256}.npy" for shard in shards}
    assert not names & {f"{shard.sha256}.tar" for shard in shards}
