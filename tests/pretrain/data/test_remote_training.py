"""Training on remote stock WebDatasets after `data_prep index` reads the samples of a local copy,
respects the cache's limit, and writes no credentials.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_prep.manifest import load_manifest
from pretrain.checkpoints.run import list_checkpoints
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader
from pretrain.data.store import ShardStore
from tests.data_prep.samples import encoded, files_of, picture
from tests.data_prep.stock import Web, forget_credentials, index, s3_server, web, write_stock
from tests.errors import fails
from tests.pretrain.data.tiny import few_files, loaded, opened
from tests.training import finish, start, write_config

NUM_SHARDS, PER_SHARD = 8, 12
WHOLE = BatchPlan(12, 12, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards like stock WebDataset writers': JPEGs and labels in tars of similar size."""
    root = tmp_path_factory.mktemp("stock")
    for number in range(NUM_SHARDS):
        samples = [
            {
                "__key__": f"{number}-{row}",
                "jpg": encoded(picture(seed=100 * number + row)),
                "cls": (number + row) % 4,
            }
            for row in range(PER_SHARD)
        ]
        write_stock(root / f"s-{number:03d}.tar", samples)
    return root


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Web]]:
    forget_credentials(monkeypatch)
    with web(folder) as found:
        yield found


def pattern(address: str) -> str:
    return f"{address}/s-{{000..{NUM_SHARDS - 1:03d}}}.tar"


def shard_bytes(dataset: Path) -> int:
    return max(shard.num_bytes for shard in load_manifest(dataset).splits["train"].shards)


@pytest.fixture
def remote(server: tuple[str, Web], tmp_path: Path) -> Path:
    assert index(tmp_path / "remote", pattern(server[0])) == 0
    server[1].gets.clear()
    return tmp_path / "remote"


@pytest.fixture
def far(remote: Path, tmp_path: Path) -> Iterator[Callable[..., ShardReader]]:
    """Return a function that opens a reader with a cache for `num_shards` shards, or with the given
    cache."""
    with ExitStack() as stack:

        def open_reader(num_shards: int, *, store: ShardStore | None = None) -> ShardReader:
            if store is None:
                how = {"setting": "data.cache_dir", "max_bytes": num_shards * shard_bytes(remote)}
                store = stack.enter_context(
                    closing(ShardStore(tmp_path / "cache", storage={}, **how))
                )  # type: ignore[arg-type]
            return stack.enter_context(closing(opened(remote, image_size=16, store=store)))

        yield open_reader


def test_what_is_read_through_a_small_cache_is_what_a_local_copy_gives(
    folder: Path, far: Callable[..., ShardReader], server: tuple[str, Web], tmp_path: Path
) -> None:
    assert index(tmp_path / "local", f"{folder}/s-*.tar") == 0
    local = opened(tmp_path / "local", image_size=16)
    whole = local.images(np.arange(local.num_samples))
    reader = far(3)
    for start_id in [*range(0, reader.num_samples, PER_SHARD)] * 2:
        ids = np.arange(start_id, start_id + PER_SHARD)
        reader.fetch_ahead(ids)
        assert torch.equal(reader.images(ids), whole[ids])
        assert sum(
            path.stat().st_size for path in (tmp_path / "cache").glob("*.tar")
        ) <= 3 * shard_bytes(tmp_path / "remote")
    assert (
        min(server[1].gets.values()) >= 1 and sum(server[1].gets.values()) > NUM_SHARDS
    )  # evicted shards were fetched again


def batches_of(
    reader: ShardReader, order: Order, *, steps: int, plan: BatchPlan = WHOLE, **more: Any
) -> list[list[int]]:
    with loaded(reader, order, plan, **more) as batches:
        return [next(batches).samples.tolist() for _ in range(steps)]


def test_shards_are_fetched_ahead_and_once(
    far: Callable[..., ShardReader], server: tuple[str, Web]
) -> None:
    found = batches_of(far(99), Order(96, 3), steps=16)
    assert sorted(sample for batch in found[:8] for sample in batch) == list(range(96))
    assert list(server[1].gets.values()) == [1] * NUM_SHARDS
    again = far(99)
    with few_files():  # fewer descriptors than shards and indices
        assert again.images(np.arange(96)).shape == (96, 16, 16, 3)


def test_look_ahead_keeps_up_with_a_rank_that_reads_every_nth_sample(
    far: Callable[..., ShardReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are released during look-ahead, so room for a few is enough for any number of located
    samples."""
    monkeypatch.setattr("pretrain.data.loader.LOOK_AHEAD", 2 * PER_SHARD)
    monkeypatch.setattr("pretrain.data.store.WAIT_S", 3)
    found = batches_of(
        far(4), Order(96, 3, "none"), steps=2 * NUM_SHARDS, plan=BatchPlan(12, 6, 2), rank=1
    )
    assert found == 2 * [
        list(range(start + 6, start + 12)) for start in range(0, NUM_SHARDS * PER_SHARD, 12)
    ]


def test_training_and_evaluation_share_a_store_that_holds_either(
    far: Callable[..., ShardReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that one reader keeps for later are removed for the other reader's current shards."""
    monkeypatch.setattr("pretrain.data.store.WAIT_S", 3)
    readers = [far(4)]
    readers.append(far(4, store=readers[0]._store))
    ids, found = [np.arange(start * PER_SHARD, (start + 3) * PER_SHARD) for start in (0, 4)], []
    for reader, mine in [*zip(readers, ids, strict=True)] * 2:
        reader.fetch_ahead(mine)
        found.append([reader.images(part) for part in np.split(mine, 3)])
    assert all(
        torch.equal(*pair)
        for turn in (0, 1)
        for pair in zip(found[turn], found[turn + 2], strict=True)
    )


def test_a_cache_too_small_for_the_order_is_one_clear_error(
    far: Callable[..., ShardReader],
) -> None:
    with fails("no-space", "data.cache_gb"):
        batches_of(far(3), Order(96, 3), steps=1)


@pytest.mark.processes
def test_a_run_goes_on_from_disk_with_what_it_began_behind_http_and_back(
    folder: Path, remote: Path, tmp_path: Path
) -> None:
    """The order depends on the pixels' hash, not on addresses: the same run continues with local
    and remote shards."""
    local = tmp_path / "local"
    assert index(local, f"{folder}/s-00*.tar", "name=of-the-disk") == 0
    assert load_manifest(local).pixels_hash == load_manifest(remote).pixels_hash
    config, run_dir = write_config(tmp_path, dataset=remote), tmp_path / "run"
    words = [
        "data.eval_split=train",
        "data.image_size=16",
        "train.duration=12 steps",
        f"data.cache_dir={tmp_path}/cache",
    ]
    words.append("checkpoint={every: 6 steps, keep_last: 2}")
    finish(start(config, run_dir, *words, ranks=1))
    whole = load_file(list_checkpoints(run_dir)[-1] / "model.safetensors")
    for dataset in (local, remote):
        shutil.rmtree(list_checkpoints(run_dir)[-1])  # as if killed before this checkpoint
        (run_dir / "result.json").unlink()
        assert "resuming from step-00000006" in finish(
            start(config, run_dir, *words, f"data.dataset={dataset}", ranks=1)
        )
        again = load_file(list_checkpoints(run_dir)[-1] / "model.safetensors")
        assert again.keys() == whole.keys() and all(
            torch.equal(again[name], whole[name]) for name in whole
        )


@pytest.mark.processes
def test_two_ranks_train_from_a_server_that_fails_now_and_then(
    remote: Path, server: tuple[str, Web], tmp_path: Path
) -> None:
    server[1].faults = {"s-001.tar": [503, "cut"], "s-004.tar": ["wrong"]}
    config = write_config(tmp_path, dataset=remote)
    words = [
        "data.eval_split=train",
        "data.image_size=16",
        "train.duration=2 epochs",
        "train.eval_every=1 epochs",
    ]
    output = finish(start(config, tmp_path / "run", *words, f"data.cache_dir={tmp_path / 'cache'}"))
    assert "finished" in output and "bad sample" not in output
    assert server[1].gets == {f"s-{n:03d}.tar": {1: 3, 4: 2}.get(n, 1) for n in range(NUM_SHARDS)}
    assert len(list((tmp_path / "cache").glob("*.tar"))) == NUM_SHARDS


@pytest.mark.processes
def test_s3_needs_its_options_and_keeps_them_to_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_credentials(monkeypatch)
    with s3_server(folder) as storage:
        assert index(tmp_path / "s3", "s3://pictures/some/s-*.tar", f"storage={storage}") == 0
        config = write_config(tmp_path, dataset=tmp_path / "s3")
        words = [
            "data.eval_split=train",
            "data.image_size=16",
            "train.duration=5 steps",
            f"data.storage={storage}",
        ]
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        finish(
            start(
                config,
                tmp_path / "run",
                *words,
                cache,
                "tracking.enabled=true",
                ranks=1,
                journal_only=True,
            )
        )
    assert not any(b"secret-word" in data for data in files_of(tmp_path / "run").values())
    shutil.rmtree(tmp_path / "run")
