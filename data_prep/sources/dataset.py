"""Any dataset object in the manner of torchvision: `len(d)`, and `d[i]` is (picture, label).

The picture is a PIL image, an array or a tensor (uint8, or floats from 0 to 1; channels first or
last); it is taken over without loss. `d.classes` names the classes, `d.targets` or `d.labels` spare
the listing from fetching every picture; what `d[i]` then says is held against them. Every process
makes its own object. This module never imports torch: a tensor is an array to it.

The same index must give the same picture every time, so transforms with randomness have no place
here. `factory` and its keyword arguments decide the content, so they stand in the manifest, but for
values that are paths of this machine.
"""

import io
import json
import operator
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from data_prep.archives.guard import SourceError
from data_prep.archives.inventory import Container, Entries, Entry, Outline
from data_prep.images import pgm, ppm
from data_prep.publish import hash_of_json
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Source

CHUNK: Final = 4096
"""Items of a container: listing, where it has to fetch pictures, goes on in as many processes as
there are chunks."""


class DatasetSettings(Settings):
    """Any object with `len()` and `[i] -> (picture, label)`, such as torchvision's datasets. Its
    code is imported and run."""

    kind: Literal["dataset"]
    factory: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", examples=["torchvision.datasets:SVHN"]
    )
    """module:callable, such as torchvision.datasets:SVHN"""
    splits: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], dict[str, Any]] = Field(
        min_length=1, examples=[{"train": {"root": "downloads", "split": "train"}}]
    )
    """What the factory is called with, by keyword, for each split."""
    class_names: tuple[str, ...] | None = Field(None, examples=[["zero", "one"]])
    """By default the object's own `classes`, or else numbers."""


class DatasetSource(Source):
    settings: DatasetSettings

    def describe(self) -> dict[str, Any]:
        """The arguments are hashed: they decide the pictures, but may hold paths of this machine,
        or secrets."""
        arguments = {name: hash_of_json(given) for name, given in self.settings.splits.items()}
        return self.settings.model_dump(mode="json", exclude={"splits"}) | {
            "arguments_sha256": arguments
        }

    def outline(self) -> Outline:
        counts = {split: self._len(split) for split in self.settings.splits}
        containers = [
            Container(
                path=f"{split}/{start // CHUNK:06d}",
                split=split,
                offset=start,
                num_bytes=min(CHUNK, count - start),
            )
            for split, count in counts.items()
            for start in range(0, count, CHUNK)
        ]
        return Outline(classes=self._classes(), containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        """The size of a picture is not known before it is fetched, so it is listed as 0."""
        split, places = (
            container.split,
            range(container.offset, container.offset + container.num_bytes),
        )
        labels = (self._targets(split) or [])[places.start : places.stop]
        labels = labels or [_item(self._object(split), split, place)[1] for place in places]
        num_classes = len(self._classes())
        for place, label in zip(places, labels, strict=True):
            if label != UNLABELLED and not 0 <= label < num_classes:
                raise SourceError(
                    f"source.splits.{split}: item {place} has the label {label}, but there are"
                    f" {num_classes} classes; set source.class_names"
                )
        return Entries.of([(f"{place:08d}", place, 0) for place in places], label=labels)

    def read(self, entry: Entry) -> bytes:
        split = entry.container.split
        picture, label = _item(self._object(split), split, entry.offset)
        if label != entry.label:
            raise SourceError(
                f"source.splits.{split}: item {entry.offset} has the label {label}, {entry.label}"
                " when it was listed; the object's targets must be its labels, with no"
                " target_transform, and the same every time"
            )
        with _calling(split, f"the picture of item {entry.offset} cannot be used"):
            return encode(picture)

    def _object(self, split: str) -> Any:
        return _made(
            self.settings.factory, split, json.dumps(self.settings.splits[split], sort_keys=True)
        )

    def _len(self, split: str) -> int:
        with _calling(split, "len() of the object fails"):
            count = len(self._object(split))
        if count == 0:
            raise SourceError(f"source.splits.{split}: the object is empty; change its arguments")
        return count

    def _classes(self) -> tuple[str, ...]:
        if self.settings.class_names is not None:
            return self.settings.class_names
        objects = [self._object(split) for split in self.settings.splits]
        named = [getattr(made, "classes", None) for made in objects]
        lists = [tuple(map(str, names)) for names in named if isinstance(names, list | tuple)]
        if lists:
            if len(set(lists)) > 1 or len(lists) < len(objects):
                raise SourceError(
                    "source.splits: the objects do not all have the same classes; set"
                    " source.class_names"
                )
            return lists[0]
        counts = [getattr(made, "num_classes", None) for made in objects]
        if not all(type(count) is int for count in counts):
            targets = [self._targets(split) for split in self.settings.splits]
            counts = [None if labels is None else 1 + max(labels) for labels in targets]
        known = [count for count in counts if count is not None]
        if len(known) < len(objects):
            raise SourceError(
                "source.class_names: the objects have neither classes nor num_classes nor targets;"
                " name the classes here"
            )
        return tuple(map(str, range(max(known))))

    def _targets(self, split: str) -> list[int] | None:
        """All labels, where the object has them at hand."""
        made = self._object(split)
        found = getattr(made, "targets", None)
        found = getattr(made, "labels", None) if found is None else found
        if found is None:
            return None
        with _calling(split, "the object's targets cannot be read"):
            array = np.asarray(found)
        if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) != self._len(split):
            return None  # not one label for each picture: each item says its own
        return [int(label) for label in array.tolist()]


@lru_cache(maxsize=16)
def _made(factory: str, split: str, arguments: str) -> Any:
    try:
        make = pkgutil.resolve_name(factory)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: it is no such name
        raise SourceError(
            f"source.factory: {factory} cannot be imported ({error}); write module:callable, with"
            " the module's folder on PYTHONPATH"
        ) from None
    with _calling(split, f"{factory} fails"):
        return make(**json.loads(arguments))


def _item(made: Any, split: str, place: int) -> tuple[Any, int]:
    with _calling(split, f"item {place} cannot be fetched as (picture, label)"):
        picture, label = made[place]
    with _calling(split, f"item {place} has no integer for a label"):
        return picture, int(operator.index(label))


@contextmanager
def _calling(split: str, what: str) -> Iterator[None]:
    """Around code of others, which may raise anything."""
    try:
        yield
    except (SourceError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise SourceError(
            f"source.splits.{split}: {what} ({detail}); mend the object or its arguments"
        ) from None


def encode(picture: Any) -> bytes:
    """The lossless file of a PIL image, an array or a tensor; raises `ValueError` for anything
    else."""
    if hasattr(picture, "save") and (
        picture.mode not in ("RGB", "L") or "transparency" in picture.info
    ):
        image = picture
    else:
        pixels = _channels_last(np.asarray(picture), first=hasattr(picture, "permute"))
        pixels = np.ascontiguousarray(_to_uint8(pixels))
        if pixels.shape[2] == 1:
            return pgm(pixels[:, :, 0])
        if pixels.shape[2] == 3:
            return ppm(pixels)
        image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _channels_last(pixels: NDArray[Any], *, first: bool) -> NDArray[Any]:
    """(H, W, C). A tensor's channels come first where both readings are possible, an array's
    last."""
    if pixels.ndim == 2 and pixels.size:
        return pixels[:, :, None]
    if pixels.ndim == 3 and pixels.size:
        for place in (0, 2) if first else (2, 0):
            if pixels.shape[place] in (1, 3, 4):
                return np.moveaxis(pixels, place, 2)
    raise ValueError(
        f"a picture of the shape {pixels.shape}; it must be HW, HWC or CHW with 1, 3 or 4 channels"
    )


def _to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind == "f":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError("floats beyond 0 to 1; take normalisation out of the transform")
        return np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    raise ValueError(
        f"pixels of the type {pixels.dtype}; uint8, or floats from 0 to 1, can be used"
    )
