"""Draw a sheet of the model's input images after augmentation, with labels (`pretrain preview`).

The sheet shows the first images of any epoch of the run, without normalization.
"""

from contextlib import closing
from pathlib import Path

import torch
from PIL import Image

from data_prep.errors import UserError
from pretrain.augment.augmentation import Augmentation, Normalization, Prepared
from pretrain.config import PretrainSettings
from pretrain.data.datasets import TrainingData
from pretrain.data.loader import BatchSource
from pretrain.data.order import BatchPlan
from pretrain.data.reader import open_store
from pretrain.data.stream import batches_of, open_reader
from pretrain.ranks.world import World
from pretrain.tracking.pictures import fed_sheet


def preview(
    settings: PretrainSettings, data: TrainingData, *, count: int, epoch: int, num_threads: int
) -> Image.Image:
    if count < 2 or count % 2:
        raise UserError(
            "--count",
            f"{count} is not valid, because MixUp combines images in pairs",
            "choose an even number",
            code="bad-value",
        )
    batch_size, seed = settings.train.global_batch_size, settings.train.seed
    normalization = Normalization(*data.channel_statistics)
    augmentation = Augmentation(
        settings.augment,
        seed=seed,
        image_size=data.image_size,
        normalization=normalization,
        device=torch.device("cpu"),
        dtype=torch.float32,
        pixels=settings.data,
    )
    start = epoch * data.epoch_size(global_batch_size=batch_size)
    reader = open_reader(
        data, seed=seed, world=World(0, 0, 1), store=open_store(settings.data, data.parts)
    )
    with closing(reader):
        batches: BatchSource[Prepared] = batches_of(
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
        )
        try:
            fed = next(batches)
        finally:
            batches.end_waits()  # otherwise `close` may wait for a download
            batches.close()
    facts = f"epoch {epoch}  ·  {data.image_size} px  ·  {settings.augment.recipe}"
    title = f"{data.name}, as {Path(settings.run_dir).name} sees it"
    return fed_sheet(
        fed, normalization=normalization, classes=data.classes, title=title, facts=facts
    )
