"""What the package `datasets` of Hugging Face leaves on a disk: a folder of `save_to_disk` (Arrow),
or Parquet files, as the hub has them. Both are read by pyarrow, which has no network: nothing is
asked, fetched or copied.

Pictures are read one by one: of Arrow they are mapped, of Parquet a whole row group is decompressed
for each that is not at hand, so a large one is better saved to disk first, or built with
order=listed.
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
    report_damage,
    stamp_of,
)
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.archives.labels import COLUMNS, sorted_names
from data_prep.images.rejection import MAX_DETAIL_CHARACTERS, Rejection
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Arrangement, Source, by_container, hold_out

NUM_HELD, NUM_SCHEMAS = 8, 4096
"""Row groups of a process, and schemas of files: each picture asks for that of its own."""
MOST_CLASSES = 1 << 20
_SPLIT = re.compile(r"(train|val|dev|test)(?:ing|idation|id)?(?![a-z])", re.IGNORECASE)


class HuggingFaceSettings(Settings):
    """A dataset of Hugging Face's `datasets`, saved by save_to_disk, or its Parquet files. No
    network is asked."""

    kind: Literal["huggingface"]
    path: str = Field(examples=["downloads/beans"])
    """The folder that save_to_disk has made, a Parquet file, or a folder of them, split by their
    names (train-00000.parquet)."""
    columns: dict[Literal["image", "label"], str] = Field(
        default={}, examples=[{"image": "img", "label": "fine_label"}]
    )
    """Which they are, where there are several: by default the one of pictures, and the one of
    classes or with a usual name."""
    val_share: float = Field(0.1, ge=0, lt=1)
    """Share of each class of `train` that becomes the split `val` if there is no `val` (seeded). 0:
    none at all."""
    seed: int = Field(0, ge=0)
    """Of which pictures become `val`."""


class HuggingFaceSource(Source):
    settings: HuggingFaceSettings
    _classes: tuple[str, ...] = ()
    """As `outline` has found them."""

    def outline(self) -> Outline:
        containers, labels = [], list[tuple[Path, str, str]]()
        for split, files in self._files().items():
            for file in files:
                path, stamp = (
                    str(file.relative_to(self.path)) if file != self.path else file.name,
                    stamp_of([file]),
                )
                groups = (
                    range(_open(file).num_row_groups) if file.suffix == ".parquet" else range(1)
                )
                containers += [
                    Container(f"{path}/{group:06d}", split, offset=group, stamp=stamp)
                    for group in groups
                ]
                labels.append((file, stamp, self._named(file, stamp, "label")))
        self._classes = _class_names(tuple(labels))
        return Outline(classes=self._classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        """The size of a picture is not known before it is read, so it is listed as 0."""
        file, stamp, classes = self._file(container), container.stamp, self._classes
        numbers: dict[Any, int] = {name: number for number, name in enumerate(classes)} | {
            None: UNLABELLED
        }
        values = _column(
            file, stamp, container.offset, self._named(file, stamp, "label")
        ).to_pylist()
        labels = [value if isinstance(value, int) else numbers[value] for value in values]
        if labels and not UNLABELLED <= min(labels) <= max(labels) < len(classes):
            raise SourceError(
                f"source.path: {file} has labels that are not from 0 to {len(classes) - 1}; save it"
                " again"
            )
        return Entries.of([(f"{row:08d}", row, 0) for row in range(len(labels))], label=labels)

    def arrange(self, inventory: Inventory) -> Arrangement:
        return hold_out(
            inventory,
            by_container(inventory),
            share=self.settings.val_share,
            seed=self.settings.seed,
        )

    def read(self, entry: Entry) -> bytes:
        file, stamp = self._file(entry.container), entry.container.stamp
        check_unchanged(entry.locator, stamp, [file])
        with report_damage(file):
            value = _column(file, stamp, entry.container.offset, self._named(file, stamp, "image"))[
                entry.offset
            ].as_py()
        if isinstance(value, dict) and value.get("bytes") is None and value.get("path"):
            raise Rejection(
                "not_held",
                f"{value['path']} is named, and its bytes are not in the file"[
                    :MAX_DETAIL_CHARACTERS
                ],
            )
        return (value.get("bytes") if isinstance(value, dict) else value) or b""

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:  # noqa: ARG002
        return changed_since([self._file(container)], container.stamp)

    def _file(self, container: Container) -> Path:
        return self.path if self.path.is_file() else self.path / container.path.rpartition("/")[0]

    def _files(self) -> dict[str, list[Path]]:
        """Of each split."""
        found = dict[str, list[Path]]()
        if (self.path / "dataset_dict.json").is_file():
            with report_damage(self.path / "dataset_dict.json", fix="save it again"):
                folders = {
                    str(name): self.path / str(name)
                    for name in json.loads((self.path / "dataset_dict.json").read_bytes())["splits"]
                }
        else:
            folders = {"train": self.path} if (self.path / "state.json").is_file() else {}
        for name, folder in folders.items():
            with report_damage(folder / "state.json", fix="save it again"):
                state = json.loads((folder / "state.json").read_bytes())
                files = [folder / Path(each["filename"]).name for each in state["_data_files"]]
                found.setdefault(_split_of(state.get("_split") or name), []).extend(files)
        if not folders:
            files = [self.path] if self.path.is_file() else sorted(self.path.rglob("*.parquet"))
            for file in files:
                words = [file.stem, *(part.name for part in file.relative_to(self.path).parents)]
                found.setdefault(
                    next(
                        (_split_of(match[0]) for word in words if (match := _SPLIT.match(word))),
                        "train",
                    ),
                    [],
                ).append(file)
        if not found:
            raise SourceError(
                f"source.path: {self.path} is neither a folder of save_to_disk nor of Parquet"
                " files; save it with save_to_disk"
            )
        return found

    def _named(self, file: Path, stamp: str, role: Literal["image", "label"]) -> str:
        schema, given = _schema(file, stamp), self.settings.columns.get(role)
        if given is not None and given not in schema.names:
            raise SourceError(
                f"source.columns: {file} has no column {given!r}, only {', '.join(schema.names)};"
                " name one of them"
            )
        if given is not None:
            return given
        if role == "image":
            likely: list[str] = [field.name for field in schema if _is_picture(field.type)]
        else:
            likely = [
                name
                for name, feature in _features(schema).items()
                if feature.get("_type") == "ClassLabel"
            ]
            likely = likely or [name for name in schema.names if name.lower() in COLUMNS["label"]]
        if len(likely) != 1:
            may = f"{len(likely)} columns that may be" if likely else "no column that is clearly"
            raise SourceError(
                f"source.columns: {file} has {may} the {role}, of {', '.join(schema.names)}; set"
                f" source.columns={{{role}: NAME}}"
            )
        return likely[0]


@lru_cache(maxsize=4)
def _class_names(places: tuple[tuple[Path, str, str], ...]) -> tuple[str, ...]:
    """Of a column of each file, as the features name them; else numbers, or the words that occur,
    sorted."""
    named = {
        tuple(_features(_schema(file, stamp)).get(column, {}).get("names") or ())
        for file, stamp, column in places
    }
    if len(named) > 1:
        raise SourceError(
            "source.path: its files do not all have the same classes; build those that have into a"
            " dataset each"
        )
    if names := named.pop():
        return names
    found: set[Any] = set()
    for file, stamp, column in places:
        if not re.match(
            r"u?int|string|large_string|dictionary",
            kind := str(_schema(file, stamp).field(column).type),
        ):
            wrong = f"{file}: {column} is {kind[:40]}, which is neither integers nor words"
            raise SourceError(
                f"source.columns: {wrong}; name another as source.columns={{label: NAME}}"
            )
        for group in range(_open(file).num_row_groups) if file.suffix == ".parquet" else (0,):
            found.update(_column(file, stamp, group, column).unique().to_pylist())
    found.discard(None)
    if all(isinstance(value, int) for value in found):
        if (most := max(found, default=-1)) > MOST_CLASSES:
            raise SourceError(
                f"source.columns: a label is {most:,}, which looks like no class; set"
                " source.columns={label: NAME}"
            )
        return tuple(map(str, range(most + 1)))
    if not all(isinstance(value, str) for value in found):
        raise SourceError(
            "source.path: some of its files have integers as labels, others words; build either"
            " alone"
        )
    return sorted_names(found)


def _split_of(word: str) -> str:
    """train, val or test where it is called like them."""
    match = _SPLIT.fullmatch(word)
    return match[1].lower().replace("dev", "val") if match else re.sub(r"[^A-Za-z0-9_-]", "_", word)


def _open(file: Path) -> Any:
    """Of Parquet the file, of Arrow a stream of batches; either has its schema."""
    from pyarrow import ipc, memory_map, parquet

    with report_damage(file, fix="save or fetch it again"):
        return (
            parquet.ParquetFile(file)
            if file.suffix == ".parquet"
            else ipc.open_stream(memory_map(str(file)))
        )


@lru_cache(maxsize=NUM_SCHEMAS)
def _schema(file: Path, stamp: str) -> Any:  # noqa: ARG001 (a changed file is read anew)
    opened = _open(file)
    return opened.schema_arrow if file.suffix == ".parquet" else opened.schema


def _features(schema: Any) -> dict[str, Any]:
    """What `datasets` says of the columns: {} where it did not write them."""
    told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = told.get("info", {}).get("features") or {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


@lru_cache(maxsize=NUM_HELD)
def _column(file: Path, stamp: str, group: int, column: str) -> Any:  # noqa: ARG001
    with report_damage(file, fix="save or fetch it again"):
        opened = _open(file)
        return (
            opened.read_row_group(group, columns=[column])
            if file.suffix == ".parquet"
            else opened.read_all()
        )[column]


def _is_picture(kind: Any) -> bool:
    """Bytes, or a struct of bytes and path."""
    from pyarrow import types

    if types.is_struct(kind):
        return "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    return bool(types.is_binary(kind) or types.is_large_binary(kind))
