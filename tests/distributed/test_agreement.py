"""Real ranks agree on the size of a micro-batch."""

from pathlib import Path
from typing import Any

import pytest

from pretrain.ranks.world import World

pytestmark = pytest.mark.processes


def agreements(world: World, run_dir: str) -> list[int]:
    """Return the sizes when the second rank has less than half of the first's memory, and when both
    have enough."""
    from pretrain.engine import micro_batch
    from tests.pretrain.engine.test_micro_batch import SIZE, Memory, model, settings_of

    sizes = []
    for most in ((300, 125)[world.rank], 10**6):
        micro_batch.run_trial_step = Memory(most)
        settings = settings_of(Path(run_dir), 2 * 960)
        sizes.append(micro_batch.micro_batch_size(model(), settings=settings, world=world, **SIZE))
    return sizes


def test_ranks_take_the_lowest_size_that_fits_and_keep_it(results: dict[str, Any]) -> None:
    assert results["agreements"] == [[120, 120], [120, 120]]
