"""The shards of an index: what they are called in the dataset, where they lie, which version of each stands there now."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from urllib.parse import urlsplit

from data_prep import remote
from data_prep.build.parts import PARTS
from data_prep.index.config import IndexSettings
from data_prep.index.patterns import expand
from data_prep.progress import progress
from data_prep.publish import TEMPORARY_PREFIX
from data_prep.remote import Version
from data_prep.settings import UserError

NUM_QUESTIONS = 8
"""To servers at a time."""


@dataclass(frozen=True)
class StockShard:
    name: str
    """Of its index: SPLIT-NUMBER."""
    split: str
    place: str
    """A local path or a URL, as it was given."""
    file: str
    """The same for the manifest: relative to the dataset directory, or a URL."""
    title: str
    """What stands for it in the paths of samples: its name, with as many folders before it as tell all shards apart."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.place


def list_shards(settings: IndexSettings) -> list[StockShard]:
    """Every shard of every split, in their order in the dataset."""
    places: list[tuple[str, int, str]] = []
    for split, patterns in sorted(settings.splits.items()):
        found = sorted(place for pattern in patterns for place in expand(pattern, storage=settings.storage))
        places += [(split, number, place) for number, place in enumerate(found)]
    double, count = Counter(_identity(place) for _, _, place in places).most_common(1)[0]
    if count > 1:
        raise UserError(f"splits: {double} is named {count} times; every shard belongs to one split, once")
    odd = next((place for _, _, place in places if not _is_utf8(place)), None)
    if odd is not None:
        raise UserError(f"splits: {odd} is not named in UTF-8; rename it, or name a link to it")
    directory = Path(settings.out)
    titles = _titles([place for _, _, place in places])
    return [
        StockShard(f"{split}-{number:06d}", split, place, _file(place, directory), title)
        for (split, number, place), title in zip(places, titles, strict=True)
    ]


def version_of(shard: StockShard, settings: IndexSettings) -> Version:
    if shard.is_remote:
        return remote.version(shard.place, storage=settings.storage, num_attempts=settings.num_attempts)
    try:
        status = Path(shard.place).stat()
    except FileNotFoundError:
        raise UserError(f"{shard.place}: there is no such file") from None
    return Version(status.st_size, str(status.st_mtime_ns))


def versions_of(shards: list[StockShard], settings: IndexSettings) -> dict[str, Version]:
    """By name; asked for side by side, as most of the time goes by in waiting. A missing shard is found before any is read."""
    with (
        ThreadPoolExecutor(NUM_QUESTIONS) as pool,
        progress("looking for", total=len(shards), unit="shards") as line,
    ):
        found = {}
        try:
            for shard, version in zip(shards, pool.map(version_of, shards, repeat(settings)), strict=True):
                found[shard.name] = version
                line.advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


@contextlib.contextmanager
def opened(shard: StockShard, directory: Path, settings: IndexSettings) -> Iterator[tuple[Path, Version]]:
    """A local file with the content of the shard, and the version that it is of; it must not change within the block."""
    if shard.is_remote:
        place = directory / PARTS / f"{TEMPORARY_PREFIX}{shard.name}.tar"
        with remote.copied(shard.place, place, storage=settings.storage, num_attempts=settings.num_attempts) as version:
            yield place, version
        return
    before = version_of(shard, settings)
    yield Path(shard.place), before
    if version_of(shard, settings) != before:
        raise UserError(f"{shard.place}: changes while it is read; index it when it is complete")


def _is_utf8(place: str) -> bool:
    try:
        return bool(place.encode())
    except UnicodeEncodeError:
        return False


def _identity(place: str) -> str:
    return place if "://" in place else str(Path(place).resolve())


def _file(place: str, directory: Path) -> str:
    if "://" in place:
        return place
    # the last part may be a link and stays one; a relative path counts from where the directory really is
    real = Path(place).parent.resolve() / Path(place).name
    return os.path.relpath(real, directory.resolve())


def _titles(places: list[str]) -> list[str]:
    """The last parts of the paths, as few as tell them apart."""
    parts = [(urlsplit(place).path if "://" in place else str(Path(place).resolve())).split("/") for place in places]
    for depth in range(1, max(map(len, parts)) + 1):
        titles = ["/".join(part[-depth:]) for part in parts]
        if len(set(titles)) == len(titles):
            return titles
    return places
