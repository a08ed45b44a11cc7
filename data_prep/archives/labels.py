"""A table of labels beside a folder of pictures: CSV or Parquet, a row for each picture with its
file, its label and, where it has such a column, its split. Whatever is wrong with it is one line.
"""

import csv
import glob
import io
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data_prep.archives.guard import SourceError, refusing

COLUMNS = {
    "file": (
        "file",
        "filename",
        "file_name",
        "filepath",
        "path",
        "image",
        "image_path",
        "image_id",
        "img",
        "id",
        "name",
    ),
    "label": ("label", "class", "class_name", "category", "target", "species", "y"),
    "split": ("split", "set", "subset", "partition"),
}
"""What a column may be called, whether or not in capitals."""
NUM_TRIED = 10
"""Rows whose files are looked for, where several columns may name them."""
_SPLITS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"} | {
    name: name for name in ("train", "val", "test")
}


class Row(NamedTuple):
    file: str
    label: str
    split: str


@lru_cache(maxsize=2)
def read_labels(
    path: Path,
    stamp: str,  # noqa: ARG001 (a changed file is read again)
    columns: tuple[tuple[str, str], ...],
    folder: Path,
) -> tuple[Row, ...]:
    """`columns`: (role, what the table calls it), where that is not the only one of `COLUMNS`;
    `folder`: of the files."""
    with refusing(path, remedy="give a CSV or Parquet file", field="source.labels"):
        names, cells = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    at = {
        role: _column(path, role, dict(columns).get(role), names, cells[:NUM_TRIED], folder)
        for role in COLUMNS
    }
    roles = [role for role in COLUMNS if at[role] is not None]
    rows, seen = [], dict[str, int]()
    for number, cell in enumerate(cells, start=1):
        found = {role: cell[at[role] or 0] for role in roles}
        lacking = [role for role in roles if not found[role]]
        file, split = str(PurePosixPath(found["file"])), found.get("split", "").lower()
        fault = ""
        if lacking:
            fault = f"has no {lacking[0]}; fill it in, or remove the row"
        elif file in seen:
            fault = f"names {file} again, as row {seen[file]} does; keep one of them"
        elif split and split not in _SPLITS:
            fault = f"has the split {split!r}; write train, val or test"
        if fault:
            raise SourceError(f"source.labels: {path}: row {number} {fault}")
        seen[file] = number
        rows.append(Row(file, found["label"], _SPLITS.get(split, "")))
    if not any(row.split in ("", "train") for row in rows):
        raise SourceError(
            f"source.labels: {path} has no row {'of the split train' if rows else 'at all'}; add"
            " some"
        )
    return tuple(rows)


def class_names(rows: Iterable[Row]) -> tuple[str, ...]:
    """Sorted; numbers by their value."""
    names = {row.label for row in rows}
    return tuple(
        sorted(
            names, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else None
        )
    )


def rows_of_files(
    path: Path, rows: Iterable[Row], *, files: Iterable[str], folder: Path
) -> Mapping[str, Row]:
    """The row of each picture file: it may leave the ending out, where that is clear. All rows have
    a file, all files a row."""
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
        wrong = (
            f"{path} names {len(missing):,} files that are no pictures in {folder}"
            f" ({', '.join(missing[:3])})"
        )
        raise SourceError(
            f"source.labels: {wrong}; names count from source.path: correct the rows, or remove"
            " them"
        )
    without = [name for name in by_name if name not in found]
    if without:
        wrong = (
            f"{len(without):,} pictures in {folder} have no row in {path}"
            f" ({', '.join(without[:3])})"
        )
        raise SourceError(f"source.labels: {wrong}; add their rows, or move them elsewhere")
    return found


def _csv(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Windows begins text files with a mark
    except UnicodeDecodeError as error:
        raise SourceError(
            f"source.labels: {path} is not UTF-8 (byte {error.start:,}); save it as CSV in UTF-8"
        ) from None
    head = text.partition("\n")[0]
    lines = [
        line
        for line in csv.reader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
        if any(map(str.strip, line))
    ]
    if not lines:
        raise ValueError("it is empty")
    names = [name.strip() for name in lines[0]]
    return names, [
        [cell.strip() for cell in line] + [""] * (len(names) - len(line)) for line in lines[1:]
    ]


def _parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    from pyarrow import parquet

    columns = parquet.read_table(path).to_pydict()
    cells = zip(*columns.values(), strict=True)
    return list(columns), [
        ["" if cell is None else str(cell).strip() for cell in row] for row in cells
    ]


def _column(
    path: Path, role: str, given: str | None, names: list[str], rows: list[list[str]], folder: Path
) -> int | None:
    wanted = (given,) if given else COLUMNS[role]
    found = [place for place, name in enumerate(names) if name in wanted or name.lower() in wanted]
    if role == "file" and len(found) > 1:  # of an id and a name, the one that there are files of
        found = [
            place for place in found if all(_is_file(folder / row[place]) for row in rows)
        ] or found
    if len(found) > 1:
        keys = " or ".join(f"source.columns={{{role}: {names[place]}}}" for place in found)
        raise SourceError(
            f"source.labels: {path} has {len(found)} columns that may be the {role}; choose: {keys}"
        )
    if found or (role == "split" and not given):
        return found[0] if found else None
    lacks = f"column {given!r}" if given else f"column for the {role}, such as {role!r}"
    raise SourceError(
        f"source.labels: {path} has no {lacks}, only {', '.join(names)}; set"
        f" source.columns={{{role}: NAME}} to one"
    )


def _is_file(path: Path) -> bool:
    """With an ending or without."""
    return path.is_file() or any(path.parent.glob(f"{glob.escape(path.name)}.*"))
