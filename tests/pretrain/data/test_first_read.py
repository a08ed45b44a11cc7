"""A byte that changes in a shard after the build ends a run. No shard is hashed twice."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from pretrain.config import DataSettings
from pretrain.data import first_read
from pretrain.data.datasets import Part, load_training_data
from pretrain.data.first_read import FirstRead
from pretrain.data.store import ShardStore
from pretrain.ranks.world import World
from tests.data_prep.samples import files_of
from tests.errors import fails, printed_errors
from tests.ranks import run_ranks
from tests.training import start, write_config

FLIPPED = "train-000002.tar"


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shapes, tmp_path / "shapes"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of hashed files."""
    found: list[str] = []

    def counted(path: Path) -> str:
        found.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(first_read, "sha256_of", counted)
    return found


def parts_of(dataset: Path) -> tuple[Part, ...]:
    return load_training_data(DataSettings(dataset=str(dataset))).read_parts


def flip(dataset: Path) -> None:
    """Flip a bit of an image, which still decodes."""
    data = bytearray((dataset / FLIPPED).read_bytes())
    data[700] ^= 1
    (dataset / FLIPPED).write_bytes(data)


def hash_all(parts: tuple[Part, ...], run_dir: Path, *, ranks: int = 1) -> None:
    """Hash the shards rank by rank, like the start of a run."""
    for rank in range(ranks):
        thread = FirstRead(
            parts, run_dir=run_dir, world=World(rank, rank, ranks), device=torch.device("cpu")
        )
        thread.start()
        thread.join()
        thread.raise_fault()


@pytest.mark.processes
def test_a_flipped_byte_ends_the_run(dataset: Path, tmp_path: Path) -> None:
    config, run_dir = write_config(tmp_path, dataset=dataset), tmp_path / "run"
    flip(dataset)
    run = start(
        config,
        run_dir,
        "train.duration=100000 steps",
        "train.eval_every=100 epochs",
        "checkpoint.every=100 steps",
        ranks=2,
    )
    output, _ = run.communicate()
    assert {rank.exitcode for rank in run.ranks} == {1}
    assert printed_errors(output) == [(str(dataset / FLIPPED), "damaged")]
    assert not (run_dir / "result.json").exists() and "Traceback" not in output


def test_each_shard_is_hashed_once_in_a_run_and_again_when_it_was_touched(
    dataset: Path, tmp_path: Path, hashed: list[str]
) -> None:
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


def test_what_a_killed_rank_left_half_written_is_hashed_again(
    dataset: Path, tmp_path: Path, hashed: list[str]
) -> None:
    hash_all(parts_of(dataset), tmp_path)
    (memory,) = (tmp_path / "checked").iterdir()
    memory.write_bytes(memory.read_bytes()[:-20])
    last, _ = hashed[-1], hashed.clear()
    hash_all(parts_of(dataset), tmp_path)
    assert hashed == [last]


def test_what_was_hashed_where_it_arrived_is_not_hashed_again(
    dataset: Path, tmp_path: Path, hashed: list[str]
) -> None:
    copy = ShardStore(tmp_path / "store", setting="data.stage_dir", max_bytes=None, storage={})
    manifest = load_manifest(dataset)
    split = manifest.splits["train"]
    far = [
        shard.model_copy(update={"file": f"http://127.0.0.1/{shard.file}"})
        for shard in split.shards
    ]
    remote = manifest.model_copy(
        update={"splits": {"train": split.model_copy(update={"shards": tuple(far)})}}
    )
    hash_all(tuple(replace(part, staged=copy) for part in parts_of(dataset)), tmp_path)
    hash_all((Part(dataset, remote, "train"),), tmp_path)
    assert hashed == []


def hash_with_only_one_staged(world: World, dataset: str, folder: str) -> list[str]:
    """Return the names of the shards that this rank hashes. Rank 0 is a node that has staged them,
    rank 1 another node."""
    from pretrain.engine.deepspeed import start_distributed

    device, parts, run_dir = (
        start_distributed(world, timeout_s=60),
        parts_of(Path(dataset)),
        Path(folder, str(world.rank)),
    )
    if world.is_first:
        copy = ShardStore(
            Path(folder, "store"), setting="data.stage_dir", max_bytes=None, storage={}
        )
        parts = tuple(replace(part, staged=copy) for part in parts)
    thread = FirstRead(parts, run_dir=run_dir, world=world, device=device)
    thread.run()
    thread.raise_fault()
    lines = (run_dir / "checked" / f"rank-{world.rank}.jsonl").read_text().splitlines()
    return [Path(json.loads(line)[0]).name for line in lines]


@pytest.mark.processes
def test_shards_that_one_node_reads_in_place_are_hashed_by_all_ranks(
    dataset: Path, tmp_path: Path
) -> None:
    hashed = run_ranks(hash_with_only_one_staged, str(dataset), str(tmp_path), num_ranks=2)
    assert [len(names) for names in hashed] == [3, 3]
    assert sorted(hashed[0] + hashed[1]) == sorted(path.name for path in dataset.glob("*.tar"))


def test_a_shard_that_cannot_be_read_is_named_and_a_memory_that_cannot_be_written_is_not(
    dataset: Path, tmp_path: Path
) -> None:
    parts, before = parts_of(dataset), files_of(dataset)
    (tmp_path / "run").write_bytes(b"")  # not a directory: nothing can be stored
    hash_all(parts, tmp_path / "run")
    (dataset / FLIPPED).unlink()
    with fails("unreadable", str(dataset / FLIPPED)):
        hash_all(parts, tmp_path / "run")
    assert before.keys() - files_of(dataset).keys() == {FLIPPED}
