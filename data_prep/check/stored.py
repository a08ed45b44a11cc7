"""Read a finished dataset: a tar as one read-only buffer, the images of a shard, or all shards in
worker processes.

Nothing is written, except the temporary copy of a remote shard. Results come in the order of the
shards, for any number of workers.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from data_prep.clients import options_for
from data_prep.errors import Code
from data_prep.images import Rejection
from data_prep.limits import cause_of
from data_prep.local_copy import own_host
from data_prep.manifest import DatasetError, Shard, load_index
from data_prep.remote import Storage, nameless_copy
from data_prep.tar import BLOCK, TarError, header_name, key_of
from data_prep.workers import sweep

T = TypeVar("T")


@contextmanager
def tar_content(directory: Path, shard: Shard, *, storage: Storage) -> Iterator[mmap.mmap | bytes]:
    """Yield the bytes of a shard's tar, memory-mapped: a slice copies only its own bytes."""
    with local_tar(directory, shard, storage=storage) as path:
        try:
            file = open(path, "rb")
        except OSError as error:
            code: Code = "missing-path" if isinstance(error, FileNotFoundError) else "unreadable"
            fix = f"run data_prep verify {directory}"
            raise DatasetError(shard.file, cause_of(error), fix, code=code) from None
        with file:
            if os.fstat(file.fileno()).st_size == 0:
                yield b""  # an empty file cannot be mapped
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield content


@contextmanager
def local_tar(directory: Path, shard: Shard, *, storage: Storage) -> Iterator[Path]:
    """Yield a local path of the tar: the file itself, or a copy of a remote file."""
    if not shard.is_remote:
        yield directory / shard.file
        return
    room = directory if os.access(directory, os.W_OK) else Path(tempfile.gettempdir())
    own = options_for(shard.file, storage, hosts=[own_host(directory)]) if storage else {}
    with nameless_copy(shard.file, room, storage=own) as (path, _):
        yield path


def each_shard(
    function: Callable[[Shard], T], shards: Sequence[Shard], *, title: str, num_workers: int
) -> Iterator[T]:
    sizes = [shard.num_samples for shard in shards]
    return sweep(function, shards, title=title, unit="images", sizes=sizes, workers=num_workers)


def each_picture(
    function: Callable[[bytes], T],
    directory: Path,
    shard: Shard,
    *,
    storage: Storage,
    rows: Any = slice(None),
) -> Iterator[T]:
    """Yield the result of `function` for the stored bytes of each image, or of the images in `rows`
    of the index."""
    with tar_content(directory, shard, storage=storage) as content:
        for offset, length in load_index(directory, shard)[rows, :2].tolist():
            try:
                found = function(content[offset : offset + length])
            except Rejection as error:
                problem, fix = (
                    f"an image is not readable ({error})",
                    f"run data_prep verify {directory}",
                )
                raise DatasetError(shard.file, problem, fix, code="damaged") from None
            yield found


def stored_key(content: mmap.mmap | bytes, offset: int) -> str:
    """Return the key of the sample whose image starts at `offset`; "" if the tar header is not
    valid."""
    try:
        return key_of(header_name(content[offset - BLOCK : offset]))[0]
    except TarError:
        return ""
