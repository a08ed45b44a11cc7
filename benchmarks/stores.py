"""Does a loader keep up with a store? Ours over http, beside local shards, the link itself, and the
peers over the same link.

    .venv/bin/python benchmarks/stores.py [--quick | --dry-run]

It takes minutes. The first call makes the pictures and installs the peers.

The server (stores_link.py, a process of its own on this machine) answers each request after 20 ms
and passes 100 MB/s in total; its CPU share stands in each row, as it has to share the cores with
who reads. What is read is the data of loader.py's `raw`: 64 px, uint8 batches of 1,024. Each
measurement is one pass of a fresh process, imports done, caches empty and bounded to less than the
dataset (with --quick: not to less). MosaicML shuffles over 16,384 samples, the others over 4,096.
  paced    each batch is followed by the pause in which half the link could bring the next; rates count from the first batch on
  unpaced  as fast as batches come; the clock runs from nothing: index, first shards, all of it. "of
  the link": what of 100 MB/s the
           delivered pictures make up, in the bytes of the format that they came in; "moved": bytes
           on the link for each byte of it
A store's object is addressed as s3://BUCKET/NAME by MosaicML streaming and litdata, by URL by
webdataset (curl) and by us.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from threading import Timer
from typing import Any
from urllib.request import urlopen

from frame import HERE, arguments, commit, machine, peer_python, ratio, sized
from loader_data import CORES, dataset, in_format_of
from rich.console import Console
from rich.table import Table
from serving import PeerFailed, Server, Task
from stores_link import BYTES_PER_S, LATENCY_S

PEERS = {
    "webdataset, http": "webdataset",
    "MosaicML streaming, s3": "mosaic",
    "litdata, s3": "litdata",
}
OURS, LOCAL, PLAIN = "ours, http", "ours, local", "four plain readers"
PATIENCE_S = 240.0
"""With one pass; a peer that has not ended it by then hangs."""
CACHE_GB, BLOCKS, BATCH_SIZE, SIZE = 0.62, (512, 8), 1024, 64
"""Of the cache: the loader asks for 32,768 samples ahead, and these must find room."""


@dataclass(frozen=True)
class Pass:
    answer: dict[str, Any]
    moved: dict[str, float]
    """What the server counted meanwhile."""

    @property
    def rate(self) -> float:
        return float(self.answer["count"] / self.answer["seconds"])

    @property
    def steady_rate(self) -> float:
        return float(
            (self.answer["count"] - BATCH_SIZE) / (self.answer["seconds"] - self.answer["first_s"])
        )

    @property
    def server_cpu(self) -> float:
        """Of one core."""
        return self.moved["cpu_s"] / float(self.answer["seconds"])


class Bench:
    def __init__(self, task: Task, address: str, python: Path, logs: Path):
        self.task, self.address, self.python, self.logs = task, address, python, logs

    def once(self, name: str, *, step_s: float = 0.0) -> Pass:
        """In a process of its own, with nothing in its cache."""
        ours = {OURS: "store", LOCAL: "local", PLAIN: "plain"}
        contestant = ours.get(name) or PEERS[name]
        command = [sys.executable, str(HERE / "stores_ours.py")]
        if name not in ours:
            command = [str(self.python), str(HERE / "stores_peers.py"), contestant]
        with tempfile.TemporaryDirectory() as cache:
            os.environ["STORES_CACHE"] = cache
            server = Server(command, log=self.logs / f"{contestant}.log")
            server.ready()
            before = self._counts()
            patience = Timer(
                PATIENCE_S, os.killpg, (server.process.pid, SIGKILL)
            )  # a group of its own
            patience.start()
            try:
                answer = server.ask(contestant, self.task, "cold", step_s=step_s)
                after = self._counts()
            finally:
                patience.cancel()
                server.close()
        if (
            answer["count"] < self.task.num_samples - BATCH_SIZE
        ):  # some drop what does not fill a batch
            raise PeerFailed(
                f"it delivered {answer['count']:,} of {self.task.num_samples:,} images"
            )
        return Pass(answer, {key: after[key] - before[key] for key in after})

    def _counts(self) -> dict[str, float]:
        with urlopen(f"{self.address}/.counts") as answer:
            return dict(json.load(answer))


@contextmanager
def link(root: Path) -> Iterator[str]:
    """The address of a server of this directory."""
    command = [sys.executable, str(HERE / "stores_link.py"), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def size_of(name: str, task: Task) -> int:
    """Bytes of the dataset in the format that a contestant reads."""
    peer = PEERS.get(name, "")
    if peer in ("mosaic", "litdata"):
        files = (Path(task.peers) / f"{peer}-{task.num_samples}").rglob("*.*")
    else:
        files = Path(task.shards).glob("train-*.tar")
    return sum(path.stat().st_size for path in files if path.is_file())


def show(title: str, task: Task, found: dict[str, list[Pass]], *, paced: bool) -> None:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for column in (
        "",
        "images/s",
        "of the link",
        "moved",
        "requests",
        "first batch s",
        "server CPU",
    ):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, passes in found.items():
        rates = [each.steady_rate if paced else each.rate for each in passes]
        num_bytes = size_of(name, task)
        share = statistics.median(rates) * num_bytes / task.num_samples / BYTES_PER_S
        middle = sorted(passes, key=lambda each: each.rate)[len(passes) // 2]
        moved, first_s = (
            f"{middle.moved['bytes'] / num_bytes:.2f}",
            f"{middle.answer['first_s']:.2f}",
        )
        requests = f"{middle.moved['requests']:,.0f}"
        first_s = "" if name == PLAIN else first_s
        row = (
            f"{statistics.median(rates):,.0f}",
            f"{share:.1%}",
            moved,
            requests,
            first_s,
            f"{middle.server_cpu:.0%}",
        )
        table.add_row(name, *row)
    Console(width=120).print(table)


def environment(task: Task, address: str) -> dict[str, str]:
    return {
        "STORES_URL": f"{address}/bench/shards",
        "STORES_LOCAL": task.shards,
        "STORES_BUCKET": "bench",
        "STORES_CACHE_GB": str(CACHE_GB),
        "STORES_BLOCKS": json.dumps(BLOCKS),
        "S3_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "LITDATA_DISABLE_VERSION_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def task_of(num_pictures: int) -> Task:
    shards, files = dataset("raw", num_samples=num_pictures, image_size=SIZE)
    manifest = json.loads((shards / "manifest.json").read_text())
    num_samples = sum(shard["num_samples"] for shard in manifest["splits"]["train"]["shards"])
    return Task(
        "raw", str(shards), str(shards.parent), str(files), num_samples, SIZE, BATCH_SIZE, CORES
    )


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    task = task_of(sized(options, full=49_152, quick=8_192, dry=2_048))
    python, _ = peer_python()
    for peer in ("mosaic", "litdata"):
        with suppress(PeerFailed):  # its pass fails below, too, and says so
            in_format_of(peer, task, python)
    step_s = size_of(OURS, task) / task.num_samples * task.batch_size / (BYTES_PER_S / 2)
    with tempfile.TemporaryDirectory() as logs, link(Path(task.peers)) as address:
        os.environ.update(environment(task, address))
        bench = Bench(task, address, python, Path(logs))
        paced: dict[str, list[Pass]] = {LOCAL: [], OURS: []}
        unpaced: dict[str, list[Pass]] = {name: [] for name in (PLAIN, OURS, *PEERS)}
        rounds = sized(options, full=3, quick=1, dry=1)
        for _ in range(rounds):
            for name, passes in paced.items():
                passes.append(bench.once(name, step_s=step_s))
            for name in list(unpaced):
                try:
                    unpaced[name].append(bench.once(name))
                except PeerFailed as failure:
                    if name not in PEERS:
                        raise
                    print(f"{name}: no row, since it failed: {failure.reason}", flush=True)
                    del unpaced[name]
    words = (
        f"{task.num_samples:,} pictures of {SIZE} px, {LATENCY_S * 1e3:.0f} ms,"
        f" {BYTES_PER_S / 1e6:.0f} MB/s, rounds: {rounds}"
    )
    show(f"paced at half the link: {words}", task, paced, paced=True)
    show(f"unpaced: {words}", task, unpaced, paced=False)
    steady = {name: [each.steady_rate for each in passes] for name, passes in paced.items()}
    rates = {name: [each.rate for each in passes] for name, passes in unpaced.items()}
    print(
        f"ours over http: {ratio(steady, OURS, LOCAL):.1%} of the local pace; unpaced"
        f" {ratio(rates, OURS, PLAIN):.1%} of {PLAIN}"
    )
    print(
        ", ".join(f"{ratio(rates, OURS, name):.2f} x {name}" for name in unpaced if name in PEERS)
        + ", in images/s"
    )
    print(f"{machine()}, commit {commit()}, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
