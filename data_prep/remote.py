"""Read and write files on web servers and in buckets, with the clients of clients.py.

1. A copy is complete or does not exist, if the server gives the size.
2. Requests are repeated after temporary faults, with growing pauses. Credentials that may have
   expired are read again. Other faults are reported at once.
3. An uploaded object appears complete. It is compared with the bucket's checksum, or read back.
4. Storage options and the queries of URLs may be secrets: no message shows them.
"""

import asyncio
import contextlib
import errno
import hashlib
import random
import shutil
import sys
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from data_prep import clients
from data_prep.clients import READ_TIMEOUT_S, MissingError, client, kind_of, shown
from data_prep.errors import UserError
from data_prep.limits import error_of_system
from data_prep.publish import atomic_file

NUM_ATTEMPTS, FIRST_PAUSE_S, LONGEST_PAUSE_S = 4, 0.5, 30.0
ANSWER_TIMEOUT_S = 10
"""Longest time without a reply, in seconds, for requests other than reading shards."""
SLOW_S = 5.0
"""Duration in seconds above which even the first failure of a request is reported."""
RANGE_BYTES, SLOWEST_BYTES_PER_S = 8 << 20, 64 << 10
"""Objects are read in ranges of RANGE_BYTES. A server slower than SLOWEST_BYTES_PER_S is treated as
silent."""
MARKS = (
    "md5Hash",
    "crc32c",
    "ETag",
    "etag",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
)
"""Fields in which clients report the version of a file, best first."""
_PART_BYTES, _MAX_PARTS = 16 << 20, 10_000
_CHANCE = random.SystemRandom()
"""Random numbers for pauses, independent of seeded generators."""
T = TypeVar("T")
Storage = Mapping[str, Any]


class RemoteError(UserError):
    """A server does not deliver the bytes. The same command may succeed later."""

    is_passing = True


class ContentError(OSError):
    """A server delivers wrong bytes."""


class StoppedError(Exception):
    """The caller no longer needs the bytes."""


class Version(NamedTuple):
    """Size and version of a file, as a server gives them without sending the file."""

    num_bytes: int | None
    mark: str | None

    @property
    def stamp(self) -> str | None:
        """Return a text that changes with the content, or None if the server gives no version."""
        return None if self.mark is None else f"{self.num_bytes} {self.mark}"


# ---- attempts


def _report(text: str) -> None:
    print(f"data_prep: {text}", file=sys.stderr, flush=True)


def tried(
    url: str,
    action: Callable[[], T],
    *,
    num_attempts: int = NUM_ATTEMPTS,
    stop: threading.Event | None = None,
    report: Callable[[str], None] = _report,
) -> T:
    """Return the result of `action`. After a temporary fault, repeat it after growing, random
    pauses. `report` receives the failures, except a quick first failure."""
    for attempt in range(1, num_attempts + 1):
        began_s = time.monotonic()
        try:
            return _with_fresh_credentials(url, action)
        except (UserError, StoppedError):
            raise
        except Exception as error:  # every client has its own exceptions
            clients.refuse_hopeless(url, error)
            if attempt == num_attempts and isinstance(error, ContentError):
                raise
            words = clients.words_of(error)
            if attempt == num_attempts:
                problem = f"it cannot be reached after {num_attempts} attempts ({words})"
                fix = "repeat the command later"
                raise RemoteError(shown(url), problem, fix, code="unreachable") from None
            if attempt > 1 or time.monotonic() - began_s > SLOW_S:
                report(f"{shown(url)}: {words}; attempt {attempt + 1} of {num_attempts} follows")
        pause_s = min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)
        if (stop or threading.Event()).wait(pause_s * _CHANCE.uniform(0.5, 1.5)):
            raise StoppedError
    raise AssertionError


def _with_fresh_credentials(url: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except (UserError, StoppedError):
        raise
    except Exception as error:
        if not clients.is_refused(error):
            raise
    clients.renew(url)
    return action()


# ---- reading


def version(url: str, *, storage: Storage, num_attempts: int = NUM_ATTEMPTS) -> Version:
    return tried(url, lambda: _version(url, storage), num_attempts=num_attempts)


def _version(url: str, storage: Storage) -> Version:
    found = _info(url, storage)
    mark = next((found[key] for key in MARKS if found.get(key)), None)
    return Version(found.get("size"), None if mark is None else str(mark))


def _info(url: str, storage: Storage) -> dict[str, Any]:
    system, kind = client(url, storage, silence_s=ANSWER_TIMEOUT_S), kind_of(url)
    found = kind.info(system, url) if kind else dict(system.info(url))
    if found.get("type") == "directory":
        fix = "choose a file in it"
        raise MissingError(shown(url), "it is a folder, not a file", fix, code="missing-path")
    return found


def listing(pattern: str, *, storage: Storage) -> list[str]:
    found = tried(pattern, lambda: client(pattern, storage).glob(pattern), num_attempts=1)
    parts = urlsplit(pattern)
    return [f"{parts.scheme}://{parts.netloc}/{name.partition('/')[2]}" for name in found]


@contextlib.contextmanager
def nameless_copy(
    url: str, directory: Path, *, storage: Storage, num_attempts: int = NUM_ATTEMPTS
) -> Iterator[tuple[Path, Version]]:
    """Yield the path and the version of a copy. The copy has no name on disk, so it always
    disappears with the process."""
    with tempfile.TemporaryFile(dir=directory) as file:
        path = Path(f"/proc/self/fd/{file.fileno()}")
        yield (path, copy_to(url, path, storage=storage, room=directory, num_attempts=num_attempts))


def copy_to(
    url: str, path: Path, *, storage: Storage, room: Path, num_attempts: int = NUM_ATTEMPTS
) -> Version:
    """Download `url` to `path`. `room`: directory to name in messages about a full disk."""

    def copy() -> Version:
        found = _version(url, storage)
        try:
            with open(path, "wb") as file:
                fetch(url, file.write, num_bytes=found.num_bytes, storage=storage)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            error.filename = str(room)
            raise error_of_system(error) from None
        num_bytes = path.stat().st_size
        if found.num_bytes is not None and num_bytes != found.num_bytes:
            raise OSError(f"only {num_bytes:,} of {found.num_bytes:,} bytes arrived")
        is_in_ranges = num_bytes > RANGE_BYTES and not _streams(url)
        if is_in_ranges and _version(url, storage) != found:
            raise OSError("it changed during reading")
        return found

    return tried(url, copy, num_attempts=num_attempts)


def fetch(
    url: str,
    write: Callable[[bytes], object],
    *,
    num_bytes: int | None,
    storage: Storage,
    silence_s: float = READ_TIMEOUT_S,
    stop: threading.Event | None = None,
) -> None:
    """Try once to pass all bytes of `url` to `write`, in blocks. `stop` and errors of `write` end
    the transfer at once, even if the server is silent."""
    system = client(url, storage, silence_s=silence_s)

    async def transfer() -> None:
        if _streams(url):
            await system._get_file(url, _Writer(write))
            return
        for start in range(0, num_bytes or 0, RANGE_BYTES):
            piece = {"start": start, "end": min(start + RANGE_BYTES, num_bytes or 0)}
            if system.async_impl:
                coming = system._cat_file(url, **piece)
            else:
                coming = asyncio.to_thread(system.cat_file, url, cache_type="none", **piece)
            write(await asyncio.wait_for(coming, silence_s + RANGE_BYTES / SLOWEST_BYTES_PER_S))

    _until_stopped(transfer(), stop)


def _streams(url: str) -> bool:
    """Return True for a web server, because it may not support ranges."""
    return url.startswith(("http://", "https://"))


def _until_stopped(transfer: Coroutine[Any, Any, object], stop: threading.Event | None) -> None:
    """Run `transfer` in fsspec's event loop. Nothing is written after this function returns."""
    from fsspec.asyn import get_loop

    finished = threading.Event()

    async def complete() -> None:
        try:
            await transfer
        finally:
            finished.set()

    future = asyncio.run_coroutine_threadsafe(complete(), get_loop())
    try:
        while not wait([future], timeout=0.1).done:
            if stop is not None and stop.is_set():
                raise StoppedError
    except BaseException:
        future.cancel()
        finished.wait(5)
        raise
    future.result()


class _Writer:
    """A writable file with the methods that fsspec uses."""

    read = tell = close = None

    def __init__(self, write: Callable[[bytes], object]):
        self.write = write


def read_bytes(
    url: str, *, storage: Storage, check: Callable[[bytes], None] | None = None
) -> bytes:
    """Return the content of a small file. `check` raises ContentError if the bytes are wrong."""

    def read() -> bytes:
        system, kind = client(url, storage), kind_of(url)
        data = kind.read(system, url) if kind else bytes(system.cat_file(url))
        if check is not None:
            check(data)
        return data

    return tried(url, read)


# ---- writing


def join(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *names])


def names_under(url: str, *, storage: Storage) -> list[str]:
    """Return the names of all objects below `url`, relative to it and sorted."""

    def find() -> list[str]:
        system = client(url, storage)
        above = system._strip_protocol(url).rstrip("/") + "/"
        names = system.find(above, withdirs=False)
        return sorted(name.removeprefix(above) for name in names if name.startswith(above))

    return tried(url, find)


def remove(urls: Sequence[str], *, storage: Storage) -> None:
    for url in urls:
        with contextlib.suppress(MissingError):
            tried(url, lambda url=url: client(url, storage).rm_file(url))  # type: ignore[misc]


def write_bytes(data: bytes, url: str, *, storage: Storage) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        upload(Path(file.name), url, storage=storage)


def upload(path: Path, url: str, *, storage: Storage, stop: threading.Event | None = None) -> None:
    """Upload the file, in several attempts if necessary, until the bucket confirms the same bytes.
    If the bucket does not reply, the object is kept, because it may have replaced a complete
    object. `stop` ends the upload at once. Uploaded parts of a large object then remain until a
    life-cycle rule of the bucket removes them."""
    if _streams(url):
        problem, fix = "web servers are read-only", "choose a bucket (s3://, gs://, az://, hf://)"
        raise UserError(shown(url), problem, fix, code="unsupported")
    checksums = _Checksums.of(path)

    def attempt() -> None:
        system, kind = client(url, storage), kind_of(url)
        if kind is None:  # file://
            target = Path(system._strip_protocol(url))
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as file, open(path, "rb") as content:
                shutil.copyfileobj(content, file)
        elif system.async_impl:
            _until_stopped(kind.put(system, path, url, checksums.part_bytes), stop)
        else:
            system.put_file(str(path), url)
        is_same = checksums.match(_info(url, storage))
        if is_same is None:  # for example, s3 with encryption
            is_same = _read_back(url, checksums, storage, stop)
        if not is_same:
            with contextlib.suppress(Exception):  # the error below says more
                client(url, storage).rm_file(url)
            raise OSError("the bucket has other bytes than were sent")

    try:
        tried(url, attempt, stop=stop)
    except MissingError:
        problem, fix = "the bucket does not exist", "correct the address, or create the bucket"
        raise MissingError(shown(url), problem, fix, code="missing-path") from None


class _Checksums(NamedTuple):
    """Checksums that a bucket may return for the same bytes; digests are hexadecimal."""

    num_bytes: int
    md5: str
    parts_md5: str
    """S3's digest (ETag) of an object that was uploaded in several parts."""
    sha256: str
    part_bytes: int

    @classmethod
    def of(cls, path: Path) -> "_Checksums":
        md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
        num_bytes, parts = path.stat().st_size, list[bytes]()
        part_bytes = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))
        with open(path, "rb") as file:
            while piece := file.read(part_bytes):
                md5.update(piece)
                sha256.update(piece)
                parts.append(hashlib.md5(piece, usedforsecurity=False).digest())
        of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
        parts_md5 = f"{of_parts}-{len(parts)}"
        return cls(num_bytes, md5.hexdigest(), parts_md5, sha256.hexdigest(), part_bytes)

    def match(self, found: dict[str, Any]) -> bool | None:
        """Return True if a checksum is equal to the bucket's, False if the size differs, and None
        if the bucket has no equal checksum."""
        if found.get("size") != self.num_bytes:
            return False
        sums = {str(found.get("ETag", "")).strip('"'), (found.get("lfs") or {}).get("sha256", "")}
        settings = found.get("content_settings") or {}
        for value in (found.get("md5Hash"), settings.get("content_md5")):
            sums.add((b64decode(value) if isinstance(value, str) else bytes(value or b"")).hex())
        return True if sums & {self.md5, self.parts_md5, self.sha256} else None


def _read_back(
    url: str, checksums: _Checksums, storage: Storage, stop: threading.Event | None
) -> bool:
    digest, num_read = hashlib.sha256(), 0

    def take(piece: bytes) -> None:
        nonlocal num_read
        digest.update(piece)
        num_read += len(piece)

    try:
        fetch(url, take, num_bytes=checksums.num_bytes, storage=storage, stop=stop)
    except Exception as error:
        if "Checksum" in type(error).__name__:  # some clients compare checksums, too
            return False
        raise
    if num_read != checksums.num_bytes:
        raise OSError("it could not be read back completely")
    return digest.hexdigest() == checksums.sha256
