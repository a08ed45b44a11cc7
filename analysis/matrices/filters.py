"""First layers as pictures, several checkpoints side by side, and how local their neurons are. The
drawing is that of a run.

Locality, of a neuron whose pixels have energies e, their squared weights summed over colours:

    area         (sum e)^2 / (H W sum e^2): the share of the picture that it looks at. One pixel 1 / (H W), all alike 1, noise of
                 three colours 3 / 5 where it is Gaussian, 15 / 19 where it is uniform
    radius       root mean square distance of the energy from its centre, of the side. All alike sqrt(1/6) = 0.41
    neighbours   correlation between the weights of pixels side by side (above each other): noise 0, smooth nearly 1
"""  # noqa: E501 (a table)

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
    "area": "area, of the picture",
    "radius": "radius, of the side",
    "neighbours": "correlation of neighbours",
}
_LEAST, _GAP = np.finfo(float).tiny, 24


@dataclass(frozen=True)
class Layer:
    name: str
    weight_NF: Tensor
    side: int
    """Of the square that each neuron looks at."""

    @cached_property
    def locality(self) -> dict[str, Array]:
        """A value for each neuron; of one without weights nothing is local: area 0."""
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
            "neighbours": together / np.maximum(alone, _LEAST),
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


def first_layers(
    places: Sequence[Path], opened: Sequence[Checkpoint], *, with_initial: bool
) -> list[Layer]:
    found = []
    for place, each in zip(places, opened, strict=True):
        weight, side = first_layer(each)
        name = name_of(each.run_dir or place)
        found.append(
            Layer(f"{name}, step {each.card.step:,}" if each.card.step else name, weight, side)
        )
        if with_initial:
            begun = initial_model(each)
            if begun is None:
                raise ValueError(
                    f"--init: {place} has no run that began from a seed, so its initial weights are"
                    " not known; leave it out"
                )
            found.append(Layer(f"{name}, initial", begun.get_parameter(FIRST_LAYER).detach(), side))
    return found


def first_layer(opened: Checkpoint) -> tuple[Tensor, int]:
    card, weights = opened.card, load_weights(opened)
    side = filter_side(card.model, image_size=card.image_size)
    if side is None:
        raise ValueError(
            f"{opened.directory}: is {card.model.label}, whose first layer has no filters; give an"
            " MLP or a Mixer"
        )
    if not weights[FIRST_LAYER].isfinite().all():
        raise ValueError(
            f"{opened.directory}: {FIRST_LAYER} has numbers that are not finite; give an earlier"
            " checkpoint"
        )
    return weights[FIRST_LAYER], side


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
    """Shares of the neurons below each value."""
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
        axes_of[0].set_ylabel("share of the neurons")
        for of_noise, words, line in (
            (3 / 5, "Gaussian noise: 3/5", "--"),
            (15 / 19, "uniform noise: 15/19", "-."),
        ):
            axes_of[0].axvline(of_noise, color=GREY, lw=0.8, ls=line, label=words)
        figure.legend(*axes_of[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
