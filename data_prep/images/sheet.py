"""A sheet of labeled images, each enlarged by an integer factor without smoothing."""

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from data_prep.errors import UserError
from data_prep.images.lettering import Letters, families, short
from data_prep.publish import write_atomic

CELL = 112
"""Smallest side of an enlarged image, in pixels."""
GAP, MARGIN, HEAD, LABEL, LINE = 14, 24, 62, 20, 16
_PNG = b"\x89PNG\r\n\x1a\n"
INK, QUIET, PAPER = (28, 28, 30), (112, 112, 118), (255, 255, 255)


@dataclass(frozen=True)
class LabeledPicture:
    picture: Image.Image
    label: str
    """Text under the image, one line or more."""


def check_out(path: Path) -> None:
    """Raise UserError if a sheet cannot be written to `path`."""
    if path.suffix.lower() != ".png":
        fix = f"name it {path.with_suffix('.png')}"
        raise UserError("out", f"{path} does not end in .png", fix, code="bad-value")
    try:
        with open(path, "rb") as file:
            is_png = file.read(len(_PNG)) == _PNG
    except FileNotFoundError:
        return
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise UserError("out", problem, "choose another file", code="unreadable") from None
    if not is_png:
        raise UserError(
            "out", f"{path} exists and is not a PNG", "choose another file", code="exists"
        )


def save_sheet(sheet: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def draw_sheet(cells: list[LabeledPicture], *, title: str, facts: str) -> Image.Image:
    size = cells[0].picture.width
    side = size * max(1, -(-CELL // size))
    columns = min(len(cells), max(4, min(10, round(len(cells) ** 0.5 * 1.2))))
    rows = -(-len(cells) // columns)
    families([title, facts, *(cell.label for cell in cells)])  # searches fonts once for all letters
    head, body = Letters(22), Letters(13)
    label_height = LABEL + LINE * max(cell.label.count("\n") for cell in cells)
    width = 2 * MARGIN + columns * side + (columns - 1) * GAP
    width = max(width, 2 * MARGIN + int(max(head.getlength(title), body.getlength(facts))) + 1)
    height = MARGIN + HEAD + rows * (side + label_height) + (rows - 1) * GAP + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    head.draw(sheet, (MARGIN, MARGIN), title, INK)
    body.draw(sheet, (MARGIN, MARGIN + 32), facts, QUIET)
    for number, cell in enumerate(cells):
        left = MARGIN + number % columns * (side + GAP)
        top = MARGIN + HEAD + number // columns * (side + label_height + GAP)
        sheet.paste(cell.picture.resize((side, side), Image.Resampling.NEAREST), (left, top))
        for line, text in enumerate(cell.label.split("\n")):
            body.draw(
                sheet, (left, top + side + 3 + LINE * line), shortened(text, body, width=side), INK
            )
    return sheet


def shortened(text: str, font: Letters, *, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    cut = (short(text, length=length) for length in range(len(text), 2, -1))
    return next((each for each in cut if font.getlength(each) <= width), "…")
