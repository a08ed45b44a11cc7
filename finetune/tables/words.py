"""The tables as Markdown and on the console. Pure: the same cells, the same words."""

from collections.abc import Sequence

from rich.table import Table as ConsoleTable

from finetune.tables.cells import Cell, Filled

NOT_RUN = "not run"
NOTES = (
    "A cell is ours / the paper's / the gap in points, top-1 in per cent. Ours is the mean over the runs of the recipe "
    "that was run last, with the sample deviation and their number n where they differ in seeds or folds; +N counts the "
    "finished runs that are left out: of earlier recipes, or of a seed or fold that was run again.",
    "DA: any of crop, flip, auto-augment, erasing and mixing is on; of a linear probe, augmented views. TTA: an "
    "evaluation with augmented views of a tuned checkpoint. Only finished runs count. A row of a paper takes runs of its "
    "model alone, from scratch or straight from weights pretrained on ImageNet-21k, judged on the split that everybody's "
    "numbers are of (test of CIFAR and STL-10, val of TinyImageNet and ImageNet); from scratch its number of epochs as "
    "well, where one is named. Runs on single folds stand by themselves: the papers' numbers are of whole splits.",
)


def markdown(tables: Sequence[Filled]) -> str:
    parts = ["# Transfer, beside the published numbers"]
    for table in tables:
        source = f" ({table.source})" if table.source else ""
        parts += [f"## {table.title}{source}", _rows(table)]
    return "\n\n".join([*parts, *NOTES]) + "\n"


def _rows(table: Filled) -> str:
    header, rule = ["", *table.columns], ["---", *("---:" for _ in table.columns)]
    rows = [[line.name, *(words_of(cell, table) for cell in line.cells)] for line in table.lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (header, rule, *rows)
    )


def words_of(cell: Cell, table: Filled) -> str:
    if not table.source:
        return ours(cell) if cell.mean is not None else "-"
    paper = "-" if cell.paper is None else f"{cell.paper:.1f}"
    return f"{ours(cell)} / {paper}" + (f" / {gap(cell)}" if cell.gap is not None else "")


def ours(cell: Cell) -> str:
    if cell.mean is None:
        return NOT_RUN
    spread = f" ± {cell.std:.1f} (n={cell.num_repetitions})" if cell.std is not None else ""
    return f"{cell.mean:.1f}{spread}" + (f" +{cell.num_left_out}" if cell.num_left_out else "")


def gap(cell: Cell) -> str:
    return "" if cell.gap is None else f"{cell.gap:+.1f}"


def console_table(table: Filled) -> ConsoleTable:
    title = table.title + (f"  ({table.source}; ours / paper / gap)" if table.source else "")
    shown = ConsoleTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    shown.add_column("")
    for column in table.columns:
        shown.add_column(column, justify="right")
    for line in table.lines:
        shown.add_row(line.name, *(words_of(cell, table) for cell in line.cells))
    return shown
