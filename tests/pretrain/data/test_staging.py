"""Shards on a node's own disk give the very samples of the dataset; no trouble with that disk ends a run."""

import errno
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cluster.preflight import MIN_FREE_GB
from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from pretrain.config import DataSettings
from pretrain.data import stage_area
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.reader import ShardReader
from pretrain.data.stage_area import StageArea, StagedCopy, Stopped, Wanted
from pretrain.data.staging import _datasets_of, staged
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from tests.data_prep.samples import change_manifest
from tests.forked import begin, wait

CPU = torch.device("cpu")


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


def wanted_of(data: TrainingData) -> list[Wanted]:
    (dataset,) = _datasets_of(data).values()
    return list(dataset.wanted.values())


def copy_of(data: TrainingData) -> StagedCopy:
    copy = data.parts[0].staged
    assert copy is not None
    return copy


def test_the_samples_are_the_same_and_the_dataset_is_not_read_again(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, scratch = tmp_path / "data", tmp_path / "deep" / "scratch"
    shutil.copytree(shapes, dataset)
    change_manifest(dataset, lambda manifest: manifest.update(name="moved", tool_version="later"))  # the same content
    before = everything(data_of(dataset, scratch))
    data = stage(dataset, scratch)
    assert capsys.readouterr().out.startswith("staged ")
    for file in [*dataset.glob("*.tar"), *dataset.glob("*.npy")]:
        file.unlink()
    after = everything(data)
    assert len(before) == len(after) == 4 and all(map(torch.equal, before, after))
    assert data.content_hash == data_of(dataset, scratch).content_hash
    assert load_manifest(scratch / data.content_hash) == load_manifest(dataset)
    stage(shapes, scratch)  # there already
    assert capsys.readouterr().out == ""


def stage_and_die(dataset: str, scratch: str) -> None:
    """Killed in the second tar."""
    stage_area.NUM_THREADS, stage_area.PIECE_BYTES = 1, 1000
    data = data_of(Path(dataset), Path(scratch))
    tars = [file.num_bytes for file in wanted_of(data) if file.name.endswith(".tar")]
    left = sum(tars[:1]) + tars[1] // 2

    def moves(num_bytes: int) -> None:
        nonlocal left
        left -= num_bytes
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    StageArea(Path(scratch), moves=moves).fill(data.parts[0].manifest, wanted_of(data))


def test_killed_in_the_middle_it_goes_on_with_the_next_file(shapes: Path, tmp_path: Path) -> None:
    words = ("tests.pretrain.data.test_staging:stage_and_die", str(shapes), str(tmp_path))
    process = begin(*words, environment=dict(os.environ), output=tmp_path / "output")
    assert wait([process], timeout_s=60) == [-signal.SIGKILL]
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    whole = {path.name: path.stat().st_ino for path in place.glob("*.tar") if not path.name.startswith(".")}
    assert whole and list(place.glob(".tmp-*"))
    (place / ".tmp-of-another-split.tar").write_text("")
    copy = copy_of(stage(shapes, tmp_path))
    assert copy.directory == place and not list(place.glob(".tmp-*"))
    assert whole.items() <= {path.name: path.stat().st_ino for path in place.glob("*.tar")}.items()
    tars = sorted(place.glob("*.tar"))
    assert len(tars) > len(whole) and all(sha256_of(path) == path.stem for path in tars)


def test_a_disk_that_is_too_small_costs_a_warning(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageArea, "_free_bytes", lambda area: 1000)
    data = stage(shapes, tmp_path)
    assert data.parts[0].staged is None and len(everything(data)[0]) == 240
    said = capsys.readouterr().err
    assert f"{tmp_path}: " in said and "GB will not fit, 1e-06 GB are free" in said and said.count("WARNING") == 1
    assert said.endswith(f"; training reads {shapes} where it lies\n")
    (tmp_path / "file").write_text("")
    assert stage(shapes, tmp_path / "file").parts[0].staged is None
    assert "file: File exists; training reads" in capsys.readouterr().err


@pytest.mark.parametrize(("disk_gb", "spared_gb"), [(2000, 20), (500, 5), (100, 5), (50, 5), (20, 2)])
def test_a_disk_is_left_enough_for_its_node_to_be_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_gb: int, spared_gb: int
) -> None:
    disk = SimpleNamespace(total=disk_gb * 10**9, free=15 * 10**9)
    monkeypatch.setattr(stage_area, "shutil", SimpleNamespace(disk_usage=lambda path: disk))
    assert StageArea(tmp_path)._free_bytes() == (15 - spared_gb) * 10**9
    assert spared_gb > MIN_FREE_GB


def test_a_disk_that_others_fill_meanwhile_is_left_as_it_was(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StageArea._copy_file

    def full(area: StageArea, file: Wanted, *arguments: object, **more: object) -> None:
        if list(tmp_path.glob("*/*.tar")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(area, file, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(StageArea, "_copy_file", full)
    monkeypatch.setattr(stage_area, "NUM_THREADS", 1)
    assert stage(shapes, tmp_path).parts[0].staged is None
    assert f"{tmp_path}: No space left on device; training reads" in capsys.readouterr().err
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_shard_that_is_not_the_manifests_is_not_staged(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shapes, tmp_path / "data")
    shard = sorted((tmp_path / "data").glob("train-*.tar"))[1]
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    assert stage(tmp_path / "data", tmp_path / "scratch").parts[0].staged is None
    assert f"{shard}: is not what its manifest says; run data_prep verify" in capsys.readouterr().err


def test_room_is_made_by_the_longest_unused_that_nobody_holds(
    shapes: Path, other_shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / ("a" * 64), tmp_path / ("b" * 64)
    for place, age_s in ((old, 9_000), (new, 1_000)):
        place.mkdir()
        (place / "x.tar").write_bytes(bytes(3_000_000))
        place.with_suffix(".lock").touch()
        os.utime(place.with_suffix(".lock"), (time.time() - age_s,) * 2)
    held = copy_of(stage(other_shapes, tmp_path))
    os.utime(held.directory.with_suffix(".lock"), (0, 0))

    def free(area: StageArea) -> int:
        return 7_000_000 - sum(path.stat().st_size for path in tmp_path.glob("*/*"))

    monkeypatch.setattr(StageArea, "_free_bytes", free)
    need = sum(file.num_bytes for file in wanted_of(data_of(shapes, tmp_path)))
    there = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert there + need > 7_000_000 > there - 3_000_000 + need
    copy_of(stage(shapes, tmp_path))
    assert not old.exists() and new.exists() and held.directory.exists()


def test_two_that_stage_at_once_copy_once_and_a_stop_ends_the_wait(shapes: Path, tmp_path: Path) -> None:
    data, moved, second_waits = data_of(shapes, tmp_path), [0, 0], threading.Event()
    manifest, wanted = data.parts[0].manifest, wanted_of(data)

    def slow(num_bytes: int) -> None:
        assert second_waits.wait(30)
        moved[0] += num_bytes

    def others(num_bytes: int) -> None:
        moved[1] += num_bytes

    first = threading.Thread(target=StageArea(tmp_path, moves=slow).fill, args=(manifest, wanted))
    first.start()
    while not list(tmp_path.glob("*.copy")):
        time.sleep(0.01)
    with pytest.raises(Stopped):
        StageArea(tmp_path, stops=lambda: True).fill(manifest, wanted)
    area = StageArea(tmp_path, stops=lambda: second_waits.set() is not None, moves=others)
    area.fill(manifest, wanted)
    first.join()
    assert moved == [sum(file.num_bytes for file in wanted), 0]
    assert area.take(manifest.content_hash, wanted) is not None


def test_borrowed_shards_are_staged_and_remote_ones_left_to_their_cache(shapes: Path, tmp_path: Path) -> None:
    assert data_prep(["subset", str(shapes), "--out", str(tmp_path / "half"), "--fraction", "0.5"]) == 0
    data, scratch = data_of(tmp_path / "half", tmp_path / "scratch"), tmp_path / "scratch"
    assert any(".." in shard.file or "/" in shard.file for shard in data.parts[0].content.shards)
    found = stage(tmp_path / "half", scratch)
    assert all(map(torch.equal, everything(data), everything(found)))
    assert all(found.parts[0].tar(shard).is_relative_to(scratch) for shard in found.parts[0].content.shards)
    manifest = data.parts[0].manifest
    shards = tuple(
        shard.model_copy(update={"file": f"https://x.invalid/{shard.name}.tar"})
        for shard in manifest.splits["train"].shards
    )
    splits = manifest.splits | {"train": manifest.splits["train"].model_copy(update={"shards": shards})}
    far = replace(data, parts=(replace(data.parts[0], manifest=manifest.model_copy(update={"splits": splits})),))
    assert [file.name for file in wanted_of(far) if str(file.source).startswith("https")] == []
    names = {file.name for file in wanted_of(far)}
    assert {f"{shard.index_sha256}.npy" for shard in shards} <= names and not {
        f"{shard.sha256}.tar" for shard in shards
    } & names
