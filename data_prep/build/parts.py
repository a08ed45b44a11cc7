"""OUT/PARTS: the records of an unfinished dataset in OUT, and the locks of the processes that write
it.

`claim` makes PARTS before any other file in OUT. `forget_parts` removes PARTS last, and begun.json
last in PARTS. tasks.py describes the locks.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from data_prep.errors import UserError
from data_prep.manifest import MANIFEST_NAME, PARTS, load_manifest
from data_prep.publish import (
    LOCK,
    Busy,
    is_held,
    make_directory,
    remove_leftovers,
    sealed,
    sole_writer,
    unsealed,
    withdraw,
    write_json,
)
from data_prep.settings import S, Settings, differences

BEGUN = "begun"
"""Name of the record (begun.json) of the dataset that is being written."""
AT_WORK = "at-work"
"""Directory that an array task locks while it writes shards."""


def refuse_url(out: str) -> str:
    """Return `out`; raise UserError if it is a URL."""
    if "://" in out:
        raise UserError(
            "--out",
            f"{out.partition('://')[0] + '://...'} is not a local directory",
            "choose a local path; data_prep push uploads a built dataset",
            code="unsupported",
        )
    return out


LocalDirectory = Annotated[str, AfterValidator(refuse_url)]


def claim(directory: Path) -> None:
    """Mark the directory as a dataset of data_prep before any other write. Raise UserError if the
    directory contains other files. Such files are never deleted or overwritten, even if named
    `parts/`, `.tmp-*` or `rejected.jsonl` (issue 17). Several array tasks may call this at once."""
    make_directory(directory)
    strangers = sorted({path.name for path in directory.iterdir()} - {LOCK})
    if strangers and not (directory / PARTS).is_dir():
        if not (directory / MANIFEST_NAME).exists():
            raise UserError(
                "out",
                f"{directory} contains {strangers[0]}, but is not a dataset of data_prep",
                "choose another directory",
                code="exists",
            )
        load_manifest(directory)  # fails for other programs' manifests
    (directory / PARTS).mkdir(exist_ok=True)


def of_another(directory: Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> UserError:
    changes = differences(before, config)
    how = f"with another config ({changes})" if changes else "with the same config from other files"
    problem = f"{directory} was made {how if before else 'by another command'}"
    return UserError("out", problem, "choose another directory", code="changed")


class Unfinished(Settings):
    """Contents of begun.json for an index or a subset."""

    plan_hash: str
    config: dict[str, Any]


def begin(directory: Path, plan_hash: str, config: Mapping[str, Any]) -> None:
    """Write begun.json. Raise UserError if the directory has files that another plan wrote."""
    try:
        begun: Unfinished | None = read_record(directory, BEGUN, Unfinished)
    except (FileNotFoundError, ValueError):
        begun = None
    written = {*(directory / PARTS).glob("*.json"), *directory.glob("*.paths")}
    is_same = begun is not None and begun.plan_hash == plan_hash
    if not is_same and written - {record_path(directory, BEGUN)}:
        raise of_another(directory, begun.config if begun else {}, config)
    write_record(directory, BEGUN, Unfinished(plan_hash=plan_hash, config=dict(config)))


def refuse_tasks_at_work(directory: Path) -> None:
    """Raise Busy if array tasks are writing shards. The caller holds the lock of the directory."""
    if any(is_held(mark)[0] for mark in sorted((directory / PARTS).glob(f"task-*/{AT_WORK}"))):
        raise Busy(
            "out",
            f"array tasks are writing to {directory}",
            "wait for them, or choose another directory",
            code="busy",
        )


@contextmanager
def sole_builder(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock the directory against other builders and against array tasks."""
    with sole_writer(directory, wait=wait):
        refuse_tasks_at_work(directory)
        yield


@contextmanager
def own_place(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Claim and lock the directory, then remove temporary files of killed writers."""
    claim(directory)
    with sole_builder(directory, wait=wait):
        (directory / PARTS).mkdir(exist_ok=True)  # the previous holder may have removed it
        remove_leftovers(directory, directory / PARTS)
        try:
            yield
        finally:
            with suppress(OSError):  # not empty if the dataset is unfinished
                (directory / PARTS).rmdir()


def forget_parts(directory: Path) -> None:
    """Remove the folder PARTS of a finished dataset, and temporary files of killed workers. After
    an interruption, a later call removes the rest."""
    with suppress(OSError):
        remove_leftovers(directory)
    parts = directory / PARTS
    for path in sorted(parts.glob("*"), key=lambda path: path == record_path(directory, BEGUN)):
        with suppress(OSError):
            withdraw(path)
    with suppress(OSError):
        parts.rmdir()


def write_record(directory: Path, name: str, record: Settings) -> None:
    write_json(record_path(directory, name), sealed(record.model_dump(mode="json")))


def read_record(directory: Path, name: str, schema: type[S]) -> S:
    """Return the record `name`; raise ValueError if its file is damaged or was changed."""
    return schema.model_validate_json(
        json.dumps(unsealed(json.loads(record_path(directory, name).read_text(encoding="utf-8"))))
    )


def record_path(directory: Path, name: str) -> Path:
    return directory / PARTS / f"{name}.json"
