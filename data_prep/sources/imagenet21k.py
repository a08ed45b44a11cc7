"""ImageNet-21k as it is downloaded (fall11 or winter21), raw or with the processing of Ridnik et
al.: classes with more than 500 images stay, and 50 images of each are held out for validation.

The published processing takes whatever 50 files a directory lists first. Here they are drawn by a
seed, for each class from its own files alone; the manifest says the seed, and `val-*.paths` names
the files.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from data_prep.archives.guard import SourceError
from data_prep.archives.inventory import Inventory, Outline
from data_prep.settings import Settings
from data_prep.sources.base import Arrangement, by_container, move_to_val
from data_prep.sources.synsets import SynsetSource, find_synsets, labelled


class ImageNet21kSettings(Settings):
    """ImageNet-21k: the whole tar, a folder of synset tars, or a folder of synset folders."""

    kind: Literal["imagenet21k"]
    path: str = Field(examples=["downloads/winter21_whole.tar.gz"])
    """The tar as downloaded, or the folder that it unpacks to."""
    processing: Literal["ridnik", "raw"] = "ridnik"
    """ridnik: large classes alone, with a validation split; raw: every class and image, in the
    split train."""
    min_images: int = Field(500, ge=0)
    """Classes with more images than this stay."""
    val_per_class: int = Field(50, ge=1)
    """Of each class that stays, the pictures in the split `val`."""
    seed: int = Field(0, ge=0)
    """Draws the validation images."""

    @model_validator(mode="after")
    def _some_are_left_to_train_on(self) -> "ImageNet21kSettings":
        if self.processing == "ridnik" and self.min_images < self.val_per_class:
            raise ValueError(
                f"source.min_images: {self.min_images} is less than val_per_class,"
                f" {self.val_per_class}; a class could lose all its images to validation"
            )
        return self


class ImageNet21kSource(SynsetSource):
    settings: ImageNet21kSettings

    def describe(self) -> dict[str, Any]:
        excluded = (
            {"path"}
            if self.settings.processing == "ridnik"
            else {"path", "min_images", "val_per_class", "seed"}
        )
        return self.settings.model_dump(mode="json", exclude=excluded)

    def outline(self) -> Outline:
        if not self.path.exists():
            raise SourceError(
                f"source.path: no {self.path}; give the whole tar, the folder of synset tars, or of"
                " synset folders"
            )
        synsets = find_synsets(
            self.root, "" if self.path == self.root else self.path.name, split="train"
        )
        classes = tuple(sorted(synsets))
        return Outline(classes=classes, containers=tuple(labelled(synsets, classes)))

    def arrange(self, inventory: Inventory) -> Arrangement:
        everything = by_container(inventory)
        if self.settings.processing == "raw":
            return everything
        counts = np.bincount(inventory.labels, minlength=len(inventory.classes))
        large = counts > self.settings.min_images
        if not large.any():
            raise SourceError(
                f"source.min_images: no class has more than {self.settings.min_images} images; "
                "lower it, or take source.processing=raw"
            )
        train = everything.splits["train"]
        staying = train[large[inventory.labels[train]]]
        chosen = Arrangement(
            splits={"train": staying},
            labels=tuple(np.flatnonzero(large).tolist()),
            left_out={"small classes": len(train) - len(staying)},
        )
        return move_to_val(
            inventory,
            chosen,
            count=lambda _total: self.settings.val_per_class,
            seed=self.settings.seed,
        )
