"""Cost of planning a build of 14 million simulated inputs in 20,000 tars, as in ImageNet-21k.

The benchmark runs the planning of `data_prep build`: inventory on disk, classes, validation split,
shuffled order, shards. It reads no images.

    .venv/bin/python benchmarks/listing.py [--quick]

The output has time and peak memory for 1.4 and 14 million inputs. Only columns on disk grow.
"""

import resource
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
from frame import DATA, arguments, commit, machine, sized

from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.build.config import BuildSettings
from data_prep.build.workplan import prepare
from data_prep.settings import load_settings
from data_prep.sources import Arrangement, Source
from data_prep.sources.base import by_container, move_to_val
from data_prep.workers import Pool

PER_CONTAINER = 700


class Simulated(Source):
    """A source of synset tars that do not exist."""

    def __init__(self, num_containers: int):
        self.num_containers = num_containers

    def describe(self) -> dict[str, Any]:
        return {"kind": "simulated", "num_containers": self.num_containers}

    def outline(self) -> Outline:
        classes = tuple(f"n{number:08d}" for number in range(self.num_containers))
        containers = (
            Container(f"{name}.tar", "train", label) for label, name in enumerate(classes)
        )
        return Outline(classes, tuple(containers))

    def entries(self, container: Container) -> Entries:
        names = [f"{container.path[:9]}_{number}.JPEG" for number in range(PER_CONTAINER)]
        offsets = 512 + 110_000 * np.arange(PER_CONTAINER, dtype=np.int64)
        sizes = np.full(PER_CONTAINER, 109_000, np.int64)
        return Entries(names, offsets, sizes, np.full(PER_CONTAINER, container.label, np.int32))

    def arrange(self, inventory: Inventory) -> Arrangement:
        return move_to_val(inventory, by_container(inventory), seed=0, per_class=50)

    def read(self, entry: Entry) -> bytes:  # noqa: ARG002
        raise AssertionError("this benchmark reads no images")


def plan(num_inputs: int) -> None:
    """Plan a build in this process, and print time and memory."""
    out = DATA / f"listing-{num_inputs}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    overrides = ["source.kind=folder", "source.path=simulated", f"out={out}"]
    settings = load_settings(BuildSettings, path=None, overrides=overrides)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.monotonic()
    with Pool(settings.num_workers) as pool:
        work = prepare(settings, Simulated(num_inputs // PER_CONTAINER), pool)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    seconds = time.monotonic() - began_s
    print(
        f"{num_inputs:>12,} inputs  {len(work.shards):>6,} shards  {seconds:6.1f} s "
        f" {num_inputs / seconds:>9,.0f}/s  peak {peak_kb / 1024:6,.0f} MB"
        f" ({before_kb / 1024:,.0f} MB at the start)  {on_disk / 1e6:6,.0f} MB on disk",
        flush=True,
    )
    shutil.rmtree(out)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--plan":
        plan(int(sys.argv[2]))
        return
    options = arguments(__doc__.splitlines()[0])
    largest = sized(options, full=14_000_000, quick=1_400_000, dry=14_000)
    for num_inputs in (largest // 10, largest):
        subprocess.run(
            [sys.executable, __file__, "--plan", str(num_inputs)],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
