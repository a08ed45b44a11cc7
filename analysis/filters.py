"""The first layer of a checkpoint as pictures: what each of its neurons looks at. The drawing is that of the run's own pictures."""

from pathlib import Path

from torch import Tensor

from data_prep.images.sheet import save_sheet
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.tracking.pictures import FIRST_LAYER, draw_filters, filter_side, strongest_filters


def draw(checkpoint: Path, path: Path, *, columns: int = 5) -> None:
    """The `columns` x `columns` neurons with the largest weights."""
    opened = Checkpoint.open(checkpoint)
    weight_NF, side = first_layer(opened)
    name = f"{opened.card.model.label}, step {opened.card.step:,}"
    save_sheet(draw_filters(strongest_filters(weight_NF, side=side, count=columns**2), columns=columns, name=name), path)


def first_layer(opened: Checkpoint) -> tuple[Tensor, int]:
    """Its weights, and the side of the square that each neuron looks at."""
    card, weights = opened.card, load_weights(opened)
    side = filter_side(card.model, image_size=card.image_size)
    if side is None:
        raise ValueError(f"{opened.directory}: is {card.model.label}, whose first layer has no filters; give an MLP or a Mixer")
    return weights[FIRST_LAYER], side
