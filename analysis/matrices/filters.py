"""First layers as images, several checkpoints side by side, and the locality of their neurons.

Locality of a neuron whose pixels have energies e, their squared weights summed over colors:

    area         (sum e)^2 / (H W sum e^2), the fraction of the image that it uses: 1 / (H W) for
                 one pixel, 1 for equal pixels, 3 / 5 for Gaussian and 15 / 19 for uniform noise
    radius       root mean square distance of the energy from its center, divided by the side:
                 sqrt(1/6) = 0.41 for equal pixels
    neighbors    correlation between the weights of adjacent pixels: 0 for noise, nearly 1 if smooth
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from analysis.matrices.weights import Array, initial_model, name_of
from analysis.output import Result, table_of
from data_prep.errors import UserError
from data_prep.images.lettering import legible
from data_prep.images.sheet import PAPER
from finetune.looks import COLOURS, GREY, looks, panels
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
    "area": "area, of the image",
    "radius": "radius, of the side",
    "neighbors": "correlation of neighbors",
}
_LEAST, _GAP = np.finfo(float).tiny, 24


@dataclass(frozen=True)
class Layer:
    name: str
    weight_NF: Tensor
    side: int
    """Side of the square of pixels that each neuron has weights for."""

    @cached_property
    def locality(self) -> dict[str, Array]:
        """Return a value for each neuron; area 0 for a neuron without weights."""
        weights = self.weight_NF.double().cpu().numpy().reshape(-1, 3, self.side, self.side)
        energy = (weights**2).sum(1)
        total = np.maximum(energy.sum((1, 2)), _LEAST)
        places = (np.arange(self.side) + 0.5) / self.side
        across = [energy.sum(axis) / total[:, None] for axis in (1, 2)]
        spread = sum(each @ places**2 - (each @ places) ** 2 for each in across)
        pairs = [(weights[..., 1:, :], weights[..., :-1, :]), (weights[..., 1:], weights[..., :-1])]
        together = sum((one * other).sum((1, 2, 3)) for one, other in pairs)
        alone = sum((one**2 + other**2).sum((1, 2, 3)) / 2 for one, other in pairs)
        return {
            "area": (
                energy.sum((1, 2)) ** 2
                / (self.side**2 * np.maximum((energy**2).sum((1, 2)), _LEAST))
            ),
            "radius": np.sqrt(np.maximum(spread, 0)),
            "neighbors": together / np.maximum(alone, _LEAST),
        }

    @property
    def medians(self) -> dict[str, float]:
        return {key: float(np.median(values)) for key, values in self.locality.items()}

    @property
    def rows(self) -> list[dict[str, Any]]:
        values = zip(*(each.tolist() for each in self.locality.values()), strict=True)
        return [
            {"layer": self.name, "neuron": n, **dict(zip(MEASURES, each, strict=True))}
            for n, each in enumerate(values)
        ]


def filters(runs: Sequence[Path], *, which: str, count: int, with_initial: bool) -> Result:
    opened = [Checkpoint.open(place) for place in runs]
    layers = list[Layer]()
    for place, each in zip(runs, opened, strict=True):
        name, step = name_of(each.run_dir or place), each.card.step
        layer = first_layer(each, f"{name}, step {step:,}" if step else name)
        layers.append(layer)
        if with_initial:
            begun = initial_model(each)
            if begun is None:
                problem = f"{place} has no run that began from a seed"
                raise UserError("--init", problem, "leave it out", code="unsupported")
            weight = begun.get_parameter(FIRST_LAYER).detach()
            layers.append(Layer(f"{name}, initial", weight, layer.side))
    facts = {layer.name: layer.medians for layer in layers}
    cells = [[name, *(f"{each:.3f}" for each in facts[name].values())] for name in facts]
    figures = {"": sheet(layers, which=which, count=count), "locality": draw_locality(layers)}
    rows = [row for layer in layers for row in layer.rows]
    inputs = [each.directory for each in opened]
    printed = [table_of(["median over the neurons", *MEASURES.values()], cells)]
    return Result(rows, facts, figures, inputs, printed)


def first_layer(opened: Checkpoint, name: str = "") -> Layer:
    card, weights = opened.card, load_weights(opened)
    side = filter_side(card.model, image_size=card.image_size)
    place = str(opened.directory)
    if side is None:
        problem = f"the first layer of {card.model.label} has no filters"
        raise UserError(place, problem, "give an MLP or a Mixer", code="unsupported")
    if not weights[FIRST_LAYER].isfinite().all():
        problem = f"{FIRST_LAYER} is not finite"
        raise UserError(place, problem, "give an earlier checkpoint", code="not-finite")
    return Layer(name, weights[FIRST_LAYER], side)


def sheet(layers: Sequence[Layer], *, which: str, count: int) -> Image.Image:
    drawn = []
    for layer in layers:
        if which == "largest":
            filters, words = (
                strongest_filters(layer.weight_NF, side=layer.side, count=count),
                f"the {count} strongest filters",
            )
        else:
            filters = filters_of(
                layer.weight_NF[: count if which == "first" else None], side=layer.side
            )
            words = (
                f"the first {count} filters"
                if which == "first"
                else f"all {len(filters):,} filters"
            )
        columns = int(np.ceil(len(filters) ** 0.5))
        panel = max(layer.side + 14, min(PANEL, 1800 // columns))
        drawn.append(
            draw_filters(filters, columns=columns, title=f"{layer.name}: {words}", panel=panel)
        )
    starts = np.cumsum([0, *(each.width + _GAP for each in drawn)]).tolist()
    whole = Image.new("RGB", (starts[-1] - _GAP, max(each.height for each in drawn)), PAPER)
    for start, each in zip(starts, drawn, strict=False):
        whole.paste(each, (start, 0))
    return whole


def draw_locality(layers: Sequence[Layer]) -> Figure:
    """Draw the fraction of the neurons below each value."""
    with looks(*(layer.name for layer in layers)):
        figure, axes_of = panels(3, height=2.4)
        for axes, (key, words) in zip(axes_of, MEASURES.items(), strict=True):
            for number, layer in enumerate(layers):
                style = ":" if layer.name.endswith("initial") else "-"
                axes.ecdf(
                    layer.locality[key],
                    label=legible(layer.name),
                    color=COLOURS[number % len(COLOURS)],
                    ls=style,
                )
            axes.set_xlabel(words)
        axes_of[0].set_ylabel("fraction of the neurons")
        for of_noise, words, line in (
            (3 / 5, "Gaussian noise: 3/5", "--"),
            (15 / 19, "uniform noise: 15/19", "-."),
        ):
            axes_of[0].axvline(of_noise, color=GREY, lw=0.8, ls=line, label=words)
        figure.legend(*axes_of[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
