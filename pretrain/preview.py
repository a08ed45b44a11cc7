"""`pretrain preview`: a sheet of the pictures that the model is fed, after all augmentation, with the labels that go with them.

They are those of the run itself: the same order, crops and mixtures, from the beginning of any epoch. Only the normalisation is
undone, which no eye could do.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data_prep.images.sheet import Cell, draw_sheet
from data_prep.settings import UserError
from pretrain.assembly import open_cache
from pretrain.augment.augmentation import Augmentation, Normalisation, Prepared
from pretrain.augment.settings import AugmentSettings
from pretrain.config import PretrainSettings
from pretrain.datasets import TrainingData
from pretrain.loader import training_batches
from pretrain.order import BatchPlan
from pretrain.shards import ShardReader


def preview(settings: PretrainSettings, data: TrainingData, *, count: int, epoch: int, num_threads: int) -> Image.Image:
    """The first `count` pictures of an epoch."""
    if count < 2 or count % 2:
        raise UserError(f"count: {count}; choose an even number, because MixUp takes pictures in pairs")
    normalisation = Normalisation(*data.channel_statistics)
    prepared = _fed(settings, data, normalisation, count=count, epoch=epoch, num_threads=num_threads)
    pictures, labels = _pictures(prepared, normalisation), _labels(prepared, data.classes)
    cells = [Cell(picture, label) for picture, label in zip(pictures, labels, strict=True)]
    facts = f"epoch {epoch}  ·  {data.image_size} px  ·  {recipe(settings.augment)}"
    return draw_sheet(cells, title=f"{data.name}, as {Path(settings.run_dir).name} sees it", facts=facts)


def recipe(augment: AugmentSettings) -> str:
    """What differs from no augmentation at all, in the words of the config."""
    plain = AugmentSettings(flip_probability=0).model_dump()
    changed = {name: value for name, value in augment.model_dump().items() if value != plain[name]}
    shown = [f"{name} {list(value) if isinstance(value, tuple) else value}" for name, value in changed.items()]
    return ", ".join(shown) or "no augmentation"


def _fed(
    settings: PretrainSettings,
    data: TrainingData,
    normalisation: Normalisation,
    *,
    count: int,
    epoch: int,
    num_threads: int,
) -> Prepared:
    batch_size, seed = settings.train.global_batch_size, settings.train.seed
    cache = open_cache(data)
    augmentation = Augmentation(
        settings.augment,
        seed=seed,
        image_size=data.image_size,
        normalisation=normalisation,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    start = epoch * data.epoch_size(global_batch_size=batch_size)
    with training_batches(
        ShardReader(data.parts, image_size=data.image_size, cache=cache),
        data.order(seed=seed, global_batch_size=batch_size),
        BatchPlan(count, count, 1),
        rank=0,
        consumed=start + start % 2,  # pairs begin at even positions
        num_threads=num_threads,
        prefetch=1,
        pin=False,
        finish=augmentation.prepare,
    ) as batches:
        try:
            return next(batches)
        finally:
            if cache is not None:
                cache.close()  # before the batches, whose end would last as long as a download


def _pictures(prepared: Prepared, normalisation: Normalisation) -> list[Image.Image]:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalisation)
    levels = ((prepared.images_BCHW.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).numpy())) for picture in levels]


def _labels(prepared: Prepared, names: tuple[str, ...]) -> list[str]:
    own = [names[label] for label in prepared.labels_B.tolist()]
    if prepared.other_labels_B is None or prepared.weight_B is None:
        return own
    others = [names[label] for label in prepared.other_labels_B.tolist()]
    return [
        f"{weight:.0%} {mine}\n{1 - weight:.0%} {other}"
        for mine, other, weight in zip(own, others, prepared.weight_B.tolist(), strict=True)
    ]
