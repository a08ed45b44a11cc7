"""A view of stored pictures. Probing learns from views and test-time augmentation averages over them: here is what one is.

A view is a function of (settings and seed of the augmentation, number of the view, sample), whatever rank or batch it is made in.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from pretrain.augment.augmentation import Augmentation
from pretrain.data.loader import Batch


def images_of(batch: Batch, view: int | None, augmentation: Augmentation) -> Tensor:
    """What the model sees of a stored batch: as evaluation does for None, or as training would in epoch `view`."""
    if view is None:
        return augmentation.plain(batch).images_BCHW
    return augmentation.prepare(replace(batch, epochs=np.full(len(batch.samples), view, np.int64))).images_BCHW
