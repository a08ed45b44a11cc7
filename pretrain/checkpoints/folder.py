"""Weights that one can pass on: a directory with model.safetensors, config.json (our card and timm's words) and their hashes.

It is a checkpoint without what only a resume needs: probe, tune, evaluate and analysis take it as they take a run, and timm as
`local-dir:DIRECTORY`; uploaded as it is, as `hf-hub:OWNER/NAME`.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_prep.publish import atomic_directory, sha256_of, write_json
from pretrain.checkpoints.card import CONFIG, HASHES, MODEL, ModelCard, config_of
from pretrain.checkpoints.checkpoint import load_weights
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.weights import check_finite, check_fit, load_strictly, needed_shapes, shapes


def save_folder(directory: Path, *, card: ModelCard, weights: Mapping[str, Tensor]) -> None:
    """`weights`: a state_dict of the card's model; the directory appears whole, in place of one that was there."""
    with torch.device("meta"):
        model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    given = shapes(weights)
    check_fit(given, needed_shapes(model, given), source=directory, label=card.model.label)
    check_finite(weights, source=directory)
    with atomic_directory(directory) as temporary:
        write_json(temporary / CONFIG, config_of(card))
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / MODEL)
        shutil.copymode(temporary / CONFIG, temporary / MODEL)  # safetensors writes for the owner alone
        write_json(temporary / HASHES, {name: sha256_of(temporary / name) for name in (MODEL, CONFIG)})


def load_folder(path: Path) -> tuple[ModelCard, ImageModel]:
    """The card and the model of a checkpoint directory, an imported folder, or of the newest whole checkpoint of a run."""
    card, weights = load_weights(path)
    model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    load_strictly(model, weights, source=path, label=card.model.label)
    return card, model
