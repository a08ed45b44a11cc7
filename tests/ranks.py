"""Run a test function on N gloo ranks, and fail fast if a rank dies.

A case is a module-level function `case(world, *arguments) -> JSON value`; `run_ranks` returns one
value per rank. Ranks are forks (see forked.py) with torch and deepspeed imported.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import begin, environments, wait

REPOSITORY = Path(__file__).parent.parent


def run_ranks(case: Callable[..., Any], *arguments: Any, num_ranks: int) -> list[Any]:
    """Return each rank's result, in rank order."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = (f"{case.__module__}:{case.__name__}", json.dumps(arguments), place)
        ranks = [
            begin("tests.ranks:run_case", *words, environment=environment, output=folder / "output")
            for environment in environments(num_ranks)
        ]
        codes = wait(ranks, timeout_s=600, grace_s=5)
        if any(code != 0 for code in codes):
            raise AssertionError(f"exit codes {codes}\n{(folder / 'output').read_text()}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def run_case(target: str, arguments: str, folder: str) -> None:
    from pretrain.ranks.world import read_world

    module, _, name = target.partition(":")
    world = read_world()
    value = getattr(importlib.import_module(module), name)(world, *json.loads(arguments))
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
