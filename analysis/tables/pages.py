"""The papers' tables with our numbers: as Markdown, on the console, and as a figure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from analysis.output import Result, table_of
from analysis.tables.published import TABLES
from analysis.tables.table import cells_of
from data_prep.images.lettering import legible
from finetune.looks import looks

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTES = (
    (
        "A cell is: ours / the paper's number / the gap in percentage points; all are top-1 in per"
        " cent. Ours is the mean over the runs of the last recipe, with the sample deviation and"
        " the number n of seeds or folds. +N counts finished runs that are left out: other"
        " recipes, or a seed that was run again. ReaL labels need source.real."
    ),
    (
        "DA: crop, flip, auto-augment, erasing or mixing is on; for a linear probe, augmented"
        " views. TTA: a tuned checkpoint with augmented views. A paper's row counts runs of its"
        " model on the official split, from scratch for its length, or from 400 epochs of"
        " ImageNet-21k (public checkpoint: 800) with the same augmentation. Runs on single folds"
        " have rows of their own."
    ),
)
COLORS = {"ours": "#1f2328", "not run": "#8b949e", "better": "#1a7f37", "worse": "#b35900"}
LINE_INCHES, NAME_INCHES, CELL_INCHES, CHARACTER_INCHES, LONGEST = 0.46, 3.9, 1.55, 0.078, 17


class Page(NamedTuple):
    title: str
    source: str
    header: list[str]
    rows: list[list[str]]
    kinds: list[list[str]]
    """Key of `COLORS` for each cell."""

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.source})" if self.source else self.title


def pages_of(cells: pd.DataFrame, *, between: str = " / ") -> Iterator[Page]:
    for (title, source), own in cells.groupby(["table", "source"], sort=False):
        text = [_words(cell, between) for cell in own.itertuples()]
        kinds = [_kind(cell) for cell in own.itertuples()]
        columns, rows = own.column.unique().tolist(), own.row.unique().tolist()
        width = len(columns)
        yield Page(
            title,
            source,
            ["", *columns],
            [[name, *text[i * width : (i + 1) * width]] for i, name in enumerate(rows)],
            [kinds[i * width : (i + 1) * width] for i in range(len(rows))],
        )


def _words(cell: "pd.Series", between: str) -> str:
    digits, has_paper, is_run = cell.decimals, pd.notna(cell.paper), pd.notna(cell.mean)
    ours = "cited" if cell.is_cited else "not run"
    if is_run:
        spread = ""
        if pd.notna(cell.std):
            spread = f" ± {cell.std:.{digits}f} (n={cell.num_repetitions})"
        left_out = f" +{cell.num_left_out}" if cell.num_left_out else ""
        ours = f"{cell.mean:.{digits}f}{spread}{left_out}"
    if not has_paper:
        return "-" if not is_run and (not cell.source or cell.is_cited) else ours
    spread = f" ± {cell.paper_std:.{digits}f}" if pd.notna(cell.paper_std) else ""
    gap = f" / {cell.gap:+.{digits}f}" if is_run else ""
    return f"{ours}{between}{cell.paper:.{digits}f}{spread}{gap}"


def _kind(cell: "pd.Series") -> str:
    if pd.isna(cell.mean):
        return "not run"
    return "ours" if pd.isna(cell.gap) else "better" if cell.gap >= 0 else "worse"


def markdown(cells: pd.DataFrame) -> str:
    parts = ["# Our runs and the published numbers"]
    for page in pages_of(cells):
        lines = [page.header, ["---", *("---:" for _ in page.header[1:])], *page.rows]
        rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
        parts += [f"## {page.heading}", "\n".join(rows)]
    return "\n\n".join([*parts, *NOTES]) + "\n"


def with_runs(cells: pd.DataFrame) -> pd.DataFrame:
    """Return our own table and the papers' tables that have a run; all tables if there is no
    run."""
    has_run = cells["mean"].notna().groupby(cells.table).transform("any")
    shown = cells[has_run] if has_run.any() else cells
    return shown.sort_values("source", key=lambda source: source != "", kind="stable")


def table(results: pd.DataFrame) -> Result:
    cells = cells_of(TABLES, results)
    shown = with_runs(cells)
    printed: list[RenderableType] = []
    if cells["mean"].notna().any():
        for page in pages_of(shown):
            printed += [page.heading, table_of(page.header, page.rows), ""]
        printed += NOTES
    num_runs = results.run.nunique()
    printed.append(f"{num_runs:,} finished runs")
    return Result(
        cells, {"finished_runs": num_runs}, {"": draw(shown)}, (), printed, markdown(cells)
    )


def draw(cells: pd.DataFrame) -> Figure:
    """Draw our number above the paper's number and the gap; green if ours is not worse."""
    pages = list(pages_of(cells, between="\n"))
    names = [row[0] for page in pages for row in page.rows]
    name_inches = max(NAME_INCHES, CHARACTER_INCHES * max(map(len, names)) + 0.3)
    widths = [name_inches + CELL_INCHES * (len(page.header) - 1) for page in pages]
    width = max(*widths, *(0.088 * len(page.heading) + 1 for page in pages))
    heights = [LINE_INCHES * (len(page.rows) + 1) for page in pages]
    with looks(*names, *(column for page in pages for column in page.header)):
        figure = Figure(figsize=(width, sum(heights) + 0.5 * len(pages)))
        panels = figure.subplots(len(pages), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, page, inches in zip(panels, pages, widths, strict=True):
            axes.set_title(f"{page.heading}, top-1 in %", fontsize=11)
            axes.set_axis_off()
            drawn = axes.table(
                [[legible(name), *cells] for name, *cells in page.rows],
                colLabels=[legible(_shortened(column)) for column in page.header],
                colWidths=[name_inches / inches] + [CELL_INCHES / inches] * (len(page.header) - 1),
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
                    cell.set_text_props(color=COLORS[page.kinds[row - 1][column - 1]])
    return figure


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
