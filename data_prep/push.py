"""Copy a finished dataset to a bucket and verify it.

1. Every file of the manifest is compared with its hash and uploaded; each upload is compared with
   the bucket's checksum.
2. The manifest is uploaded last, so a reader never finds an unfinished dataset.

After a kill, run the same command again: it uploads all files again.
"""

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from data_prep.clients import MissingError, shown, without_secrets
from data_prep.errors import UserError
from data_prep.manifest import (
    CHANGED,
    MANIFEST_NAME,
    WIDS_NAME,
    DatasetError,
    Manifest,
    load_manifest,
    wids_index,
)
from data_prep.progress import ProgressLine
from data_prep.publish import sha256_of
from data_prep.remote import join, read_bytes, upload

NUM_UPLOADS = 8


def push(directory: Path, url: str, *, storage: Mapping[str, Any]) -> Manifest:
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
        problem, fix = f"{shown(url)} contains another dataset", "choose another URL"
        raise UserError("URL", problem, fix, code="exists")
    fix_damage = f"run data_prep verify {directory}"
    hashes, stop = _hashes(directory, manifest), threading.Event()

    def send(name: str) -> None:
        if sha256_of(directory / name) != hashes[name]:
            raise DatasetError(str(directory / name), CHANGED, fix_damage, code="damaged")
        if not stop.is_set():
            upload(directory / name, join(url, name), storage=options, stop=stop)

    for name in sorted(hashes):
        if not (directory / name).is_file():
            raise DatasetError(
                str(directory / name), "the file is missing", fix_damage, code="missing-path"
            )
    with (
        ThreadPoolExecutor(NUM_UPLOADS) as pool,
        ProgressLine("uploading", total=len(hashes), unit="files") as line,
    ):
        try:
            for sent in as_completed([pool.submit(send, name) for name in sorted(hashes)]):
                sent.result()
                line.advance()
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    upload(directory / MANIFEST_NAME, join(url, MANIFEST_NAME), storage=options)
    return manifest


def _hashes(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Return path -> sha256 of each file to upload, except the manifest."""
    hashes = manifest.file_hashes()
    for name, split in manifest.splits.items():
        if (directory / (wids := f"{name}-{WIDS_NAME}")).is_file():
            hashes[wids] = hashlib.sha256(wids_index(manifest.name, split)).hexdigest()
    return hashes
