"""Read a dataset whose directory is a URL: copy everything but its shards to this machine, and read
the shards from the server.

    CACHE/datasets/KEY/     KEY: hash of the URL and of the manifest
      manifest.json         written last; each shard's `file` is a URL
      .host                 the dataset's server: no other server gets storage options
      ...                   indices, paths, annotations and rejected.jsonl, unchanged

When a process first opens a URL, every file of the copy is compared with its hash in the manifest.
A changed manifest has another KEY, so a copy never changes while it is read.
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
    DatasetError,
    Manifest,
    load_manifest,
    parse_manifest,
    save_manifest,
)
from data_prep.progress import ProgressLine
from data_prep.publish import hash_of_json, remove_leftovers, sha256_of, sole_writer, write_atomic
from data_prep.remote import ContentError, Storage, join, read_bytes

NUM_THREADS = 16
HOST_NAME = ".host"
_OPENED: dict[tuple[str, str], Path] = {}
"""(URL, storage options as JSON) -> directory of the copy that this process reads."""


def local_copy(
    dataset: Path | str, *, storage: Mapping[str, Any] | None, cache_dir: str | None = None
) -> Path:
    """Return the local directory of a dataset, after copying it if it is remote. If `storage` is
    None, the options of an earlier call for this URL are used. If `cache_dir` is None, the user's
    cache is used."""
    url = str(dataset).rstrip("/")
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    if is_command(url):
        problem, fix = "a command (pipe:) can only be streamed", "set data.stream=true"
        raise UserError("data.dataset", problem, fix, code="unsupported")
    if "://" not in url:
        return Path(dataset)
    without_secrets(url, remedy="give it as a storage option", field=shown(url))
    options = json.dumps(dict(storage or {}), sort_keys=True, default=str)
    key = next((known for known in _OPENED if storage is None and known[0] == url), (url, options))
    if key not in _OPENED:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wide-mlps"
        _OPENED[key] = _copied(url, Path(cache_dir) if cache_dir else user, storage or {})
    return _OPENED[key]


def own_host(directory: Path) -> str:
    """Return the host that receives a dataset's storage options. For a copy, this is the host of
    its URL, even if the manifest names others. For a local dataset, this is the host of its remote
    shards; several hosts are an error."""
    if (directory / HOST_NAME).is_file():
        return (directory / HOST_NAME).read_text()
    splits = load_manifest(directory).splits.values()
    shards = (shard for split in splits for shard in split.shards if shard.is_remote)
    hosts = sorted({host_of(shard.file) for shard in shards})
    if len(hosts) > 1:
        problem = (
            f"the shards of {directory} are on {len(hosts)} hosts ({', '.join(hosts[:3])}), but "
            "storage options are sent to only one host"
        )
        fix = "index the shards of each host as a separate dataset"
        raise UserError("storage", problem, fix, code="conflict")
    return "".join(hosts)


def _copied(url: str, cache: Path, storage: Storage) -> Path:
    address = join(url, MANIFEST_NAME)
    try:
        manifest = parse_manifest(read_bytes(address, storage=storage), shown(address))
    except MissingError as error:
        problem = f"it has no {MANIFEST_NAME}, so it is no finished dataset"
        raise DatasetError(shown(url), problem, error.fix, code="missing-path") from None
    directory = cache / "datasets" / hash_of_json([url, manifest.hash])[:32]
    own = (directory / MANIFEST_NAME, directory / HOST_NAME)
    if all(path.is_file() for path in own) and not _missing(directory, manifest):
        return directory
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        notice = f"{shown(url)}: another process copies its index; waiting"
        with sole_writer(directory.parent, wait=True, notice=notice):
            directory.mkdir(exist_ok=True)
            remove_leftovers(directory)
            _fill(url, directory, _missing(directory, manifest), storage)
            write_atomic(directory / HOST_NAME, host_of(url).encode())
            save_manifest(directory, _with_addresses(url, manifest))
    except ContentError as error:
        fix = "upload the dataset again (data_prep push)"
        raise DatasetError(shown(url), str(error), fix, code="damaged") from None
    except OSError as error:
        problem = f"{cache} cannot be written ({error.strerror})"
        raise UserError(
            "data.cache_dir", problem, "choose another directory", code="unreadable"
        ) from None
    return directory


def _missing(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Return path and sha256 of each missing or damaged file of the dataset, except its shards."""
    files = manifest.file_hashes(with_tars=False)

    def is_right(name: str) -> bool:
        return (directory / name).is_file() and sha256_of(directory / name) == files[name]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        right = pool.map(is_right, files)
        return {name: files[name] for name, ok in zip(files, right, strict=True) if not ok}


def _fill(url: str, directory: Path, files: dict[str, str], storage: Storage) -> None:
    def fetch(name: str) -> None:
        def check(data: bytes) -> None:
            if hashlib.sha256(data).hexdigest() != files[name]:
                raise ContentError(f"{name} does not match the manifest")

        # if a crash cuts the file, the next call finds a wrong hash
        (directory / name).write_bytes(read_bytes(join(url, name), storage=storage, check=check))

    title = f"copying the index of {shown(url)}"
    with (
        ThreadPoolExecutor(NUM_THREADS) as pool,
        ProgressLine(title, total=len(files), unit="files") as line,
    ):
        try:
            for _ in pool.map(fetch, files):
                line.advance()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _with_addresses(url: str, manifest: Manifest) -> Manifest:
    splits = {}
    for name, split in manifest.splits.items():
        shards = (
            each.model_copy(update={"file": _address(url, each.file)}) for each in split.shards
        )
        splits[name] = split.model_copy(update={"shards": tuple(shards)})
    return manifest.model_copy(update={"splits": splits})


def _address(url: str, file: str) -> str:
    """Return the URL of a shard, within the dataset's bucket or host. Raise DatasetError if `file`
    is an absolute path."""
    if "://" in file:
        return file
    if posixpath.isabs(file):
        problem = f"its shards, such as {file}, are on the disk of the machine that made it"
        fix = "upload the shards, then run data_prep index for their URLs"
        raise DatasetError(shown(url), problem, fix, code="unsupported")
    scheme, _, rest = url.partition("://")
    place, _, folder = rest.partition("/")
    path = posixpath.join("/", folder, quote(file) if scheme.startswith("http") else file)
    return f"{scheme}://{place}{posixpath.normpath(path)}"
