"""`data_prep preview`: a contact sheet of images as the model sees them, with labels.

The same manifest, options and seed give the same samples, sorted by class.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.check.stored import each_picture
from data_prep.errors import UserError
from data_prep.images import decode, resize
from data_prep.images.sheet import LabeledPicture, draw_sheet
from data_prep.manifest import load_index, load_manifest
from data_prep.remote import Storage


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
    if shard is not None and not 0 <= shard < len(shards):
        problem, fix = f"{split} has no shard {shard}", f"choose 0 to {len(shards) - 1}"
        raise UserError("shard", problem, fix, code="bad-value")
    chosen = shards if shard is None else (shards[shard],)
    num_samples = sum(part.num_samples for part in chosen)
    draws = np.random.Philox(np.random.SeedSequence(seed)).random_raw(num_samples)
    positions = np.sort(np.argsort(draws, kind="stable")[:count])
    found: list[tuple[int, LabeledPicture]] = []
    start = 0
    for part in chosen:
        rows = positions[(positions >= start) & (positions < start + part.num_samples)] - start
        start += part.num_samples
        if len(rows):
            labels = load_index(directory, part)[rows, 2].tolist()
            pictures = each_picture(decode, directory, part, storage=storage or {}, rows=rows)
            for label, (whole, _) in zip(labels, pictures, strict=True):
                # crop and resize as in training
                picture = resize(
                    whole,
                    size=manifest.image_size,
                    crop=manifest.crop,
                    interpolation=manifest.interpolation,
                )
                name = manifest.classes[label] if 0 <= label < len(manifest.classes) else "no label"
                found.append((label, LabeledPicture(picture, name)))
    if not found:
        fix = "choose another split"
        raise UserError(str(directory), f"{split} has no samples", fix, code="empty")
    cells = [cell for _, cell in sorted(found, key=lambda pair: pair[0])]
    where = (
        f"{split}, {len(shards)} shard{'s' * (len(shards) > 1)}"
        if shard is None
        else shards[shard].name
    )
    facts = (
        f"{where}  ·  {len(cells):,} of {num_samples:,} samples  ·  {manifest.image_size} px"
        f" {manifest.encoding}"
    )
    return draw_sheet(
        cells, title=manifest.name, facts=f"{facts}  ·  {len(manifest.classes):,} classes"
    )
