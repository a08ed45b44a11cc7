"""The papers' tables with our numbers as Markdown, on the console, and as one picture: the same
cells, the same words."""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.table import Table as ConsoleTable
from rich.text import Text

from analysis.tables.table import Cell, Filled
from data_prep.images.lettering import legible
from finetune.looks import looks, save

NOT_RUN, CITED = "not run", "cited"
NOTES = (
    (
        "A cell is ours / the paper's / the gap in points, top-1 in per cent. Ours is the mean over"
        " the runs of the recipe that was run last (in a paper's table of those of its own plan, if"
        " that has any), with the sample deviation and their number n where they differ in seeds or"
        " folds; +N counts the finished runs that are left out: of other settings, such as another"
        " batch size (`analysis points` has each), or of a seed or fold that was run again. Where"
        " ours stands alone the paper prints no number, or we have not seen it. Understanding"
        " MLP-Mixer prints errors: here is what they leave of 100. ReaL accuracies need an ImageNet"
        " that was built with source.real."
    ),
    (
        "DA: any of crop, flip, auto-augment, erasing and mixing is on; of a linear probe,"
        " augmented views. TTA: an evaluation with augmented views of a tuned checkpoint. Only"
        " finished runs count. A row of a paper takes runs of its model alone, in all its settings,"
        " judged on the split that everybody's numbers are of (test of CIFAR and STL-10, val of"
        " TinyImageNet and ImageNet): from scratch for its number of epochs, where one is named, or"
        " straight from 400 epochs of ImageNet-21k (the public checkpoint: 800), which were"
        " augmented if what follows is. Runs on single folds stand by themselves: the papers'"
        " numbers are of whole splits."
    ),
)
COLOURS = {"ours": "#1f2328", "not run": "#8b949e", "better": "#1a7f37", "worse": "#b35900"}
LINE_INCHES, NAME_INCHES, CELL_INCHES, CHARACTER_INCHES, TITLE_INCHES, LONGEST = (
    0.46,
    3.9,
    1.55,
    0.078,
    0.088,
    17,
)


def rows_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def markdown(tables: Sequence[Filled]) -> str:
    parts = ["# Our runs, beside the published numbers"]
    for table in tables:
        source = f" ({table.source})" if table.source else ""
        parts += [f"## {table.title}{source}", rows_of(*in_words(table))]
    return "\n\n".join([*parts, *NOTES]) + "\n"


def console_table(table: Filled) -> Group:
    """Below its title, which may be wider."""
    has_numbers = any(cell.paper is not None for line in table.lines for cell in line.cells)
    title = table.title + (
        f"  ({table.source}{'; ours / paper / gap' if has_numbers else ''})" if table.source else ""
    )
    return Group(Text(title, style="table.title"), for_console(*in_words(table)))


def for_console(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    num_words: int = 1,
) -> ConsoleTable:
    """The first `num_words` columns to the left, numbers to the right."""
    shown = ConsoleTable(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for number, column in enumerate(header):
        shown.add_column(column, justify="left" if number < num_words else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def console_of(width: int = 120) -> Console:
    """The user's; a file or a pipe is so wide."""
    return Console(width=None if sys.stdout.isatty() else width)


def show(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int = 1) -> None:
    console_of().print(for_console(header, rows, num_words=num_words))


def in_words(table: Filled, *, between: str = " / ") -> tuple[list[str], list[list[str]]]:
    """(header, rows)"""
    rows = [
        [line.name, *(_words(cell, table, between=between) for cell in line.cells)]
        for line in table.lines
    ]
    return ["", *table.columns], rows


def _words(cell: Cell, table: Filled, *, between: str) -> str:
    digits = table.decimals
    ours = CITED if cell.is_cited else NOT_RUN
    if cell.mean is not None:
        spread = (
            f" ± {cell.std:.{digits}f} (n={cell.num_repetitions})" if cell.std is not None else ""
        )
        ours = f"{cell.mean:.{digits}f}{spread}" + (
            f" +{cell.num_left_out}" if cell.num_left_out else ""
        )
    if cell.paper is None:
        return "-" if cell.mean is None and (not table.source or cell.is_cited) else ours
    spread = "" if cell.paper_std is None else f" ± {cell.paper_std:.{digits}f}"
    gap = "" if cell.gap is None else f" / {cell.gap:+.{digits}f}"
    return f"{ours}{between}{cell.paper:.{digits}f}{spread}{gap}"


def with_runs(tables: Sequence[Filled]) -> list[Filled]:
    """The user's own rows first, then of the papers' tables those that have a run; all of them
    where there is no run."""
    met = [
        table
        for table in tables
        if any(cell.mean is not None for line in table.lines for cell in line.cells)
    ]
    return sorted(met or tables, key=lambda table: bool(table.source))


def draw(tables: Sequence[Filled], path: Path) -> None:
    """Our number above, the paper's and the gap below it; green where ours is not worse."""
    tables = with_runs(tables)
    names = [line.name for table in tables for line in table.lines]
    with looks(*names, *(column for table in tables for column in table.columns)):
        save(_drawn(tables, longest=max(map(len, names))), path)


def _drawn(tables: Sequence[Filled], *, longest: int) -> Figure:
    name_inches = max(NAME_INCHES, CHARACTER_INCHES * longest + 0.3)
    beside = [
        f"beside {table.source}" if table.source else "what the papers have no row or column for"
        for table in tables
    ]
    titles = [
        f"{table.title}, top-1 in %: {words}" for table, words in zip(tables, beside, strict=True)
    ]
    used = [name_inches + CELL_INCHES * len(table.columns) for table in tables]
    width = max(*used, *(TITLE_INCHES * len(title) for title in titles))
    heights = [LINE_INCHES * (len(table.lines) + 1) for table in tables]
    figure = Figure(figsize=(width, sum(heights) + 0.5 * len(tables)))
    panels = figure.subplots(len(tables), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, table, title, inches in zip(panels, tables, titles, used, strict=True):
        axes.set_title(title, fontsize=11)
        axes.set_axis_off()
        drawn = axes.table(
            [[legible(name), *cells] for name, *cells in in_words(table, between="\n")[1]],
            colLabels=[
                "",
                *(
                    legible(each if len(each) <= LONGEST else each[: LONGEST - 3] + "...")
                    for each in table.columns
                ),
            ],
            colWidths=[name_inches / inches, *[CELL_INCHES / inches] * len(table.columns)],
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
                ours = table.lines[row - 1].cells[column - 1]
                kind = (
                    "not run"
                    if ours.mean is None
                    else "ours"
                    if ours.gap is None
                    else "better"
                    if ours.gap >= 0
                    else "worse"
                )
                cell.set_text_props(color=COLOURS[kind])
    return figure
