"""A folder of classes, with or without split folders above the classes; a class may have folders of its own."""

import os
from pathlib import Path
from typing import Any

from data_prep.building.inventory import Container, Entries, Entry, Inventory, Layout
from data_prep.sources.arrange import hold_out
from data_prep.sources.base import Arrangement, Source, SourceError, by_container
from data_prep.sources.config import FolderSettings
from data_prep.sources.files import list_files, loose_pictures, read_file

SPLIT_NAMES = ("train", "val", "test")


class FolderSource(Source):
    def __init__(self, settings: FolderSettings):
        self.settings, self.root = settings, Path(settings.path)

    def describe(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json", exclude={"path"})

    def layout(self) -> Layout:
        if not self.root.is_dir():
            raise SourceError(f"source.path: {self.root} is not a directory; give the folder that holds the classes")
        splits = [name for name in SPLIT_NAMES if (self.root / name).is_dir()]
        prefixes = {name: f"{name}/" for name in splits} or {"train": ""}
        names = {split: subfolders(self.root / prefix) for split, prefix in prefixes.items()}
        self._check_levels(splits, prefixes)
        for split, found in names.items():
            if not found:
                raise SourceError(
                    f"source.path: {self.root / prefixes[split]} holds no class folders; "
                    "the layout is PATH/CLASS/*.jpg or PATH/train/CLASS/*.jpg"
                )
        classes = tuple(sorted({name for found in names.values() for name in found}))
        labels = {name: label for label, name in enumerate(classes)}
        containers = [
            Container(path=f"{prefixes[split]}{name}", split=split, label=labels[name])
            for split, found in names.items()
            for name in found
        ]
        return Layout(classes=classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        assert container.label is not None
        return Entries.of(list_files(self.root / container.path), label=container.label)

    def arrange(self, inventory: Inventory) -> Arrangement:
        arrangement = by_container(inventory)
        if list(arrangement.splits) == ["train"] and self.settings.val_share > 0:
            return hold_out(inventory, arrangement, share=self.settings.val_share, seed=self.settings.seed)
        return arrangement

    def read(self, entry: Entry) -> bytes:
        return read_file(self.root, entry)

    def _check_levels(self, splits: list[str], prefixes: dict[str, str]) -> None:
        """Nothing that looks like data may lie where it would not be read."""
        others = [name for name in subfolders(self.root) if name not in splits] if splits else []
        if others:
            raise SourceError(
                f"source.path: {self.root} holds {' and '.join(splits)}, so it has split folders, but also {others[0]}/, which is "
                f"none of {', '.join(SPLIT_NAMES)}; rename it, or move it elsewhere"
            )
        for folder in {self.root, *(self.root / prefix for prefix in prefixes.values())}:
            loose = loose_pictures(folder)
            if loose:
                raise SourceError(
                    f"source.path: {len(loose)} pictures lie in {folder} itself, in no class ({loose[0]}); move them"
                )


def subfolders(root: Path) -> list[str]:
    with os.scandir(root) as found:
        return sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
