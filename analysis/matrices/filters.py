"""First layers as images, several checkpoints side by side, and the locality of their neurons
(Scaling MLPs, Figures 10 and 11). As in Appendix B of the paper, a pixel shows the maximum of its
three colors.

Locality of a neuron, from the energy e of each pixel (squared weights summed over colors):

    area         used fraction of the image, (sum e)^2 / (H W sum e^2). One pixel gives 1 / (H W),
                 equal pixels 1, Gaussian noise 3 / 5, uniform noise 15 / 19.
    radius       root mean square distance of the energy from its center, divided by the side:
                 sqrt(1/6) = 0.41 for equal pixels
    neighbors    correlation between the centered weights of adjacent pixels: 0 for noise, nearly 1
                 if smooth, null for equal pixels
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from analysis.matrices.weights import initial_model, name_of
from analysis.output import Result, draw_legend, mark
from data_prep.errors import UserError
from data_prep.images.lettering import legible
from data_prep.images.sheet import PAPER
from finetune.looks import GRAY, looks, panels
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.tracking.pictures import (
    FIRST_LAYER,
    PANEL,
    draw_filters,
    filter_side,
    filters_of,
    strongest_filters,
)

MEASURES = {
    "area": "used area / image",
    "radius": "radius / side",
    "neighbors": "correlation of adjacent pixels",
}
_LEAST, _GAP = np.finfo(float).tiny, 24


@dataclass(frozen=True)
class Layer:
    name: str
    weight_NF: Tensor
    side: int
    """Side in pixels of the square of each neuron's weights."""

    @property
    def locality(self) -> pd.DataFrame:
        """Area, radius and neighbors of each neuron. The area is 0 if all weights are 0."""
        weights = self.weight_NF.double().cpu().numpy().reshape(-1, 3, self.side, self.side)
        centered = weights - weights.mean((2, 3), keepdims=True)
        energy = (weights**2).sum(1)
        total = np.maximum(energy.sum((1, 2)), _LEAST)
        places = (np.arange(self.side) + 0.5) / self.side
        across = [energy.sum(axis) / total[:, None] for axis in (1, 2)]
        spread = sum(each @ places**2 - (each @ places) ** 2 for each in across)
        pairs = [(each[..., 1:], each[..., :-1]) for each in (centered, centered.swapaxes(2, 3))]
        products = sum((one * other).sum((1, 2, 3)) for one, other in pairs)
        squares = sum((one**2 + other**2).sum((1, 2, 3)) / 2 for one, other in pairs)
        used = self.side**2 * np.maximum((energy**2).sum((1, 2)), _LEAST)
        return pd.DataFrame(
            {
                "layer": self.name,
                "neuron": np.arange(len(weights)),
                "area": energy.sum((1, 2)) ** 2 / used,
                "radius": np.sqrt(np.maximum(spread, 0)),
                "neighbors": products / np.where(squares > 1e-20 * total, squares, np.nan),
            }
        )


def filters(runs: Sequence[Path], which: str, count: int, *, with_initial: bool) -> Result:
    opened = [Checkpoint.open(place) for place in runs]
    layers = list[Layer]()
    names = [name_of(each.run_dir or place) for place, each in zip(runs, opened, strict=True)]
    if len(set(names)) < len(names):
        names = [str(place) for place in runs]
    for place, name, each in zip(runs, names, opened, strict=True):
        step = each.card.step
        layer = first_layer(each, f"{name}, step {step:,}" if step else name)
        layers.append(layer)
        if with_initial:
            model = initial_model(each)
            if model is None:
                problem = f"{place} is not from a run with random initial weights"
                raise UserError("--init", problem, "remove --init", code="unsupported")
            weight = model.get_parameter(FIRST_LAYER).detach()
            layers.append(Layer(f"{name}, initial", weight, layer.side))
    rows = pd.concat([layer.locality for layer in layers], ignore_index=True)
    medians = rows.groupby("layer", sort=False)[[*MEASURES]].median()
    figures = {"": sheet(layers, which, count), "locality": draw_locality(rows)}
    inputs = [each.directory for each in opened]
    table = medians.reset_index().rename(columns={"layer": "median over the neurons", **MEASURES})
    return Result(rows, medians.to_dict("index"), figures, inputs, [table])


def first_layer(opened: Checkpoint, name: str = "") -> Layer:
    card, weights, place = opened.card, load_weights(opened), str(opened.directory)
    side = filter_side(card.model, image_size=card.image_size)
    if side is None:
        problem = f"the first layer of {card.model.label} has no filters"
        raise UserError(place, problem, "give an MLP or a Mixer", code="unsupported")
    if not weights[FIRST_LAYER].isfinite().all():
        problem, fix = f"{FIRST_LAYER} has a NaN or infinity", "give an earlier checkpoint"
        raise UserError(place, problem, fix, code="not-finite")
    return Layer(name, weights[FIRST_LAYER], side)


def sheet(layers: Sequence[Layer], which: str, count: int) -> Image.Image:
    """Draw `count` neurons of each layer. `which`: "first", or "largest" for the largest
    weights."""
    sheets = []
    for layer in layers:
        weight, side = layer.weight_NF, layer.side
        if which == "largest":
            shown = strongest_filters(weight, side=side, count=count, color="max")
        else:
            shown = filters_of(weight[:count], side=side, color="max")
        title = f"{layer.name}: the {which} {len(shown):,} filters"
        columns = int(np.ceil(len(shown) ** 0.5))
        panel = max(side + 14, min(PANEL, 1800 // columns))
        sheets.append(draw_filters(shown, columns=columns, title=title, panel=panel, color="max"))
    starts = np.cumsum([0, *(each.width + _GAP for each in sheets)]).tolist()
    whole = Image.new("RGB", (starts[-1] - _GAP, max(each.height for each in sheets)), PAPER)
    for start, each in zip(starts, sheets, strict=False):
        whole.paste(each, (start, 0))
    return whole


def draw_locality(rows: pd.DataFrame) -> Figure:
    with looks(*rows.layer.unique()):
        figure, axes_of = panels(3, height=2.4)
        for axes, (key, words) in zip(axes_of, MEASURES.items(), strict=True):
            for number, (name, own) in enumerate(rows.groupby("layer", sort=False)):
                line, color = ":" if name.endswith("initial") else "-", mark(number)["color"]
                if own[key].notna().any():
                    axes.ecdf(own[key].dropna(), label=legible(name), color=color, ls=line)
            axes.set_xlabel(words)
        axes_of[0].set_ylabel("fraction of the neurons")
        noise = {"Gaussian noise: 3/5": (3 / 5, "--"), "uniform noise: 15/19": (15 / 19, "-.")}
        for words, (area, line) in noise.items():
            axes_of[0].axvline(area, color=GRAY, lw=0.8, ls=line, label=words)
        draw_legend(figure, axes_of[:1])
    return figure
