"""How fast do shards become batches? Against other loaders, against a plain copy in memory, against
libjpeg-turbo's decode alone.

    .venv/bin/python benchmarks/loader.py [--quick | --dry-run] [--only
    raw,recipe,jpeg,start,memory] .venv/bin/python benchmarks/loader.py --decoders        which JPEG
    decoder, threads or processes (loader_decoders.py)

Everything is shuffled, delivered as torch tensors, warm in the page cache, on all cores. Nobody
hashes what it reads: data.check is off here, and what it costs a training while it lasts is a row
of benchmarks/train.py. Every contestant is a process of its own (loader_ours.py, loader_peers.py)
and is asked in turn for whole passes; what its design starts anew for a pass is in the clock.
  raw     64 px, uint8 batches of 1,024; the limit copies random rows of the same bytes in memory into one buffer
  recipe  the same pictures: random resized crop (0.4 to 1), flip, MixUp 0.8, normalised, as float32
  batches of 1,024 on the CPU jpeg    224 px, 4:2:0, quality 90, to uint8 batches of 256; the limit
  decodes the same bytes in memory, a process per core start   a fresh process, imports done: the
  first batch, and the first batch after a resume in the middle of an epoch memory  private memory
  (RssAnon) of a process with our reader, over one epoch
What a GPU is fed is measured by benchmarks/gpu.py.
Loaders that do thousands and not hundreds of thousands a second take part in `raw` with fewer of
the pictures; so does everybody in `recipe`. The pictures (loader_data.py) are photographs made by
code. A peer that cannot be installed, or fails, has no row.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from frame import HERE, add_sizes, commit, machine, peer_python, ratio, report, sized
from loader_data import CORES, dataset, in_format_of
from rich.console import Console
from rich.table import Table
from serving import PeerFailed, Server, Task

PARTS = ("raw", "recipe", "jpeg", "start", "memory")


@dataclass(frozen=True)
class Row:
    """A line of a table: which process, and which of its contestants."""

    server: str
    contestant: str


OURS = Row("ours", "ours")
PEERS = {
    "FFCV": Row("ffcv", "ffcv"),
    "MosaicML streaming": Row("mosaic", "mosaic"),
    "litdata": Row("litdata", "litdata"),
    "webdataset": Row("webdataset", "webdataset"),
    "ImageFolder": Row("folder", "folder"),
}
COPY, DECODER, FFCV_TORCH = "random copy", "libjpeg-turbo alone", "FFCV, mixed by torch"
ROWS: dict[str, dict[str, Row]] = {
    "raw": {"ours": OURS, **PEERS, COPY: Row("limits", "random copy")},
    "recipe": {"ours": OURS, FFCV_TORCH: Row("ffcv", "ffcv+torch"), **PEERS},
    "jpeg": {"ours": OURS, **PEERS, DECODER: Row("limits", "libjpeg-turbo")},
}
PACKAGE_OF = {"mosaic": "mosaicml-streaming", "folder": "torchvision"}
"""The package of a process, if its name is another one."""
FAST = ("ours", "FFCV", COPY)
CAN_RESUME = ("ours", "MosaicML streaming", "litdata")


class Field:
    """All contestants with their processes, started when they are first needed."""

    def __init__(self, python: Path, able: set[str], logs: Path):
        self.python, self.able, self.logs = python, able, logs
        self.servers: dict[str, Server] = {}

    def server(self, name: str, *, fresh: bool = False) -> Server:
        if fresh:
            return self._start(name)
        if name not in self.servers:
            self.servers[name] = self._start(name)
        return self.servers[name]

    @contextmanager
    def without_peers_that_fail(self, server: str) -> Iterator[None]:
        """Our own process and the limits must not fail. A peer loses its rows, in this table and in
        later ones."""
        try:
            yield
        except PeerFailed as failure:
            if server in ("ours", "limits"):
                raise
            self.able.discard(server)
            print(f"{server}: no row, since it failed: {failure.reason}", flush=True)

    def rows(self, kind: str) -> dict[str, Row]:
        return {name: row for name, row in ROWS[kind].items() if row.server in self.able}

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        self.servers.clear()

    def _start(self, name: str) -> Server:
        ours = name in ("ours", "limits")
        command = [sys.executable, str(HERE / "loader_ours.py")]
        return Server(
            command if ours else [str(self.python), str(HERE / "loader_peers.py"), name],
            log=self.logs / f"{name}.log",
        )


def installed() -> tuple[Path, set[str]]:
    """The peers' interpreter, and the processes that can run."""
    python, missing = peer_python()
    servers = {row.server for rows in ROWS.values() for row in rows.values()}
    return python, {server for server in servers if PACKAGE_OF.get(server, server) not in missing}


def tasks(options: argparse.Namespace) -> dict[str, Task]:
    """Batches alike for everybody; `few` is the part of the raw pictures that the slow loaders
    take."""
    num_raw, num_jpeg = (1024, 256) if options.dry_run else (40_960, 8_192)
    batch, jpeg_batch = (64, 32) if options.dry_run else (1024, 256)
    num_few = min(num_raw, sized(options, full=4, quick=2, dry=1) * 1024 * CORES)
    shards, files = dataset("raw", num_samples=num_raw, image_size=64)
    raw = Task("raw", str(shards), str(shards.parent), str(files), num_raw, 64, batch, CORES)
    shards, files = dataset("jpeg", num_samples=num_jpeg, image_size=224)
    num_jpeg = min(num_jpeg, sized(options, full=num_jpeg, quick=1024 * CORES, dry=num_jpeg))
    jpeg = Task(
        "jpeg", str(shards), str(shards.parent), str(files), num_jpeg, 224, jpeg_batch, CORES
    )
    few = replace(raw, num_samples=num_few)
    return {"raw": raw, "raw, few": few, "recipe": replace(few, kind="recipe"), "jpeg": jpeg}


def write_formats(field: Field, found: dict[str, Task]) -> None:
    for peer in sorted(field.able & {"ffcv", "mosaic", "litdata"}):
        for name, task in found.items():
            if peer in field.able and (name != "raw" or peer == "ffcv"):
                with field.without_peers_that_fail(peer):
                    in_format_of(peer, task, field.python)


def measure(
    field: Field, found: dict[str, Task], kind: str, *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Images per second of every contestant, one measurement per round; before that a pass that is
    checked and not counted."""
    rows = field.rows(kind)
    task_of = {
        name: found["raw, few"] if kind == "raw" and name not in FAST else found[kind]
        for name in rows
    }
    totals: dict[str, set[float]] = {}
    for row in rows.values():
        field.server(row.server)  # so that they import side by side
    for name, row in rows.items():
        if row.server in field.able:
            with field.without_peers_that_fail(row.server):
                checked = field.server(row.server).ask(row.contestant, task_of[name], "check")
                if checked["count"] != task_of[name].num_samples:
                    raise PeerFailed(
                        f"it delivered {checked['count']:,} of {task_of[name].num_samples:,} images"
                    )
                totals.setdefault(f"{checked['count']} {checked['form']}", set()).add(
                    checked["total"]
                )
    if kind == "raw":
        assert all(len(values) == 1 for values in totals.values()), (
            f"not everybody delivered the same pixels: {totals}"
        )
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, row in rows.items():
            if row.server in field.able:
                with field.without_peers_that_fail(row.server):
                    answer = field.server(row.server).ask(
                        row.contestant, task_of[name], "run", seconds=seconds
                    )
                    rates[name].append(answer["count"] / answer["seconds"])
    return {name: values for name, values in rates.items() if rows[name].server in field.able}


def show(kind: str, task: Task, rates: dict[str, list[float]]) -> None:
    """One table with its claim."""
    rounds = len(rates["ours"])
    limit = {"raw": COPY, "jpeg": DECODER}.get(kind)
    peers = [name for name in rates if name not in ("ours", limit)]
    fastest = max(peers, key=lambda name: statistics.median(rates[name]))
    headline = f"ours: {ratio(rates, 'ours', fastest):.2f} x the fastest peer ({fastest})"
    if "FFCV" in peers:
        headline += f", {ratio(rates, 'ours', 'FFCV'):.2f} x FFCV"
    if limit:
        headline += f", {ratio(rates, 'ours', limit):.1%} of {limit}"
    title = (
        f"{kind}: {task.image_size} px, batches of {task.batch_size:,}, {CORES} cores, {rounds}"
        " rounds, no data.check"
    )
    report(title, rates, unit="images/s", against=limit or "ours", headline=headline)
    print(", ".join(f"{ratio(rates, 'ours', name):.2f} x {name}" for name in peers), flush=True)


def start(field: Field, task: Task, few: Task, *, rounds: int) -> None:
    """Fresh processes; the median over the rounds."""
    rows = field.rows("raw")
    rows.pop(COPY)
    table = Table(
        title="start: 64 px, batches of 1,024, from a fresh process", title_justify="left", box=None
    )
    for column in (
        "",
        "imports s",
        "first batch s",
        "resumed in mid-epoch s",
        "the same batch as without",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        job = task if name in FAST else few
        imports, first, resumed, same = [], [], [], "cannot resume"
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "state.json")
            if name in CAN_RESUME:
                server = field.server(row.server, fresh=True)
                expected = server.ask(row.contestant, job, "save", path=path)["batch"]
                server.close()
            for _ in range(rounds):
                server = field.server(row.server, fresh=True)
                imports.append(server.ready())
                first.append(server.ask(row.contestant, job, "first")["seconds"])
                server.close()
                if name in CAN_RESUME:
                    server = field.server(row.server, fresh=True)
                    answer = server.ask(row.contestant, job, "first", state=path)
                    server.close()
                    resumed.append(answer["seconds"])
                    same = "yes" if answer["batch"] == expected else "no"
        medians = [
            f"{statistics.median(values):.2f}" if values else ""
            for values in (imports, first, resumed)
        ]
        table.add_row(name, *medians, same)
    Console(width=120).print(table)
    print(
        "FFCV compiles its pipeline (numba) in every process; imports are of the whole process,"
        " torch included",
        flush=True,
    )


def memory(field: Field, found: dict[str, Task]) -> None:
    """Of our reader: one epoch in a fresh process, each kind of work."""
    table = Table(
        title="memory: private MB of our process over one epoch", title_justify="left", box=None
    )
    for column in ("", "before it opens", "after 10 %", "after 50 %", "at the end"):
        table.add_column(column, justify="left" if not column else "right")
    for kind in ("raw", "recipe", "jpeg"):
        server = field.server("ours", fresh=True)
        sizes = server.ask("ours", found["raw" if kind == "raw" else kind], "memory")["bytes"]
        server.close()
        places = [0, *(-(-len(sizes[1:]) * tenths // 10) for tenths in (1, 5, 10))]
        table.add_row(kind, *(f"{sizes[place] / 1e6:,.0f}" for place in places))
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument(
        "--decoders", action="store_true", help="the table of JPEG decoders instead"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.decoders:
        words = ["--dry-run"] if options.dry_run else ["--quick"] if options.quick else []
        sys.exit(
            subprocess.run(
                [sys.executable, str(HERE / "loader_decoders.py"), *words], check=False
            ).returncode
        )
    os.environ.update({"LITDATA_DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"})
    python, able = installed()
    parts, rounds = options.only.split(","), sized(options, full=5, quick=2, dry=1)
    seconds = sized(options, full=1.0, quick=0.5, dry=0.01)
    found = tasks(options)
    with tempfile.TemporaryDirectory() as logs:
        field = Field(python, able, Path(logs))
        write_formats(field, found)
        for kind in ("raw", "recipe", "jpeg"):
            if kind in parts:
                show(kind, found[kind], measure(field, found, kind, rounds=rounds, seconds=seconds))
        field.close()
        if "start" in parts:
            start(
                field,
                found["raw"],
                found["raw, few"],
                rounds=sized(options, full=3, quick=1, dry=1),
            )
        if "memory" in parts:
            memory(field, found)
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
