"""Copy a finished dataset to a bucket and verify it.

1. Every file but the manifest is uploaded; each upload is compared with the bucket's checksum.
2. The manifest is uploaded last, so a reader never finds an unfinished dataset.

After a kill, run the same command again: files that are in the bucket are uploaded again.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep.clients import without_secrets
from data_prep.errors import UserError
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest
from data_prep.progress import progress
from data_prep.publish import LOCK, TEMPORARY_PREFIX
from data_prep.remote import MissingError, join, read_bytes, shown, upload

NUM_UPLOADS = 8


def push(directory: Path, url: str, *, storage: Mapping[str, Any]) -> Manifest:
    """Upload the dataset and return its manifest."""
    if "://" not in url:
        raise UserError("URL", f"{url} is not a URL", "write s3://BUCKET/NAME", code="bad-value")
    without_secrets(url, remedy="give it as a storage option", field="URL")
    manifest, options = load_manifest(directory), dict(storage)
    for split in manifest.splits.values():
        for shard in split.shards:
            if shard.is_remote or not (directory / shard.file).parent.samefile(directory):
                problem = f"its shard {shard.file} is not in the dataset's folder"
                fix = "push a dataset that data_prep build has written"
                raise UserError(str(directory), problem, fix, code="unsupported")
    own = (directory / MANIFEST_NAME).read_bytes()
    try:
        stored = read_bytes(join(url, MANIFEST_NAME), storage=options)
    except MissingError:
        stored = own
    if stored != own:
        problem, fix = f"{shown(url)} holds another dataset", "choose another URL"
        raise UserError("URL", problem, fix, code="exists")
    paths = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.name not in (MANIFEST_NAME, LOCK)
        and not path.name.startswith(TEMPORARY_PREFIX)
    ]

    def send(path: Path) -> None:
        upload(path, join(url, path.name), storage=options)

    with (
        ThreadPoolExecutor(NUM_UPLOADS) as pool,
        progress("uploading", total=len(paths), unit="files") as line,
    ):
        try:
            for _ in pool.map(send, paths):
                line.advance()
        finally:
            pool.shutdown(cancel_futures=True)
    send(directory / MANIFEST_NAME)
    return manifest
