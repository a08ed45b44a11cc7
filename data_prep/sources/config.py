"""The settings section of each source, told apart by `kind`."""

from typing import Annotated, Literal

from pydantic import Field

from data_prep.settings import Settings


class FolderSettings(Settings):
    """A folder of classes: PATH/CLASS/*.jpg, or PATH/{train,val,test}/CLASS/*.jpg."""

    kind: Literal["folder"]
    path: str
    val_share: float = Field(0.0, ge=0, lt=1)
    """Share of each class that becomes the split `val` where the folder has no splits of its own (seeded)."""
    seed: int = Field(0, ge=0)


class SyntheticSettings(Settings):
    """Procedural pictures: class = shape x colour x position. See `data_prep/sources/synthetic.py`."""

    kind: Literal["synthetic"]
    class_set: Literal["a", "b"] = "a"
    """Two disjoint sets of classes, so that a model pretrained on one can be transferred to the other."""
    num_classes: int = Field(48, ge=2, le=48)
    num_train_per_class: int = Field(100, ge=1)
    num_val_per_class: int = Field(20, ge=0)
    image_size: int = Field(48, ge=16, le=512)
    seed: int = Field(0, ge=0)
    images_dir: str | None = None
    """Where the JPEG files are written; by default `OUT-images` beside the dataset."""


class ImageNet21kSettings(Settings):
    """ImageNet-21k: the whole tar, a folder of synset tars, or a folder of synset folders."""

    kind: Literal["imagenet21k"]
    path: str
    processing: Literal["ridnik", "raw"] = "ridnik"
    """ridnik: large classes alone, with a validation split; raw: every class and image, in the split train."""
    min_images: int = Field(500, ge=0)
    """Classes with more images than this stay."""
    val_per_class: int = Field(50, ge=1)
    seed: int = Field(0, ge=0)
    """Draws the validation images."""


class ImageNet1kSettings(Settings):
    """ImageNet-1k: a folder with the downloaded archives, or with what they unpack to."""

    kind: Literal["imagenet1k"]
    path: str
    splits: tuple[Literal["train", "val"], ...] = Field(("train", "val"), min_length=1)
    real: str | None = None
    """The file real.json, for the reassessed labels of val."""
    md5: Literal["devkit", "all", "off"] = "devkit"
    """Which archives are held against their published MD5; `all` reads 144 GB once more."""


SourceSettings = Annotated[
    FolderSettings | SyntheticSettings | ImageNet21kSettings | ImageNet1kSettings, Field(discriminator="kind")
]
