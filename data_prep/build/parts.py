"""OUT/PARTS: what is kept of an unfinished dataset beside its shards, and who may write there.

PARTS is made before anything else is written in OUT (`claim`) and goes last (`forget_parts`),
begun.json last of what it holds. The lock of OUT is that of a build, a merge, an index or whoever
plans; array tasks have locks of their own (tasks.py).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.manifest import MANIFEST_NAME, PARTS, load_manifest
from data_prep.publish import (
    LOCK,
    Busy,
    is_held,
    make_directory,
    sealed,
    sole_writer,
    unsealed,
    withdraw,
    write_json,
)
from data_prep.settings import S, Settings, differences

BEGUN = "begun"
"""The record of whose directory it is."""
AT_WORK = "at-work"
"""The directory, in that of a task, whose lock it holds while it writes shards."""


def claim(directory: Path) -> None:
    """Marks the place as ours before anything else is written in it; what others keep there is
    neither deleted nor overwritten (issue 17: `parts/`, `.tmp-*`, `rejected.jsonl` of users were).

    Array tasks claim side by side: whoever else has written here by the time of the listing had
    made the mark before.
    """
    make_directory(directory)
    strangers = sorted({path.name for path in directory.iterdir()} - {LOCK})
    if strangers and not (directory / PARTS).is_dir():
        if not (directory / MANIFEST_NAME).exists():
            raise UserError(
                f"out: {directory} holds {strangers[0]}, and no dataset was begun there; "
                "name another directory, or move it"
            )
        load_manifest(directory)  # or it is no manifest of ours
    (directory / PARTS).mkdir(exist_ok=True)


def of_another(directory: Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> UserError:
    changes = differences(before, config) if before else "made by another verb"
    what = f"of another config ({changes})" if changes else "of this config, but of other files"
    return UserError(f"out: {directory} holds a dataset {what}; name another out")


def tasks_at_work(directory: Path) -> bool:
    """Whether array tasks write shards there now; the caller holds the directory alone, so that
    none begins meanwhile."""
    return any(is_held(mark)[0] for mark in sorted((directory / PARTS).glob(f"task-*/{AT_WORK}")))


@contextmanager
def sole_builder(directory: Path) -> Iterator[None]:
    """Holds the directory against other builders and against array tasks."""
    with sole_writer(directory):
        if tasks_at_work(directory):
            raise Busy(
                f"{directory}: array tasks are at work here; wait for them, or choose "
                "another directory"
            )
        yield


@contextmanager
def own_place(directory: Path) -> Iterator[None]:
    """The directory, claimed, for this process alone."""
    claim(directory)
    with sole_builder(directory):
        try:
            yield
        finally:
            with suppress(OSError):
                (
                    directory / PARTS
                ).rmdir()  # where it is empty nothing has begun, or all is finished


def forget_parts(directory: Path) -> None:
    """Of a finished dataset, each whole or not at all; whatever remains goes the next time."""
    parts = directory / PARTS
    for path in sorted(parts.glob("*"), key=lambda path: path == record_path(directory, BEGUN)):
        with suppress(OSError):
            withdraw(path)
    with suppress(OSError):
        parts.rmdir()


def write_record(directory: Path, name: str, record: Settings) -> None:
    write_json(record_path(directory, name), sealed(record.model_dump(mode="json")))


def read_record(directory: Path, name: str, schema: type[S]) -> S:
    """ValueError where it is not as it was written."""
    return schema.model_validate_json(
        json.dumps(unsealed(json.loads(record_path(directory, name).read_text(encoding="utf-8"))))
    )


def record_path(directory: Path, name: str) -> Path:
    return directory / PARTS / f"{name}.json"
