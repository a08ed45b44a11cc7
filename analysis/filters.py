"""The first layer of a checkpoint as pictures: what each of its neurons looks at. The drawing is that of the run's own pictures."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_prep.images.sheet import save_sheet
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.tracking.pictures import FIRST_LAYER, draw_filters, filter_side, filters_of, strongest_filters


def first_layer(checkpoint: Path) -> NDArray[np.float32]:
    """(neurons, side, side): the weights of every first-layer neuron, maximum over the colours."""
    weight_NF, side = _weight(checkpoint)
    return filters_of(weight_NF, side=side)


def draw(checkpoint: Path, path: Path, *, columns: int = 5) -> None:
    """The `columns` x `columns` neurons with the largest weights."""
    weight_NF, side = _weight(checkpoint)
    save_sheet(draw_filters(strongest_filters(weight_NF, side=side, count=columns**2), columns=columns), path)


def _weight(checkpoint: Path) -> tuple[Tensor, int]:
    opened = Checkpoint.open(checkpoint)
    card, weights = opened.card, load_weights(opened)
    side = filter_side(card.model, image_size=card.image_size)
    if side is None:
        raise ValueError(f"{checkpoint}: is {card.model.label}, whose first layer has no filters; give an MLP or a Mixer")
    return weights[FIRST_LAYER], side
