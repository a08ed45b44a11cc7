"""An empty directory with configs and job scripts: plans and submissions name files from the
repository root."""

import os
from pathlib import Path

import pytest

from tests.cluster.checkouts import stand_in, whole_checkout
from tests.ranks import REPOSITORY

STAND_IN = """# Notes its words; answers as SLURM does, by the files queue and refuse.
name=$(basename "$0")
printf '%s\\n' "$name $*" >>calls
case $name in
sbatch)
    count=$(grep -c ^sbatch calls)
    [ "$count" != "$(cat refuse 2>/dev/null)" ] || { echo "sbatch: error: no such partition" >&2; exit 1; }
    echo "a word of the site's"; echo "$((100 + count));lab" ;;
squeue)
    [ -z "$SQUEUE_STATES" ] && [ "$*" = "--noheader --me --array --format=%F %K %T" ] || exit 1
    cat queue 2>/dev/null; true ;;
snapshot) echo /kept ;;
esac"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "cluster").mkdir()
    for script in (REPOSITORY / "cluster").glob("*.slurm"):
        (tmp_path / "cluster" / script.name).symlink_to(script)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def slurm(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with stand-ins for SLURM's commands, which log their arguments in `calls`."""
    (checkout / "bin").mkdir()
    for name in ("bin/squeue", "bin/scancel", "bin/sbatch", "cluster/snapshot"):
        stand_in(checkout, name, STAND_IN)
    monkeypatch.setenv("PATH", f"{checkout}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")  # a user's preference
    return checkout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A complete checkout, as shell files need it."""
    return whole_checkout(tmp_path)
