"""MixUp and CutMix. An image is mixed with its neighbor (positions 2j and 2j + 1 of a batch) or
with the previous image of the global batch. B batch, O size.

Both images of a pair, or all images of the global batch, have the same weight and box. Three
numbers are drawn: mixed or not, the method, and lambda ~ Beta(alpha, alpha). CutMix's box has the
area fraction 1 - lambda around a uniform center. If the border cuts the box, the weight is the area
fraction outside the cut box (timm's `correct_lam`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.draws import BetaTable, Draws, Floats, Purpose, send
from pretrain.config import AugmentSettings

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Mix:
    """Parameters of each image's mixture."""

    weight: Floats
    """Weight of the image's own label."""
    blend: Floats
    """Weight of the image in the pixels outside the box."""
    top: Ints
    bottom: Ints
    left: Ints
    right: Ints
    """Edges of the box with the partner's pixels; empty for MixUp."""


class PairMixer:
    def __init__(self, settings: AugmentSettings):
        self.settings = settings
        alphas = {"MixUp": settings.mixup_alpha, "CutMix": settings.cutmix_alpha}
        self._lambda = {way: BetaTable(alphas[way]) for way in settings.mixing}

    def draw(self, shared: Draws, *, size: int) -> Mix:
        settings, ways = self.settings, self.settings.mixing
        mixed = shared.uniform(Purpose.MIX) < settings.mix_probability
        cuts = np.full(len(mixed), "CutMix" in ways)
        if len(ways) > 1:
            cuts = shared.uniform(Purpose.SWITCH) < settings.switch_probability
        weight = np.ones(len(mixed))
        for way, purpose in (("MixUp", Purpose.MIXUP), ("CutMix", Purpose.CUTMIX)):
            if way in ways:
                here = mixed & (cuts == (way == "CutMix"))
                weight = np.where(here, self._lambda[way](shared.uniform(purpose)), weight)
        if "CutMix" not in ways:
            none = np.zeros(len(mixed), np.int64)
            return Mix(weight, weight, none, none, none, none)
        side = np.where(mixed & cuts, np.floor(size * np.sqrt(1 - weight)), 0).astype(np.int64)
        row = shared.integer(Purpose.CUTMIX_ROW, size)
        column = shared.integer(Purpose.CUTMIX_COLUMN, size)
        top, bottom = np.clip(row - side // 2, 0, size), np.clip(row + (side + 1) // 2, 0, size)
        left = np.clip(column - side // 2, 0, size)
        right = np.clip(column + (side + 1) // 2, 0, size)
        blend = np.where(cuts, 1.0, weight)
        weight = np.where(cuts, 1 - (bottom - top) * (right - left) / size**2, weight)
        return Mix(weight, blend, top, bottom, left, right)

    def mix(self, pictures_BCOO: Tensor, drawn: Mix) -> tuple[Tensor, Tensor]:
        """Return the mixed images, and the weight of each image's own label."""
        device, size = pictures_BCOO.device, pictures_BCOO.shape[-1]
        pictures_BCOO, others_BCOO = self.with_partners(pictures_BCOO)
        shares = {
            "weight": drawn.weight.astype(np.float32),
            "blend": drawn.blend.astype(np.float32),
        }
        box = {name: getattr(drawn, name) for name in ("top", "bottom", "left", "right")}
        sent = send(shares | box, device)
        own_B111 = sent["blend"].view(-1, 1, 1, 1)
        if "CutMix" in self.settings.mixing:
            place_O = torch.arange(size, device=device)
            rows_BO = (place_O >= sent["top"].unsqueeze(-1)) & (
                place_O < sent["bottom"].unsqueeze(-1)
            )
            columns_BO = (place_O >= sent["left"].unsqueeze(-1)) & (
                place_O < sent["right"].unsqueeze(-1)
            )
            own_B111 = torch.where(
                rows_BO[:, None, :, None] & columns_BO[:, None, None, :], 0.0, own_B111
            )
        return torch.lerp(others_BCOO, pictures_BCOO, own_B111), sent["weight"]

    def with_partners(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images (or labels) and their partners."""
        if self.settings.mixup_pairing == "ffcv":
            return rows[1:], rows[:-1]
        return rows, rows[torch.arange(len(rows), device=rows.device) ^ 1]
