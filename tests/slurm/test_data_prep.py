"""The script cluster/data_prep.slurm on a real SLURM: an array writes the parts, a dependent job
merges and verifies them."""

import time

import pytest

from data_prep.cli import main as data_prep
from tests.slurm.conftest import Cluster

SCRIPT = "cluster/data_prep.slurm"
pytestmark = [pytest.mark.timeout(400), pytest.mark.processes, pytest.mark.nightly]
CONFIG = "configs/data_prep/demo_transfer.yaml"
SMALL = (
    "image_size=16",
    "source.image_size=20",
    "source.num_train_per_class=9",
    "source.num_val_per_class=3",
)
MORE = ("samples_per_shard=50", "num_workers=1")


def words(name: str) -> list[str]:
    return [CONFIG, f"out=data/{name}", f"source.images_dir=data/{name}-images", *SMALL, *MORE]


def merge_of(slurm: Cluster, array: str) -> str:
    """Return the merge job, which a task of the array submits."""
    deadline_s, noted = time.monotonic() + 120, slurm.root / f"jobs/{array}/merge"
    while not noted.exists() or not noted.read_text().endswith("\n"):
        assert time.monotonic() < deadline_s, slurm.log(f"{array}_0")
        time.sleep(0.05)
    return noted.read_text().strip()


def test_an_array_writes_what_one_process_writes(slurm: Cluster) -> None:
    array = slurm.sbatch(
        "--array=0-2", "--cpus-per-task=1", "--mem=3G", "--time=77", SCRIPT, *words("parts")
    )
    merge = merge_of(slurm, array)
    assert {name: slurm.job(merge)[name] for name in ("TimeLimit", "MinMemoryNode", "Task")} == {
        "TimeLimit": "01:17:00",
        "MinMemoryNode": "3G",
        "Task": "1",
    }
    assert slurm.job(merge)["Dependency"] in (
        "(null)",
        f"afterok:{array}_*(unfulfilled)",
    )  # (null) if the dependency is met
    slurm.wait(merge, "COMPLETED")
    assert "288 samples match the manifest" in slurm.log(f"{merge}_0"), slurm.log(f"{merge}_0")
    alone = slurm.root / "data/alone"
    config = str(slurm.root / CONFIG)
    images = f"source.images_dir={slurm.root}/data/parts-images"
    assert data_prep(["build", config, f"out={alone}", images, *SMALL, *MORE, "name=parts"]) == 0
    theirs, ours = (
        {path.name: path.read_bytes() for path in place.glob("*.tar")}
        for place in (slurm.root / "data/parts", alone)
    )
    assert len(ours) >= 5 and theirs == ours
    assert (slurm.root / "data/parts/manifest.json").exists()
    again = slurm.sbatch("--array=0", "--cpus-per-task=1", SCRIPT, *words("parts"))
    slurm.wait(again, "COMPLETED")
    assert "data/parts is already built" in slurm.log(f"{again}_0")


def test_a_merge_whose_part_is_gone_goes_too_and_the_array_can_be_submitted_again(
    slurm: Cluster,
) -> None:
    merge = slurm(
        "cluster/submit",
        "--parsable",
        "--hold",
        "--array=0-1",
        "--cpus-per-task=1",
        SCRIPT,
        *words("again"),
    )
    array = slurm.job(merge)["Dependency"].partition(":")[2].partition("_")[0]
    slurm("scontrol", "release", merge)  # the merge still waits for the parts
    slurm("scancel", f"{array}_1")
    slurm("scontrol", "release", f"{array}_0")
    slurm.wait(f"{array}_0", "COMPLETED")
    slurm.wait(merge, "CANCELLED")
    assert not (slurm.root / "data/again/manifest.json").exists()
    merge = slurm(
        "cluster/submit", "--parsable", "--array=0-1", "--cpus-per-task=1", SCRIPT, *words("again")
    )
    slurm.wait(merge, "COMPLETED")
    assert (slurm.root / "data/again/manifest.json").exists()
