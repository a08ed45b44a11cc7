from pathlib import Path

import pytest

from pretrain.data.reader import ShardReader
from tests.pretrain.data.tiny import opened


@pytest.fixture(scope="session")
def reader(shapes: Path) -> ShardReader:
    return opened(shapes)


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking database without runs: creating one takes seconds, copying it no time."""
    from pretrain.tracking.store import Store

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    assert not Store(f"sqlite:///{path}").has_run("none")
    return path
