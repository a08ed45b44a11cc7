"""Dataset objects as others write them, for test_dataset.py: found by worker processes under their names."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests.data_prep.sources.layouts import Pixels, pixels


class Pictures:
    """PIL images with classes and targets, like torchvision's CIFAR10."""

    def __init__(self, size: int, seed: int = 0):
        self.arrays = pixels(size, 20, 24, 3, seed=seed)
        self.targets = [number % 3 for number in range(size)]
        self.classes = ["ant", "bee", "cat"]
        self.num_fetched = 0

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        self.num_fetched += 1
        return Image.fromarray(self.arrays[place]), self.targets[place]


class Bare:
    """Nothing but len() and [i]; `make` says what an item is."""

    def __init__(self, size: int, make: Callable[[Pixels, int], Any], *, seed: int = 0):
        self.arrays, self.make = pixels(size, 20, 24, 3, seed=seed), make

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, place: int) -> Any:
        return self.make(self.arrays[place], place)


class Tensor:
    """As much of a torch tensor as counts here: an array by its protocol, with channels first."""

    def __init__(self, array: np.ndarray[Any, Any]):
        self.array = array

    def permute(self) -> None: ...

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.array


ITEMS: dict[str, Callable[[Pixels, int], Any]] = {
    "array": lambda array, place: (array, place % 3),
    "numpy label": lambda array, place: (array, np.int64(place % 3)),
    "channels first": lambda array, place: (array.transpose(2, 0, 1), place % 3),
    "floats": lambda array, place: (Tensor((array / 255).astype(np.float32).transpose(2, 0, 1)), place % 3),
    "grey": lambda array, place: (Image.fromarray(array[:, :, 0]), place % 3),
    "grey array": lambda array, place: (array[:, :, :1], place % 3),
    "clear": lambda array, place: (Image.fromarray(np.dstack([array, np.full((20, 24), 255, np.uint8)])), place % 3),
    "negative": lambda array, place: (array, -2 if place == 4 else 0),
    "beyond": lambda array, place: (array, 3 if place == 4 else 0),
    "words": lambda array, place: (array, "ant"),
    "half a label": lambda array, place: (array, 0.5),
    "no pair": lambda array, place: array,
    "raises": lambda array, place: (array, 1 // (place - 4)),
    "normalised": lambda array, place: (array / 255 - 0.5, 0),
    "integers": lambda array, place: (array.astype(np.int64), 0),
    "vector": lambda array, place: (array.reshape(-1), 0),
    "nothing": lambda array, place: (None, 0),
}


def bare(items: str, size: int, seed: int = 0) -> Bare:
    return Bare(size, ITEMS[items], seed=seed)


def mislabelled(size: int) -> Pictures:
    made = Pictures(size)
    made.targets = [0] * size

    class Mislabelled(Pictures):
        def __getitem__(self, place: int) -> tuple[Any, Any]:
            return Image.fromarray(self.arrays[place]), 1

    return Mislabelled(size)


def failing() -> None:
    raise RuntimeError("Dataset not found.\nUse download=True")
