"""Shards on a node's own disk give the very samples of the dataset; no trouble with that disk ends
a run."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cluster.preflight import MIN_FREE_GB
from data_prep.cli import main as data_prep
from data_prep.publish import sha256_of
from data_prep.remote import StoppedError
from pretrain.config import DataSettings
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.reader import ShardReader
from pretrain.data.store import directory as directory_module
from pretrain.data.store import staging
from pretrain.data.store import store as store_module
from pretrain.data.store.directory import File, StoreDirectory
from pretrain.data.store.staging import files_of, staged
from pretrain.data.store.store import ShardStore
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from tests.data_prep.samples import change_manifest
from tests.forked import begin, wait
from tests.moments import wait_until

CPU = torch.device("cpu")
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def data_of(dataset: Path, scratch: Path) -> TrainingData:
    return load_training_data(DataSettings(dataset=str(dataset), stage_dir=str(scratch)))


def stage(dataset: Path, scratch: Path) -> TrainingData:
    return staged(data_of(dataset, scratch), world=World(0, 0, 1), device=CPU, stop=StopFlag())


def everything(data: TrainingData) -> list[torch.Tensor]:
    """Pictures and labels of both splits."""
    evaluated, found = data.eval_part(), []
    assert evaluated is not None
    for part in (data.parts[0], evaluated):
        reader = ShardReader([part])
        ids = np.arange(reader.num_samples)
        found += [reader.images(ids), torch.from_numpy(reader.locate(ids).labels)]
    return found


def files(data: TrainingData) -> list[File]:
    return [file for each in files_of(data).values() for file in each]


def copies(data: TrainingData) -> Path:
    copy = data.parts[0].staged
    assert copy is not None
    return copy.path


def test_the_samples_are_the_same_and_the_dataset_is_not_read_again(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    dataset, scratch = tmp_path / "data", tmp_path / "deep" / "scratch"
    shutil.copytree(shapes, dataset)
    change_manifest(
        dataset, lambda manifest: manifest.update(name="moved", tool_version="later")
    )  # the same content
    before = everything(data_of(dataset, scratch))
    data = stage(dataset, scratch)
    assert capsys.readouterr().out.startswith("staged ")
    for file in [*dataset.glob("*.tar"), *dataset.glob("*.npy")]:
        file.unlink()
    after = everything(data)
    assert len(before) == len(after) == 4 and all(map(torch.equal, before, after))
    assert data.content_hash == data_of(shapes, scratch).content_hash
    again = stage(shapes, scratch)  # there already
    assert copies(again) == copies(data) and capsys.readouterr().out == ""


def stage_and_die(dataset: str, scratch: str) -> None:
    """Killed in the second tar."""
    real, tars = ShardStore._copy, list[Path]()

    def copy(store: ShardStore, source: Path, write: Callable[[memoryview], None]) -> None:
        tars.extend([source] if source.suffix == ".tar" else [])
        if len(tars) == 2:
            write(memoryview(bytes(1000)))
            os.kill(os.getpid(), signal.SIGKILL)
        real(store, source, write)

    staging.NUM_THREADS, ShardStore._copy = 1, copy  # type: ignore[method-assign]
    stage(Path(dataset), Path(scratch))


def test_killed_in_the_middle_it_goes_on_with_the_next_file(shapes: Path, tmp_path: Path) -> None:
    words = ("tests.pretrain.data.test_staging:stage_and_die", str(shapes), str(tmp_path))
    process = begin(*words, environment=dict(os.environ), output=tmp_path / "output")
    assert wait([process], timeout_s=60) == [-signal.SIGKILL]
    (place,) = tmp_path.glob("shards-*")
    whole = {path.name: path.stat().st_ino for path in place.glob("*.tar")}
    assert whole and list(place.glob("*.part"))
    assert copies(data := stage(shapes, tmp_path)) == place and not list(place.glob("*.part"))
    assert whole.items() <= {path.name: path.stat().st_ino for path in place.glob("*.tar")}.items()
    tars = sorted(place.glob("*.tar"))
    assert len(tars) > len(whole) and all(sha256_of(path) == path.stem for path in tars)
    assert {file.name for file in files(data)} == {
        path.name for path in place.glob("*.*[rny]") if path.suffix != ".user"
    }


def test_a_disk_that_is_too_small_costs_a_warning(
    shapes: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(StoreDirectory, "_free_bytes", lambda directory: 1000)
    data = stage(shapes, tmp_path)
    assert data.parts[0].staged is None and len(everything(data)[0]) == 240
    said = capsys.readouterr().err
    assert (
        f"{tmp_path}/shards-" in said
        and "GB will not fit, 1e-06 GB are free" in said
        and said.count("WARNING") == 1
    )
    assert said.endswith(f"; training reads {shapes} where it is\n")
    (tmp_path / "file").write_text("")
    assert stage(shapes, tmp_path / "file").parts[0].staged is None
    assert (
        "cannot be written to; name another directory as data.stage_dir" in capsys.readouterr().err
    )


def test_a_disk_is_left_enough_for_its_node_to_be_a_good_one(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    directory = StoreDirectory(tmp_path / "store", setting="data.stage_dir", max_bytes=None)
    for disk_gb, spared_gb in ((2000, 20), (500, 5), (100, 5), (50, 5), (20, 2)):
        disk = SimpleNamespace(total=disk_gb * 10**9, free=15 * 10**9)
        monkeypatch.setattr(directory_module.shutil, "disk_usage", lambda path, disk=disk: disk)
        assert directory._free_bytes() == (15 - spared_gb) * 10**9 and spared_gb > MIN_FREE_GB


def test_a_disk_that_others_fill_meanwhile_is_left_as_it_was(
    shapes: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if list(tmp_path.glob("*/*.tar")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(staging, "NUM_THREADS", 1)
    assert stage(shapes, tmp_path).parts[0].staged is None
    assert (
        "its disk is full; free some of it, or name another data.stage_dir"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.glob("*/*")] == [".lock"]


def test_the_first_error_ends_all_copies(
    shapes: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """A shard is not the manifest's; the copies beside it stand in the middle of theirs until that
    is found, and do not go on."""
    shutil.copytree(shapes, tmp_path / "data")
    wrong, real, ended, began = (
        tmp_path / "data" / "train-000001.tar",
        ShardStore._copy,
        list[Path](),
        threading.Barrier(3),
    )

    def copy(store: ShardStore, source: Path, write: Callable[[memoryview], None]) -> None:
        if source.suffix == ".tar":
            began.wait(60)
            if source == wrong:
                write(memoryview(bytes(wrong.stat().st_size)))
                return
            with suppress(StoppedError):
                while True:
                    write(memoryview(b""))
            ended.append(source)
            raise StoppedError
        real(store, source, write)

    monkeypatch.setattr(ShardStore, "_copy", copy)
    monkeypatch.setattr(staging, "NUM_THREADS", began.parties)
    assert stage(tmp_path / "data", tmp_path / "scratch").parts[0].staged is None
    assert (
        f"{wrong}: is not what its manifest says; run data_prep verify" in capsys.readouterr().err
    )
    assert (
        len(ended) == 2
        and not list(tmp_path.glob("scratch/*/*.part"))
        and not list(tmp_path.glob("scratch/*/*.user"))
    )


def test_room_is_made_by_the_longest_unused_that_nobody_holds(
    shapes: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    held = stage(other_shapes, tmp_path)
    place = copies(held)
    old, new = (place / f"{letter * 64}.tar" for letter in "ab")
    for path, age_s in ((old, 9_000), (new, 1_000)):
        path.write_bytes(bytes(3_000_000))
        os.utime(path, (time.time() - age_s,) * 2)
    for file in files(held):
        os.utime(place / file.name, ns=(0, store_module.VERIFIED_NS))

    def occupied() -> int:
        return sum(path.stat().st_size for path in place.iterdir())

    room = 7_000_000
    monkeypatch.setattr(StoreDirectory, "_free_bytes", lambda directory: room - occupied())
    need = sum(file.num_bytes for file in files(data_of(shapes, tmp_path)))
    assert occupied() + need > room > occupied() - 3_000_000 + need
    assert copies(stage(shapes, tmp_path)) == place
    assert (
        not old.exists()
        and new.exists()
        and all((place / file.name).exists() for file in files(held))
    )


def test_two_that_stage_at_once_copy_once_and_a_stop_ends_the_wait(
    shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    real, copied, may_copy = ShardStore._copy, list[Path](), threading.Event()

    def slow(store: ShardStore, source: Path, write: object) -> None:
        copied.append(source)
        assert may_copy.wait(30)
        real(store, source, write)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardStore, "_copy", slow)
    sources = [Path(file.source) for file in files(data_of(shapes, tmp_path))]
    monkeypatch.setattr(staging, "NUM_THREADS", len(sources))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(stage, shapes, tmp_path) for _ in range(2)]
        wait_until(lambda: len(copied) == len(sources))
        stop = StopFlag()
        stop.raised_by = "SIGTERM"
        stopped = staged(data_of(shapes, tmp_path), world=World(0, 0, 1), device=CPU, stop=stop)
        assert stopped.parts[0].staged is None
        may_copy.set()
        assert all(each.result().parts[0].staged is not None for each in both)
    assert sorted(copied) == sorted(sources)


def test_borrowed_shards_are_staged_and_remote_ones_left_to_their_store(
    shapes: Path, tmp_path: Path
) -> None:
    assert (
        data_prep(["subset", str(shapes), "--out", str(tmp_path / "half"), "--fraction", "0.5"])
        == 0
    )
    data, scratch = data_of(tmp_path / "half", tmp_path / "scratch"), tmp_path / "scratch"
    assert any(".." in shard.file or "/" in shard.file for shard in data.parts[0].content.shards)
    found = stage(tmp_path / "half", scratch)
    assert all(map(torch.equal, everything(data), everything(found)))
    assert all(
        found.parts[0].tar(shard).is_relative_to(scratch) for shard in found.parts[0].content.shards
    )
    manifest = data.parts[0].manifest
    shards = tuple(
        shard.model_copy(update={"file": f"https://x.invalid/{shard.name}.tar"})
        for shard in manifest.splits["train"].shards
    )
    splits = manifest.splits | {
        "train": manifest.splits["train"].model_copy(update={"shards": shards})
    }
    far = replace(
        data,
        parts=(replace(data.parts[0], manifest=manifest.model_copy(update={"splits": splits})),),
    )
    names = {file.name for file in files(far) if not file.is_remote}
    assert names >= {f"{shard.index_sha256}.npy" for shard in shards}
    assert not names & {f"{shard.sha256}.tar" for shard in shards} and not [
        file for file in files(far) if file.is_remote
    ]
