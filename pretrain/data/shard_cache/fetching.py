"""Fills the .part of a shard from its URL, as patiently as told, until its bytes are those of the manifest."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from typing import Any

from data_prep.manifest import Shard
from data_prep.remote import ContentError, fetch, shown, tried
from pretrain.data.shard_cache.directory import CacheDirectory, hash_of
from pretrain.data.shard_cache.files import plain_errors


@dataclass(frozen=True)
class Patience:
    """With a server, and with the others on this machine."""

    num_attempts: int = 8
    """To fetch a shard; wrong bytes count as a failure like any other."""
    first_pause_s: float = 0.5
    """After the first failure; it doubles with each, up to half a minute, and is made uneven."""
    silence_s: float = 30.0
    """A server that says nothing for so long has failed."""
    wait_s: float = 300.0
    """For others to let go of room, or to get on with a shard that we need. Below engine.timeout_s, whose message says less."""


def fill(
    part: FileIO,
    shard: Shard,
    directory: CacheDirectory,
    *,
    storage: dict[str, Any],
    patience: Patience,
    stop: threading.Event,
    tell: Callable[[str], None],
) -> None:
    """`tell` is for whoever waits: it hears of a server that failed twice, and what it says now."""

    def write(data: bytes) -> None:
        if part.tell() + len(data) > shard.num_bytes:
            raise ContentError(_wrong(shard, f"more than the {shard.num_bytes:,} bytes"))
        with plain_errors(directory.path):
            view = memoryview(data)
            while view:
                view = view[part.write(view) :]

    def attempt() -> None:
        part.seek(0)
        os.utime(part.fileno())  # those who wait see that something is done
        fetch(shard.file, write, num_bytes=shard.num_bytes, storage=storage, silence_s=patience.silence_s, stop=stop)
        num_bytes = part.tell()
        if num_bytes != shard.num_bytes:
            raise ContentError(_wrong(shard, f"{num_bytes:,} of the {shard.num_bytes:,} bytes"))
        found = hash_of(part)
        if found != shard.sha256:
            raise ContentError(_wrong(shard, f"sha256 {found} instead of {shard.sha256}"))

    tried(
        shard.file,
        attempt,
        num_attempts=patience.num_attempts,
        first_pause_s=patience.first_pause_s,
        stop=stop,
        tell=tell,
    )


def _wrong(shard: Shard, what: str) -> str:
    return (
        f"{shown(shard.file)}: delivers {what} that the manifest promises, each time; it was changed or is damaged: "
        "put the right file back, or run data_prep index again"
    )
