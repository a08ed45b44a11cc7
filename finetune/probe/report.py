"""What a probe says of its grid: a table on the console, and a picture of held-out accuracy over learning rate and weight decay."""

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

from data_prep.images.sheet import INK, MARGIN, PAPER, QUIET
from finetune.probe.grid import Judged
from finetune.probe.heads import Cell

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP = 96, 52, 110, 78
_LOW, _HIGH = (247, 251, 255), (8, 81, 156)


def by_cell(judged: list[Judged], epochs: int) -> dict[tuple[float, float], Judged]:
    return {(each.cell.weight_decay, each.cell.lr): each for each in judged if each.cell.epochs == epochs}


def shown(each: Judged) -> str:
    return "diverged" if each.has_diverged else f"{each.score.top1:.1%}"


def print_grid(judged: list[Judged], best: Cell, console: Console) -> None:
    """A table for each number of epochs: a row for each weight decay, a column for each learning rate."""
    for epochs in sorted({each.cell.epochs for each in judged}):
        found = by_cell(judged, epochs)
        lrs = sorted({lr for _, lr in found})
        title = f"held-out top-1, {epochs} epochs" if len(lrs) > 1 else f"held-out top-1, at most {epochs} epochs"
        console.print(title)
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("decay \\ lr", justify="right")
        for lr in lrs:
            table.add_column(f"{lr:g}", justify="right", no_wrap=True)
        for decay in sorted({decay for decay, _ in found}):
            row = [found[decay, lr] for lr in lrs]
            words = [f"[bold green]{shown(each)}[/]" if each.cell == best else shown(each) for each in row]
            table.add_row(f"{decay:g}", *words)
        console.print(table)


def draw_grid(judged: list[Judged], best: Cell, *, facts: str) -> Image.Image:
    """Of the cells that are as long as the best: darker is better, the best has a frame."""
    found = by_cell(judged, best.epochs)
    decays, lrs = sorted({decay for decay, _ in found}), sorted({lr for _, lr in found})
    font, head_font = ImageFont.load_default(13), ImageFont.load_default(20)
    title = "held-out top-1"
    grid_width = _LEFT + len(lrs) * _CELL_WIDTH
    text_width = int(max(head_font.getlength(title), font.getlength(facts)))
    height = 2 * MARGIN + _TOP + len(decays) * _CELL_HEIGHT + 48
    sheet = Image.new("RGB", (2 * MARGIN + max(grid_width, text_width), height), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, INK, head_font)
    pen.text((MARGIN, MARGIN + 28), facts, QUIET, font)
    scores = [each.score.top1 for each in found.values() if not each.has_diverged]
    low, high = min(scores), max(scores)
    for row, decay in enumerate(decays):
        top = MARGIN + _TOP + row * _CELL_HEIGHT
        pen.text((MARGIN + _LEFT - 10, top + _CELL_HEIGHT / 2), f"{decay:g}", INK, font, anchor="rm")
        for column, lr in enumerate(lrs):
            left = MARGIN + _LEFT + column * _CELL_WIDTH
            _draw_cell(pen, left, top, found[decay, lr], low=low, high=high, font=font)
    left, bottom = MARGIN + _LEFT, MARGIN + _TOP + len(decays) * _CELL_HEIGHT
    for column, lr in enumerate(lrs):
        pen.text((left + (column + 0.5) * _CELL_WIDTH, bottom + 8), f"{lr:g}", INK, font, anchor="ma")
    pen.text((left + len(lrs) * _CELL_WIDTH / 2, bottom + 28), "learning rate", QUIET, font, anchor="ma")
    pen.text((MARGIN, MARGIN + _TOP - 8), "weight decay", QUIET, font, anchor="ls")
    column, row = lrs.index(best.lr), decays.index(best.weight_decay)
    left, top = left + column * _CELL_WIDTH, MARGIN + _TOP + row * _CELL_HEIGHT
    pen.rectangle((left, top, left + _CELL_WIDTH - 3, top + _CELL_HEIGHT - 3), outline=(204, 85, 0), width=3)
    return sheet


def _draw_cell(
    pen: ImageDraw.ImageDraw,
    left: int,
    top: int,
    each: Judged,
    *,
    low: float,
    high: float,
    font: ImageFont.FreeTypeFont,
) -> None:
    share = 0.0 if each.has_diverged or high == low else (each.score.top1 - low) / (high - low)
    colour = tuple(round(a + share * (b - a)) for a, b in zip(_LOW, _HIGH, strict=True))
    pen.rectangle((left, top, left + _CELL_WIDTH - 3, top + _CELL_HEIGHT - 3), fill=colour)
    centre = (left + _CELL_WIDTH / 2 - 1, top + _CELL_HEIGHT / 2 - 1)
    pen.text(centre, shown(each), PAPER if share > 0.5 else INK, font, anchor="mm")
