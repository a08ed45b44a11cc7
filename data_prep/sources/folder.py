"""A folder of classes, with or without split folders above the classes; a class may have folders of its own."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.sources.arrange import hold_out
from data_prep.sources.base import Arrangement, Source, SourceError, by_container
from data_prep.sources.config import FolderSettings
from data_prep.sources.files import changed_files, list_files, only_folders, read_file
from data_prep.sources.inventory import Container, Entries, Entry, Inventory, Layout

SPLIT_NAMES = ("train", "val", "test")


class FolderSource(Source):
    def __init__(self, settings: FolderSettings):
        self.settings, self.root = settings, Path(settings.path)

    def describe(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json", exclude={"path"})

    def layout(self) -> Layout:
        if not self.root.is_dir():
            raise SourceError(f"source.path: {self.root} is not a directory; give the folder that holds the classes")
        top = only_folders(self.root, of="class")
        prefixes = {name: f"{name}/" for name in SPLIT_NAMES if name in top}
        others = [name for name in top if name not in prefixes] if prefixes else []
        if others:
            raise SourceError(
                f"source.path: {self.root} holds {' and '.join(prefixes)}, so it has split folders, but also {others[0]}/, which "
                f"is none of {', '.join(SPLIT_NAMES)}; rename it, or move it elsewhere"
            )
        prefixes = prefixes or {"train": ""}
        names = {split: only_folders(self.root / prefix, of="class") for split, prefix in prefixes.items()}
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

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        return changed_files(self.root, container, listed)
