"""Plans and submissions name their files from the repository root: here an empty directory with its configs and its job scripts."""

from pathlib import Path

import pytest

from tests.cluster.checkouts import whole_checkout
from tests.ranks import REPOSITORY


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "cluster").mkdir()
    for script in (REPOSITORY / "cluster").glob("*.slurm"):
        (tmp_path / "cluster" / script.name).symlink_to(script)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """All of a checkout: what shell files need."""
    return whole_checkout(tmp_path)
