"""`pretrain preview`: a sheet of the pictures that the model is fed, after all augmentation, with the labels that go with them.

They are those of the run itself: the same order, crops and mixtures, from the beginning of any epoch. Only the normalisation is
undone, which no eye could do.
"""

from pathlib import Path

import torch
from PIL import Image

from data_prep.settings import UserError
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.config import PretrainSettings
from pretrain.data.datasets import TrainingData
from pretrain.data.loader import training_batches
from pretrain.data.order import BatchPlan
from pretrain.data.reader import reading
from pretrain.tracking.pictures import fed_sheet


def preview(settings: PretrainSettings, data: TrainingData, *, count: int, epoch: int, num_threads: int) -> Image.Image:
    """The first `count` pictures of an epoch."""
    if count < 2 or count % 2:
        raise UserError(f"count: {count}; choose an even number, because MixUp takes pictures in pairs")
    batch_size, seed, normalisation = settings.train.global_batch_size, settings.train.seed, Normalisation(*data.channel_statistics)
    augmentation = Augmentation(
        settings.augment,
        seed=seed,
        image_size=data.image_size,
        normalisation=normalisation,
        device=torch.device("cpu"),
        dtype=torch.float32,
        pixels=settings.data,
    )
    start = epoch * data.epoch_size(global_batch_size=batch_size)
    with (
        reading(data.parts, settings.data, image_size=data.image_size) as reader,
        training_batches(
            reader,
            data.order(seed=seed, global_batch_size=batch_size),
            BatchPlan(count, count, 1),
            rank=0,
            consumed=start + start % 2,  # pairs begin at even positions
            num_threads=num_threads,
            prefetch=1,
            pin=False,
            finish=augmentation.prepare,
            previous_in=batch_size if settings.augment.mixes_previous else None,
        ) as batches,
    ):
        try:
            fed = next(batches)
        finally:
            reader.end_waits()  # before the batches, whose end would last as long as a download
    facts = f"epoch {epoch}  ·  {data.image_size} px  ·  {settings.augment.recipe}"
    title = f"{data.name}, as {Path(settings.run_dir).name} sees it"
    return fed_sheet(fed, normalisation=normalisation, classes=data.classes, title=title, facts=facts)
