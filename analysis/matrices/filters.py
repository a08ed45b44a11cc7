"""First layers as pictures, several checkpoints side by side, and how local their neurons are. The drawing is that of a run.

Locality, of a neuron whose pixels have energies e, their squared weights summed over colours:

    area         (sum e)^2 / (H W sum e^2): the share of the picture that it looks at. One pixel 1 / (H W), all alike 1, noise of
                 three colours 3 / 5 where it is Gaussian, 15 / 19 where it is uniform
    radius       root mean square distance of the energy from its centre, of the side. All alike sqrt(1/6) = 0.41
    neighbours   correlation between the weights of pixels side by side (above each other): noise 0, smooth nearly 1
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from torch import Tensor

from analysis.matrices.weights import Array, initial_model, name_of
from analysis.tables.pages import for_console
from data_prep.images.lettering import legible
from data_prep.images.sheet import PAPER
from finetune.looks import looks, panels
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.tracking.pictures import FIRST_LAYER, PANEL, draw_filters, filter_side, filters_of, strongest_filters

MEASURES = {"area": "area, of the picture", "radius": "radius, of the side", "neighbours": "correlation of neighbours"}


@dataclass(frozen=True)
class Layer:
    name: str
    weight_NF: Tensor
    side: int

    def locality(self) -> dict[str, Array]:
        return locality(self.weight_NF, side=self.side)


def first_layers(places: list[Path], opened: list[Checkpoint], *, with_initial: bool) -> list[Layer]:
    found = []
    for place, each in zip(places, opened, strict=True):
        weight, side = first_layer(each)
        name = name_of(each.run_dir or place)
        found.append(Layer(f"{name}, step {each.card.step:,}" if each.card.step else name, weight, side))
        begun = initial_model(each) if with_initial else None
        if begun is not None:
            found.append(Layer(f"{name}, initial", begun.get_parameter(FIRST_LAYER).detach(), side))
        elif with_initial:
            raise ValueError(
                f"--init: {place} has no run that began from a seed, so its initial weights are not known; leave it out"
            )
    return found


def first_layer(opened: Checkpoint) -> tuple[Tensor, int]:
    """Its weights, and the side of the square that each neuron looks at."""
    card, weights = opened.card, load_weights(opened)
    side = filter_side(card.model, image_size=card.image_size)
    if side is None:
        raise ValueError(f"{opened.directory}: is {card.model.label}, whose first layer has no filters; give an MLP or a Mixer")
    return weights[FIRST_LAYER], side


def locality(weight_NF: Tensor, *, side: int) -> dict[str, Array]:
    """A value for each neuron; of one without weights nothing is local: area 0."""
    weights = weight_NF.double().cpu().numpy().reshape(-1, 3, side, side)
    energy = (weights**2).sum(1)
    total = np.maximum(energy.sum((1, 2)), np.finfo(float).tiny)
    places = (np.arange(side) + 0.5) / side
    rows, columns = ((energy.sum(axis) @ places) / total for axis in (2, 1))
    spread = ((energy.sum(2) @ places**2) + (energy.sum(1) @ places**2)) / total - rows**2 - columns**2
    pairs = [(weights[..., 1:, :], weights[..., :-1, :]), (weights[..., 1:], weights[..., :-1])]
    together = sum((one * other).sum((1, 2, 3)) for one, other in pairs)
    alone = sum((one**2 + other**2).sum((1, 2, 3)) / 2 for one, other in pairs)
    return {
        "area": energy.sum((1, 2)) ** 2 / (side**2 * np.maximum((energy**2).sum((1, 2)), np.finfo(float).tiny)),
        "radius": np.sqrt(np.maximum(spread, 0)),
        "neighbours": together / np.maximum(alone, np.finfo(float).tiny),
    }


def sheet(layers: list[Layer], *, which: str, count: int) -> Image.Image:
    drawn = []
    for layer in layers:
        shown = len(layer.weight_NF) if which == "all" else count
        if which == "largest":
            filters, words = strongest_filters(layer.weight_NF, side=layer.side, count=shown), f"the {count} strongest filters"
        else:
            filters = filters_of(layer.weight_NF[:shown], side=layer.side)
            words = f"all {shown:,} filters" if which == "all" else f"the first {count} filters"
        columns = max(1, int(np.ceil(len(filters) ** 0.5)))
        panel = max(layer.side + 14, min(PANEL, 1800 // columns))
        drawn.append(draw_filters(filters, columns=columns, title=f"{layer.name}: {words}", panel=panel))
    gap, widths = 24, [each.width for each in drawn]
    whole = Image.new("RGB", (sum(widths) + gap * (len(drawn) - 1), max(each.height for each in drawn)), PAPER)
    for number, each in enumerate(drawn):
        whole.paste(each, (sum(widths[:number]) + gap * number, 0))
    return whole


def rows_of(layer: Layer) -> list[dict[str, Any]]:
    found = layer.locality()
    return [
        {"layer": layer.name, "neuron": n, **{key: float(v[n]) for key, v in found.items()}} for n in range(len(layer.weight_NF))
    ]


def facts_of(layers: list[Layer]) -> dict[str, Any]:
    """Medians over the neurons."""
    return {layer.name: {key: float(np.median(values)) for key, values in layer.locality().items()} for layer in layers}


def print_facts(facts: Mapping[str, Mapping[str, float]], *, file: IO[str]) -> None:
    rows = [[legible(name), *(f"{value:.3f}" for value in medians.values())] for name, medians in facts.items()]
    Console(file=file, width=120).print(for_console(["median over the neurons", *MEASURES.values()], rows))


def draw_locality(layers: list[Layer]) -> Figure:
    """Shares of the neurons below each value."""
    with looks(*(layer.name for layer in layers)):
        figure, axes_of = panels(3, height=2.4)
        for axes, (key, words) in zip(axes_of, MEASURES.items(), strict=True):
            for number, layer in enumerate(layers):
                values = layer.locality()[key]
                style: dict[str, Any] = {"color": f"C{number % 6}", "ls": ":" if layer.name.endswith("initial") else "-", "lw": 1.2}
                label = legible(layer.name) if key == "area" else None
                axes.ecdf(values, label=label, **style)
            axes.set_xlabel(words)
        figure.axes[0].set_ylabel("share of the neurons")
        for of_noise, words, line in ((3 / 5, "Gaussian noise: 3/5", "--"), (15 / 19, "uniform noise: 15/19", "-.")):
            figure.axes[0].axvline(of_noise, color="grey", lw=0.8, ls=line, label=words)
        figure.legend(loc="outside lower center", ncols=3)
    return figure
