"""`data_prep show`: a contact sheet, one picture of what the model would see, with the labels.

Which samples are drawn is a function of manifest, seed and count; they stand in the order of their classes.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.check.stored import Storage, each_picture
from data_prep.images import decode, resize
from data_prep.images.sheet import LabelledPicture, draw_sheet
from data_prep.manifest import Manifest, Shard, load_index, load_manifest
from data_prep.settings import UserError


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
        raise UserError(f"shard: {shard}, but {split} has the shards 0 to {len(shards) - 1}")
    chosen = shards if shard is None else (shards[shard],)
    cells = _cells(directory, manifest, chosen, count=count, seed=seed, storage=storage or {})
    if not cells:
        raise UserError(f"{directory}: {split} has no samples to show")
    where = f"{split}, {len(shards)} shard{'s' * (len(shards) > 1)}" if shard is None else shards[shard].name
    num_samples = sum(part.num_samples for part in chosen)
    facts = f"{where}  ·  {len(cells):,} of {num_samples:,} samples  ·  {manifest.image_size} px {manifest.encoding}"
    return draw_sheet(cells, title=manifest.name, facts=f"{facts}  ·  {len(manifest.classes):,} classes")


def _cells(
    directory: Path, manifest: Manifest, shards: tuple[Shard, ...], *, count: int, seed: int, storage: Storage
) -> list[LabelledPicture]:
    num_samples = sum(shard.num_samples for shard in shards)
    draws = np.random.Philox(np.random.SeedSequence(seed)).random_raw(num_samples)
    positions = np.sort(np.argsort(draws, kind="stable")[:count])
    found: list[tuple[int, LabelledPicture]] = []
    start = 0
    for shard in shards:
        low, high = np.searchsorted(positions, (start, start + shard.num_samples))
        if low < high:
            rows = positions[low:high] - start
            labels = load_index(directory, shard)[rows, 2].tolist()
            pictures = each_picture(decode, directory, shard, storage=storage, rows=rows)
            for label, (whole, _) in zip(labels, pictures, strict=True):
                # as training does
                picture = resize(whole, size=manifest.image_size, crop=manifest.crop, interpolation=manifest.interpolation)
                name = manifest.classes[label] if 0 <= label < len(manifest.classes) else "no label"
                found.append((label, LabelledPicture(picture, name)))
        start += shard.num_samples
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]
