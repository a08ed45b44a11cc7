"""The first layer of a checkpoint as pictures: what each of its neurons looks at. The drawing is that of the run's own pictures."""

from pathlib import Path

from torch import Tensor

from data_prep.images.sheet import save_sheet
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.tracking.pictures import FIRST_LAYER, draw_filters, filter_side, strongest_filters


def draw(checkpoint: Path, path: Path, *, columns: int = 5) -> None:
    """The `columns` x `columns` neurons with the largest weights."""
    weight_NF, side = first_layer(checkpoint)
    save_sheet(draw_filters(strongest_filters(weight_NF, side=side, count=columns**2), columns=columns), path)


def first_layer(checkpoint: Path) -> tuple[Tensor, int]:
    """Its weights, and the side of the square that each neuron looks at."""
    opened = Checkpoint.open(checkpoint)
    card, weights = opened.card, load_weights(opened)
    side = filter_side(card.model, image_size=card.image_size)
    if side is None:
        raise ValueError(f"{checkpoint}: is {card.model.label}, whose first layer has no filters; give an MLP or a Mixer")
    return weights[FIRST_LAYER], side
