"""The distributed-test helper: runs a function of the tests on N gloo ranks and fails fast when one of them dies.

A case is a module-level function `case(world, *arguments) -> JSON value`; `run_ranks` returns one value per rank.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
_STARTER = """
import sys
from pretrain.launch import launch
sys.exit(launch([sys.executable, "-m", "tests.ranks", *sys.argv[2:]], num_ranks=int(sys.argv[1]), timeout_s=150))
"""


def run_ranks(case: Callable[..., Any], *arguments: Any, num_ranks: int) -> list[Any]:
    """What each rank returned, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{case.__module__}:{case.__name__}", json.dumps(arguments), folder]
        # in a process of its own: starting ranks takes over signals, and they must not write into pytest's terminal
        done = subprocess.run(
            [sys.executable, "-c", _STARTER, str(num_ranks), *words],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _main() -> None:
    from pretrain.world import read_world

    target, arguments, folder = sys.argv[1:]
    module, _, name = target.partition(":")
    world = read_world()
    value = getattr(importlib.import_module(module), name)(world, *json.loads(arguments))
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
