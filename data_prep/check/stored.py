"""Reads what a finished dataset holds, shard by shard: a tar as one read-only buffer, wherever it
lies; every picture of a shard; every shard of a dataset in worker processes.

Invariants: nothing is written, but for the temporary copy of a shard behind a URL, which goes when
its reader ends; results come in the order of the shards, whatever the number of workers.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from data_prep.clients import options_for
from data_prep.images import Rejection
from data_prep.local_copy import own_host
from data_prep.manifest import (
    MANIFEST_NAME,
    REJECTED_NAME,
    DatasetError,
    Manifest,
    Shard,
    load_index,
)
from data_prep.remote import Storage, nameless_copy
from data_prep.tar import BLOCK, TarError, header_name, key_of
from data_prep.workers import Tally, sweep

T = TypeVar("T")


@contextmanager
def tar_content(directory: Path, shard: Shard, *, storage: Storage) -> Iterator[mmap.mmap | bytes]:
    """The whole tar of a shard; a slice of it is a copy of that part alone."""
    with local_tar(directory, shard, storage=storage) as path:
        try:
            file = open(path, "rb")
        except OSError as error:
            why = (
                "missing" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
            )
            raise DatasetError(f"{shard.file}: {why}; run data_prep verify {directory}") from None
        with file:
            if os.fstat(file.fileno()).st_size == 0:
                yield b""  # which cannot be mapped
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield content


@contextmanager
def local_tar(directory: Path, shard: Shard, *, storage: Storage) -> Iterator[Path]:
    """Where the tar of a shard can be opened: in place, or a copy of one that is remote."""
    if not shard.is_remote:
        yield directory / shard.file
        return
    room = directory if os.access(directory, os.W_OK) else Path(tempfile.gettempdir())
    own = options_for(shard.file, storage, hosts=[own_host(directory)]) if storage else {}
    with nameless_copy(shard.file, room, storage=own) as (path, _):
        yield path


def known_files(manifest: Manifest) -> set[str]:
    """What a dataset directory holds according to its manifest."""
    known = {MANIFEST_NAME, REJECTED_NAME}
    for split in manifest.splits.values():
        known |= {
            file
            for shard in split.shards
            for file in (shard.file, shard.index_file, shard.paths_file)
        }
        known |= {annotation.file for annotation in split.annotations.values()}
    return known


def each_shard(
    function: Callable[[Shard], T], shards: Sequence[Shard], *, title: str, num_workers: int
) -> Iterator[T]:
    """`function` of every shard, in their order; it counts its images with `Tally.add`."""
    total = sum(shard.num_samples for shard in shards)
    return sweep(function, shards, title=title, unit="images", total=total, num_workers=num_workers)


def each_picture(
    function: Callable[[bytes], T],
    directory: Path,
    shard: Shard,
    *,
    storage: Storage,
    rows: Any = slice(None),
) -> Iterator[T]:
    """`function` of the stored bytes of every picture of a shard, or of some rows of its index."""
    with tar_content(directory, shard, storage=storage) as content:
        for offset, length in load_index(directory, shard)[rows, :2].tolist():
            try:
                found = function(content[offset : offset + length])
            except Rejection as error:
                raise DatasetError(
                    f"{shard.file}: a picture does not decode ({error}); run data_prep verify"
                    f" {directory}"
                ) from None
            Tally.add(1)
            yield found


def stored_key(content: mmap.mmap | bytes, offset: int) -> str:
    """The key of the sample whose picture starts at `offset`, from the header before it."""
    try:
        return key_of(header_name(content[offset - BLOCK : offset]))[0]
    except TarError:
        return ""
