"""Which shards the patterns of an index name, where they lie, which version of each stands there
now.

    a/{000..146}.tar, a/*.tar, https://host/{train,val}-{0..9}.tar, s3://bucket/*.tar

Braces are expanded as the shell does it, before anything is looked up; `*`, `?` and `[...]` are
looked up where files can be listed (everywhere but on a web server). What a pattern names is
sorted, so the same files give the same dataset.
"""

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from braceexpand import braceexpand

from data_prep import clients, remote
from data_prep.errors import UserError
from data_prep.index.config import IndexSettings
from data_prep.manifest import PARTS
from data_prep.pictures import COMPRESSED
from data_prep.progress import progress
from data_prep.publish import TEMPORARY_PREFIX
from data_prep.remote import Version

MAX_SHARDS = 1_000_000
_RANGE = re.compile(r"{(-?\d+)\.\.(-?\d+)")
_REMEDY = (
    "a manifest is for everybody to read: give it through storage ({params: {NAME: VALUE}} of"
    " http), ~/.netrc or AWS_*; signed URLs expire: index what they sign as s3://, or fetch the"
    " shards"
)
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
    """What stands for it in the paths of samples: its name, with as many folders before it as tell
    all shards apart."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.place


def list_shards(settings: IndexSettings) -> list[StockShard]:
    """Every shard of every split, in their order in the dataset."""
    places: list[tuple[str, int, str]] = []
    for split, patterns in sorted(settings.splits.items()):
        found = sorted(
            place for pattern in patterns for place in expand(pattern, storage=settings.storage)
        )
        places += [(split, number, place) for number, place in enumerate(found)]
    double, count = Counter(
        place if "://" in place else str(Path(place).resolve()) for _, _, place in places
    ).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"splits: {double} is named {count} times; every shard belongs to one split, once"
        )
    odd = next(
        (place for _, _, place in places if place.encode(errors="ignore").decode() != place), None
    )
    if odd is not None:
        raise UserError(f"splits: {odd} is not named in UTF-8; rename it, or name a link to it")
    directory = settings.directory
    local = next(
        (place for _, _, place in places if settings.is_remote and "://" not in place), None
    )
    if local is not None:
        raise UserError(
            f"splits: {local} lies on this disk, and who reads {remote.shown(settings.out)} may not"
            " have it; upload it first"
        )
    titles = _titles([place for _, _, place in places])
    return [
        StockShard(f"{split}-{number:06d}", split, place, _file(place, directory), title)
        for (split, number, place), title in zip(places, titles, strict=True)
    ]


def version_of(shard: StockShard, settings: IndexSettings) -> Version:
    if shard.is_remote:
        return remote.version(
            shard.place, storage=settings.storage, num_attempts=settings.num_attempts
        )
    try:
        status = Path(shard.place).stat()
    except FileNotFoundError:
        raise UserError(f"{shard.place}: there is no such file") from None
    return Version(status.st_size, str(status.st_mtime_ns))


def versions_of(shards: list[StockShard], settings: IndexSettings) -> dict[str, Version]:
    """By name; asked for side by side, as most of the time goes by in waiting. A missing shard is
    found before any is read."""
    with (
        ThreadPoolExecutor(NUM_QUESTIONS) as pool,
        progress("looking for", total=len(shards), unit="shards") as line,
    ):
        found = {}
        try:
            for shard, version in zip(
                shards, pool.map(version_of, shards, repeat(settings)), strict=True
            ):
                found[shard.name] = version
                line.advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


@contextlib.contextmanager
def opened(
    shard: StockShard, directory: Path, settings: IndexSettings
) -> Iterator[tuple[Path, Version]]:
    """A local file with the content of the shard, and the version that it is of; it must not change
    within the block."""
    if shard.is_remote:
        place = directory / PARTS / f"{TEMPORARY_PREFIX}{shard.name}.tar"
        with remote.copied(
            shard.place, place, storage=settings.storage, num_attempts=settings.num_attempts
        ) as version:
            yield place, version
        return
    before = version_of(shard, settings)
    yield Path(shard.place), before
    if version_of(shard, settings) != before:
        raise UserError(f"{shard.place}: changes while it is read; index it when it is complete")


def _file(place: str, directory: Path) -> str:
    if "://" in place:
        return place
    # the last part may be a link and stays one; a relative path counts from where the directory
    # really is
    real = Path(place).parent.resolve() / Path(place).name
    return os.path.relpath(real, directory.resolve())


def _titles(places: list[str]) -> list[str]:
    """The last parts of the paths, as few as tell them apart."""
    parts = [
        (urlsplit(place).path if "://" in place else str(Path(place).resolve())).split("/")
        for place in places
    ]
    for depth in range(1, max(map(len, parts)) + 1):
        titles = ["/".join(part[-depth:]) for part in parts]
        if len(set(titles)) == len(titles):
            return titles
    return places


# ---- patterns
# --------------------------------------------------------------------------------------------------


def expand(pattern: str, *, storage: dict[str, Any]) -> list[str]:
    """The local paths or the URLs that `pattern` names, sorted."""
    if pattern.startswith("pipe:"):
        raise UserError(
            "pipe: webdataset's commands are not run here; give what they read, as local files or"
            f" {clients.SCHEMES}"
        )
    if "://" in pattern:
        _check_url(pattern)
        found = [file for part in braces(pattern) for file in _listed(part, storage)]
    else:
        found = [file for part in braces(pattern) for file in _local(part)]
    if len(set(found)) != len(found):
        double = next(file for file in found if found.count(file) > 1)
        raise UserError(f"{pattern}: names {double} twice; name every shard once")
    for file in found:
        if urlsplit(file).path.lower().endswith(COMPRESSED):
            raise UserError(
                f"{file}: is compressed, so its pictures cannot be reached one by one; decompress"
                " it to a plain .tar"
            )
    return sorted(found)


def braces(pattern: str) -> list[str]:
    """Every word that the braces of `pattern` stand for, as webdataset has them."""
    sizes = [abs(int(last) - int(first)) for first, last in _RANGE.findall(pattern)]
    try:
        words = (
            []
            if max(sizes, default=0) >= MAX_SHARDS
            else list(islice(braceexpand(pattern, escape=False), MAX_SHARDS + 1))
        )
    except ValueError:
        raise UserError(
            f"{pattern}: its braces do not match; write ranges as {{000..146}} and choices as"
            " {a,b}"
        ) from None
    if not 0 < len(words) <= MAX_SHARDS:
        raise UserError(f"{pattern}: stands for more than {MAX_SHARDS:,} shards; is a range wrong?")
    return words


def _local(path: str) -> list[str]:
    if Path(path).is_file():
        return [path]
    if Path(path).is_dir():
        raise UserError(f"{path}: is a folder; name its shards, such as {path.rstrip('/')}/*.tar")
    if not glob.has_magic(path):
        raise UserError(
            f"{path}: no such file; a pattern may hold *, {{000..146}} or {{a,b}}, and is best"
            " quoted"
        )
    found = [name for name in glob.glob(path, recursive=True) if Path(name).is_file()]  # noqa: PTH207 (** and absolute patterns)
    if not found:
        raise UserError(f"{path}: no file has such a name")
    return found


def _listed(url: str, storage: dict[str, Any]) -> list[str]:
    if url.startswith("file://"):
        return _local(url.removeprefix("file://"))
    can_list = urlsplit(url).scheme not in ("http", "https")
    if not any(
        character in (url if can_list else urlsplit(url).path)
        for character in ("*?[" if can_list else "*[")
    ):
        return [url]
    if not can_list:
        raise UserError(
            f"{url}: a web server cannot be asked for its files; name them, such as"
            " shard-{000..146}.tar"
        )
    found = remote.listing(url, storage=storage)
    if not found:
        raise UserError(f"{url}: no object has such a name")
    return found


def _check_url(url: str) -> None:
    """A manifest is for everybody to read: it must hold no password and no key; nor may an error
    show one."""
    parts = urlsplit(url)
    if parts.scheme not in clients.KINDS and parts.scheme != "file":
        raise UserError(
            f"{remote.shown(url)}: {parts.scheme}:// is not read; copy the shards here, or use"
            f" {clients.SCHEMES}"
        )
    clients.without_secrets(url, remedy=_REMEDY)
