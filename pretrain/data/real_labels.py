"""ReaL labels of a split ("Are we done with ImageNet?"): all correct classes of an image.

`data_prep` stores these labels as the annotation `real`, with a bit for each class of the dataset.
Images without a correct class are excluded. Shapes: B batch, K classes of the dataset.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.manifest import DatasetError, load_annotation
from pretrain.data.datasets import Part
from pretrain.data.order import Ids

NAME = "real"


@dataclass(frozen=True)
class RealLabels:
    bits: NDArray[np.bool_]
    """True for each correct class. Shape: (samples of the split, K)."""
    column_of: Tensor
    """Column of `bits` for each class that the model can predict; -1 if the dataset has no such
    class."""

    @classmethod
    def of(cls, part: Part, *, num_answers: int, device: torch.device) -> "RealLabels | None":
        if NAME not in part.content.annotations:
            return None
        bits = load_annotation(part.directory, part.content, NAME)
        num_classes = len(part.manifest.classes)
        if bits.shape[1] != num_classes:
            raise DatasetError(
                str(part.directory),
                f"the annotation {NAME!r} has {bits.shape[1]:,} classes, but the dataset has"
                f" {num_classes:,}",
                "build the dataset again",
                code="mismatch",
            )
        column_of = torch.full((num_answers,), -1)
        column_of[list(part.classes or range(num_classes))] = torch.arange(num_classes)
        return cls(bits, column_of.to(device))

    def count(self, answers_B: Tensor, samples: Ids, mask_B: Tensor) -> Tensor:
        """Return two counts on the device: correct predictions, and unmasked images that have a
        correct class."""
        bits_BK, columns_B = torch.from_numpy(self.bits[samples]), self.column_of[answers_B]
        if columns_B.is_cuda:
            bits_BK = bits_BK.pin_memory().to(columns_B.device, non_blocking=True)
        right_B = bits_BK.gather(1, columns_B.clamp(min=0).unsqueeze(1)).squeeze(1) & (
            columns_B >= 0
        )
        return (torch.stack([right_B, bits_BK.any(dim=1)]) & mask_B).sum(dim=1).double()
