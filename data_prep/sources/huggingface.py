"""Datasets that Hugging Face's package `datasets` has saved: a folder of `save_to_disk` (Arrow), or
Parquet files, as on the hub. pyarrow reads both, without network and without copies.

Arrow files are memory-mapped. To read one image of a Parquet file, its complete row group must be
decompressed. For a large dataset, use save_to_disk first, or build with order=listed.
"""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from data_prep.archives.guard import (
    SourceError,
    changed_since,
    check_unchanged,
    damaged,
    report_damage,
    stamp_of,
)
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.archives.labels import COLUMNS, SPLITS, sorted_names
from data_prep.errors import Code
from data_prep.images.rejection import MAX_DETAIL_CHARACTERS, Rejection
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Arrangement, Source, by_container, hold_out

NUM_HELD, NUM_SCHEMAS = 8, 4096
"""Number of row groups, and of file schemas, that a process keeps in memory."""
MOST_CLASSES = 1 << 20
Role = Literal["image", "label"]


class HuggingFaceSettings(Settings):
    """A dataset of Hugging Face's `datasets`, saved by save_to_disk, or its Parquet files. Nothing
    is downloaded."""

    kind: Literal["huggingface"]
    path: str = Field(examples=["downloads/beans"])
    """Folder that save_to_disk wrote, a Parquet file, or a folder of Parquet files. The split is a
    word of the file name (cifar10-train.parquet) or of its folder. Without such words, all files
    are `train`."""
    columns: dict[Role, str] = Field(default={}, examples=[{"image": "img", "label": "fine_label"}])
    """Columns of the image and the label. Default: the only image column; the only ClassLabel
    column or, if there is none, the only column with a usual label name."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of each class of `train` that becomes `val`, if there is no `val`."""
    seed: int = Field(0, ge=0)
    """Seed that selects the images of `val`."""


class HuggingFaceSource(Source, of=HuggingFaceSettings):
    settings: HuggingFaceSettings
    _classes: tuple[str, ...] = ()

    def outline(self) -> Outline:
        containers, columns = [], list[tuple[Path, str, str]]()
        for split, files in self._files().items():
            for file in files:
                path = file.name if file == self.path else str(file.relative_to(self.path))
                stamp = stamp_of([file])
                containers += [
                    Container(f"{path}/{group:06d}", split, offset=group, stamp=stamp)
                    for group in range(_num_groups(file))
                ]
                columns.append((file, stamp, self._column_of(file, stamp, "label")))
        self._classes = _class_names(tuple(columns))
        return Outline(classes=self._classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        """Return the rows. Sizes are 0, because only reading an image shows its size."""
        numbers: dict[Any, int] = {name: number for number, name in enumerate(self._classes)}
        numbers[None] = UNLABELLED
        file, column = self._column(container, "label")
        labels = [
            numbers[each] if not isinstance(each, int) else each for each in column.to_pylist()
        ]
        if labels and not UNLABELLED <= min(labels) <= max(labels) < len(self._classes):
            problem = f"has labels that are not from 0 to {len(self._classes) - 1}"
            raise damaged(file, problem, "save the dataset again")
        return Entries.of([(f"{row:08d}", row, 0) for row in range(len(labels))], label=labels)

    def arrange(self, inventory: Inventory) -> Arrangement:
        share, seed = self.settings.val_fraction, self.settings.seed
        return hold_out(inventory, by_container(inventory), share=share, seed=seed)

    def read(self, entry: Entry) -> bytes:
        file, column = self._column(entry.container, "image")
        check_unchanged(entry.locator, entry.container.stamp, [file])
        with report_damage(file):
            value = column[entry.offset].as_py()
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path"):
                problem = f"refers to {value['path']}, but the file does not contain its bytes"
                raise Rejection("not_held", problem[:MAX_DETAIL_CHARACTERS])
            value = value.get("bytes")
        return value or b""

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:  # noqa: ARG002
        return changed_since([self._file(container)], container.stamp)

    def _file(self, container: Container) -> Path:
        return self.path if self.path.is_file() else self.path / container.path.rpartition("/")[0]

    def _column(self, container: Container, role: Role) -> tuple[Path, Any]:
        file, stamp = self._file(container), container.stamp
        return file, _column(file, stamp, container.offset, self._column_of(file, stamp, role))

    def _files(self) -> dict[str, list[Path]]:
        found, folders = dict[str, list[Path]](), dict[str, Path]()
        if (self.path / "state.json").is_file():
            folders = {"": self.path}
        if (whole := self.path / "dataset_dict.json").is_file():
            with report_damage(whole, fix="save it again"):
                names = json.loads(whole.read_bytes())["splits"]
                folders = {str(name): self.path / str(name) for name in names}
        for name, folder in folders.items():
            with report_damage(folder / "state.json", fix="save it again"):
                state = json.loads((folder / "state.json").read_bytes())
                files = [folder / Path(each["filename"]).name for each in state["_data_files"]]
                # train_test_split() gives both parts the "_split" of their origin
                split = str(name or state.get("_split") or "train")
                split = SPLITS.get(split.lower(), re.sub(r"[^A-Za-z0-9_-]", "_", split))
                found.setdefault(split, []).extend(files)
        if not folders:
            files = [self.path] if self.path.is_file() else sorted(self.path.rglob("*.parquet"))
            named = {file: _named_splits(file, self.path) for file in files}
            unclear = [str(file) for file, splits in named.items() if len(splits) != 1]
            if unclear and any(named.values()):
                problem = f"{len(unclear)} of {len(files)} file names contain no split or several"
                problem += f" ({', '.join(unclear[:3])})"
                fix = "write one of train, val and test into each name, or move these files"
                raise SourceError("source.path", problem, fix, code="unknown-format")
            for file, splits in named.items():
                found.setdefault(next(iter(splits), "train"), []).append(file)
        if not found:
            problem = f"{self.path} has neither files of save_to_disk nor Parquet files"
            raise SourceError(
                "source.path", problem, "save the dataset with save_to_disk", code="unknown-format"
            )
        return found

    def _column_of(self, file: Path, stamp: str, role: Role) -> str:
        schema, given = _schema(file, stamp), self.settings.columns.get(role)
        if given is not None:
            likely = [given] if given in schema.names else []
        elif role == "image":
            likely = [field.name for field in schema if _is_picture(field.type)]
        else:
            kinds = {name: feature.get("_type") for name, feature in _features(schema).items()}
            likely = [name for name, kind in kinds.items() if kind == "ClassLabel"]
            likely = likely or [name for name in schema.names if name.lower() in COLUMNS["label"]]
        if len(likely) != 1:
            problem = f"{len(likely) or 'no'} columns of {file} can be the {role}"
            fix = f"set 'source.columns={{{role}: NAME}}' with one of {', '.join(schema.names)}"
            code: Code = "conflict" if likely else "unknown-name"
            raise SourceError("source.columns", problem, fix, code=code)
        return likely[0]


@lru_cache(maxsize=4)
def _class_names(columns: tuple[tuple[Path, str, str], ...]) -> tuple[str, ...]:
    """Return the class names in the dataset's features, or else numbers, or the sorted words that
    occur."""
    named = {
        tuple(_features(_schema(file, stamp)).get(column, {}).get("names") or ())
        for file, stamp, column in columns
    }
    if len(named) > 1:
        fix = "build a dataset from the files with equal classes"
        raise SourceError("source.path", "its files have different classes", fix, code="mismatch")
    if names := named.pop():
        return names
    found: set[Any] = set()
    for file, stamp, column in columns:
        kind = str(_schema(file, stamp).field(column).type)
        if not re.match(r"u?int|string|large_string|dictionary", kind):
            raise _no_label(f"{column} of {file} is {kind[:40]}, neither integers nor words")
        for group in range(_num_groups(file)):
            found.update(_column(file, stamp, group, column).unique().to_pylist())
    found.discard(None)
    if all(isinstance(value, int) for value in found):
        most = max(found, default=-1)
        if most > MOST_CLASSES:
            raise _no_label(f"a label is {most:,}, too large for a class")
        return tuple(map(str, range(most + 1)))
    if not all(isinstance(value, str) for value in found):
        raise _no_label("labels are integers in some files and words in others")
    return sorted_names(found)


def _no_label(problem: str) -> SourceError:
    fix = "set 'source.columns={label: NAME}' with another column"
    return SourceError("source.columns", problem, fix, code="bad-value")


def _named_splits(file: Path, root: Path) -> set[str]:
    """Return the splits that the file's name contains as words. If it contains none, the name of
    the nearest folder below `root` counts."""
    for name in (file.stem, *(folder.name for folder in file.relative_to(root).parents)):
        words = re.findall(r"[^\W\d_]+", name.lower())
        if splits := {SPLITS[word] for word in words if word in SPLITS}:
            return splits
    return set()


def _open(file: Path) -> Any:
    from pyarrow import ipc, memory_map, parquet

    with report_damage(file, fix="save or fetch it again"):
        if file.suffix == ".parquet":
            return parquet.ParquetFile(file)
        return ipc.open_stream(memory_map(str(file)))


def _num_groups(file: Path) -> int:
    return int(_open(file).num_row_groups) if file.suffix == ".parquet" else 1


@lru_cache(maxsize=NUM_SCHEMAS)
def _schema(file: Path, stamp: str) -> Any:  # noqa: ARG001 (a changed file is read again)
    opened = _open(file)
    return opened.schema_arrow if file.suffix == ".parquet" else opened.schema


def _features(schema: Any) -> dict[str, Any]:
    """Return the metadata of `datasets` about the columns, or {}."""
    written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = written.get("info", {}).get("features") or {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


@lru_cache(maxsize=NUM_HELD)
def _column(file: Path, stamp: str, group: int, column: str) -> Any:  # noqa: ARG001
    with report_damage(file, fix="save or fetch it again"):
        opened = _open(file)
        if file.suffix == ".parquet":
            return opened.read_row_group(group, columns=[column])[column]
        return opened.read_all()[column]


def _is_picture(kind: Any) -> bool:
    """Return True for a column type of image files: bytes, or a struct of bytes and path."""
    from pyarrow import types

    if types.is_struct(kind):
        return "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    return bool(types.is_binary(kind) or types.is_large_binary(kind))
