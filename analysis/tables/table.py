"""The cells of the papers' tables, filled from the results table.

Only finished runs are used. Repetitions are runs of one recipe that differ only in seeds and folds.
A cell uses runs of the table's plan if there are any, because other plans train the same models
with other batches or data. A cell shows the newest recipe: mean and sample SD over the newest run
of each repetition. It also shows the number of other runs. No run is selected by its accuracy.
"""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.results import last_of_each_run
from analysis.run_rows import model_words
from analysis.tables.published import COLUMNS, JUDGED_ON, REAL, Row, Table
from finetune.runs import NOT_STATED

PRETRAINED_ON = "imagenet21k"
METHODS = {
    "scratch": "from scratch",
    "tune": "fine-tune",
    "probe": "linear probe",
    "knn": "k-NN",
    "tta": "fine-tune, TTA",
}
OURS = "Ours"


def cells_of(tables: Sequence[Table], results: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each cell of the papers' tables, and of our table, which has all other
    runs.

    Columns: table, source, decimals, row, column, is_cited, paper, paper_std, mean, std,
    num_repetitions, num_left_out, gap (accuracies in percent).
    """
    entries = entries_of(results)
    is_used = pd.Series(False, index=entries.index)
    cells = list[dict[str, Any]]()
    for table in tables:
        about = {"table": table.title, "source": table.source, "decimals": table.decimals}
        for row in table.rows:
            for number, column in enumerate(table.columns):
                is_meant = _is_meant(entries, row, column)
                is_used |= is_meant
                cell = {"row": row.name, "column": COLUMNS[column], "is_cited": row.method is None}
                cell["paper"] = row.top1[number] if number < len(row.top1) else None
                cell["paper_std"] = row.stds[number] if number < len(row.stds) else None
                cells.append(about | cell | _statistics(entries[is_meant], table.plan))
    others = entries[~is_used]
    about = {"table": OURS, "source": "", "decimals": 1, "is_cited": False}
    columns = sorted({*others.column}, key=lambda name: ([*COLUMNS, name].index(name), name))
    for name in sorted({*others.name}, key=_by_numbers):
        for column in columns:
            own = others[(others.name == name) & (others.column == column)]
            cell = about | {"row": name, "column": COLUMNS.get(column, column)}
            cells.append(cell | _statistics(own, ""))
    frame = pd.DataFrame(cells)
    numbers = ["paper", "paper_std", "mean", "std"]
    frame[numbers] = frame[numbers].astype(float)
    return frame.assign(gap=frame["mean"] - frame.paper)


def _by_numbers(name: str) -> list[str]:
    """Sort B-6 before B-12."""
    return [part.zfill(9) for part in re.split(r"(\d+)", name)]


def entries_of(results: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each accuracy, with the names of its column and row in the table."""
    data = last_of_each_run(results)
    data = data[data.method.notna() & data.error.notna()]
    words = ["benchmark", "target", "model", "length", "start", "split", "fold"]
    data = data.astype(dict.fromkeys(words, object))
    is_known = data.benchmark.isin([*COLUMNS, PRETRAINED_ON])
    is_augmented = data.own_augmented.where(data.own_augmented.notna(), data.augmented)
    neighbors = data.neighbors.map(", k = {:.0f}".format).where(data.neighbors.notna(), "")
    data = data.assign(
        column=data.benchmark.where(is_known, data.target),
        model=data.model.fillna("?") + neighbors,
        is_augmented=is_augmented.eq(True),
        length=data.length.fillna(""),
        start=data.start.fillna(""),
        top1=100 * (1 - data.error.astype(float)),
    )
    real = data[data.error_real.notna()]
    real = real.assign(column=real.column + REAL, top1=100 * (1 - real.error_real.astype(float)))
    entries = pd.concat([data, real]).sort_values(["began_ms", "run"]).reset_index(drop=True)
    return entries.assign(name=[_row_name(each) for each in entries.itertuples()])


def _row_name(entry: Any) -> str:
    augmented = "" if entry.method == "knn" else " + DA" if entry.is_augmented else ", no DA"
    length = f", {entry.length}" if entry.method == "scratch" and "epoch" in entry.length else ""
    folds = ", per fold" if pd.notna(entry.fold) else ""
    start = f", of {entry.start}" if entry.start else ""
    usual = (NOT_STATED, JUDGED_ON.get(entry.column, "val"))
    split = "" if entry.split in usual else f", on {entry.split}"
    return f"{METHODS[entry.method]} {entry.model}{augmented}{length}{folds}{start}{split}"


def _is_meant(entries: pd.DataFrame, row: Row, column: str) -> "pd.Series[bool]":
    if row.model is None or row.method is None:
        return pd.Series(False, index=entries.index)
    starts = [f"{PRETRAINED_ON} for 400 epochs" + " without DA" * (not row.is_augmented)]
    if row.is_augmented:
        starts.append(f"published {PRETRAINED_ON} weights (400 epochs)")
    if row.public_epochs:
        starts = [f"published {PRETRAINED_ON} weights ({row.public_epochs} epochs)"]
    return (
        (entries.method == row.method)
        & (entries.model == model_words(row.model))
        & (entries.column == column)
        & (entries.split == JUDGED_ON[column])
        & entries.fold.isna()
        & ((row.method != "scratch") | (entries.is_augmented == row.is_augmented))
        & entries.start.isin([""] if row.method == "scratch" else starts)
        & (not row.length or entries.length == row.length)
    )


def _statistics(entries: pd.DataFrame, plan: str) -> dict[str, Any]:
    """Return the numbers of a cell. `entries` are sorted by time."""
    if entries.empty:
        return {"mean": None, "std": None, "num_repetitions": 0, "num_left_out": 0}
    own = entries[entries.plan == plan]
    last = (own if len(own) else entries).recipe.iloc[-1]
    chosen = entries[entries.recipe == last].drop_duplicates("repetition", keep="last")
    return {
        "mean": chosen.top1.mean(),
        "std": chosen.top1.std(),
        "num_repetitions": len(chosen),
        "num_left_out": len(entries) - len(chosen),
    }
