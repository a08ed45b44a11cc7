"""A procedural archive: writes real JPEG files into a folder of classes, which `FolderSource` then reads like any other.

The picture number i of a class is a function of (seed, class, split, i) alone, so any count and resolution is a prefix or a
redrawing of the same data. The sets "a" and "b" share no class: of all shape x colour x quadrant combinations, "a" takes those
of even parity and "b" those of odd parity, so that every attribute occurs in both.

`begun.json` (whose pictures these are) is written first, a class folder is drawn under a temporary name and then renamed, and
`complete.json` is written last: a killed run goes on with the classes that it lacks. (No fsync for each picture: after a power
cut, delete the folder.)
"""

import io
import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.build.workers import worker_pool
from data_prep.progress import progress
from data_prep.publish import TEMPORARY_PREFIX, sole_writer, write_json
from data_prep.sources.base import Arrangement, Source, SourceError
from data_prep.sources.config import FolderSettings, SyntheticSettings
from data_prep.sources.drawing import COLOURS, QUADRANTS, SHAPES, Look, draw
from data_prep.sources.folder import FolderSource
from data_prep.sources.inventory import Container, Entries, Entry, Inventory, Layout

JPEG_QUALITY = 90
BEGUN_NAME, COMPLETE_NAME = "begun.json", "complete.json"
SPLIT_NUMBERS = {"train": 0, "val": 1}


def class_set(name: str, *, num_classes: int) -> tuple[Look, ...]:
    """The first `num_classes` looks of a set, in a fixed mixed order, so that few classes still differ in everything."""
    combinations = itertools.product(enumerate(SHAPES), enumerate(COLOURS), enumerate(QUADRANTS))
    parity = {"a": 0, "b": 1}[name]
    looks = [Look(s, c, q) for (i, s), (j, c), (k, q) in combinations if (i + j + k) % 2 == parity]
    order = np.random.Generator(np.random.Philox(20240)).permutation(len(looks))
    return tuple(looks[row] for row in order[:num_classes])


def picture_bytes(look: Look, *, split: str, number: int, size: int, seed: int) -> bytes:
    """The JPEG file of one picture."""
    identity = [seed, SHAPES.index(look.shape), list(COLOURS).index(look.colour), list(QUADRANTS).index(look.quadrant)]
    sequence = np.random.SeedSequence([*identity, SPLIT_NUMBERS[split], number])
    pixels = draw(look, size=size, generator=np.random.Generator(np.random.Philox(sequence)))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


class SyntheticSource(Source):
    def __init__(self, settings: SyntheticSettings, *, num_workers: int):
        assert settings.images_dir is not None, "build resolves the default"
        self.settings, self.num_workers, self.root = settings, num_workers, Path(settings.images_dir)
        self._folder = FolderSource(FolderSettings(kind="folder", path=str(self.root)))

    def describe(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json", exclude={"images_dir"})

    def layout(self) -> Layout:
        with sole_writer(self.root, wait=True):
            self._write_images()
        return self._folder.layout()

    def entries(self, container: Container) -> Entries:
        return self._folder.entries(container)

    def arrange(self, inventory: Inventory) -> Arrangement:
        return self._folder.arrange(inventory)

    def read(self, entry: Entry) -> bytes:
        return self._folder.read(entry)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        return self._folder.changed(container, listed)

    def _write_images(self) -> None:
        begun, complete = self.root / BEGUN_NAME, self.root / COMPLETE_NAME
        strangers = {path.name for path in self.root.iterdir()} - {".lock", TEMPORARY_PREFIX + BEGUN_NAME}
        if strangers and not begun.exists():
            raise SourceError(
                f"source.images_dir: {self.root} holds {min(strangers)}, and no pictures of this tool; name another directory"
            )
        for path in (begun, complete):
            if path.exists() and json.loads(path.read_text()) != self.describe():
                raise SourceError(
                    f"source.images_dir: {self.root} holds pictures of other settings; remove it or name another"
                )
        if complete.exists():
            return
        write_json(begun, self.describe())
        looks = class_set(self.settings.class_set, num_classes=self.settings.num_classes)
        counts = {"train": self.settings.num_train_per_class, "val": self.settings.num_val_per_class}
        jobs = [(look, split, count) for look in looks for split, count in counts.items() if count]
        with (
            worker_pool(self.num_workers) as pool,
            progress("drawing pictures", total=sum(count for _, _, count in jobs), unit="images") as line,
        ):
            for count in pool.map(self._write_class, *zip(*jobs, strict=True)):
                line.advance(count)
        write_json(complete, self.describe())

    def _write_class(self, look: Look, split: str, count: int) -> int:
        folder = self.root / split / look.name
        if folder.exists():
            return count
        temporary = folder.with_name(TEMPORARY_PREFIX + folder.name)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for number in range(count):
            data = picture_bytes(
                look, split=split, number=number, size=self.settings.image_size, seed=self.settings.seed
            )
            (temporary / f"{number:06d}.jpg").write_bytes(data)
        temporary.rename(folder)
        return count
