"""A folder of classes, with or without split folders above the classes."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.base import Item, Listing, SourceError
from data_prep.sources.config import FolderSettings

SPLIT_NAMES = ("train", "val", "test")


class FolderSource:
    def __init__(self, settings: FolderSettings):
        self.settings, self.root = settings, Path(settings.path)

    def describe(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json", exclude={"path"})

    def listing(self) -> Listing:
        if not self.root.is_dir():
            raise SourceError(f"source.path: {self.root} is not a directory; give the folder that holds the classes")
        splits = [name for name in SPLIT_NAMES if (self.root / name).is_dir()]
        roots = {name: name for name in splits} or {"train": ""}
        class_names = {split: _subfolders(self.root / prefix) for split, prefix in roots.items()}
        classes = tuple(sorted({name for names in class_names.values() for name in names}))
        if not classes:
            raise SourceError(
                f"source.path: {self.root} holds no class folders; the layout is PATH/CLASS/*.jpg or PATH/train/CLASS/*.jpg"
            )
        items = {split: self._items(prefix, class_names[split], classes) for split, prefix in roots.items()}
        for split, found in items.items():
            if not found:
                raise SourceError(f"source.path: the class folders of split {split} in {self.root} hold no files")
        labels = {item.label for found in items.values() for item in found}
        empty = [name for label, name in enumerate(classes) if label not in labels]
        if empty:
            raise SourceError(
                f"source.path: {len(empty)} class folders in {self.root} hold no files ({', '.join(empty[:3])}); "
                "remove them, or complete the archive"
            )
        if not splits and self.settings.val_share > 0:
            items = self._hold_out(items["train"])
        return Listing(classes=classes, splits=items)

    def read(self, locator: str) -> bytes:
        return (self.root / locator).read_bytes()

    def _items(self, prefix: str, names: list[str], classes: tuple[str, ...]) -> tuple[Item, ...]:
        found = []
        labels = {name: label for label, name in enumerate(classes)}
        for name in names:
            label = labels[name]
            relative = f"{prefix}/{name}" if prefix else name
            found += [Item(f"{relative}/{file}", label, size) for file, size in _files(self.root / relative)]
        return tuple(found)

    def _hold_out(self, items: tuple[Item, ...]) -> dict[str, tuple[Item, ...]]:
        """A seeded share of every class becomes `val`."""
        generator = np.random.Generator(np.random.Philox(self.settings.seed))
        held: set[int] = set()
        labels = np.array([item.label for item in items])
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            count = round(len(rows) * self.settings.val_share)
            held.update(generator.permutation(rows)[:count].tolist())
        train = tuple(item for row, item in enumerate(items) if row not in held)
        return {"train": train, "val": tuple(items[row] for row in sorted(held))}


def _subfolders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _files(root: Path) -> list[tuple[str, int]]:
    """(name, bytes) of every file; what is not an image is found out, and recorded, when it is decoded."""
    entries = [entry for entry in os.scandir(root) if entry.is_file() and not entry.name.startswith(".")]
    return sorted((entry.name, entry.stat().st_size) for entry in entries)
