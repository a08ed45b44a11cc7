"""ImageNet-21k as it is downloaded (fall11 or winter21), raw or processed as by Ridnik et al. Their
processing keeps classes with more than 500 images and moves 50 images of each class to `val`.

The published processing takes the first 50 files in directory order. This program draws 50 files of
each class with a seed. The manifest has the seed, and `val-*.paths` names the files.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from data_prep.archives.guard import SourceError
from data_prep.archives.inventory import Inventory, Outline
from data_prep.errors import UserError
from data_prep.settings import Settings
from data_prep.sources.base import Arrangement, by_container, move_to_val
from data_prep.sources.synsets import SynsetSource, find_synsets, with_labels

_OF_RIDNIK = {"min_images", "val_per_class", "seed"}


class ImageNet21kSettings(Settings):
    """ImageNet-21k: the complete tar, a folder of synset tars, or a folder of synset folders."""

    kind: Literal["imagenet21k"]
    path: str = Field(examples=["downloads/fall11_whole.tar"])
    """Downloaded tar, or the folder that it unpacks to."""
    processing: Literal["ridnik", "raw"] = "ridnik"
    """ridnik: keep large classes and split off `val`, as Ridnik et al. raw: put all images into
    `train`."""
    min_images: int = Field(500, ge=0)
    """Keep classes with more images than this (ridnik only)."""
    val_per_class: int = Field(50, ge=1)
    """Number of images of each class in the split `val` (ridnik only)."""
    seed: int = Field(0, ge=0)
    """Seed that selects the images of `val` (ridnik only)."""

    @model_validator(mode="after")
    def _some_are_left_to_train_on(self) -> "ImageNet21kSettings":
        if self.processing == "ridnik" and self.min_images < self.val_per_class:
            raise UserError(
                "min_images",
                f"{self.min_images} is less than val_per_class, {self.val_per_class}, so val could "
                "get all images of a class",
                "raise min_images",
                code="bad-value",
            )
        return self


class ImageNet21kSource(SynsetSource, of=ImageNet21kSettings):
    settings: ImageNet21kSettings

    def describe(self) -> dict[str, Any]:
        unused = set() if self.settings.processing == "ridnik" else _OF_RIDNIK
        return self.settings.model_dump(mode="json", exclude={"path", *unused})

    def outline(self) -> Outline:
        if not self.path.exists():
            problem, fix = f"{self.path} does not exist", "give the tar, or its folder of synsets"
            raise SourceError("source.path", problem, fix, code="missing-path")
        place = "" if self.path == self.root else self.path.name
        synsets = find_synsets(self.root, place, split="train")
        classes = tuple(sorted(synsets))
        return Outline(classes=classes, containers=tuple(with_labels(synsets, classes)))

    def arrange(self, inventory: Inventory) -> Arrangement:
        everything = by_container(inventory)
        if self.settings.processing == "raw":
            return everything
        counts = np.bincount(inventory.labels, minlength=len(inventory.classes))
        large = counts > self.settings.min_images
        if not large.any():
            problem = f"no class has more than {self.settings.min_images} images"
            fix = "lower it, or set source.processing=raw"
            raise SourceError("source.min_images", problem, fix, code="empty")
        train = everything.splits["train"]
        chosen = train[large[inventory.labels[train]]]
        arrangement = Arrangement(
            splits={"train": chosen},
            labels=tuple(np.flatnonzero(large).tolist()),
            left_out={"small classes": len(train) - len(chosen)},
        )
        per_class = self.settings.val_per_class
        return move_to_val(inventory, arrangement, seed=self.settings.seed, per_class=per_class)
