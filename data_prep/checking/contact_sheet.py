"""`data_prep show`: a contact sheet, one picture of what the model would see, with the labels.

Which samples are drawn is a function of manifest, seed and count; they stand in the order of their classes. Every picture has the
model's size in pixels, enlarged by a whole number without smoothing, so that what is seen is what is there.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.checking.stored import Storage, tar_content
from data_prep.images import Rejection, decode, resize
from data_prep.manifest import DatasetError, Manifest, Shard, load_index, load_manifest
from data_prep.publish import write_atomic
from data_prep.settings import UserError

CELL = 112
"""Pixels that a picture is enlarged to at least, by a whole number."""
GAP, MARGIN, HEAD, LABEL = 14, 24, 62, 20
_PNG = b"\x89PNG\r\n\x1a\n"
INK, QUIET, PAPER = (28, 28, 30), (112, 112, 118), (255, 255, 255)


@dataclass(frozen=True)
class Cell:
    picture: Image.Image
    label: str


def contact_sheet(
    directory: Path,
    *,
    split: str = "train",
    shard: int | None = None,
    count: int = 64,
    seed: int = 0,
    storage: Storage | None = None,
) -> Image.Image:
    manifest = load_manifest(directory)
    shards = manifest.split(split, directory=directory).shards
    if count < 1:
        raise UserError(f"count: {count}; choose at least 1")
    if shard is not None and not 0 <= shard < len(shards):
        raise UserError(f"shard: {shard}, but {split} has the shards 0 to {len(shards) - 1}")
    chosen = shards if shard is None else (shards[shard],)
    cells = _cells(directory, manifest, chosen, count=count, seed=seed, storage=storage or {})
    if not cells:
        raise UserError(f"{directory}: {split} has no samples to show")
    where = f"{split}, {len(shards)} shard{'s' * (len(shards) > 1)}" if shard is None else shards[shard].name
    num_samples = sum(part.num_samples for part in chosen)
    facts = f"{where}  ·  {len(cells):,} of {num_samples:,} samples  ·  {manifest.image_size} px {manifest.encoding}"
    return draw_sheet(cells, title=manifest.name, facts=f"{facts}  ·  {len(manifest.classes):,} classes")


def check_out(path: Path) -> None:
    """Refuses what is no place for a sheet, before any work."""
    if path.suffix.lower() != ".png":
        raise UserError(f"out: {path} does not end in .png; name it {path.with_suffix('.png')}")
    try:
        with open(path, "rb") as file:
            is_png = file.read(len(_PNG)) == _PNG
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"out: {path} cannot be written ({error.strerror}); name another file") from None
    if not is_png:
        raise UserError(f"out: {path} exists and is no PNG; name another file, it is left as it is")


def save_sheet(sheet: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def _cells(
    directory: Path, manifest: Manifest, shards: tuple[Shard, ...], *, count: int, seed: int, storage: Storage
) -> list[Cell]:
    num_samples = sum(shard.num_samples for shard in shards)
    draws = np.random.Philox(np.random.SeedSequence(seed)).random_raw(num_samples)
    positions = np.sort(np.argsort(draws, kind="stable")[:count])
    found: list[tuple[int, Cell]] = []
    start = 0
    for shard in shards:
        low, high = np.searchsorted(positions, (start, start + shard.num_samples))
        if low < high:
            rows = load_index(directory, shard)[positions[low:high] - start].tolist()
            with tar_content(directory, shard, storage=storage) as content:
                for offset, length, label in rows:
                    picture = _seen(directory, manifest, shard, content[offset : offset + length])
                    name = manifest.classes[label] if 0 <= label < len(manifest.classes) else "no label"
                    found.append((label, Cell(picture, name)))
        start += shard.num_samples
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]


def _seen(directory: Path, manifest: Manifest, shard: Shard, data: bytes) -> Image.Image:
    try:
        picture, _ = decode(data)
    except Rejection as rejection:
        raise DatasetError(
            f"{shard.file}: a picture does not decode ({rejection}); run data_prep verify {directory}"
        ) from None
    return resize(picture, size=manifest.image_size, crop=manifest.crop)  # as pretrain.shards does


# ---- drawing -----------------------------------------------------------------------------------------------------


def draw_sheet(cells: list[Cell], *, title: str, facts: str) -> Image.Image:
    size = cells[0].picture.width
    side = size * max(1, -(-CELL // size))
    columns = min(len(cells), max(4, min(10, round(len(cells) ** 0.5 * 1.2))))
    rows = -(-len(cells) // columns)
    head_font, font = ImageFont.load_default(22), ImageFont.load_default(13)
    width = 2 * MARGIN + columns * side + (columns - 1) * GAP
    width = max(width, 2 * MARGIN + int(max(head_font.getlength(title), font.getlength(facts))) + 1)
    height = MARGIN + HEAD + rows * (side + LABEL) + (rows - 1) * GAP + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, INK, head_font)
    pen.text((MARGIN, MARGIN + 32), facts, QUIET, font)
    for number, cell in enumerate(cells):
        left = MARGIN + number % columns * (side + GAP)
        top = MARGIN + HEAD + number // columns * (side + LABEL + GAP)
        sheet.paste(cell.picture.resize((side, side), Image.Resampling.NEAREST), (left, top))
        pen.text((left, top + side + 3), shortened(cell.label, font, width=side), INK, font)
    return sheet


def shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, *, width: float) -> str:
    """The text as far as it fits; the middle goes first, because class names differ at both ends."""
    if font.getlength(text) <= width:
        return text
    for length in range(len(text) - 1, 1, -1):
        head = -(-length // 2)
        short = f"{text[:head].rstrip()}…{text[len(text) - (length - head) :].lstrip()}"
        if font.getlength(short) <= width:
            return short
    return "…"
