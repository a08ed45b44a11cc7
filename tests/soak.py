"""Seeds of the random tests. `make soak` runs SOAK seeds from SOAK_SEED on; otherwise each test has
one seed.

The seed is in the test's name. To repeat a failed seed: SOAK=1 SOAK_SEED=SEED .venv/bin/python -m
pytest TEST. Tests of damaged archives have no seed in their names: they make SOAK times as many
mutants from SOAK_SEED, which pytest prints first.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

FACTOR, FIRST = int(os.environ.get("SOAK", "1")), int(os.environ.get("SOAK_SEED", "0"))


def soaked(test: Callable[..., Any]) -> Any:
    """Parametrize a test with `salt`, its seed."""
    return pytest.mark.soak(pytest.mark.parametrize("salt", range(FIRST, FIRST + FACTOR))(test))
