"""A folder of classes, with or without split folders above the classes; a class may have folders of its own. Or a folder without
classes and a table of its pictures' labels (archives/labels.py), which is then the one container.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from data_prep.archives.files import changed_in_folder, is_picture, list_files, only_folders, read_file
from data_prep.archives.guard import SourceError, stamp_of
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.archives.labels import Row, class_names, read_labels, rows_of_files
from data_prep.publish import hash_of_json
from data_prep.settings import Settings
from data_prep.sources.base import Arrangement, Source, by_container, move_to_val

SPLIT_NAMES = ("train", "val", "test")


class FolderSettings(Settings):
    """A folder of classes: PATH/CLASS/*.jpg, or PATH/{train,val,test}/CLASS/*.jpg; or PATH/*.jpg with a table of labels."""

    kind: Literal["folder"]
    path: str = Field(examples=["photos"])
    """The folder."""
    val_share: float = Field(0.1, ge=0, lt=1)
    """Share of each class that becomes the split `val` where the folder has no splits of its own (seeded): at least one picture
    where a class has two, none where it has one. 0: none at all."""
    seed: int = Field(0, ge=0)
    """Of which pictures become `val`."""
    labels: str | None = Field(None, examples=["photos/labels.csv"])
    """A CSV or Parquet file with a row for each picture below `path`: its file, its label and, if it likes, its split."""
    columns: dict[Literal["file", "label", "split"], str] = Field(default={}, examples=[{"label": "species"}])
    """What the table calls them, where it is no usual name (`file`, `path`, `image_id`, ...; `label`, `class`, ...; `split`).
    Splits are train, val and test."""


class FolderSource(Source):
    settings: FolderSettings

    def describe(self) -> dict[str, Any]:
        """Of a table what it says, wherever it lies and however it is written."""
        described = self.settings.model_dump(mode="json", exclude={"path", "labels", "columns"})
        return described if self.settings.labels is None else described | {"labels": hash_of_json(sorted(self._table()))}

    def outline(self) -> Outline:
        if not self.path.is_dir():
            raise SourceError(f"source.path: {self.path} is not a directory; give the folder that holds the classes")
        if self.settings.labels is not None:
            file, classes = Path(self.settings.labels), class_names(self._table())
            return Outline(classes, (Container(path="", split="train"),), beside=((file.name, stamp_of([file])),))
        give_table = "move them into a folder for each class, or name a table of their labels: source.labels=FILE.csv"
        top = only_folders(self.path, of="class", remedy=give_table)
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
        listed = list_files(self.path / container.path)
        if container.label is not None:
            return Entries.of(listed, label=container.label)
        plain = {name for name, _, num_bytes in listed if num_bytes >= 0}
        rows = self._rows([name for name, _, _ in listed], is_picture=lambda name: name in plain and is_picture(self.path / name))
        numbers = {name: label for label, name in enumerate(class_names(rows.values()))}
        listed = [each for each in listed if each[0] in rows]
        return Entries.of(listed, label=[numbers[rows[name].label] for name, _, _ in listed])

    def arrange(self, inventory: Inventory) -> Arrangement:
        arrangement, share = by_container(inventory), self.settings.val_share
        if self.settings.labels is not None:
            names = [inventory.name(row) for row in range(len(inventory))]
            rows = self._rows(names, is_picture=lambda _: True)
            of_row = np.array([rows[name].split or "train" for name in names])
            splits = {str(split): np.flatnonzero(of_row == split).astype(np.int32) for split in np.unique(of_row)}
            arrangement = Arrangement(splits)
        if list(arrangement.splits) != ["train"] or not share:
            return arrangement

        def count(total: int) -> int:
            return max(1, round(total * share)) if total > 1 else 0

        moved = move_to_val(inventory, arrangement, count=count, seed=self.settings.seed)
        return moved if moved.num_held_out else arrangement

    def read(self, entry: Entry) -> bytes:
        return read_file(self.path, entry)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        if self.settings.labels is None:
            return changed_in_folder(self.path, container, listed)
        listed = list(listed)
        return changed_in_folder(self.path, container, listed, among={entry.name for entry in listed})

    def _table(self) -> tuple[Row, ...]:
        assert self.settings.labels is not None
        file = Path(self.settings.labels)
        return read_labels(file, stamp_of([file]) if file.exists() else "", tuple(sorted(self.settings.columns.items())))

    def _rows(self, files: list[str], *, is_picture: Callable[[str], bool]) -> Mapping[str, Row]:
        """The row of each file that has one."""
        file = Path(self.settings.labels or "")
        return rows_of_files(file, self._table(), files=files, is_picture=is_picture, folder=self.path)
