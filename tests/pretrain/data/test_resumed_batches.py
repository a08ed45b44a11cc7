"""Batches for other training loops: interrupted runs with any ranks and workers read the trainer's
sequence exactly once and in order."""

import hashlib
import json
import os
import random
import time
from collections.abc import Iterable
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from pretrain.config import DataSettings
from pretrain.data.datasets import load_training_data
from pretrain.data.order import BatchPlan
from pretrain.data.torch_dataset import ShardBatches, ShardLoader
from tests.errors import fails
from tests.forked import environments
from tests.pretrain.data.test_bad_samples import damaged
from tests.pretrain.data.tiny import loaded, opened
from tests.soak import soaked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),
]
SIZE = 33  # only 1 and 3 ranks divide it; 9 of 240 samples remain in an epoch


def batches_of(dataset: Path, ranks: tuple[int, int] = (0, 1), **more: Any) -> ShardBatches:
    return ShardBatches(dataset, "train", batch_size=SIZE, seed=5, ranks=ranks, **more)


def digest(batch: tuple[Tensor, Tensor]) -> list[str]:
    """Return a hash for each image and its label."""
    return [
        hashlib.sha1(image.contiguous().numpy().tobytes()).hexdigest() + f" {label}"
        for image, label in zip(*batch, strict=True)
    ]


def line_of(dataset: Path, count: int, *, consumed: int = 0) -> list[str]:
    """Return the next batches of `pretrain`."""
    order = load_training_data(DataSettings(dataset=str(dataset))).order(
        seed=5, global_batch_size=SIZE
    )
    plan = BatchPlan(SIZE, SIZE, 1)
    with loaded(opened(dataset), order, plan, consumed=consumed) as batches:
        return joined(
            digest((batch.images_BHWC.permute(0, 3, 1, 2), batch.labels_B))
            for batch in islice(batches, count)
        )


def joined(parts: Iterable[list[str]]) -> list[str]:
    return list(chain.from_iterable(parts))


def loader_of(batches: ShardBatches, num_workers: int, kind: Any = ShardLoader) -> Any:
    settings = {} if kind is ShardLoader else {"batch_size": None}
    context = "fork" if num_workers else None
    return kind(batches, num_workers=num_workers, multiprocessing_context=context, **settings)


def take(loader: Any, count: int) -> list[list[str]]:
    """Return the next batches across the ends of epochs."""
    found: list[list[str]] = []
    while len(found) < count:
        found += map(digest, islice(loader, count - len(found)))
    return found


@pytest.mark.slow
@soaked
def test_any_sequence_of_worlds_and_workers_reads_the_uninterrupted_line(
    salt: int, shapes: Path
) -> None:
    """Each segment loses its workers' read-ahead, and the next begins with new objects."""
    draws = random.Random(salt)
    segments = [(world, workers) for world in (1, 2, 3, 5) for workers in (0, 2, 4)]
    draws.shuffle(segments)
    found: list[str] = []
    state: dict[str, Any] = {}
    for world, workers in segments:
        count, parts, states = draws.randrange(1, 10), [], []
        for rank in range(world):
            loader = loader_of(batches_of(shapes, (rank, world)), workers)
            if state:
                loader.load_state_dict(state)
            parts.append(take(loader, count))
            states.append(loader.state_dict())
        state = states[0]
        assert states == [state] * world
        found += joined(chain.from_iterable(zip(*parts, strict=True)))
        assert state["samples"] == len(found)
    assert found == line_of(shapes, len(found) // SIZE)


def test_a_plain_loader_needs_no_workers_and_may_have_none(shapes: Path) -> None:
    loader = loader_of(batches_of(shapes), 0, DataLoader)
    found = joined(digest(batch) for _ in range(3) for batch in loader)
    assert len(loader) == 7 and found == line_of(shapes, 21)
    for workers in (0, 2):  # a trainer such as Lightning stops at the last batch
        loader = loader_of(batches_of(shapes), workers)
        found = joined(digest(batch) for _ in range(3) for batch in islice(loader, len(loader)))
        assert found == line_of(shapes, 21)
    with pytest.raises(RuntimeError, match="UserError: num_workers"):  # torch wraps the error
        next(iter(loader_of(batches_of(shapes), 1, DataLoader)))


@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_torchdata_continues_with_its_own_state(num_workers: int, shapes: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    state, found = None, list[str]()
    for count in (4, 3, 1, 9, 4):  # the second count ends with an epoch's last batch
        loader = loader_of(batches_of(shapes), num_workers, torchdata.StatefulDataLoader)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(count):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            found += digest(batch)
        state = json.loads(json.dumps(loader.state_dict()))
    assert found == line_of(shapes, 21)


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_order_every_rank_has_its_slices_once(ranks: int, shapes: Path) -> None:
    """The last batch has 2 samples for 3 ranks."""
    found: list[list[str]] = [[], []]
    for rank in range(ranks):
        batches = ShardBatches(shapes, "train", batch_size=34, shuffle=False, ranks=(rank, ranks))
        for each in found:
            each.extend(joined(digest(batch) for batch in loader_of(batches, 2)))
    reader = opened(shapes)
    whole = digest(
        (reader.images(np.arange(240)).permute(0, 3, 1, 2), torch.from_numpy(reader.labels))
    )
    for each in found:
        assert (each if ranks == 1 else sorted(each)) == (whole if ranks == 1 else sorted(whole))


def test_unreadable_samples_have_the_stand_ins_of_the_trainer(shapes: Path, tmp_path: Path) -> None:
    dataset = damaged(shapes, tmp_path / "shapes", [3, 64, 130])
    assert joined(take(loader_of(batches_of(dataset), 2), 8)) == line_of(dataset, 8)


def test_a_resume_locates_no_earlier_sample(shapes: Path) -> None:
    """10^15 earlier samples would take eleven days at one nanosecond each."""
    batches, epoch = batches_of(shapes), 10**15 // (7 * SIZE)
    consumed = (epoch * 7 + 2) * SIZE
    batches.load_state_dict(batches.state_dict() | {"epoch": epoch, "samples": consumed})
    assert joined(map(digest, batches)) == line_of(shapes, 5, consumed=consumed)


def test_states_of_others_are_mistakes(shapes: Path, other_shapes: Path) -> None:
    state = batches_of(shapes).state_dict()
    for others in (
        batches_of(other_shapes),
        ShardBatches(shapes, "val", batch_size=SIZE, seed=5),
        ShardBatches(shapes, "train", batch_size=SIZE, seed=6),
        ShardBatches(shapes, "train", batch_size=SIZE + 1, seed=5),
        batches_of(shapes, shuffle=False),
    ):
        with fails("mismatch", "state"):
            others.load_state_dict(state)
    with fails("bad-value", "state"):
        batches_of(shapes).load_state_dict({"epoch": 1})
    with fails("bad-value", "batch_size"):
        next(iter(batches_of(shapes, (0, SIZE + 1))))


def train(environment: dict[str, str], dataset: Path, place: Path, num_workers: int) -> None:
    """Train on gloo ranks. The first rank saves the state after each step."""
    os.environ.update(environment)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    loader = loader_of(ShardBatches(dataset, "train", batch_size=SIZE, seed=5), num_workers)
    saved: dict[str, Any] = {"worlds": []}
    if (place / "state.json").exists():
        saved = json.loads((place / "state.json").read_text())
        loader.load_state_dict(saved["loader"])
    while True:
        for batch in loader:
            step = len(saved["worlds"])
            (place / f"{step}-{rank}-{world}.json").write_text(json.dumps(digest(batch)))
            distributed.barrier()
            saved["worlds"].append(world)
            if rank == 0:
                text = json.dumps(saved | {"loader": loader.state_dict()})
                (place / "new.json").write_text(text)
                (place / "new.json").replace(place / "state.json")


@pytest.mark.slow
def test_killed_trainings_have_read_the_uninterrupted_line(shapes: Path, tmp_path: Path) -> None:
    """SIGKILL ends all ranks and their workers at any moment."""
    state = tmp_path / "state.json"

    def num_steps() -> int:
        return len(json.loads(state.read_text())["worlds"]) if state.exists() else 0

    for world, num_workers in ((2, 2), (3, 0), (1, 4), (5, 2)):
        ranks = [
            get_context("fork").Process(
                target=train, args=(environment, shapes, tmp_path, num_workers)
            )
            for environment in environments(world)
        ]
        end = num_steps() + 5
        for each in ranks:
            each.start()
        while num_steps() < end and all(each.is_alive() for each in ranks):
            time.sleep(0.01)
        for each in ranks:
            each.kill()
            each.join()
        assert num_steps() >= end
    worlds = json.loads(state.read_text())["worlds"]
    found = joined(
        json.loads((tmp_path / f"{step}-{rank}-{world}.json").read_text())
        for step, world in enumerate(worlds)
        for rank in range(world)
    )
    assert set(worlds) == {1, 2, 3, 5} and found == line_of(shapes, len(worlds))
