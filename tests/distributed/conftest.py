"""One start of 2 ranks computes the results of all tests in this folder, because DeepSpeed's import
is slow."""

import gc
from typing import Any

import pytest

from pretrain.ranks.world import World
from tests.distributed.engine_cells import CELLS, cell, elsewhere, going_on_alone
from tests.distributed.engine_options import UPDATED, accumulated, options, updated
from tests.distributed.engines import from_all_ranks
from tests.distributed.test_agreement import agreements
from tests.distributed.test_zero_cost import CELLS as COST_CELLS
from tests.distributed.test_zero_cost import cell as cost_cell
from tests.distributed.test_zero_cost import count_traffic
from tests.ranks import run_ranks


def everything(world: World, folder: str) -> dict[str, Any]:
    from pretrain.engine.deepspeed import start_distributed

    traffic = count_traffic()  # before DeepSpeed copies the functions
    start_distributed(world, timeout_s=60)
    # DeepSpeed collects garbage for every engine: skip the imported objects
    gc.freeze()
    cost = [cost_cell(world, traffic, *each) for each in COST_CELLS]
    found = {identity: cell(world, identity, folder) for identity in CELLS}
    for identity in CELLS:
        found[identity] |= elsewhere(world, identity, folder)
    agreed = from_all_ranks(agreements(world, folder))
    return {"costs": cost, "cells": found, "options": options(world, folder), "agreements": agreed}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the states that two ranks saved for each cell."""
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="session")
def results(folder: str) -> dict[str, Any]:
    return dict(run_ranks(everything, folder, num_ranks=2)[0])


def one_alone(world: World, folder: str) -> dict[str, Any]:
    losses = going_on_alone(world, folder)
    found = {identity: updated(world, identity) for identity in UPDATED}
    return {"losses": losses, "updated": found, "accumulated": accumulated(world, 1)}


@pytest.fixture(scope="session")
def alone(results: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the results of one rank that loads the states of two ranks."""
    return dict(run_ranks(one_alone, folder, num_ranks=1)[0])
