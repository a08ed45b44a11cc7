"""A dataset whose directory is a URL: all of it but the shards is copied to this machine, and the
shards are read where they lie.

    CACHE/datasets/KEY/     KEY: of the URL and of what its manifest says
      manifest.json         written last; the dataset's own, but that each shard's `file` is a URL
      .host                 the server that the dataset is on: no other receives storage options
      ...                   indices, paths, annotations and rejected.jsonl, as they are there

Invariants: every file of a copy has the hash that the manifest gives when a process first uses it;
another manifest at the URL is another KEY, so a copy never changes under its reader; a process that
has opened a URL reads that copy of it to its end.
"""

import hashlib
import json
import os
import posixpath
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from data_prep.clients import MissingError, host_of, is_command, shown, without_secrets
from data_prep.errors import UserError
from data_prep.manifest import (
    MANIFEST_NAME,
    REJECTED_NAME,
    DatasetError,
    Manifest,
    load_manifest,
    parse_manifest,
    save_manifest,
)
from data_prep.progress import progress
from data_prep.publish import hash_of_json, remove_leftovers, sha256_of, sole_writer, write_atomic
from data_prep.remote import ContentError, join, read_bytes, read_together

NUM_THREADS, FILES_AT_ONCE = 8, 16
HOST_NAME = ".host"
_OPENED: dict[tuple[str, str], Path] = {}
"""(URL, storage options as JSON) -> the copy that this process reads."""


def local_copy(
    dataset: Path | str, *, storage: Mapping[str, Any] | None, cache_dir: str | None = None
) -> Path:
    """The directory to read: of a dataset on this disk its own.

    `storage` None: as this process has opened that URL before, else without options. `cache_dir`
    None: the user's cache.
    """
    url = str(dataset).rstrip("/")
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    if is_command(url):
        raise UserError(
            "data.dataset: a command can only be streamed. Set data.stream=true, or name a dataset"
        )
    if "://" not in url:
        return Path(dataset)
    without_secrets(url, remedy="give it as a storage option")
    options = json.dumps(dict(storage or {}), sort_keys=True, default=str)
    key = next((known for known in _OPENED if storage is None and known[0] == url), (url, options))
    if key not in _OPENED:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wide-mlps"
        _OPENED[key] = _copied(url, Path(cache_dir) if cache_dir else user, dict(storage or {}))
    return _OPENED[key]


def own_host(directory: Path) -> str:
    """The server that a dataset's storage options are meant for.

    A copy's server is the one of its URL, whatever hosts the manifest names. A local dataset has
    its remote shards on one server.
    """
    if (directory / HOST_NAME).is_file():
        return (directory / HOST_NAME).read_text()
    shards = (
        shard
        for split in load_manifest(directory).splits.values()
        for shard in split.shards
        if shard.is_remote
    )
    hosts = sorted({host_of(shard.file) for shard in shards})
    if len(hosts) > 1:
        several = (
            f"the shards of {directory} are on {len(hosts)} hosts ({', '.join(hosts[:3])}), and"
            " options are sent to one only"
        )
        raise UserError(
            f"storage: {several}. Index the shards of each host as a dataset of its own"
        )
    return "".join(hosts)


def _copied(url: str, cache: Path, storage: dict[str, Any]) -> Path:
    address = join(url, MANIFEST_NAME)
    try:
        manifest = parse_manifest(read_bytes(address, storage=storage), shown(address))
    except MissingError as error:
        raise DatasetError(f"{shown(url)}: no finished dataset is there ({error})") from None
    directory = cache / "datasets" / hash_of_json([url, manifest.hash])[:32]
    if all((directory / name).is_file() for name in (MANIFEST_NAME, HOST_NAME)) and not _missing(
        directory, manifest
    ):
        return directory
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with sole_writer(
            directory.parent,
            wait=True,
            notice=f"{shown(url)}: another process copies its index; waiting",
        ):
            directory.mkdir(exist_ok=True)
            remove_leftovers(directory)
            _fill(url, directory, _missing(directory, manifest), storage)
            write_atomic(directory / HOST_NAME, host_of(url).encode())
            save_manifest(directory, _with_addresses(url, manifest))
    except OSError as error:
        if error.errno is None:  # the store's fault, not the disk's
            raise
        raise UserError(
            f"data.cache_dir: {cache}: {error.strerror}; name another directory of your own"
        ) from None
    return directory


def _missing(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Files of the dataset, beside its shards, that are not there as they should be -> their
    sha256."""
    files = {REJECTED_NAME: manifest.rejected_sha256}
    for split in manifest.splits.values():
        files |= {each.file: each.sha256 for each in split.annotations.values()}
        files |= {each.index_file: each.index_sha256 for each in split.shards}
        files |= {each.paths_file: each.paths_sha256 for each in split.shards}

    def is_right(name: str) -> bool:
        return (directory / name).is_file() and sha256_of(directory / name) == files[name]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return {
            name: files[name]
            for name, right in zip(files, pool.map(is_right, files), strict=True)
            if not right
        }


def _fill(url: str, directory: Path, files: dict[str, str], storage: dict[str, Any]) -> None:
    names = list(files)

    def read(name: str) -> bytes:
        address = join(url, name)

        def check(data: bytes) -> None:
            if hashlib.sha256(data).hexdigest() != files[name]:
                raise ContentError(
                    f"{shown(address)}: is not what the manifest there says; write that dataset"
                    " again"
                )

        return read_bytes(address, storage=storage, check=check)

    def fetch(first: int) -> int:
        group = names[first : first + FILES_AT_ONCE]
        for name, data in zip(
            group, read_together([join(url, name) for name in group], storage=storage), strict=True
        ):
            is_right = hashlib.sha256(data).hexdigest() == files[name]
            (directory / name).write_bytes(
                data if is_right else read(name)
            )  # cut by a crash it has another hash
        return len(group)

    title = f"copying the index of {shown(url)}"
    with (
        ThreadPoolExecutor(NUM_THREADS) as pool,
        progress(title, total=len(files), unit="files") as line,
    ):
        try:
            for num_files in pool.map(fetch, range(0, len(names), FILES_AT_ONCE)):
                line.advance(num_files)
        except ContentError as error:
            raise DatasetError(str(error)) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _with_addresses(url: str, manifest: Manifest) -> Manifest:
    splits = {}
    for name, split in manifest.splits.items():
        shards = tuple(
            each.model_copy(update={"file": _address(url, each.file)}) for each in split.shards
        )
        splits[name] = split.model_copy(update={"shards": shards})
    return manifest.model_copy(update={"splits": splits})


def _address(url: str, file: str) -> str:
    """Of a shard; never outside the bucket, or the host, that the dataset is in."""
    if "://" in file:
        return file
    if posixpath.isabs(file):
        raise DatasetError(
            f"{shown(url)}: its shards are on the disk where it was made, such as {file}; index"
            " them where they are"
        )
    scheme, _, rest = url.partition("://")
    place, _, folder = rest.partition("/")
    path = posixpath.join("/", folder, quote(file) if scheme.startswith("http") else file)
    return f"{scheme}://{place}{posixpath.normpath(path)}"
