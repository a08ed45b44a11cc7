"""Digits of scikit-learn: 1,797 gray images of 8 x 8 pixels, which are part of its package.

Splits are as in an example of scikit-learn. The first half, 898 images, is `train`. The second
half, with 86 to 92 images of each class, is `test`. Levels from 0 to 16 become 0 to 255.
"""

from importlib.util import find_spec
from typing import Literal

import numpy as np

from data_prep.archives.guard import SourceError
from data_prep.settings import Settings
from data_prep.sources.records import Batch, Records, RecordSource

_LEVELS = 16


class DigitsSettings(Settings):
    """The digits of scikit-learn, 8 pixels wide. Needs the extra `digits`, and no download."""

    kind: Literal["digits"]


class DigitsSource(RecordSource, of=DigitsSettings):
    def names(self) -> tuple[str, ...]:
        """Return no names: scikit-learn reads the file."""
        return ()

    def load(self) -> Records:
        if find_spec("sklearn") is None:
            problem, fix = "digits needs scikit-learn", "run pip install 'wide-mlps[digits]'"
            raise SourceError("source.kind", problem, fix, code="missing-library")
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / _LEVELS)).astype(np.uint8)
        half = len(pixels) // 2
        parts = {"train": slice(half), "test": slice(half, None)}
        batches = {
            split: Batch(split, pixels[part], digits.target[part].astype(np.int64))
            for split, part in parts.items()
        }
        return Records(tuple(map(str, digits.target_names)), batches)
