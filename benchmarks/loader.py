"""Loader throughput, compared with other loaders, a plain copy in memory, and libjpeg-turbo.

    .venv/bin/python benchmarks/loader.py [--quick | --dry-run]

All data is shuffled, in the page cache, and delivered as torch tensors on all cores. No contestant
hashes data (data.verify_hashes=never); benchmarks/train.py has a row with hashes. Each contestant is
a separate process (ours.py, peers.py). The processes run complete passes in turn. Times include all
work that a loader repeats for each pass.
  raw      64 px, uint8 batches of 1,024. Limit: copy random rows of the same bytes in memory to one buffer
  recipe   the same images with random resized crop (0.4 to 1), flip, MixUp 0.8, as normalized float32 batches
  jpeg     224 px, 4:2:0, quality 90, to uint8 batches of 256. Limit: decode the same bytes in memory
The raw benchmark also prints the private memory (RssAnon) of our process before and after an epoch.
benchmarks/gpu.py measures the input of GPUs. In `raw`, slow loaders read fewer images. In
`recipe`, all loaders do.
"""

import argparse
import os
import shutil
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace

from frame import DATA, HERE, Rates, arguments, peer_python, rates, ratio, ratios, report, sized
from images import CORES, folder_dataset
from serving import Answer, PeerError, Server, Task

OURS, COPY, DECODER = "ours", "random copy", "libjpeg-turbo"
LIMITS = {"raw": COPY, "recipe": "", "jpeg": DECODER}
OF_OURS = (OURS, COPY, DECODER)
"""Contestants that ours.py serves."""
PEERS = ("FFCV", "MosaicML streaming", "litdata", "webdataset", "ImageFolder")
MIXED_BY_TORCH = "FFCV, mixed by torch"
FAST = (OURS, "FFCV", COPY)


def server(name: str) -> Server:
    if name in OF_OURS:
        return Server(sys.executable, HERE / "ours.py", name)
    return Server(peer_python(), HERE / "peers.py", name)


def write_for(peer: str, task: Task) -> None:
    """Write the dataset in the peer's format, unless it needs none or the files exist."""
    out = task.written_by(peer)
    if peer in ("FFCV", "MosaicML streaming", "litdata") and not out.exists():
        temporary = out.with_name(f"{out.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        with server(peer) as writer:
            writer.ask("write", task, out=str(temporary))
        temporary.rename(out)


class Contestant:
    """One loader on one task. The first call checks a pass; later calls measure."""

    def __init__(self, name: str, task: Task, server: Server, *, seconds: float):
        self.name, self.task, self.server, self.seconds = name, task, server, seconds
        self.checked: Answer = {}

    def __call__(self) -> tuple[float, float]:
        if self.checked:
            answer = self.server.ask("run", self.task, seconds=self.seconds)
        else:
            write_for(self.name, self.task)
            answer = self.checked = self.server.ask("run", self.task, check=True)
            if answer["count"] != self.task.num_samples:
                raise PeerError(f"read {answer['count']:,} of {self.task.num_samples:,} images")
        return answer["count"], answer["seconds"]


def tasks(options: argparse.Namespace) -> dict[str, tuple[Task, Task]]:
    """For each kind of data, return the task, and a smaller task for slow loaders."""
    num_raw, num_jpeg = (1024, 256) if options.dry_run else (40_960, 8_192)
    batch, jpeg_batch = (64, 32) if options.dry_run else (1024, 256)
    num_few = min(num_raw, sized(options, full=4, quick=2, dry=1) * 1024 * CORES)
    shards = folder_dataset(DATA / f"raw-{num_raw}", num_raw, size=64)
    raw = Task("raw", f"{shards}-files", num_raw, 64, batch, CORES, str(shards))
    shards = folder_dataset(DATA / f"jpeg-{num_jpeg}", num_jpeg, size=224, suffix=".jpg")
    num_jpeg = min(num_jpeg, sized(options, full=num_jpeg, quick=1024 * CORES, dry=num_jpeg))
    jpeg = Task("jpeg", f"{shards}-files", num_jpeg, 224, jpeg_batch, CORES, str(shards))
    few = replace(raw, num_samples=num_few)
    recipe = replace(few, kind="recipe")
    return {"raw": (raw, few), "recipe": (recipe, recipe), "jpeg": (jpeg, jpeg)}


def measure(kind: str, task: Task, few: Task, *, rounds: int, seconds: float) -> None:
    limit = LIMITS[kind]
    peers = (*PEERS, MIXED_BY_TORCH) if kind == "recipe" else PEERS
    task_of = {
        name: task if name in FAST else few for name in (OURS, *peers, *filter(None, [limit]))
    }
    with ExitStack() as stack:
        contestants = {
            name: Contestant(name, each, stack.enter_context(server(name)), seconds=seconds)
            for name, each in task_of.items()
        }
        found = rates(contestants, rounds=rounds, peers=peers)
        if kind == "raw":
            for each in (task, few):
                totals = {
                    name: contestants[name].checked["total"]
                    for name in found
                    if task_of[name] == each
                }
                assert len({*totals.values()}) <= 1, f"different pixels: {totals}"
            before_mb, after_mb = contestants[OURS].checked["memory_mb"]
            print(f"our private memory: {before_mb:,.0f} MB, {after_mb:,.0f} MB after an epoch")
    show(kind, task, found, rounds=rounds)


def show(kind: str, task: Task, found: Rates, *, rounds: int) -> None:
    peers = [name for name in found if name not in OF_OURS]
    fastest = max(peers, default=OURS, key=lambda name: statistics.median(found[name]))
    limit = LIMITS[kind]
    headline = f"ours: {ratio(found, OURS, fastest):.2f} x the fastest peer ({fastest})"
    if limit:
        headline += f", {ratio(found, OURS, limit):.1%} of {limit}"
    title = (
        f"{kind}: {task.image_size} px, batches of {task.batch_size:,}, {CORES} cores, {rounds}"
        " rounds, data.verify_hashes=never"
    )
    headline += f"; {ratios(found, OURS, peers)}"
    report(title, found, unit="images/s", against=limit or OURS, headline=headline)


def main() -> None:
    options = arguments(__doc__ or "")
    os.environ.update({"LITDATA_DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"})
    rounds = sized(options, full=5, quick=2, dry=1)
    seconds = sized(options, full=1.0, quick=0.5, dry=0.01)
    for kind, (task, few) in tasks(options).items():
        measure(kind, task, few, rounds=rounds, seconds=seconds)


if __name__ == "__main__":
    main()
