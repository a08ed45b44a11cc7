"""Which runs belong into which cell of a paper's table, and what the cell then says. Pure: runs in, numbers out.

A cell holds the recipe that was run last (see entries.py): the mean over its repetitions, each at its last run, with the sample
deviation. Where the numbers come from several recipes, the earlier ones are left out, and the cell says how many: nothing is chosen
by its result.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.tables.entries import PRETRAINED_ON, Entry, entries_of
from finetune.tables.published import COLUMNS, JUDGED_ON, Row, Table
from pretrain.tracking.stored_run import StoredRun

USUAL_SPLIT = "val"
"""Of a dataset that the papers do not have."""


@dataclass(frozen=True)
class Cell:
    """In per cent."""

    paper: float | None = None
    mean: float | None = None
    std: float | None = None
    """Sample deviation over the repetitions; None with one."""
    num_repetitions: int = 0
    num_left_out: int = 0
    """Finished runs of other recipes, or of a repetition that was run again."""

    @property
    def gap(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Line:
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Filled:
    """A table with our numbers."""

    title: str
    source: str
    """"" of the table that has none."""
    columns: tuple[str, ...]
    lines: tuple[Line, ...]


def fill(tables: Sequence[Table], runs: Sequence[StoredRun]) -> list[Filled]:
    """Each paper's table, and one more of what no paper has. `runs`: the oldest first."""
    entries = entries_of(runs)
    taken: set[int] = set()
    filled = []
    for table in tables:
        lines = []
        for row in table.rows:
            cells = []
            for column, paper in zip(table.columns, row.top1, strict=True):
                found = [number for number, entry in enumerate(entries) if belongs(entry, row, column)]
                taken.update(found)
                cells.append(cell_of([entries[number] for number in found], paper=paper))
            lines.append(Line(row.name, tuple(cells)))
        titles = tuple(COLUMNS[column] for column in table.columns)
        filled.append(Filled(table.title, table.source, titles, tuple(lines)))
    others = [entry for number, entry in enumerate(entries) if number not in taken]
    return [*filled, _ours(others)] if others else filled


def belongs(entry: Entry, row: Row, column: str) -> bool:
    return (
        entry.column == column
        and entry.split == JUDGED_ON[column]
        and not entry.is_fold
        and entry.method == row.method
        and entry.model == row.model
        and entry.augmented == row.augmented
        and row.epochs in (None, entry.epochs)
        and entry.is_public == row.public_checkpoint
        and entry.pretrained_on == ("" if row.method == "scratch" else PRETRAINED_ON)
    )


def cell_of(entries: Sequence[Entry], *, paper: float | None = None) -> Cell:
    if not entries:
        return Cell(paper)
    last = entries[-1].recipe
    found = {entry.repetition: entry.top1 * 100 for entry in entries if entry.recipe == last}  # the last of each
    values = list(found.values())
    std = statistics.stdev(values) if len(values) > 1 else None
    return Cell(paper, statistics.fmean(values), std, len(values), len(entries) - len(values))


# ---- what the papers have no place for ----------------------------------------------------------------------------------


def _ours(entries: Sequence[Entry]) -> Filled:
    met = {entry.column for entry in entries}
    columns = [*(name for name in COLUMNS if name in met), *sorted(met - COLUMNS.keys())]
    names = sorted({_name(entry) for entry in entries}, key=_numerically)
    lines = tuple(
        Line(
            name,
            tuple(
                cell_of([entry for entry in entries if _name(entry) == name and entry.column == column])
                for column in columns
            ),
        )
        for name in names
    )
    return Filled("Ours", "", tuple(COLUMNS.get(column, column) for column in columns), lines)


def _numerically(name: str) -> list[str]:
    """k = 20 before k = 100."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _name(entry: Entry) -> str:
    words = {
        "scratch": "from scratch",
        "tune": "fine-tune",
        "probe": "linear probe",
        "knn": "k-NN",
        "tta": "fine-tune, TTA",
    }
    augmented = "" if entry.method == "knn" else " + DA" if entry.augmented else ", no DA"
    length = f", {entry.epochs} epochs" if entry.method == "scratch" and entry.epochs else ""
    folds = ", per fold" if entry.is_fold else ""
    start = f", of {entry.pretrained_on}" if entry.pretrained_on and entry.model != "pixels" else ""
    is_usual = entry.split in ("", JUDGED_ON.get(entry.column, USUAL_SPLIT))
    judged = "" if is_usual else f", on {entry.split}"
    return f"{words[entry.method]} {entry.model}{augmented}{length}{folds}{start}{judged}"
