"""What several files of these tests stand on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_prep.stock import Web, web


@pytest.fixture
def server(shards: Path) -> Iterator[tuple[str, Web]]:
    """Address and faults of a web server over the `shards` of the test's own file."""
    with web(shards) as found:
        yield found
