"""Where a dataset is written: a directory, or a store.

A store has no locks and no renames. What is made for one is made in `work`, a directory of its own
on this disk (or on one that array tasks share), as if that were `out`; what is whole there goes to
the store:

1. under the lock of `work`: where the manifest stands already it is brought here. Else the mark
   `.building.json` is written in the store, unless one is there: who finds that of another `work`
   is refused;
2. a shard that is whole in `work` is uploaded and verified; its record says as what the store knows
   it, then its tar is removed here (build/shards.py): the dataset need not fit on this disk;
3. the small files, then manifest.json; then the mark goes, then what lies in `work`.

After a kill anywhere the same command goes on; what is uploaded twice has the same bytes.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from data_prep.build.parts import record_path
from data_prep.clients import without_secrets
from data_prep.errors import UserError
from data_prep.manifest import MANIFEST_NAME, PARTS, Manifest, Shard, parse_manifest
from data_prep.publish import LOCK, TEMPORARY_PREFIX, Busy, Holder, write_atomic, write_json
from data_prep.remote import (
    MissingError,
    join,
    names_under,
    read_bytes,
    remove,
    shown,
    upload,
    version,
    write_bytes,
)
from data_prep.settings import Settings

MARK_NAME = ".building.json"
OWN_MARK = "mark"
"""The record with the bytes of that mark, by which a builder knows its own."""
NUM_UPLOADS = 8
"""Of small files at a time."""


class Destination(Settings):
    example_with: ClassVar = {"work": "out=s3://bucket/mine"}
    out: str
    work: str | None = Field(None, examples=["/scratch/me/mine"])
    """If `out` is a URL: the directory of locks and unfinished work; array tasks on several
    machines share one."""
    out_storage: dict[str, Any] = Field(
        default_factory=dict, examples=[{"endpoint_url": "https://HOST"}]
    )
    """Options for fsspec, if `out` is a URL; written nowhere."""

    @model_validator(mode="after")
    def _work_goes_with_a_url(self) -> "Destination":
        without_secrets(
            self.out, remedy="give it as out_storage, or where the store's own tools have it"
        )
        if self.is_remote and self.work is None:
            raise ValueError(
                f"work: {shown(self.out)} is a store, which has no locks; name a directory "
                "for unfinished work, --work DIR"
            )
        if self.work is not None and ("://" in self.work or not self.is_remote):
            raise ValueError(
                "work: goes with an out that is a URL, and is a directory itself; leave it "
                "out, or mend them"
            )
        return self

    @property
    def is_remote(self) -> bool:
        return "://" in self.out

    @property
    def directory(self) -> Path:
        """Where the dataset is made."""
        return Path(self.work or self.out)

    @property
    def last_name(self) -> str:
        return (
            self.out.rstrip("/").rpartition("/")[2]
            if self.is_remote
            else Path(self.out).resolve().name
        )


def occupy(place: Destination) -> None:
    """Step 1; the caller holds the directory alone."""
    if not place.is_remote:
        return
    mark, url, how = (
        record_path(place.directory, OWN_MARK),
        join(place.out, MARK_NAME),
        {"storage": place.out_storage},
    )
    if mark.exists() and (begun := json.loads(mark.read_bytes())["out"]) != place.out:
        raise UserError(
            f"work: {place.directory} has unfinished work for {begun}; name another "
            "directory, or finish that first"
        )
    finished = _manifest_in_store(place)
    if finished is not None:
        write_atomic(place.directory / MANIFEST_NAME, finished)
        return
    (place.directory / MANIFEST_NAME).unlink(
        missing_ok=True
    )  # it is made again, from records that are held against the store
    if not mark.exists():
        names = names_under(place.out, **how)
        if names and MARK_NAME not in names:
            raise UserError(
                f"out: {shown(place.out)} holds {names[0]}, and no dataset was begun there; "
                "name another place, or empty it"
            )
        write_json(
            mark, asdict(Holder()) | {"work": str(place.directory.absolute()), "out": place.out}
        )
    if not write_bytes(mark.read_bytes(), url, only_if_new=True, **how):
        mark.unlink()
        raise _of_another_builder(place, url)


@contextmanager
def occupied(place: Destination) -> Iterator[None]:
    """A builder that fails before it has kept anything leaves no mark: others may begin there."""
    try:
        occupy(place)
        yield
    except BaseException:
        mark = record_path(place.directory, OWN_MARK)
        if mark.exists() and [*mark.parent.iterdir()] == [mark]:
            with suppress(OSError, UserError):  # what matters more is why
                remove([join(place.out, MARK_NAME)], storage=place.out_storage)
                mark.unlink()
        raise


def _manifest_in_store(place: Destination) -> bytes | None:
    try:
        return read_bytes(join(place.out, MANIFEST_NAME), storage=place.out_storage)
    except MissingError:
        return None


def finished_manifest(place: Destination) -> Manifest | None:
    """Of a dataset that is in the store already."""
    found = _manifest_in_store(place)
    return None if found is None else parse_manifest(found, shown(join(place.out, MANIFEST_NAME)))


def _of_another_builder(place: Destination, url: str) -> UserError:
    whom, work = "another process", "DIR"
    with suppress(ValueError, TypeError, KeyError, MissingError):
        found = json.loads(read_bytes(url, storage=place.out_storage))
        work = found.pop("work")
        del found["out"]
        whom = str(Holder(**found))
    return Busy(
        f"out: {shown(place.out)} is being written by {whom}; its own command goes on there "
        f"(--work {work}); if that directory is "
        f"lost, remove all that lies at {shown(place.out)}, {MARK_NAME} last, and build again"
    )


def deliver_tar(place: Destination, shard: Shard) -> str:
    """Step 2: what the store calls the tar that it holds now."""
    upload(place.directory / shard.file, join(place.out, shard.file), storage=place.out_storage)
    return _as_stored(place, shard)


def is_as_delivered(place: Destination, shard: Shard, stored: str) -> bool:
    with suppress(MissingError):
        return _as_stored(place, shard) == stored
    return False


def _as_stored(place: Destination, shard: Shard) -> str:
    found = version(join(place.out, shard.file), storage=place.out_storage)
    return found.stamp or str(found.num_bytes)


def hand_over(place: Destination, made: Path | None = None) -> None:
    """Step 3, but for the records, which the caller removes. `made`: where the files are, if they
    have a directory of their own."""
    if not place.is_remote:
        return
    made = made or place.directory
    manifest, small = made / MANIFEST_NAME, [*_small_files(made)]

    def send(path: Path) -> None:
        upload(path, join(place.out, path.name), storage=place.out_storage)

    _refuse_taken_over(place)
    with ThreadPoolExecutor(NUM_UPLOADS) as pool:
        for _ in pool.map(send, small):
            pass
    if _manifest_in_store(place) != manifest.read_bytes():
        _refuse_taken_over(place)
        send(manifest)
    remove([join(place.out, MARK_NAME)], storage=place.out_storage)
    for path in [manifest, *small]:
        path.unlink()


def _refuse_taken_over(place: Destination) -> None:
    """Somebody may have emptied the store since we began, or begun there himself."""
    own, url = record_path(place.directory, OWN_MARK), join(place.out, MARK_NAME)
    if not own.exists():  # it was finished before
        return
    try:
        mark = read_bytes(url, storage=place.out_storage)
    except MissingError:
        if _manifest_in_store(place) is not None:
            return
        raise UserError(
            f"out: {shown(url)} has gone since this build began; give the same command "
            "again: it goes on"
        ) from None
    if mark != own.read_bytes():
        raise _of_another_builder(place, url)


def _small_files(directory: Path) -> Iterator[Path]:
    """All of the dataset but tars, which are there already, and the manifest."""
    for path in sorted(directory.iterdir()):
        if (
            path.name not in (MANIFEST_NAME, PARTS, LOCK)
            and not path.name.startswith(TEMPORARY_PREFIX)
            and path.suffix != ".tar"
        ):
            yield path
