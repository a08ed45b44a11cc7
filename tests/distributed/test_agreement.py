"""What real ranks must agree on outside the engine: LAMB's norms, and the size of a micro-batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pretrain.optim import Lamb
from pretrain.optim.segments import Segment
from pretrain.ranks.world import World

SIZES, CUT, STEPS = (5, 8, 3), 10, 3
MINE = [[Segment(0, 0, 5), Segment(1, 5, 5)], [Segment(1, 0, 3), Segment(2, 3, 3)]]
"""Two decayed and one undecayed tensor per rank, stepped one after the other as at stage 3."""


def vectors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def shard(values: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat(values)[rank * CUT : (rank + 1) * CUT].clone()


def agreements(world: World, run_dir: str) -> dict[str, Any]:
    from pretrain.engine import micro_batch
    from tests.pretrain.engine.test_micro_batch import SIZE, model, settings_of

    flats = [nn.Parameter(shard(vectors(seed), world.rank)) for seed in (1, 2, 3)]
    groups = [
        {"params": flats[:2], "weight_decay": 0.1},
        {"params": flats[2:], "is_decayed": False},
    ]
    optimizer = Lamb(groups, lr=0.1)
    numbered = [
        [
            Segment(3 * flat + each.parameter_number, each.offset, each.length)
            for each in MINE[world.rank]
        ]
        for flat in range(3)
    ]
    optimizer.bind(dict(zip(flats, numbered, strict=True)))
    for step in range(STEPS):
        for number, flat in enumerate(flats):  # one at a time, the other groups empty
            flat.grad = shard(vectors(100 * step + number), world.rank)
            for at, group in enumerate(optimizer.param_groups):
                group["params"] = [flat] if at == (number == 2) else []
            optimizer.step()
    room = (16_000_000, 8_000_000)[world.rank]
    sizes = []
    for available in (room, 10**10):
        micro_batch.available_bytes = lambda *_, available=available: available  # type: ignore[misc,assignment]
        settings = settings_of(Path(run_dir), 2 * 960)
        sizes.append(micro_batch.micro_batch_size(model(), settings=settings, world=world, **SIZE))
    return {"weights": [flat.tolist() for flat in flats], "sizes": sizes}


@pytest.fixture
def said(results: dict[str, Any]) -> list[Any]:
    return list(results["agreements"])


def test_lamb_on_the_shards_of_two_ranks_is_lamb_on_parameters(said: list[Any]) -> None:
    whole = [[nn.Parameter(each) for each in vectors(seed)] for seed in (1, 2, 3)]
    groups = [
        {"params": whole[0] + whole[1], "weight_decay": 0.1},
        {"params": whole[2], "is_decayed": False},
    ]
    optimizer = Lamb(groups, lr=0.1)
    for step in range(STEPS):
        for number, weights in enumerate(whole):
            for weight, gradient in zip(weights, vectors(100 * step + number), strict=True):
                weight.grad = gradient
        optimizer.step()
    for number, weights in enumerate(whole):
        found = torch.tensor([each for rank in said for each in rank["weights"][number]])
        assert torch.allclose(found, torch.cat(weights), rtol=1e-5)


def test_ranks_take_the_lowest_size_that_fits_and_keep_it(said: list[Any]) -> None:
    """The second rank has half the room of the first; later both have more."""
    together, again = said[0]["sizes"]
    assert said[1]["sizes"] == said[0]["sizes"] and 1 < together == again < 960
