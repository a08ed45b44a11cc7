"""Which inputs make up each split: with a part held out for validation.

Every choice is seeded by the class's own name, so that it depends on nothing but that class's inputs.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from data_prep.sources.base import Arrangement
from data_prep.sources.inventory import Inventory


def hold_out(inventory: Inventory, arrangement: Arrangement, *, share: float, seed: int) -> Arrangement:
    """A seeded share of every class of `train` becomes `val`: at least one image where a class has two."""

    def count(total: int) -> int:
        return max(1, round(total * share)) if total > 1 else 0

    return move_to_val(inventory, arrangement, count=count, seed=seed)


def move_to_val(
    inventory: Inventory, arrangement: Arrangement, *, count: Callable[[int], int], seed: int
) -> Arrangement:
    """Of every class of `train`, `count(images of the class)` seeded ones become `val`."""
    train = arrangement.splits["train"]
    held = np.zeros(len(train), np.bool_)
    for label, places in places_by_label(inventory.labels[train]).items():
        generator = class_generator(inventory.classes[label], seed=seed)
        held[generator.permutation(places)[: count(len(places))]] = True
    splits = arrangement.splits | {"train": train[~held], "val": train[held]}
    return Arrangement(splits=splits, labels=arrangement.labels, left_out=arrangement.left_out)


def places_by_label(labels: NDArray[np.int32]) -> dict[int, NDArray[np.int64]]:
    """Where each label stands, for labels >= 0."""
    order = np.argsort(labels, kind="stable")
    num_unlabelled = int(np.count_nonzero(labels < 0))
    counts = np.bincount(labels[labels >= 0] if num_unlabelled else labels)
    pieces = np.split(order[num_unlabelled:], np.cumsum(counts)[:-1])
    return {label: places for label, places in enumerate(pieces) if len(places)}


def class_generator(name: str, *, seed: int) -> np.random.Generator:
    """Randomness for one class, the same whatever the other classes are."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int.from_bytes(digest[:8], "big")])))
