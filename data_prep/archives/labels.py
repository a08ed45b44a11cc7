"""A table of labels beside a folder of pictures: CSV or Parquet, a row for each picture with its file, its label and, where it has
such a column, its split. Whatever is wrong with it is one line.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data_prep.archives.guard import SourceError, refusing

COLUMNS = {
    "file": ("file", "filename", "file_name", "filepath", "path", "image", "image_path", "image_id", "img", "id", "name"),
    "label": ("label", "class", "class_name", "category", "target", "species", "y"),
    "split": ("split", "set", "subset", "partition"),
}
"""What a column may be called, whether or not in capitals: the first that is there counts."""
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


class Row(NamedTuple):
    file: str
    label: str
    split: str


@lru_cache(maxsize=2)
def read_labels(path: Path, stamp: str, columns: tuple[tuple[str, str | None], ...]) -> tuple[Row, ...]:  # noqa: ARG001
    """`columns`: by role, what the user calls them; None: one of `COLUMNS`. Without a column for it the split is empty. A table
    with another `stamp` is read anew."""
    with refusing(path, remedy="write it as CSV or Parquet", field="source.labels"):
        names, cells = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    at = {role: _column(path, role, given, names) for role, given in columns}
    rows, seen = [], dict[str, int]()
    for number, row in enumerate(cells, start=1):
        file, label, split = (row[place] if (place := at[role]) is not None else "" for role in COLUMNS)
        file = str(PurePosixPath(file)) if file else ""
        if not (file and label and (split or at["split"] is None)):
            lacking = next(role for role, word in zip(COLUMNS, (file, label, split), strict=True) if not word)
            raise SourceError(f"source.labels: {path}: row {number} has no {lacking}; fill it in, or remove the row")
        if file in seen:
            raise SourceError(f"source.labels: {path} names {file} twice, in rows {seen[file]} and {number}; keep one of them")
        if split and split.lower() not in _SPLITS:
            raise SourceError(f"source.labels: {path}: row {number} has the split {split!r}; write train, val or test")
        seen[file] = number
        rows.append(Row(file, label, _SPLITS.get(split.lower(), "")))
    if not any(row.split in ("", "train") for row in rows):
        raise SourceError(f"source.labels: {path} has no row {'of the split train' if rows else 'at all'}; add some")
    return tuple(rows)


def class_names(rows: Iterable[Row]) -> tuple[str, ...]:
    """Sorted; numbers by their value."""
    names = {row.label for row in rows}
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else None))


def rows_of_files(
    path: Path, rows: Iterable[Row], *, files: Iterable[str], is_picture: Callable[[str], bool], folder: Path
) -> Mapping[str, Row]:
    """The row of each file: it may leave the ending out, where that is clear. All rows have a file, all pictures a row."""
    by_name = {file: file for file in files}
    stems: dict[str, str | None] = {}
    for file in by_name:
        stem = str(PurePosixPath(file).with_suffix(""))
        stems[stem] = None if stem in stems else file
    found, missing = dict[str, Row](), []
    for row in rows:
        name = by_name.get(row.file) or stems.get(row.file)
        if name is None or name in found:
            missing.append(row.file)
        else:
            found[name] = row
    if missing:
        wrong = f"{path} names {len(missing):,} files that are not in {folder} ({', '.join(missing[:3])})"
        raise SourceError(f"source.labels: {wrong}; names count from source.path: correct the rows, or remove them")
    without = [name for name in by_name if name not in found and is_picture(name)]
    if without:
        wrong = f"{len(without):,} pictures in {folder} have no row in {path} ({', '.join(without[:3])})"
        raise SourceError(f"source.labels: {wrong}; add their rows, or move them elsewhere")
    return found


def _csv(path: Path) -> tuple[list[str], list[list[str]]]:
    text = path.read_bytes().decode("utf-8-sig")  # Windows begins text files with a mark
    head = text.partition("\n")[0]
    lines = [line for line in csv.reader(io.StringIO(text), delimiter=max(",;\t", key=head.count)) if any(map(str.strip, line))]
    if not lines:
        raise ValueError("it is empty")
    names = [name.strip() for name in lines[0]]
    return names, [[cell.strip() for cell in line] + [""] * (len(names) - len(line)) for line in lines[1:]]


def _parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    from pyarrow import parquet

    columns = parquet.read_table(path).to_pydict()
    cells = zip(*columns.values(), strict=True)
    return list(columns), [["" if cell is None else str(cell).strip() for cell in row] for row in cells]


def _column(path: Path, role: str, given: str | None, names: list[str]) -> int | None:
    wanted = [given] if given is not None else [each for known in COLUMNS[role] for each in names if each.lower() == known]
    if wanted and wanted[0] in names:
        return names.index(wanted[0])
    if role == "split" and given is None:
        return None
    lacks = f"column {given!r}" if given is not None else f"column for the {role}, such as {role!r}"
    raise SourceError(
        f"source.labels: {path} has no {lacks}, only {', '.join(names)}; set source.{role}_column=NAME to one of them"
    )
