"""Whether a checkpoint's classes are those of a dataset. No torch here."""

from pathlib import Path

from data_prep.manifest import Manifest
from pretrain.checkpoints.card import ModelCard


def class_numbers(card: ModelCard, manifest: Manifest, *, dataset: str | Path) -> tuple[int, ...]:
    """The number that the checkpoint gives each class of the dataset: a classifier can only be judged on its own classes. It may
    have more, having been trained on a mixture; they stay among its answers."""
    number_of = {name: number for number, name in enumerate(card.classes)}
    if all(name in number_of for name in manifest.classes):
        return tuple(number_of[name] for name in manifest.classes)
    if len(card.classes) != len(manifest.classes):
        detail = f"{len(card.classes)} classes against {len(manifest.classes)}"
    else:
        number = next(i for i, (a, b) in enumerate(zip(card.classes, manifest.classes, strict=True)) if a != b)
        detail = f"class {number} is {card.classes[number]!r} against {manifest.classes[number]!r}"
    raise ValueError(f"dataset: {dataset} has other classes than the checkpoint ({detail}); probe or tune on it first")
