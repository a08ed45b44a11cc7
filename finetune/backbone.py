"""A frozen model as what makes a vector of a picture, with what it expects of the picture and the name of its weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_prep.manifest import Filter, Manifest
from data_prep.settings import UserError
from finetune.recording import Weights
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.checkpoints.files import load_model
from pretrain.config import AugmentSettings
from pretrain.models.build import pooled_features
from pretrain.models.image_model import ImageModel
from pretrain.ranks.collectives import same_on_all_ranks


@dataclass(frozen=True)
class Backbone:
    extract: Callable[[Tensor], Tensor]
    """Normalised (B, 3, H, W) to (B, features)."""
    image_size: int
    normalisation: Normalisation
    weights: Weights | None = None
    model: ImageModel | None = None
    """None, both, where there is no model."""
    interpolation: Filter = "bilinear"
    """With which pictures of another size are fed, unless settings name another."""

    @property
    def weights_sha256(self) -> str:
        return self.weights.sha256 if self.weights else "pixels"

    def augmentation(
        self, settings: AugmentSettings | None = None, *, seed: int = 0, device: torch.device
    ) -> Augmentation:
        return Augmentation(
            (settings or AugmentSettings()).fed_as(self.interpolation),
            seed=seed,
            image_size=self.image_size,
            normalisation=self.normalisation,
            device=device,
            dtype=torch.float32,
        )


def pixels(images_BCHW: Tensor) -> Tensor:
    """The features of a model that has none: the normalised picture itself."""
    return images_BCHW.flatten(1)


def open_backbone(
    pretrained: str | None, manifest: Manifest, *, image_size: int | None, device: torch.device
) -> Backbone:
    """Of a run or checkpoint, the same on all ranks; of the pixels themselves, normalised as the dataset says, for None."""
    if pretrained is None:
        normalisation = Normalisation(manifest.channel_mean, manifest.channel_std)
        return Backbone(pixels, image_size or manifest.image_size, normalisation)
    weights = Weights.at(pretrained)
    if not same_on_all_ranks(int(weights.sha256[:15], 16), device=device):
        raise UserError(
            f"{pretrained}: the ranks found different weights there (is it still being trained?); "
            "name one of its checkpoints/step-*"
        )
    card, model = weights.card, load_model(weights.opened)
    if image_size not in (None, card.image_size):
        raise ValueError(f"image_size: {image_size}, but {pretrained} was trained at {card.image_size}; leave it out")
    model.to(device).eval()
    return Backbone(
        lambda images: pooled_features(model, images),
        card.image_size,
        Normalisation(card.channel_mean, card.channel_std),
        weights,
        model,
        card.fed_interpolation,
    )
