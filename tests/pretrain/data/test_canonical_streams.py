"""The setting `data.canonical_streams`: every epoch is exact, and every world trains on the same
batches. A node reads, fetches and stages only the shards of its own streams."""

import itertools
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.errors import Code
from data_prep.settings import load_settings
from pretrain.config import DataSettings, PretrainSettings
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.order import BatchPlan, Line
from pretrain.data.reader import ShardReader
from pretrain.data.staging import files_to_stage, stage_data
from pretrain.data.store import ShardStore
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from tests.data_prep.samples import encoded, picture
from tests.data_prep.stock import forget_credentials, index, web, write_stock
from tests.errors import fails
from tests.pretrain.data.tiny import loaded, opened
from tests.training import final_state, finish, start, write_config

NUM_SHARDS, PER_SHARD = 41, 3
BATCH = 24


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stock")
    for number in range(NUM_SHARDS):
        rows = [
            {"__key__": f"{number}-{row}", "jpg": encoded(picture(seed=number)), "cls": row % 4}
            for row in range(PER_SHARD)
        ]
        write_stock(root / f"s-{number:03d}.tar", rows)
    return root


@pytest.fixture(scope="module")
def local(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("local") / "dataset"
    assert index(out, f"{stock}/s-*.tar") == 0
    return out


def data_of(dataset: Path, streams: int, **more: object) -> TrainingData:
    settings = {"dataset": str(dataset), "eval_split": None, "image_size": 16, **more}
    return load_training_data(DataSettings(canonical_streams=streams, **settings))


def order_of(data: TrainingData, *, seed: int = 3) -> Line:
    return data.order(seed=seed, global_batch_size=BATCH)


@pytest.mark.parametrize("streams", [2, 3, 8, 24])
@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
@pytest.mark.parametrize("last_batch", ["carry", "drop", "pad"])
def test_every_epoch_has_every_sample_once(
    local: Path, streams: int, shuffle: str, last_batch: str
) -> None:
    data = data_of(local, streams, shuffle=shuffle, last_batch=last_batch, block_size=4)
    epochs, samples = order_of(data).locate(np.arange(40 * BATCH))
    size = data.epoch_size(global_batch_size=BATCH)
    for epoch in range(5):
        counts = Counter(samples[epochs == epoch].tolist())
        if last_batch == "carry":
            assert counts == Counter(range(data.num_samples))
        elif last_batch == "drop":
            assert counts.total() == size and set(counts.values()) == {1}
        else:
            assert counts.total() == size and len(counts) == data.num_samples
    assert order_of(data, seed=4) != order_of(data) == order_of(data)


def test_one_stream_is_the_order_without_streams(local: Path) -> None:
    usual = load_training_data(DataSettings(dataset=str(local), eval_split=None, image_size=16))
    positions = np.arange(300)
    for found, expected in zip(
        order_of(data_of(local, 1)).locate(positions),
        order_of(usual).locate(positions),
        strict=True,
    ):
        assert np.array_equal(found, expected)


def batches_of_world(order: Line, plan: BatchPlan, *, first: int, end: int) -> list[set[int]]:
    """Return the samples of the global batches; the ranks' parts must not overlap."""
    batches = []
    for batch in range(first, end):
        parts = [
            order.locate(plan.positions(consumed=batch * BATCH, micro_step=micro_step, rank=rank))
            for rank in range(plan.num_ranks)
            for micro_step in range(plan.accumulation_steps)
        ]
        pairs = {
            pair for part in parts for pair in zip(*(each.tolist() for each in part), strict=True)
        }
        assert len(pairs) == BATCH
        batches.append(pairs)
    return batches


def test_all_worlds_train_on_the_same_batches_also_after_a_resume_on_other_nodes(
    local: Path,
) -> None:
    order = order_of(data_of(local, 4))
    plans = [
        BatchPlan(BATCH, size, ranks, is_connected=True)
        for ranks, size in itertools.product((1, 2, 3, 4, 6, 12), (1, 2, 4))
        if BATCH % (ranks * size) == 0
    ]
    assert len(plans) > 10
    expected = batches_of_world(order, plans[0], first=0, end=12)
    for plan in plans:
        assert batches_of_world(order, plan, first=0, end=12) == expected
    resumed = [
        batches_of_world(order, plan, first=number, end=number + 1)[0]
        for number, plan in zip(range(12), itertools.cycle(plans), strict=False)
    ]
    assert resumed == expected


def shards_read(data: TrainingData, plan: BatchPlan, ranks: range) -> set[int]:
    """Return the numbers of the shards that these ranks read in three epochs."""
    order, found = order_of(data), set[int]()
    for rank in ranks:
        for batch in range(3 * data.num_samples // BATCH):
            for micro_step in range(plan.accumulation_steps):
                _, ids = order.locate(
                    plan.positions(consumed=batch * BATCH, micro_step=micro_step, rank=rank)
                )
                found |= set((ids // PER_SHARD).tolist())
    return found


@pytest.mark.parametrize(("streams", "nodes"), [(1, 2), (4, 1), (4, 2), (4, 4), (6, 3), (4, 3)])
def test_the_shards_of_a_node_are_those_that_its_ranks_read(
    local: Path, streams: int, nodes: int
) -> None:
    data, per_node = data_of(local, streams), 2
    plan = BatchPlan(BATCH, 1, per_node * nodes, is_connected=streams > 1)
    sizes = []
    for node in range(nodes):
        ranks = range(per_node * node, per_node * (node + 1))
        listed = {
            int(shard.name[-6:]) for _, shard in data.shards_of(ranks, num_ranks=plan.num_ranks)
        }
        assert shards_read(data, plan, ranks) <= listed
        if streams % nodes == 0 and streams > 1:
            assert len(listed) <= NUM_SHARDS / nodes + 2
        positions = np.arange(3 * BATCH)
        mine = set(plan.of_ranks(positions, ranks).tolist())
        read = {
            position
            for rank, batch, step in itertools.product(
                ranks, range(3), range(plan.accumulation_steps)
            )
            for position in plan.positions(
                consumed=batch * BATCH, micro_step=step, rank=rank
            ).tolist()
        }
        assert mine == read if streams > 1 else mine == set(positions.tolist())
        sizes.append(
            sum(shard.num_bytes for _, shard in data.shards_of(ranks, num_ranks=plan.num_ranks))
        )
    assert data.node_bytes(nodes) == max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_node_fetches_its_part_of_a_remote_dataset_once(
    stock: Path, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each simulated node has two ranks and its own cache, over HTTP."""
    forget_credentials(monkeypatch)
    monkeypatch.setattr("pretrain.data.loader.LOOK_AHEAD", 2 * BATCH)
    with web(stock) as (address, server), ExitStack() as stack:
        assert index(tmp_path / "far", f"{address}/s-{{000..{NUM_SHARDS - 1:03d}}}.tar") == 0
        server.gets.clear()
        data = data_of(tmp_path / "far", 4)
        plan, seen = BatchPlan(BATCH, 3, 2 * nodes, is_connected=True), Counter[int]()
        for node in range(nodes):
            ranks, place = range(2 * node, 2 * node + 2), tmp_path / f"node-{node}"
            store = ShardStore(place, setting="data.cache_dir", max_bytes=10**9, storage={})
            stack.enter_context(closing(store))
            for rank in ranks:
                reader = opened(tmp_path / "far", image_size=16, store=store)
                with loaded(reader, order_of(data), plan, rank=rank, node_ranks=ranks) as batches:
                    for _ in range(
                        3 * data.num_samples // (plan.local_batch_size * plan.num_ranks)
                    ):
                        seen.update(next(batches).samples.tolist())
            assert store.num_written <= data.node_bytes(nodes)
            assert store.num_written <= (1 / nodes + 2 / NUM_SHARDS) * data.node_bytes(1)
        assert len(seen) == data.num_samples
        assert sum(server.gets.values()) <= NUM_SHARDS + nodes - 1  # a shard at each boundary


def test_a_node_stages_its_shards_and_reads_the_others_in_place(
    local: Path, tmp_path: Path
) -> None:
    data = data_of(local, 4, stage_dir=str(tmp_path / "disk"))
    world = World(rank=1, local_rank=0, num_ranks=4, num_local_ranks=1)
    own = {shard.sha256 for _, shard in data.shards_of(world.node_ranks, num_ranks=4)}
    tars = {file.sha256 for file in files_to_stage(data, world) if file.name.endswith(".tar")}
    assert tars == own and 10 <= len(own) <= 12
    staged = stage_data(data, world=world, device=torch.device("cpu"), stop=StopFlag())
    assert len(list((tmp_path / "disk").rglob("*.tar"))) == len(own)
    ids = np.arange(data.num_samples)
    readers = [ShardReader(each.parts, image_size=16) for each in (data, staged)]
    assert torch.equal(*(reader.images(ids) for reader in readers))


@pytest.mark.parametrize(
    ("words", "field", "code"),
    [
        (["data.canonical_streams=5"], "data.canonical_streams", "mismatch"),
        (["data.canonical_streams=16"], "data.canonical_streams", "mismatch"),  # half a MixUp pair
        (
            ["data.canonical_streams=2", "augment.mixup_pairing=ffcv"],
            "augment.mixup_pairing",
            "conflict",
        ),
        (["data.canonical_streams=2", "data.fold=0"], "data.canonical_streams", "conflict"),
    ],
)
def test_settings_that_no_streams_can_have(
    words: list[str], field: str, code: Code, local: Path, tmp_path: Path
) -> None:
    path = write_config(tmp_path, dataset=local)
    with fails(code, field):
        load_settings(PretrainSettings, path=str(path), overrides=["run_dir=x", *words])


@pytest.mark.processes
def test_a_run_on_one_rank_equals_one_that_resumes_on_two(shapes: Path, tmp_path: Path) -> None:
    words = ["data.canonical_streams=2", "schedule.name=constant", "schedule.warmup=0 steps"]
    config = write_config(tmp_path, dataset=shapes)
    for run, ranks, steps in (("full", 1, 12), ("parts", 1, 6), ("parts", 2, 12)):
        length = f"train.duration={steps} steps"
        finish(start(config, tmp_path / run, *words, length, ranks=ranks))
    full, parts = (final_state(tmp_path / run) for run in ("full", "parts"))
    for name, tensor in full.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-5)
    other = ["data.canonical_streams=4", "schedule.name=constant", "schedule.warmup=0 steps"]
    refused = start(config, tmp_path / "parts", *other, "train.duration=14 steps", ranks=1)
    assert "data.canonical_streams" in finish(refused, code=2)


def test_more_streams_than_shards_are_an_error(local: Path) -> None:
    data_of(local, NUM_SHARDS)
    with fails("bad-value", "data.canonical_streams"):
        data_of(local, NUM_SHARDS + 1)
