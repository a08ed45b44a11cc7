"""Any dataset object `d` with torchvision's interface: `len(d)`, and (image, label) as `d[i]`.

The image is a PIL image, an array or a tensor, and is stored without loss. Arrays and tensors have
uint8 or floats from 0 to 1 (rounded to 8 bits), and channels first or last. `d.classes` names the
classes. Listing fetches every image unless the object has `d.targets` or `d.labels`; these are
checked against `d[i]`. Every process makes its own object.

The same index must give the same image every time, without random transforms. The manifest contains
the factory's name and only a hash of its arguments, which may be local paths.
"""

import io
import json
import operator
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from data_prep.archives.guard import SourceError
from data_prep.archives.inventory import Container, Entries, Entry, Outline
from data_prep.errors import Code
from data_prep.images import pgm, ppm
from data_prep.publish import hash_of_json
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Source

CHUNK = 4096
"""Number of items in a container. Each container is listed by one process."""


class DatasetSettings(Settings):
    """Any dataset object with `len()` and `[i] -> (image, label)`, for example torchvision's. The
    object's code is imported and executed."""

    kind: Literal["dataset"]
    factory: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", examples=["torchvision.datasets:SVHN"]
    )
    """Function or class that makes the object, as module:callable."""
    splits: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], dict[str, Any]] = Field(
        min_length=1, examples=[{"train": {"root": "downloads", "split": "train"}}]
    )
    """Keyword arguments of the factory for each split."""
    class_names: tuple[str, ...] | None = Field(None, examples=[["zero", "one"]])
    """Class names. Default: `classes` of the object; without `classes`, numbers."""


class DatasetSource(Source, of=DatasetSettings):
    settings: DatasetSettings

    def describe(self) -> dict[str, Any]:
        hashes = {split: hash_of_json(given) for split, given in self.settings.splits.items()}
        described = self.settings.model_dump(mode="json", exclude={"splits"})
        return described | {"arguments_sha256": hashes}

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
        """Return the items. Sizes are 0, because only fetching an image shows its size."""
        split, first = container.split, container.offset
        places = range(first, first + container.num_bytes)
        labels = (self._targets(split) or [])[places.start : places.stop]
        labels = labels or [_item(self._object(split), split, place)[1] for place in places]
        num_classes = len(self._classes())
        for place, label in zip(places, labels, strict=True):
            if label != UNLABELLED and not 0 <= label < num_classes:
                problem = f"item {place} has the label {label}, but there are {num_classes} classes"
                raise _mistake(split, problem, "set source.class_names", code="mismatch")
        return Entries.of([(f"{place:08d}", place, 0) for place in places], label=labels)

    def read(self, entry: Entry) -> bytes:
        split = entry.container.split
        image, label = _item(self._object(split), split, entry.offset)
        if label != entry.label:
            problem = f"item {entry.offset} has the label {label}, but {entry.label} in the targets"
            fix = "make targets and labels the same, with no target_transform"
            raise _mistake(split, problem, fix, code="mismatch")
        with _calling(split, f"the image of item {entry.offset} cannot be used"):
            return encode(image)

    def _object(self, split: str) -> Any:
        arguments = json.dumps(self.settings.splits[split], sort_keys=True)
        return _made(self.settings.factory, split, arguments)

    def _len(self, split: str) -> int:
        with _calling(split, "len() of the object fails"):
            count = len(self._object(split))
        if count == 0:
            raise _mistake(split, "the object is empty", "change its arguments", code="empty")
        return count

    def _classes(self) -> tuple[str, ...]:
        """Return the class names in the settings, or else in the objects, or else numbers."""
        if self.settings.class_names is not None:
            return self.settings.class_names
        names, counts = set[tuple[str, ...]](), list[int]()
        for split in self.settings.splits:
            made, targets = self._object(split), self._targets(split)
            named, count = getattr(made, "classes", None), getattr(made, "num_classes", None)
            if isinstance(named, list | tuple):
                names.add(tuple(map(str, named)))
            elif type(count) is int:
                counts.append(count)
            elif targets is not None:
                counts.append(1 + max(targets))
            else:
                counts.append(0)
        if len(names) == 1 and not counts:
            return names.pop()
        if names or 0 in counts:
            problem = "the objects do not all have the same classes, num_classes or targets"
            raise SourceError(
                "source.class_names", problem, "name the classes", code="missing-value"
            )
        return tuple(map(str, range(max(counts))))

    def _targets(self, split: str) -> list[int] | None:
        """Return all labels if the object has a list with one integer per image, else None."""
        made = self._object(split)
        found = getattr(made, "targets", None)
        found = getattr(made, "labels", None) if found is None else found
        if found is None:
            return None
        with _calling(split, "the object's targets cannot be read"):
            array = np.asarray(found)
        if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) != self._len(split):
            return None  # not one integer per image
        return [int(label) for label in array.tolist()]


@lru_cache(maxsize=16)
def _made(factory: str, split: str, arguments: str) -> Any:
    try:
        make = pkgutil.resolve_name(factory)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: no split has this name
        problem = f"{factory} cannot be imported ({error})"
        fix = "write module:callable, with the module's folder on PYTHONPATH"
        raise SourceError("source.factory", problem, fix, code="unknown-name") from None
    with _calling(split, f"{factory} fails"):
        return make(**json.loads(arguments))


def _item(made: Any, split: str, place: int) -> tuple[Any, int]:
    with _calling(split, f"item {place} is no pair of an image and an integer label"):
        image, label = made[place]
        return image, int(operator.index(label))


@contextmanager
def _calling(split: str, what: str) -> Iterator[None]:
    """Turn exceptions of the dataset's code into one SourceError."""
    try:
        yield
    except (SourceError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        fix = "fix the dataset object or its arguments"
        raise _mistake(split, f"{what} ({detail})", fix, code="bad-value") from None


def _mistake(split: str, problem: str, fix: str, *, code: Code) -> SourceError:
    return SourceError(f"source.splits.{split}", problem, fix, code=code)


def encode(image: Any) -> bytes:
    """Return a lossless image file of a PIL image, an array or a tensor. Raise ValueError for other
    shapes or values."""
    if hasattr(image, "save") and (image.mode not in ("RGB", "L") or "transparency" in image.info):
        stored = image
    else:
        pixels = _channels_last(np.asarray(image), first=hasattr(image, "permute"))
        pixels = np.ascontiguousarray(_to_uint8(pixels))
        if pixels.shape[2] == 1:
            return pgm(pixels[:, :, 0])
        if pixels.shape[2] == 3:
            return ppm(pixels)
        stored = Image.fromarray(pixels)
    buffer = io.BytesIO()
    stored.save(buffer, "PNG")
    return buffer.getvalue()


def _channels_last(pixels: NDArray[Any], *, first: bool) -> NDArray[Any]:
    """Return an array of shape (H, W, C). If the shape is ambiguous, channels are first in tensors
    and last in arrays."""
    if pixels.ndim == 2 and pixels.size:
        return pixels[:, :, None]
    if pixels.ndim == 3 and pixels.size:
        for place in (0, 2) if first else (2, 0):
            if pixels.shape[place] in (1, 3, 4):
                return np.moveaxis(pixels, place, 2)
    raise ValueError(
        f"an image of shape {pixels.shape}, not HW, HWC or CHW with 1, 3 or 4 channels"
    )


def _to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind == "f":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError("floats outside 0 to 1: remove normalization from the transform")
        return np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    raise ValueError(f"pixels of type {pixels.dtype}, not uint8 or floats from 0 to 1")
