"""A table of labels for a folder of images (CSV or Parquet): file, label and optional split in each
row."""

import csv
import glob
import io
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data_prep.archives.guard import SourceError, report_damage

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
"""Common column names of each role, in lower case."""
NUM_TRIED = 10
"""Number of rows whose files are looked up to choose between several possible columns."""
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Split of each common name, in lower case. Hugging Face's `datasets` documents the same names."""


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
    """Return the rows of the table. `columns` maps a role (file, label, split) to a column name;
    `folder` contains the files."""
    with report_damage(path, fix="give a CSV or Parquet file", field="source.labels"):
        names, cells = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    at = {
        role: _column(path, role, dict(columns).get(role), names, cells[:NUM_TRIED], folder)
        for role in COLUMNS
    }
    roles = [role for role in COLUMNS if at[role] is not None]
    rows, seen = [], dict[str, int]()
    for number, cell in enumerate(cells, start=1):
        found = {role: cell[at[role] or 0] for role in roles}
        empty = [role for role in roles if not found[role]]
        file, split = str(PurePosixPath(found["file"])), found.get("split", "").lower()
        problem = fix = ""
        if empty:
            problem, fix = f"has no {empty[0]}", "fill it in, or remove the row"
        elif file in seen:
            problem, fix = f"repeats {file} of row {seen[file]}", "keep one of them"
        elif split and split not in SPLITS:
            problem, fix = f"has the split {split!r}", "write train, val or test"
        if problem:
            problem = f"row {number} of {path} {problem}"
            raise SourceError("source.labels", problem, fix, code="bad-value")
        seen[file] = number
        rows.append(Row(file, found["label"], SPLITS.get(split, "")))
    if not any(row.split in ("", "train") for row in rows):
        problem = f"{path} has no rows" + " of the split train" * bool(rows)
        raise SourceError("source.labels", problem, "add rows", code="empty")
    return tuple(rows)


def class_names(rows: Iterable[Row]) -> tuple[str, ...]:
    return sorted_names({row.label for row in rows})


def sorted_names(names: Collection[str]) -> tuple[str, ...]:
    if all(map(str.isdecimal, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def rows_of_files(
    path: Path, rows: Iterable[Row], *, files: Iterable[str], folder: Path
) -> Mapping[str, Row]:
    """Return the table row of each image file. Raise SourceError if rows and files do not match.
    File names in the table may lack the ending."""
    by_name = {file: file for file in files}
    stems: dict[str, str | None] = {}
    for file in by_name:
        stem = str(PurePosixPath(file).with_suffix(""))
        stems[stem] = None if stem in stems else file
    found, missing, repeated = dict[str, Row](), [], []
    for row in rows:
        name = by_name.get(row.file) or stems.get(row.file)
        if name is None:
            missing.append(row.file)
        elif name in found:
            repeated.append(row.file)
        else:
            found[name] = row
    without = [name for name in by_name if name not in found]
    for names, problem, fix in (
        (missing, "names files that are not images in", "write paths relative to this folder"),
        (repeated, "names images twice in", "keep one row of each image"),
        (without, "has no rows for images in", "add the rows, or move the images elsewhere"),
    ):
        if names:
            what = f"{path} {problem} {folder} ({len(names):,}: {', '.join(names[:3])})"
            raise SourceError("source.labels", what, fix, code="mismatch")
    return found


def _csv(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Windows adds a byte order mark
    except UnicodeDecodeError as error:
        raise SourceError(
            "source.labels",
            f"{path} is not UTF-8 (byte {error.start:,})",
            "save it as CSV in UTF-8",
            code="unknown-format",
        ) from None
    head = text.partition("\n")[0]
    lines = [
        line
        for line in csv.reader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
        if any(map(str.strip, line))
    ]
    if not lines:
        raise SourceError("source.labels", f"{path} is empty", "add rows", code="empty")
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
    if role == "file" and len(found) > 1:  # one table may have both an id column and a name column
        found = [
            place for place in found if all(_is_file(folder / row[place]) for row in rows)
        ] or found
    if len(found) > 1:
        keys = " or ".join(f"'source.columns={{{role}: {names[place]}}}'" for place in found)
        problem = f"{path} has {len(found)} possible columns for the {role}"
        raise SourceError("source.labels", problem, f"set {keys}", code="conflict")
    if found or (role == "split" and not given):
        return found[0] if found else None
    lacks = f"column {given!r}" if given else f"column for the {role}, such as {role!r}"
    raise SourceError(
        "source.labels",
        f"{path} has no {lacks}, only {', '.join(names)}",
        f"set 'source.columns={{{role}: NAME}}' with one of these names",
        code="unknown-name",
    )


def _is_file(path: Path) -> bool:
    """Return True if the file exists with this name, or with an added ending."""
    return path.is_file() or any(path.parent.glob(f"{glob.escape(path.name)}.*"))
