"""A folder of classes, with or without split folders above the classes; a class may have
subfolders. Alternatively, a folder of images with a table of labels (archives/labels.py). Such a
folder is one container.

Files without the ending or first bytes of an image are skipped and counted by their ending.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from pydantic import Field

from data_prep.archives.files import (
    NO_IMAGE,
    changed_in_folder,
    only_folders,
    read_file,
    walk_images,
)
from data_prep.archives.guard import SourceError, stamp_of
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.archives.labels import SPLITS, Row, class_names, read_labels, rows_of_files
from data_prep.publish import hash_of_json
from data_prep.settings import Settings, printable
from data_prep.sources.base import UNLABELLED, Arrangement, Source, by_container, hold_out

NUM_ENDINGS = 5
"""Number of the most common file name endings that are counted separately."""


class FolderSettings(Settings):
    """A folder of classes: PATH/CLASS/*.jpg, or PATH/{train,val,test}/CLASS/*.jpg; or PATH/*.jpg
    with a table of labels. `Training`, `valid` and other common split names are recognized."""

    kind: Literal["folder"]
    path: str = Field(examples=["photos"])
    """Folder of the images."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of each class of `train` that becomes `val`, if the folder has no `val`. Classes of
    two or more images give at least one; a class of one image stays in `train`. Byte-equal files
    stay in one split and count as one. 0: no `val`."""
    seed: int = Field(0, ge=0)
    """Seed that selects the images of `val`."""
    labels: str | None = Field(None, examples=["photos/labels.csv"])
    """CSV or Parquet file with a row for each image below `path`: file, label and, optionally,
    split (train, val or test)."""
    columns: dict[Literal["file", "label", "split"], str] = Field(
        default={}, examples=[{"label": "species"}]
    )
    """Columns of the table with the file, label and split. Set this only if the columns have
    unusual names or if several columns fit. Common names (`file`, `path`, `image_id`, ...; `label`,
    `class`, ...; `split`) are recognized."""


class FolderSource(Source, of=FolderSettings):
    settings: FolderSettings

    def describe(self) -> dict[str, Any]:
        """Return the settings, with a hash of the rows of a table."""
        described = self.settings.model_dump(mode="json", exclude={"path", "labels", "columns"})
        if self.settings.labels is not None:
            described["labels"] = f"table {hash_of_json(sorted(self._table()))[:16]}"
        return described

    def outline(self) -> Outline:
        if not self.path.is_dir():
            problem, fix = f"{self.path} is not a folder", "give the folder of the classes"
            raise SourceError("source.path", problem, fix, code="missing-path")
        if self.settings.labels is not None:
            file, classes = Path(self.settings.labels), class_names(self._table())
            beside = ((file.name, stamp_of([file])),)
            return Outline(classes, (Container(path="", split="train"),), beside)
        give_table = "move them into class folders, or name a table: source.labels=FILE.csv"
        top = only_folders(self.path, fix=give_table)
        splits = {f"{name}/": SPLITS[name.lower()] for name in top if name.lower() in SPLITS}
        others = [name for name in top if name.lower() not in SPLITS]
        if splits and others:
            split = next(iter(splits))
            problem = f"{self.path} contains the split {split} and {others[0]}/, which is no split"
            fix = f"move {others[0]}/, or rename {split} if it is a class"
            raise SourceError("source.path", problem, fix, code="unknown-format")
        splits = splits or {"": "train"}
        names = {prefix: only_folders(self.path / prefix) for prefix in splits}
        for prefix, found in names.items():
            if not found:
                problem = f"{self.path / prefix} contains no class folders"
                fix = "give PATH/CLASS/*.jpg or PATH/train/CLASS/*.jpg"
                raise SourceError("source.path", problem, fix, code="unknown-format")
        classes = tuple(sorted({name for found in names.values() for name in found}))
        labels = {name: label for label, name in enumerate(classes)}
        containers = [
            Container(path=f"{prefix}{name}", split=splits[prefix], label=labels[name])
            for prefix, found in names.items()
            for name in found
        ]
        return Outline(classes=classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        listed = list(walk_images(self.path / container.path))
        if container.label is not None:
            return Entries.of(listed, label=container.label)
        rows = self._rows([name for name, _, num_bytes in listed if num_bytes != NO_IMAGE])
        numbers = {name: label for label, name in enumerate(class_names(rows.values()))}
        labels = [numbers[rows[name].label] if name in rows else UNLABELLED for name, *_ in listed]
        return Entries.of(listed, label=labels)

    def arrange(self, inventory: Inventory) -> Arrangement:
        is_input = inventory.sizes != NO_IMAGE
        counts = Counter(
            PurePosixPath(printable(inventory.name(row))).suffix.lower()
            for row in np.flatnonzero(~is_input).tolist()
        ).most_common()
        left_out = {
            f"{ending} files" if ending else "files without an ending": count
            for ending, count in counts[:NUM_ENDINGS]
        }
        left_out["other files"] = sum(count for _, count in counts[NUM_ENDINGS:])
        rows_of = by_container(inventory).splits
        splits = {split: rows[is_input[rows]] for split, rows in rows_of.items()}
        if self.settings.labels is not None:
            names = [inventory.name(row) for row in splits["train"].tolist()]
            rows = self._rows(names)
            of_row = np.array([rows[name].split or "train" for name in names])
            splits = {str(split): splits["train"][of_row == split] for split in np.unique(of_row)}
        return hold_out(
            inventory,
            Arrangement(splits, left_out=left_out),
            share=self.settings.val_fraction,
            seed=self.settings.seed,
            root=self.path,
        )

    def read(self, entry: Entry) -> bytes:
        return read_file(self.path, entry)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        return changed_in_folder(container, listed, walk_images(self.path / container.path))

    def _table(self) -> tuple[Row, ...]:
        file = Path(self.settings.labels or "")
        stamp = stamp_of([file]) if file.exists() else ""
        return read_labels(file, stamp, tuple(self.settings.columns.items()), self.path)

    def _rows(self, files: list[str]) -> Mapping[str, Row]:
        table = Path(self.settings.labels or "")
        return rows_of_files(table, self._table(), files=files, folder=self.path)
