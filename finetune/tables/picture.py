"""The tables as one PNG: our number large, the paper's and the gap below it."""

from collections.abc import Sequence
from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from finetune.tables.cells import Cell, Filled
from finetune.tables.words import NOT_RUN, gap, ours

INK, FAINT, RULE, BETTER, WORSE = "#1f2328", "#8b949e", "#d0d7de", "#1a7f37", "#b35900"
NAME_INCHES, CELL_INCHES, LINE_INCHES, HEAD_INCHES, GAP_INCHES = 3.9, 1.55, 0.46, 0.72, 0.35
CHARACTER_INCHES = 0.078
DPI, LONGEST = 150, 17


def draw(tables: Sequence[Filled]) -> bytes:
    """PNG."""
    names = [line.name for table in tables for line in table.lines]
    name_inches = max(NAME_INCHES, CHARACTER_INCHES * max(map(len, names)) + 0.3)
    width = name_inches + CELL_INCHES * max(len(table.columns) for table in tables) + 0.3
    height = sum(HEAD_INCHES + LINE_INCHES * len(table.lines) + GAP_INCHES for table in tables) + 0.45
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)  # downwards, in inches
    axes.axis("off")
    top = 0.15
    for table in tables:
        _table(axes, table, top=top, left=name_inches)
        top += HEAD_INCHES + LINE_INCHES * len(table.lines) + GAP_INCHES
    legend = "top-1 in per cent; below ours: the paper's, and the gap in points; ± over n seeds or folds; +N earlier runs left out"
    axes.text(0.15, height - 0.2, legend, size=8, color=FAINT, va="center")
    stream = BytesIO()
    FigureCanvasAgg(figure).print_png(stream)  # type: ignore[no-untyped-call]
    return stream.getvalue()


def _table(axes, table: Filled, *, top: float, left: float) -> None:  # type: ignore[no-untyped-def]
    axes.text(0.15, top + 0.2, table.title, size=12, weight="bold", color=INK, va="center")
    source = f"beside {table.source}" if table.source else "what the papers have no row or column for"
    axes.text(0.15, top + 0.45, source, size=8, color=FAINT, va="center")
    for number, column in enumerate(table.columns):
        axes.text(
            left + CELL_INCHES * (number + 0.5),
            top + 0.45,
            _short(column),
            size=9.5,
            weight="bold",
            color=INK,
            **_CENTRED,
        )
    right = left + CELL_INCHES * len(table.columns)
    for number, line in enumerate(table.lines):
        y = top + HEAD_INCHES + LINE_INCHES * number
        axes.plot((0.15, right), (y, y), color=RULE, linewidth=0.7)
        axes.text(0.15, y + LINE_INCHES / 2, line.name, size=9.5, color=INK, va="center")
        for place, cell in enumerate(line.cells):
            _cell(axes, cell, x=left + CELL_INCHES * (place + 0.5), y=y)


_CENTRED = {"ha": "center", "va": "center"}


def _short(column: str) -> str:
    """A dataset may have any name."""
    return column if len(column) <= LONGEST else column[: LONGEST - 3] + "..."


def _cell(axes, cell: Cell, *, x: float, y: float) -> None:  # type: ignore[no-untyped-def]
    run = cell.mean is not None
    words = ours(cell) if run else NOT_RUN
    size = 10.5 if run and len(words) < 8 else 9.0
    if cell.paper is None:
        axes.text(
            x,
            y + LINE_INCHES / 2,
            words if run else "-",
            size=size,
            color=INK if run else FAINT,
            **_CENTRED,
        )
        return
    axes.text(x, y + 0.15, words, size=size, color=INK if run else FAINT, **_CENTRED)
    if cell.gap is None:
        axes.text(x, y + 0.34, f"{cell.paper:.1f}", size=8, color=FAINT, **_CENTRED)
        return
    axes.text(x - 0.04, y + 0.34, f"{cell.paper:.1f}", size=8, color=FAINT, ha="right", va="center")
    axes.text(x + 0.04, y + 0.34, gap(cell), size=8, color=BETTER if cell.gap >= 0 else WORSE, ha="left", va="center")
