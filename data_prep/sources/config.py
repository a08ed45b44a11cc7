"""The settings section of each source, told apart by `kind`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_prep.settings import Settings

Md5Policy = Literal["published", "off"]
"""published: a file that is not the published one, to the byte, is refused; off: its structure alone is checked."""


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

    @model_validator(mode="after")
    def _some_are_left_to_train_on(self) -> "ImageNet21kSettings":
        if self.processing == "ridnik" and self.min_images < self.val_per_class:
            raise ValueError(
                f"source.min_images: {self.min_images} is less than val_per_class, {self.val_per_class}; a class could lose all "
                "its images to validation"
            )
        return self


class ImageNet1kSettings(Settings):
    """ImageNet-1k: a folder with the downloaded archives, or with what they unpack to."""

    kind: Literal["imagenet1k"]
    path: str
    splits: tuple[Literal["train", "val"], ...] = Field(("train", "val"), min_length=1)
    real: str | None = None
    """The file real.json, for the reassessed labels of val."""
    md5: Literal["devkit", "all", "off"] = "devkit"
    """Which archives are held against their published MD5; `all` reads 144 GB once more."""


class CifarSettings(Settings):
    """CIFAR-10 or CIFAR-100, python or binary version; which of them is told by the content."""

    kind: Literal["cifar"]
    path: str
    """The .tar.gz as downloaded, or the folder that it unpacks to."""
    labels: Literal["fine", "coarse"] = "fine"
    """CIFAR-100 has 100 fine and 20 coarse classes."""
    md5: Md5Policy = "published"


class MnistSettings(Settings):
    """MNIST or what is published in its layout: a folder of four idx files, .gz or not."""

    kind: Literal["mnist"]
    path: str
    variant: Literal["mnist", "fashion", "kmnist", "other"] = "mnist"
    """Whose published sums and class names these are; other (EMNIST, say) has none."""
    prefix: str = Field("", pattern="^[a-z-]*$")
    """What all file names begin with, such as emnist-letters-"""
    transposed: bool = False
    """EMNIST's pictures are stored with rows and columns exchanged."""
    class_names: tuple[str, ...] | None = None
    """By default those of the variant, or else the numbers."""
    md5: Md5Policy = "published"


class Stl10Settings(Settings):
    """STL-10, binary version, with its ten folds."""

    kind: Literal["stl10"]
    path: str
    """stl10_binary.tar.gz as downloaded, or the folder that it unpacks to."""
    unlabelled: bool = True
    """Whether the 100,000 pictures without labels become the split `unlabelled`."""
    md5: Md5Policy = "published"


class TinyImageNetSettings(Settings):
    """TinyImageNet-200."""

    kind: Literal["tinyimagenet"]
    path: str
    """tiny-imagenet-200.zip as downloaded, or the folder that it unpacks to."""
    unlabelled_test: bool = False
    """Whether the 10,000 test pictures, whose labels were never published, become the split `test`."""


class DatasetSettings(Settings):
    """Any object with `len()` and `[i] -> (picture, label)`, such as torchvision's datasets. Its code is imported and run."""

    kind: Literal["dataset"]
    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """module:callable, such as torchvision.datasets:SVHN"""
    splits: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], dict[str, Any]] = Field(min_length=1)
    """What the factory is called with, by keyword, for each split."""
    class_names: tuple[str, ...] | None = None
    """By default the object's own `classes`, or else numbers."""


SourceSettings = Annotated[
    FolderSettings
    | SyntheticSettings
    | ImageNet21kSettings
    | ImageNet1kSettings
    | CifarSettings
    | MnistSettings
    | Stl10Settings
    | TinyImageNetSettings
    | DatasetSettings,
    Field(discriminator="kind"),
]
