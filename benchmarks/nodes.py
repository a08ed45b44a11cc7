"""Bytes that each node fetches from a remote dataset, with and without canonical streams.

    .venv/bin/python benchmarks/nodes.py [--quick]

An HTTP server on loopback has the shards. Each simulated node has two ranks and a cache for 40 % of
the dataset. The ranks of all nodes read two epochs with block shuffle. The table shows the largest
number of bytes that one node fetched in each epoch, relative to the dataset.
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from frame import arguments, print_table, sized

from data_prep.cli import main as data_prep
from pretrain.config import DataSettings
from pretrain.data import loader
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.loader import as_stored, training_batches
from pretrain.data.order import BatchPlan
from pretrain.data.reader import open_split
from pretrain.data.store import ShardStore

BATCH, PER_SHARD, RANKS_PER_NODE = 256, 64, 2


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def fetched(data: TrainingData, *, num_nodes: int, folder: Path) -> list[int]:
    """Return, for each of two epochs, the largest number of bytes that one node fetches."""
    plan = BatchPlan(
        BATCH,
        BATCH // (RANKS_PER_NODE * num_nodes),
        RANKS_PER_NODE * num_nodes,
        is_connected=data.settings.canonical_streams > 1,
    )
    order, part = data.order(seed=0, global_batch_size=BATCH), data.parts[0]
    steps, found = data.num_samples // BATCH, []
    for node in range(num_nodes):
        cache = folder / f"cache-{node}"
        max_bytes = int(0.4 * data.node_bytes(1))
        ranks = range(RANKS_PER_NODE * node, RANKS_PER_NODE * (node + 1))
        store = ShardStore(cache, setting="data.cache_dir", max_bytes=max_bytes, storage={})
        with closing(store):
            reader = open_split(part.directory, part.manifest, "train", store=store)
            batches = [
                training_batches(
                    reader, order, plan, rank=rank, node_ranks=ranks, consumed=0, num_threads=1,
                    prefetch=1, pin=False, finish=as_stored,
                )
                for rank in ranks
            ]  # fmt: skip
            counts = [0]
            for _ in range(2):
                for _ in range(steps):
                    for each in batches:
                        next(each)
                counts.append(store.num_written)
            for each in batches:
                each.close()
        found.append(np.diff(counts))
        shutil.rmtree(cache)
    return [int(most) for most in np.max(found, axis=0)]


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    num_shards = sized(options, full=640, quick=320, dry=80)
    loader.LOOK_AHEAD = 2 * BATCH  # reduced for a small dataset
    with TemporaryDirectory() as place:
        folder, rows = Path(place), []
        words = ["build", "--source", "synthetic", "--out", str(folder / "data"), "image_size=16"]
        words += [f"samples_per_shard={PER_SHARD}", "source.num_classes=8"]
        words += [f"source.num_train_per_class={num_shards * PER_SHARD // 8}"]
        assert data_prep([*words, "source.num_val_per_class=1"]) == 0
        with served(folder / "data") as address:
            out = folder / "remote"
            shards = f"{address}/train-{{000000..{num_shards - 1:06d}}}.tar"
            assert data_prep(["index", "--out", str(out), "--train", shards, "image_size=16"]) == 0
            for streams in (1, 4):
                data = load_training_data(
                    DataSettings(
                        dataset=str(out), eval_split=None, canonical_streams=streams,
                        shuffle="block", block_size=PER_SHARD, window_blocks=4,
                    )
                )  # fmt: skip
                for num_nodes in (1, 2, 4):
                    counts = fetched(data, num_nodes=num_nodes, folder=folder)
                    total = data.node_bytes(1)
                    expected = f"{data.node_bytes(num_nodes) / total:.1%}"
                    shares = [f"{count / total:.1%}" for count in counts]
                    rows.append((f"{streams}", f"{num_nodes}", expected, *shares))
    columns = ("canonical streams", "nodes", "estimate", "first epoch", "second epoch")
    print_table(f"bytes that a node fetches, of {num_shards} shards", columns, rows)


if __name__ == "__main__":
    main()
