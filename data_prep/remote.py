"""Files in stores, through fsspec: which version stands there, a copy of it for as long as it is
read, its bytes; and what is written there. What differs from one kind of store to another is in
clients.py.

Invariants: an object that we write appears whole, and the store's bytes are compared with ours; a
copy is whole (as long as the server says) or there is none; what may pass is tried again, with a
growing pause; what will not pass (no such file, no right to it) is reported at once, after
credentials that may have expired were read anew. Storage options hold secrets: they go to fsspec
alone. Query strings may hold secrets, too, not least those that a server redirects to: no error
shows one.

Long because reading and writing share attempts, refusals and what may be printed.
"""

import contextlib
import errno
import hashlib
import io
import random
import shutil
import sys
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from data_prep import clients
from data_prep.clients import READ_TIMEOUT_S, MissingError, client, shown
from data_prep.errors import UserError
from data_prep.publish import atomic_file, write_atomic

__all__ = ["MissingError", "shown"]

NUM_ATTEMPTS, FIRST_PAUSE_S = 4, 0.5
LONGEST_PAUSE_S = 30.0
ANSWER_TIMEOUT_S = 10
"""For questions that a server answers without reading a shard; of a web server each is asked in two
ways."""
SLOW_S = 5.0
RANGE_BYTES, SLOWEST_BYTES_PER_S = 8 << 20, 64 << 10
"""Objects are read in such ranges; a store that takes longer for one counts as silent, whatever
patience its client has."""
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
"""What clients call that by which contents differ, the best first."""
_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000
"""Of an object that s3 receives in parts; ten are in memory at once."""
_AZURE = ("az://", "abfs://", "abfss://")
_CONDITIONAL = ("s3://", "gs://", *_AZURE)
_CHANCE = random.SystemRandom()
"""Of its own: the generators that others seed must not feel a server's faults."""
T = TypeVar("T")


class RemoteError(OSError):
    """A server that does not deliver, for now: the same command may work later."""


class ContentError(OSError):
    """A server that delivers other bytes than it should; the message goes to whoever knows the
    remedy."""


class StoppedError(Exception):
    """Whoever wanted the bytes does not want them any longer."""


class Version(NamedTuple):
    """What distinguishes one content of a file from another without reading it."""

    num_bytes: int | None
    mark: str | None
    """Entity tag or time of change; None where the server gives neither."""

    @property
    def stamp(self) -> str | None:
        """None: nothing is known, so it must be read to be known."""
        return None if self.mark is None else f"{self.num_bytes} {self.mark}"


def version(url: str, *, storage: dict[str, Any], num_attempts: int = NUM_ATTEMPTS) -> Version:
    found = tried(
        url,
        lambda: clients.info(url, storage, silence_s=ANSWER_TIMEOUT_S),
        num_attempts=num_attempts,
    )
    mark = next((found[key] for key in MARKS if found.get(key)), None)
    return Version(found.get("size"), None if mark is None else str(mark))


def listing(pattern: str, *, storage: dict[str, Any]) -> list[str]:
    """The URLs that a pattern names in a store that lists what it has."""
    found = tried(
        pattern, lambda: client(pattern, storage, retries=False).glob(pattern), num_attempts=1
    )
    parts = urlsplit(pattern)
    return [f"{parts.scheme}://{parts.netloc}/{name.partition('/')[2]}" for name in found]


@contextlib.contextmanager
def copied(
    url: str, place: Path, *, storage: dict[str, Any], num_attempts: int = NUM_ATTEMPTS
) -> Iterator[Version]:
    """The file of `url` stands at `place` within the block."""
    try:
        yield copy_to(url, place, storage=storage, num_attempts=num_attempts, room=place)
    finally:
        place.unlink(missing_ok=True)


@contextlib.contextmanager
def nameless_copy(url: str, directory: Path, *, storage: dict[str, Any]) -> Iterator[Path]:
    """A path of a copy of `url` within the block. The copy has no name on disk, so it goes whatever
    ends the process."""
    with tempfile.TemporaryFile(dir=directory) as file:
        place = Path(f"/proc/self/fd/{file.fileno()}")
        copy_to(url, place, storage=storage, room=directory)
        yield place


def copy_to(
    url: str, place: Path, *, storage: dict[str, Any], room: Path, num_attempts: int = NUM_ATTEMPTS
) -> Version:
    """Write the file of `url` to `place`. `room`: the path that a message names if the disk is
    full."""
    how: dict[str, Any] = {
        "storage": storage,
        "silence_s": READ_TIMEOUT_S,
        "stop": threading.Event(),
    }

    def copy() -> Version:
        found = version(url, storage=storage, num_attempts=1)
        try:
            with open(place, "wb") as file:
                fetch(url, file.write, num_bytes=found.num_bytes, **how)
        except OSError as error:
            if error.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
            ):  # is not the server's fault, and does not pass
                raise UserError(
                    f"{room}: {error.strerror}; make room there, then give the same command again"
                ) from None
            raise
        num_bytes = place.stat().st_size
        if found.num_bytes is not None and num_bytes != found.num_bytes:
            raise RemoteError(f"{num_bytes:,} of {found.num_bytes:,} bytes came")
        if (
            num_bytes > RANGE_BYTES
            and not _streams(url)
            and version(url, storage=storage, num_attempts=1) != found
        ):
            raise RemoteError("changed while it was read")
        return found

    return tried(url, copy, num_attempts=num_attempts)


def fetch(
    url: str,
    write: Callable[[bytes], object],
    *,
    num_bytes: int | None,
    storage: dict[str, Any],
    silence_s: float,
    stop: threading.Event | None,
) -> None:
    """One attempt to hand all bytes of `url`, of which `num_bytes` are expected, to `write`, one
    piece after the other.

    `stop` ends it at once, even if the server is silent. What `write` raises ends it, too.
    """
    import asyncio

    system = client(url, storage, silence_s=silence_s, retries=False)

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

    _until_stopped(transfer, stop)


def _streams(url: str) -> bool:
    """A web server may know no ranges."""
    return url.startswith(("http://", "https://"))


def _until_stopped(
    transfer: Callable[[], Coroutine[Any, Any, object]], stop: threading.Event | None
) -> None:
    """`transfer`, in the loop of fsspec; nothing is moved after this function."""
    import asyncio

    from fsspec.asyn import get_loop

    finished = threading.Event()

    async def whole() -> None:
        try:
            await transfer()
        finally:
            finished.set()

    future = asyncio.run_coroutine_threadsafe(whole(), get_loop())
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
    """As much of a file as fsspec asks for before it writes to one."""

    read = tell = close = None

    def __init__(self, write: Callable[[bytes], object]):
        self.write = write


def _report(text: str) -> None:
    print(f"data_prep: {text}", file=sys.stderr, flush=True)


def tried(
    url: str,
    action: Callable[[], T],
    *,
    num_attempts: int = NUM_ATTEMPTS,
    stop: threading.Event | None = None,
    report: Callable[[str], None] = _report,
    what: str = "read",
) -> T:
    """The result of `action`, which is tried again after a growing and uneven pause, as others are
    turned away with us.

    `report` receives what goes wrong: of the first failure, which passes as a rule, only if it took
    long.
    """
    for attempt in range(1, num_attempts + 1):
        began_s = time.monotonic()
        try:
            return _with_fresh_credentials(url, action)
        except (UserError, StoppedError):
            raise
        except Exception as error:
            # every storage has exceptions of its own, and all of them mean that this shard was not
            # delivered
            clients.refuse_hopeless(url, error)
            if attempt == num_attempts:
                if isinstance(error, ContentError):
                    raise
                tries = f" after {num_attempts} attempts" if num_attempts > 1 else ""
                raise RemoteError(
                    f"{shown(url)}: cannot be {what}{tries} ({clients.said(error)})"
                ) from None
            if attempt > 1 or time.monotonic() - began_s > SLOW_S:
                said = clients.said(error).removeprefix(f"{shown(url)}: ")
                report(f"{shown(url)}: {said}; attempt {attempt + 1} of {num_attempts} follows")
        pause_s = min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S) * _CHANCE.uniform(
            0.5, 1.5
        )
        if stop is None:
            time.sleep(pause_s)
        elif stop.wait(pause_s):
            raise StoppedError
    raise AssertionError


def _with_fresh_credentials(url: str, action: Callable[[], T]) -> T:
    """`action` once more, by a new client, where the store refuses it: what a provider's chain gave
    may have expired."""
    try:
        return action()
    except (UserError, StoppedError):
        raise
    except Exception as error:
        if not clients.is_refused(error):
            raise
    clients.renew(url)
    return action()


def join(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *names])


def upload(
    place: Path, url: str, *, storage: dict[str, Any], stop: threading.Event | None = None
) -> None:
    """Afterwards the bytes of `place` stand at `url`: the store's own checksum says so, or they
    were read back.

    The object appears whole or not at all: stores publish what is complete, and what arrived wrong
    is taken away again. `stop` ends it at once; parts of a large object that was stopped are for
    the store's life-cycle rule to remove.
    """
    num_bytes = place.stat().st_size
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))

    def put(system: Any) -> None:
        if url.startswith("file://"):
            with (
                atomic_file(Path(system._strip_protocol(url))) as file,
                open(place, "rb") as source,
            ):
                shutil.copyfileobj(source, file)
        elif url.startswith(_AZURE):
            with open(
                place, "rb"
            ) as source:  # put_file never ends where the container is not there
                _until_stopped(lambda: system._pipe_file(url, source, validate_content=True), stop)
        elif system.async_impl:
            more = {"chunksize": part_bytes} if url.startswith("s3://") else {}
            _until_stopped(lambda: system._put_file(str(place), url, **more), stop)
        else:
            system.put_file(str(place), url)

    with open(place, "rb") as file:
        marks = _marks(file, part_bytes=part_bytes)
    _write(url, put, marks, storage=storage, stop=stop)


def write_bytes(
    data: bytes, url: str, *, storage: dict[str, Any], only_if_new: bool = False
) -> bool:
    """False: `only_if_new`, and another object stands there. The store is asked first, as some
    ignore conditions; of two writers at the same moment it is the condition of the write that
    refuses one (s3, gs, az)."""
    marks = _marks(io.BytesIO(data), part_bytes=_PART_BYTES)
    conditional = only_if_new and url.startswith(_CONDITIONAL)
    is_ours = True

    def put(system: Any) -> None:
        nonlocal is_ours
        try:
            if only_if_new and system.exists(url):
                raise FileExistsError
            if url.startswith("file://"):
                write_atomic(Path(system._strip_protocol(url)), data)
            else:
                system.pipe_file(url, data, **({"mode": "create"} if conditional else {}))
        except FileExistsError:  # an attempt whose answer was lost has left ours
            is_ours = system.cat_file(url) == data

    _write(url, put, marks, storage=storage, is_ours=lambda: is_ours)
    return is_ours


def read_bytes(
    url: str, *, storage: dict[str, Any], check: Callable[[bytes], None] | None = None
) -> bytes:
    """MissingError: there is none. `check` raises ContentError of other bytes than it should
    have."""

    def read() -> bytes:
        system = client(url, storage, retries=False)
        data = bytes(clients.asked(url, system, system.cat_file))
        if check is not None:
            check(data)
        return data

    return tried(url, read)


def read_together(urls: Sequence[str], *, storage: dict[str, Any]) -> Iterator[bytes]:
    """As `read_bytes` of each, but asked for at once: a thread for each small file would cost more
    than the file. What fails is asked for again by itself."""
    system, found = client(urls[0], storage, retries=False), {}
    with contextlib.suppress(Exception):
        found = system.cat(list(urls), on_error="return")
    for url in urls:
        data = found.get(system._strip_protocol(url))
        yield data if isinstance(data, bytes) else read_bytes(url, storage=storage)


def names_under(url: str, *, storage: dict[str, Any]) -> list[str]:
    """All objects below, sorted, as `join` takes them; none where there is no such place in a
    bucket."""

    def found() -> list[str]:
        system = client(url, storage, retries=False)
        above = system._strip_protocol(url).rstrip("/") + "/"
        return sorted(
            name.removeprefix(above)
            for name in system.find(above, withdirs=False)
            if name.startswith(above)
        )

    return tried(url, found)


def remove(urls: Sequence[str], *, storage: dict[str, Any]) -> None:
    """What is gone already is no error."""
    for url in urls:
        with contextlib.suppress(MissingError):
            tried(
                url, partial(lambda each: client(each, storage, retries=False).rm_file(each), url)
            )


class _Marks(NamedTuple):
    """What a store may say of bytes that it holds."""

    num_bytes: int
    md5: str
    """Hexadecimal, as those below."""
    parts_md5: str
    """s3's, of an object that came in several parts."""
    sha256: str

    def in_store(self, found: dict[str, Any]) -> bool | None:
        """Whether these bytes are there; None: the store does not say."""
        if found.get("size") != self.num_bytes:
            return False
        said = [str(found.get("ETag", "")).strip('"'), (found.get("lfs") or {}).get("sha256", "")]
        settings = found.get("content_settings") or {}
        for value in (found.get("md5Hash"), settings.get("content_md5")):
            said.append(
                b64decode(value).hex() if isinstance(value, str) else bytes(value or b"").hex()
            )
        return True if {*said} & {self.md5, self.parts_md5, self.sha256} else None


def _marks(file: IO[bytes], *, part_bytes: int) -> _Marks:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    parts, num_bytes = [], 0
    while piece := file.read(part_bytes):
        num_bytes += len(piece)
        md5.update(piece)
        sha256.update(piece)
        parts.append(hashlib.md5(piece, usedforsecurity=False).digest())
    parts_md5 = f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
    return _Marks(num_bytes, md5.hexdigest(), parts_md5, sha256.hexdigest())


def _write(
    url: str,
    put: Callable[[Any], None],
    marks: _Marks,
    *,
    storage: dict[str, Any],
    stop: threading.Event | None = None,
    is_ours: Callable[[], bool] = lambda: True,
) -> None:
    """`put`, until the store holds what it was given, or something else that is to stay."""
    if url.startswith(("http://", "https://")):
        raise UserError(
            f"{shown(url)}: a web server is read, not written; name a store (s3://, gs://, az://,"
            " hf://)"
        )

    def attempt() -> None:
        system = client(url, storage, retries=False)
        if url.startswith("file://"):  # where alone directories are no names
            system.makedirs(system._parent(url), exist_ok=True)
        put(system)
        if not is_ours():
            return
        # where that cannot be asked, what stands there stays: it may have taken the place of what
        # was whole
        if not holds(clients.info(url, storage, silence_s=ANSWER_TIMEOUT_S)):
            with contextlib.suppress(Exception):  # what matters more is why
                system.rm_file(url)
            raise RemoteError("the store holds other bytes than it was given")

    def holds(found: dict[str, Any]) -> bool:
        answer = marks.in_store(found)
        if answer is None:  # such as s3 with keys of its own
            digest, num_read = hashlib.sha256(), 0

            def take(piece: bytes) -> None:
                nonlocal num_read
                digest.update(piece)
                num_read += len(piece)

            try:
                fetch(
                    url,
                    take,
                    num_bytes=marks.num_bytes,
                    storage=storage,
                    silence_s=READ_TIMEOUT_S,
                    stop=stop,
                )
            except Exception as error:
                if "Checksum" in type(error).__name__:  # the client's own check is one, too
                    return False
                raise
            if num_read != marks.num_bytes:
                raise RemoteError("it could not be read back whole")
            answer = digest.hexdigest() == marks.sha256
        return answer

    try:
        tried(url, attempt, stop=stop, what="written")
    except MissingError:
        raise MissingError(
            f"{shown(url)}: there is no such bucket; mend the address, or make the bucket first"
        ) from None
