"""A folder of classes, with or without split folders above the classes; a class may have folders of its own."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from data_prep.archives.files import changed_in_folder, list_files, only_folders, read_file
from data_prep.archives.guard import SourceError
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.settings import Settings
from data_prep.sources.base import Arrangement, Source, by_container, move_to_val

SPLIT_NAMES = ("train", "val", "test")


class FolderSettings(Settings):
    """A folder of classes: PATH/CLASS/*.jpg, or PATH/{train,val,test}/CLASS/*.jpg."""

    kind: Literal["folder"]
    path: str
    val_share: float = Field(0.0, ge=0, lt=1)
    """Share of each class that becomes the split `val` where the folder has no splits of its own (seeded): at least one picture
    where a class has two."""
    seed: int = Field(0, ge=0)


class FolderSource(Source):
    settings: FolderSettings

    def outline(self) -> Outline:
        if not self.path.is_dir():
            raise SourceError(f"source.path: {self.path} is not a directory; give the folder that holds the classes")
        top = only_folders(self.path, of="class")
        splits = [name for name in SPLIT_NAMES if name in top]
        others = [name for name in top if name not in splits]
        if splits and others:
            raise SourceError(
                f"source.path: {self.path} holds {'/ and '.join(splits)}/, so it has split folders, but also {others[0]}/, which "
                f"is none of {', '.join(SPLIT_NAMES)}; rename it, or move it elsewhere"
            )
        prefixes = {name: f"{name}/" for name in splits} or {"train": ""}
        names = {split: only_folders(self.path / prefix, of="class") for split, prefix in prefixes.items()}
        empty = [self.path / prefixes[split] for split, found in names.items() if not found]
        if empty:
            raise SourceError(
                f"source.path: {empty[0]} holds no class folders; the layout is PATH/CLASS/*.jpg or PATH/train/CLASS/*.jpg"
            )
        classes = tuple(sorted({name for found in names.values() for name in found}))
        labels = {name: label for label, name in enumerate(classes)}
        containers = [
            Container(path=f"{prefixes[split]}{name}", split=split, label=labels[name])
            for split, found in names.items()
            for name in found
        ]
        return Outline(classes=classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        assert container.label is not None
        return Entries.of(list_files(self.path / container.path), label=container.label)

    def arrange(self, inventory: Inventory) -> Arrangement:
        arrangement = by_container(inventory)
        share = self.settings.val_share
        if list(arrangement.splits) != ["train"] or not share:
            return arrangement

        def count(total: int) -> int:
            return max(1, round(total * share)) if total > 1 else 0

        return move_to_val(inventory, arrangement, count=count, seed=self.settings.seed)

    def read(self, entry: Entry) -> bytes:
        return read_file(self.path, entry)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        return changed_in_folder(self.path, container, listed)
