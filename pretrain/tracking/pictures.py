"""Images of a run: the model's input, and the filters of its first layer.

A neuron of the first layer is a filter over the complete image (MLP) or over one patch (Mixer,
SW-MLP). Other models have no such layer.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from data_prep.images.lettering import Letters
from data_prep.images.sheet import INK, PAPER, QUIET, LabeledPicture, draw_sheet, shortened
from pretrain.augment.augmentation import Normalization, Prepared
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec

Color = Literal["max", "furthest"]
COLORS: dict[Color, str] = {
    "max": "the maximum over a pixel's colors",
    "furthest": "a pixel's color furthest from 0",
}
"""Rules that choose which of a pixel's three color weights is drawn."""
FIRST_LAYER = "stem.weight"
PANEL, MARGIN, HEAD = 144, 6, 66
_RED_TO_BLUE = np.array(
    [(103, 0, 31), (214, 96, 77), (247, 247, 247), (67, 147, 195), (5, 48, 97)], np.float64
)
"""Colors of the values -1, -1/2, 0, 1/2 and 1."""


def filter_side(spec: AnySpec, *, image_size: int) -> int | None:
    """Return the side of the first layer's filters in pixels, or None if the model has none."""
    if isinstance(spec, MlpSpec):
        return image_size
    return spec.patch_size if isinstance(spec, MixerSpec | SparseMlpSpec) else None


def filters_of(weight_NF: Tensor, *, side: int, color: Color = "furthest") -> NDArray[np.float32]:
    """Return (N, side, side): one weight for each pixel. F is the flattened (color, row,
    column)."""
    colors_N3HW = weight_NF.float().cpu().view(-1, 3, side, side)
    by_N3HW = colors_N3HW.abs() if color == "furthest" else colors_N3HW
    filters: NDArray[np.float32] = colors_N3HW.take_along_dim(
        by_N3HW.argmax(dim=1, keepdim=True), dim=1
    )[:, 0].numpy()
    return filters


def strongest_filters(
    weight_NF: Tensor, *, side: int, count: int, color: Color = "furthest"
) -> NDArray[np.float32]:
    """Return the filters of the `count` neurons with the largest weight norms, the largest
    first."""
    order = weight_NF.float().norm(dim=1).argsort(descending=True, stable=True)[:count]
    return filters_of(weight_NF[order], side=side, color=color)


def draw_filters(
    filters: NDArray[np.float32],
    *,
    columns: int,
    title: str,
    panel: int = PANEL,
    color: Color = "furthest",
) -> Image.Image:
    """Draw `columns` x `columns` panels in one scale: blue is positive, red negative, white
    zero."""
    # a single large weight would make all others pale
    scale = float(np.percentile(np.abs(filters), 99)) or 1.0
    sheet = Image.new("RGB", (columns * panel, HEAD + columns * panel), PAPER)
    large = Letters(18)
    large.draw(
        sheet, (MARGIN, MARGIN), shortened(title, large, width=sheet.width - 2 * MARGIN), INK
    )
    small, bar = Letters(13), _colored(np.tile(np.linspace(-1, 1, 120), (12, 1)))
    sheet.paste(bar, (MARGIN, MARGIN + 36))
    facts = (
        f"{-scale:.2g} to {scale:.2g}, {COLORS[color]};"
        " noise: hardly trained; one color: equal weights"
    )
    small.draw(sheet, (MARGIN + bar.width + 8, MARGIN + 33), facts, QUIET)
    inside = panel - 2 * MARGIN
    for number, values in enumerate(filters[: columns * columns]):
        row, column = divmod(number, columns)
        place = column * panel + MARGIN, HEAD + row * panel + MARGIN
        # an edge for white panels
        edge = (place[0] - 1, place[1] - 1, place[0] + inside + 1, place[1] + inside + 1)
        sheet.paste(QUIET, edge)
        sheet.paste(
            _colored(values / scale).resize((inside, inside), Image.Resampling.NEAREST), place
        )
    return sheet


def _colored(shares: NDArray[np.floating[Any]]) -> Image.Image:
    places = np.linspace(-1, 1, len(_RED_TO_BLUE))
    channels = [np.interp(shares, places, _RED_TO_BLUE[:, channel]) for channel in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8))


def fed_sheet(
    prepared: Prepared,
    *,
    normalization: Normalization,
    classes: Sequence[str],
    title: str,
    facts: str,
) -> Image.Image:
    """Draw the input of the model, without normalization, with its labels."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalization)
    levels = (
        ((prepared.images_BCHW.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    )
    pictures = [
        Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).numpy()))
        for picture in levels
    ]
    cells = [
        LabeledPicture(picture, label)
        for picture, label in zip(pictures, labels_of(prepared, classes), strict=True)
    ]
    return draw_sheet(cells, title=title, facts=facts)


def first_of(prepared: Prepared, *, count: int) -> Prepared:
    held = {name: values for name, values in vars(prepared).items() if values is not None}
    return Prepared(**{name: values[:count].to("cpu", copy=True) for name, values in held.items()})


def labels_of(prepared: Prepared, names: Sequence[str]) -> list[str]:
    own = [names[label] for label in prepared.labels_B.tolist()]
    if prepared.other_labels_B is None or prepared.weight_B is None:
        return own
    others = [names[label] for label in prepared.other_labels_B.tolist()]
    return [
        f"{weight:.0%} {mine}\n{1 - weight:.0%} {other}"
        for mine, other, weight in zip(own, others, prepared.weight_B.tolist(), strict=True)
    ]
