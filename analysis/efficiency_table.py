"""The efficiency table of `efficiency` on the console, as markdown, and as JSON; the paper's own figures stand beside ours."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.efficiency import IMAGE_SIZE, PRINTED, Conditions, Row
from analysis.table_pages import rows_of
from data_prep.publish import write_atomic, write_json
from data_prep.settings import UserError

COLUMNS = ("model", "params", "multiply-adds", "latency", "of first", "images/s", "of first")
PAPER_COLUMNS = ("paper: m.-adds", "latency", "images/s", "of first")
FORMATS = (".md", ".json")


def title(conditions: Conditions, machine: str) -> str:
    return f"One forward pass at {IMAGE_SIZE} px, {conditions.words}; {machine}"


def cells(row: Row, *, first: str) -> tuple[str, ...]:
    printed = PRINTED.get(row.name)
    ours = (
        printed.label if printed else row.name,
        f"{row.cost.num_parameters / 1e6:.2f} M",
        _giga(row.cost.multiply_adds / 1e9),
        f"{row.latency_ms:,.1f} ms",
        f"{row.times_the_latency:.3g} x",
        f"{row.images_per_s:,.0f}" if row.images_per_s >= 100 else f"{row.images_per_s:.3g}",
        f"{row.times_the_rate:.3g} x",
    )
    if printed is None:
        return (*ours, *[""] * len(PAPER_COLUMNS))
    share = f"{printed.images_per_s / PRINTED[first].images_per_s:.3g} x" if first in PRINTED else ""
    latency = f"{printed.latency_ms:g} ms" if printed.latency_ms else ""
    return (*ours, _giga(printed.giga_multiply_adds), latency, f"{printed.images_per_s:,}", share)


def _giga(value: float) -> str:
    return f"{value:.2f} G" if value >= 1 else f"{1000 * value:.1f} M"


def print_table(rows: list[Row], console: Console, *, heading: str) -> None:
    console.print(heading)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate((*COLUMNS, *PAPER_COLUMNS)):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, first=rows[0].name))
    console.print(table)
    console.print("paper: as printed, on an A5000.", style="dim")


def markdown(rows: list[Row], *, heading: str) -> str:
    shown = rows_of((*COLUMNS, *PAPER_COLUMNS), [cells(row, first=rows[0].name) for row in rows])
    return "\n".join([heading, "", shown, "", "paper: as printed, on an A5000.", ""])


def check_out(path: Path | None) -> None:
    """Before minutes are spent on what cannot be written."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise UserError(f"--out: {path} has no ending that is known; give one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UserError(f"--out: there is no folder {path.parent}; make it, or give another")


def write(path: Path, rows: list[Row], *, conditions: Conditions, machine: str) -> None:
    if path.suffix == ".md":
        write_atomic(path, markdown(rows, heading=title(conditions, machine)).encode())
        return
    found: dict[str, Any] = {"machine": machine, "conditions": asdict(conditions), "image_size": IMAGE_SIZE}
    found["models"] = [{**asdict(row), "paper": asdict(PRINTED[row.name]) if row.name in PRINTED else None} for row in rows]
    write_json(path, found)
