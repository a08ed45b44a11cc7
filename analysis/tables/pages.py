"""The papers' tables with our numbers: as Markdown, on the console, and as a figure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from analysis.output import Result
from analysis.tables.published import TABLES
from analysis.tables.table import cells_of
from data_prep.images.lettering import legible, short
from finetune.looks import looks

NOTES = (
    (
        "A cell has our top-1 in percent / the paper's number / the gap in percentage points. For"
        " several seeds or folds, our number is their mean, with the sample deviation and the"
        " number n. +N counts other finished runs: other recipes, or earlier runs of a seed. ReaL"
        " labels need a dataset built with source.real."
    ),
    (
        "DA: crop, flip, auto-augment, erasing or mixing is on; for a linear probe, augmented"
        " views. TTA: a tuned checkpoint with augmented views. A paper's row has runs of its"
        " model on the official split. Runs from scratch have its length. Other runs start from"
        " weights of 400 epochs on ImageNet-21k (public checkpoints: as the row says) with the same"
        " augmentation. Runs on single folds have their own rows."
    ),
)
COLORS = {"ours": "#1f2328", "not run": "#8b949e", "better": "#1a7f37", "worse": "#b35900"}
LINE_INCHES, NAME_INCHES, CELL_INCHES, CHARACTER_INCHES, LONGEST = 0.46, 3.9, 1.55, 0.078, 17


class Page(NamedTuple):
    title: str
    source: str
    cells: pd.DataFrame
    """Text of each cell; the index has the names of the rows."""
    kinds: pd.DataFrame
    """Color of each cell, as a key of `COLORS`."""

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.source})" if self.source else self.title

    @property
    def lines(self) -> list[list[str]]:
        rows = zip(self.cells.index, self.cells.to_numpy().tolist(), strict=True)
        return [["", *self.cells.columns], *([name, *cells] for name, cells in rows)]


def pages_of(cells: pd.DataFrame, *, between: str = " / ") -> Iterator[Page]:
    words = [_words(cell, between) for cell in cells.itertuples()]
    kinds = [_kind(cell) for cell in cells.itertuples()]
    shown = cells.assign(words=words, kinds=kinds)
    for (title, source), own in shown.groupby(["table", "source"], sort=False):
        wide = own.set_index(["row", "column"])[["words", "kinds"]].unstack(sort=False)
        yield Page(title, source, wide.words, wide.kinds)


def _words(cell: Any, between: str) -> str:
    digits, has_paper, is_run = cell.decimals, pd.notna(cell.paper), pd.notna(cell.mean)
    ours = "cited" if cell.is_cited else "not run"
    if is_run:
        spread = f" ± {cell.std:.{digits}f} (n={cell.num_repetitions})" * pd.notna(cell.std)
        ours = f"{cell.mean:.{digits}f}{spread}" + f" +{cell.num_left_out}" * bool(
            cell.num_left_out
        )
    if not has_paper:
        return "-" if not is_run and (not cell.source or cell.is_cited) else ours
    spread = f" ± {cell.paper_std:g}" * pd.notna(cell.paper_std)
    gap = f" / {cell.gap:+.{digits}f}" * is_run
    return f"{ours}{between}{cell.paper:.{digits}f}{spread}{gap}"


def _kind(cell: Any) -> str:
    if pd.isna(cell.mean):
        return "not run"
    return "ours" if pd.isna(cell.gap) else "better" if cell.gap >= 0 else "worse"


def markdown(cells: pd.DataFrame) -> str:
    parts = ["# Our runs and the published numbers"]
    for page in pages_of(cells):
        header, *rows = page.lines
        lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
        text = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
        parts += [f"## {page.heading}", "\n".join(text)]
    return "\n\n".join([*parts, *NOTES]) + "\n"


def with_runs(cells: pd.DataFrame) -> pd.DataFrame:
    """Return our table and the papers' tables that have a run. If no table has a run, return all
    tables."""
    has_run = cells["mean"].notna().groupby(cells.table).transform("any")
    shown = cells[has_run] if has_run.any() else cells
    return shown.sort_values("source", key=lambda source: source != "", kind="stable")


def table(results: pd.DataFrame) -> Result:
    cells = cells_of(TABLES, results)
    shown, printed = with_runs(cells), list[str | pd.DataFrame]()
    if cells["mean"].notna().any():
        for page in pages_of(shown):
            printed += [page.heading, page.cells.rename_axis("").reset_index(), ""]
        printed += NOTES
    num_runs = results.run.nunique()
    printed.append(f"{num_runs:,} finished runs")
    facts, text = {"finished_runs": num_runs}, markdown(cells)
    return Result(cells, facts, {"": draw(shown)}, printed=printed, page=text)


def draw(cells: pd.DataFrame) -> Figure:
    """Draw our number above the paper's number and the gap. Green: not worse than the paper."""
    pages = list(pages_of(cells, between="\n"))
    name_inches = max(NAME_INCHES, CHARACTER_INCHES * cells.row.str.len().max() + 0.3)
    widths = [name_inches + CELL_INCHES * len(page.cells.columns) for page in pages]
    width = max(*widths, *(0.088 * len(page.heading) + 1 for page in pages))
    heights = [LINE_INCHES * len(page.lines) for page in pages]
    with looks(*cells.row.unique(), *cells.column.unique()):
        figure = Figure(figsize=(width, sum(heights) + 0.5 * len(pages)))
        panels = figure.subplots(len(pages), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, page, inches in zip(panels, pages, widths, strict=True):
            header, *rows = page.lines
            axes.set_title(f"{page.heading}, top-1 in %", fontsize=11)
            axes.set_axis_off()
            drawn = axes.table(
                [[legible(name), *words] for name, *words in rows],
                colLabels=[legible(short(name, length=LONGEST)) for name in header],
                colWidths=[name_inches / inches] + [CELL_INCHES / inches] * (len(header) - 1),
                cellLoc="center",
                edges="horizontal",
                bbox=(0, 0, inches / width, 1),
            )
            drawn.auto_set_font_size(False)
            for (row, column), cell in drawn.get_celld().items():
                cell.set_edgecolor("#d0d7de")
                if row and not column:
                    cell.set_text_props(ha="left")
                    cell.PAD = 0.02
                elif row:
                    cell.set_text_props(color=COLORS[page.kinds.iloc[row - 1, column - 1]])
    return figure
