"""`finetune evaluate`: exact scores of a checkpoint's classifier on a split, on any number of ranks."""

from pathlib import Path

import torch
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.accelerator import start_accelerator
from finetune.classes import class_numbers
from finetune.judging.config import EvaluateSettings
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.settings import AugmentSettings
from pretrain.datasets import Part
from pretrain.evaluate import Scores, evaluate
from pretrain.folder import load_folder
from pretrain.shards import ShardReader
from pretrain.world import World


def evaluate_checkpoint(settings: EvaluateSettings, world: World) -> Scores:
    accelerator = start_accelerator(world)
    manifest = load_manifest(settings.dataset)
    card, model = load_folder(Path(settings.pretrained))
    numbers = class_numbers(card, manifest, dataset=settings.dataset)
    model.to(accelerator.device).eval()
    augmentation = Augmentation(
        AugmentSettings(),
        seed=0,
        image_size=card.image_size,
        normalisation=Normalisation(card.channel_mean, card.channel_std),
        device=accelerator.device,
        dtype=torch.float32,
    )

    @torch.no_grad()
    def logits(images: Tensor) -> Tensor:
        result: Tensor = model(images)
        return result

    manifest.split(settings.split, directory=settings.dataset)
    part = Part(Path(settings.dataset), manifest, settings.split, numbers)
    reader = ShardReader([part], image_size=card.image_size)
    return evaluate(
        logits,
        reader,
        augmentation,
        local_batch_size=settings.local_batch_size,
        num_threads=world.num_cores,
        world=world,
    )
