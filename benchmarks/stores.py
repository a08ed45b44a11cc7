"""Throughput of our loader over http, compared with local shards, the bare link, and peers.

    .venv/bin/python benchmarks/stores.py [--quick | --dry-run]

The first call also makes the images and installs the peers.

The server (stores_link.py, a separate process on this machine) answers each request after 20 ms
and sends 100 MB/s in total. Rows show its CPU usage, because it shares the cores with the
readers. The data is `raw` of loader.py: 64 px, uint8 batches of 1,024. Each measurement is one pass
of a fresh process after its imports. Caches are empty, and smaller than the dataset except with
--quick. MosaicML shuffles over 16,384 samples, the others over about 4,096.
  paced    pauses, so that the demand is half of the link's throughput; the clock starts at the first batch
  unpaced  no pauses; the clock includes opening the index and the first shards

"of the link": bytes of delivered images (in the contestant's format) as a fraction of 100 MB/s.
"moved": bytes on the link per byte of the dataset.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from frame import DATA, HERE, arguments, peer_python, print_table, rates, ratio, ratios, sized
from images import CORES, folder_dataset
from loader import write_for
from serving import PeerError, Server, Task
from stores_link import BYTES_PER_S, LATENCY_S

LOCAL, OURS, PLAIN = "ours, local", "ours, http", "four readers"
OF_OURS = {LOCAL: "ours", OURS: "ours", PLAIN: PLAIN}
"""Contestants that ours.py serves, and their names in ours.py."""
PEERS = ("webdataset", "MosaicML streaming", "litdata")
BATCH_SIZE, SIZE = 1024, 64


class Pass:
    """Passes of one contestant."""

    def __init__(self, name: str, task: Task, *, pause_s: float = 0.0):
        self.name, self.task, self.pause_s = name, task, pause_s
        self.address = task.url.rpartition("/bench/")[0]
        ours = (sys.executable, HERE / "ours.py", OF_OURS.get(name, ""))
        self.command = ours if name in OF_OURS else (peer_python(), HERE / "peers.py", name)
        self.answers: list[dict[str, Any]] = []

    def __call__(self) -> tuple[float, float]:
        write_for(self.name, self.task)
        with tempfile.TemporaryDirectory() as cache, Server(*self.command) as server:
            server.ready()
            task = replace(self.task, cache=cache, url="" if self.name == LOCAL else self.task.url)
            before = self._counts()
            answer = server.ask("run", task, pause_s=self.pause_s)
            after = self._counts()
        if answer["count"] < task.num_samples - BATCH_SIZE:  # some peers drop an incomplete batch
            raise PeerError(f"read {answer['count']:,} of {task.num_samples:,} images")
        self.answers.append(answer | {key: after[key] - before[key] for key in after})
        if self.pause_s:
            return answer["count"] - BATCH_SIZE, answer["seconds"] - answer["first_s"]
        return answer["count"], answer["seconds"]

    def row(self, rate: float) -> tuple[str, ...]:
        num_bytes = self._num_bytes()
        fraction = rate * num_bytes / self.task.num_samples / BYTES_PER_S
        answer = sorted(self.answers, key=lambda each: each["seconds"])[len(self.answers) // 2]
        return (
            self.name,
            f"{rate:,.0f}",
            f"{fraction:.1%}",
            f"{answer['bytes'] / num_bytes:.2f}",
            f"{answer['requests']:,}",
            "" if self.name == PLAIN else f"{answer['first_s']:.2f}",
            f"{answer['cpu_s'] / answer['seconds']:.0%}",
        )

    def _counts(self) -> dict[str, float]:
        with urlopen(f"{self.address}/.counts") as answer:
            return dict(json.load(answer))

    def _num_bytes(self) -> int:
        """Return the size of the dataset in bytes in the contestant's format."""
        written = self.task.written_by(self.name)
        files = written.rglob("*.*") if written.exists() else Path(self.task.shards).glob("*.tar")
        return sum(path.stat().st_size for path in files if path.is_file())


@contextmanager
def link(root: Path) -> Iterator[str]:
    """Serve a directory over HTTP, and yield the URL."""
    command = [sys.executable, str(HERE / "stores_link.py"), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def measure(title: str, passes: dict[str, Pass], *, rounds: int) -> dict[str, list[float]]:
    found = rates(passes, rounds=rounds, warm_ups=0, peers=PEERS)
    columns = ("", "images/s", "of the link", "moved", "requests", "first batch s", "server CPU")
    rows = [passes[name].row(statistics.median(values)) for name, values in found.items()]
    print_table(title, columns, rows)
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    count = sized(options, full=49_152, quick=8_192, dry=2_048)
    rounds = sized(options, full=3, quick=1, dry=1)
    shards = folder_dataset(DATA / f"raw-{count}", count, size=SIZE)
    with link(DATA) as address:
        os.environ |= {
            "S3_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "LITDATA_DISABLE_VERSION_CHECK": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        url = f"{address}/bench/{shards.name}"
        task = Task("raw", f"{shards}-files", count, SIZE, BATCH_SIZE, CORES, str(shards), url)
        task = replace(task, shuffle="block")
        num_bytes = sum(path.stat().st_size for path in shards.glob("*.tar"))
        pause_s = num_bytes / count * BATCH_SIZE / (BYTES_PER_S / 2)
        words = (
            f"{count:,} images of {SIZE} px, {LATENCY_S * 1e3:.0f} ms, {BYTES_PER_S / 1e6:.0f} MB/s"
        )
        paced = {name: Pass(name, task, pause_s=pause_s) for name in (LOCAL, OURS)}
        steady = measure(f"paced at half the link: {words}", paced, rounds=rounds)
        unpaced = {name: Pass(name, task) for name in (PLAIN, OURS, *PEERS)}
        found = measure(f"unpaced: {words}", unpaced, rounds=rounds)
    print(
        f"ours over http: {ratio(steady, OURS, LOCAL):.1%} of the local pace; unpaced"
        f" {ratio(found, OURS, PLAIN):.1%} of {PLAIN}; {ratios(found, OURS, PEERS)}"
    )


if __name__ == "__main__":
    main()
