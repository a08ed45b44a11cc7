"""A frozen model as what makes a vector of a picture, with what it expects of the picture and the name of its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.manifest import Manifest
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.settings import AugmentSettings
from pretrain.card import ModelCard, weights_hash
from pretrain.folder import load_folder
from pretrain.models.build import pooled_features
from pretrain.models.image_model import ImageModel


@dataclass(frozen=True)
class Backbone:
    extract: Callable[[Tensor], Tensor]
    """Normalised (B, 3, H, W) to (B, features)."""
    image_size: int
    normalisation: Normalisation
    weights_sha256: str
    """Of model.safetensors; `pixels` where there is no model."""
    card: ModelCard | None = None
    model: ImageModel | None = None

    def augmentation(
        self, settings: AugmentSettings | None = None, *, seed: int = 0, device: torch.device
    ) -> Augmentation:
        return Augmentation(
            settings or AugmentSettings(),
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
    """Of a run or checkpoint; of the pixels themselves, normalised as the dataset says, for None."""
    if pretrained is None:
        normalisation = Normalisation(manifest.channel_mean, manifest.channel_std)
        return Backbone(pixels, image_size or manifest.image_size, normalisation, "pixels")
    card, model = load_folder(Path(pretrained))
    if image_size not in (None, card.image_size):
        raise ValueError(f"image_size: {image_size}, but {pretrained} was trained at {card.image_size}; leave it out")
    model.to(device).eval()
    return Backbone(
        lambda images: pooled_features(model, images),
        card.image_size,
        Normalisation(card.channel_mean, card.channel_std),
        weights_hash(Path(pretrained)),
        card,
        model,
    )
