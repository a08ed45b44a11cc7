"""How long the random tests go on: `make soak` draws SOAK seeds for each, from SOAK_SEED on;
elsewhere each has its usual one.

A seed stands in the name of its test. To repeat one that failed: SOAK=1 SOAK_SEED=THAT
.venv/bin/python -m pytest TEST. Tests of damaged archives have no seed in their names: they make
SOAK times as many mutants from SOAK_SEED, which pytest prints first.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

FACTOR, FIRST = int(os.environ.get("SOAK", "1")), int(os.environ.get("SOAK_SEED", "0"))


def soaked(test: Callable[..., Any], *, usual: int = 1) -> Any:
    """The test has a parameter `salt`: 0 stands for its usual seed, and what is below `usual` for
    so many of them."""
    number = FACTOR if "SOAK" in os.environ else usual
    return pytest.mark.soak(pytest.mark.parametrize("salt", range(FIRST, FIRST + number))(test))
