"""Find the shards that match the patterns of `data_prep index`, and their versions.

    a/{000..146}.tar, a/*.tar, https://host/{train,val}-{0..9}.tar, s3://bucket/*.tar

Braces are expanded as in a shell, before any look-up. `*`, `?` and `[...]` need a disk or a bucket,
because web servers list no files. Names are sorted, so the same files give the same dataset.
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
from data_prep.progress import ProgressLine
from data_prep.remote import Version

MAX_SHARDS = 1_000_000
_RANGE = re.compile(r"{(-?\d+)\.\.(-?\d+)")
_REMEDY = (
    "give the secret through storage ({params: {NAME: VALUE}} for http), "
    "~/.netrc or AWS_*. Instead of signed URLs, use s3:// or copies of the shards"
)
NUM_QUESTIONS = 8
"""Number of parallel requests to servers."""


@dataclass(frozen=True)
class StockShard:
    name: str
    """Name of the shard in the dataset: SPLIT-NUMBER."""
    split: str
    place: str
    """Local path or URL, expanded from a pattern of the config."""
    file: str
    """Path of the shard in the manifest: relative to the dataset directory, or a URL."""
    title: str
    """Path of the shard in sample paths: its file name, with folders if the name is not unique."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.place


def list_shards(settings: IndexSettings) -> list[StockShard]:
    places: list[tuple[str, int, str]] = []
    for split, patterns in sorted(settings.splits.items()):
        found = sorted(
            place for pattern in patterns for place in expand(pattern, storage=settings.storage)
        )
        places += [(split, number, place) for number, place in enumerate(found)]
    twice, count = Counter(
        place if "://" in place else str(Path(place).resolve()) for _, _, place in places
    ).most_common(1)[0]
    if count > 1:
        raise UserError(
            "splits",
            f"{twice} occurs {count} times",
            "list every shard once, in one split",
            code="conflict",
        )
    for _, _, place in places:
        if place.encode(errors="ignore").decode() != place:
            raise UserError(
                "splits",
                f"{place} has a name that is not UTF-8",
                "rename it, or make a link with another name",
                code="unsupported",
            )
    directory = settings.directory
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
        raise UserError(
            shard.place, "the file does not exist", "correct the pattern", code="missing-path"
        ) from None
    return Version(status.st_size, str(status.st_mtime_ns))


def versions_of(shards: list[StockShard], settings: IndexSettings) -> dict[str, Version]:
    """Return the version of each shard, by name. Missing shards are reported before any shard is
    read."""
    with (
        ThreadPoolExecutor(NUM_QUESTIONS) as pool,
        ProgressLine("looking for", total=len(shards), unit="shards") as line,
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
    """Yield a local file with the shard's content, and its version. Raise UserError if the shard
    changes before the block ends."""
    if shard.is_remote:
        with remote.nameless_copy(
            shard.place,
            directory / PARTS,
            storage=settings.storage,
            num_attempts=settings.num_attempts,
        ) as copy:
            yield copy
        return
    before = version_of(shard, settings)
    yield Path(shard.place), before
    if version_of(shard, settings) != before:
        raise UserError(
            shard.place,
            "the file changes during reading",
            "index it when it is complete",
            code="changed",
        )


def _file(place: str, directory: Path) -> str:
    if "://" in place:
        return place
    # do not follow a link of the file itself; relative paths start at the resolved directory
    real = Path(place).parent.resolve() / Path(place).name
    return os.path.relpath(real, directory.resolve())


def _titles(places: list[str]) -> list[str]:
    """Return, for each path, the shortest end (last folders and file name) that is unique."""
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


def expand(pattern: str, *, storage: dict[str, Any]) -> list[str]:
    """Return the local paths or URLs that match `pattern`, sorted."""
    if pattern.startswith("pipe:"):
        raise UserError(
            "splits",
            "commands of webdataset (pipe:) are not supported",
            f"give their input as local files or {clients.SCHEMES}",
            code="unsafe",
        )
    if "://" in pattern:
        _check_url(pattern)
        found = [file for part in braces(pattern) for file in _listed(part, storage)]
    else:
        found = [file for part in braces(pattern) for file in _local(part)]
    file, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise UserError(
            pattern, f"the pattern contains {file} twice", "list every shard once", code="conflict"
        )
    for file in found:
        if urlsplit(file).path.lower().endswith(COMPRESSED):
            raise UserError(
                file,
                "the file is compressed, so single images cannot be read",
                "decompress it to a plain .tar",
                code="unsupported",
            )
    return sorted(found)


def braces(pattern: str) -> list[str]:
    """Return all expansions of the braces of `pattern`, as in webdataset."""
    sizes = [abs(int(last) - int(first)) for first, last in _RANGE.findall(pattern)]
    words: list[str] = []
    try:
        if max(sizes, default=0) < MAX_SHARDS:
            words = list(islice(braceexpand(pattern, escape=False), MAX_SHARDS + 1))
    except ValueError:
        raise UserError(
            pattern,
            "the braces do not match",
            "write ranges as {000..146} and choices as {a,b}",
            code="bad-syntax",
        ) from None
    if not 0 < len(words) <= MAX_SHARDS:
        problem = f"the pattern expands to more than {MAX_SHARDS:,} shards"
        raise UserError(pattern, problem, "correct its range", code="bad-value")
    return words


def _local(path: str) -> list[str]:
    if Path(path).is_file():
        return [path]
    if Path(path).is_dir():
        name_shards = f"use a pattern for its shards, for example {path.rstrip('/')}/*.tar"
        raise UserError(path, "this is a folder", name_shards, code="bad-value")
    found = [name for name in glob.glob(path, recursive=True) if Path(name).is_file()]  # noqa: PTH207 (** and absolute patterns)
    if not found:
        raise UserError(
            path,
            "no such file exists",
            "use *, {000..146} or {a,b} in patterns, and quote them",
            code="missing-path",
        )
    return found


def _listed(url: str, storage: dict[str, Any]) -> list[str]:
    if url.startswith("file://"):
        return _local(url.removeprefix("file://"))
    if urlsplit(url).scheme in ("http", "https"):
        if any(character in urlsplit(url).path for character in "*["):
            raise UserError(
                url,
                "a web server does not list its files",
                "list them, for example shard-{000..146}.tar",
                code="unsupported",
            )
        return [url]
    if not any(character in url for character in "*?["):
        return [url]
    found = remote.listing(url, storage=storage)
    if not found:
        raise UserError(url, "no object matches", "correct the URL", code="missing-path")
    return found


def _check_url(url: str) -> None:
    """Raise UserError for unknown schemes, and for secrets in a URL, because manifests and errors
    are public."""
    scheme = urlsplit(url).scheme
    if scheme not in clients.KINDS and scheme != "file":
        raise UserError(
            clients.shown(url),
            f"{scheme}:// is not supported",
            f"copy the shards to a local disk, or use {clients.SCHEMES}",
            code="unsupported",
        )
    clients.without_secrets(url, remedy=_REMEDY, field=clients.shown(url))
