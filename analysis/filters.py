"""The first layer of an MLP as pictures: what each of its neurons looks at (paper B shows that they become local)."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pretrain.checkpoint import load_weights

matplotlib.use("Agg")


def first_layer(checkpoint: Path) -> NDArray[np.float32]:
    """(neurons, H, W): the weights of every first-layer neuron, maximum over the colours."""
    card, weights = load_weights(checkpoint)
    if card.model.kind != "mlp":
        raise ValueError(f"{checkpoint}: is {card.model.label}; filters over the whole image exist in an MLP only")
    size = card.image_size
    filters: NDArray[np.float32] = weights["stem.weight"].view(-1, 3, size, size).amax(dim=1).numpy()
    return filters


def draw(checkpoint: Path, path: Path, *, side: int = 5) -> None:
    """The `side` x `side` neurons with the largest weights."""
    filters = first_layer(checkpoint)
    strongest = np.argsort(-np.linalg.norm(filters.reshape(len(filters), -1), axis=1), kind="stable")[: side * side]
    figure = Figure(figsize=(side * 1.2, side * 1.2), layout="constrained")
    panels = np.ravel(figure.subplots(side, side))
    for axes in panels:
        axes.set_axis_off()
    for axes, neuron in zip(panels, strongest, strict=False):
        axes.imshow(
            filters[neuron], cmap="RdBu", vmin=-np.abs(filters[neuron]).max(), vmax=np.abs(filters[neuron]).max()
        )
    figure.savefig(path, dpi=120)
