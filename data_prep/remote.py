"""Shards behind http(s) and in s3, through fsspec: which version stands there, a copy of it for as long as it is read, its bytes;
and what is written there.

Invariants: an object that we write appears whole, and the store's bytes are compared with ours; a copy is whole (as long as the
server says) or there is none; what may pass is tried again, with a growing pause; what will not pass (no such file, no right to
it) is reported at once. Storage options hold secrets: they go to fsspec alone. Query strings may hold secrets, too, not least
those that a server redirects to: no error shows one.
"""

import contextlib
import errno
import hashlib
import io
import random
import re
import shutil
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from data_prep.publish import atomic_file, write_atomic
from data_prep.settings import UserError

NUM_ATTEMPTS, FIRST_PAUSE_S = 4, 0.5
LONGEST_PAUSE_S = 30.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, ANSWER_TIMEOUT_S = 30, 60, 10
"""The last is for questions that a server answers without reading a shard; of a web server each is asked in two ways."""
SLOW_S = 5.0
_S3_CHUNK_BYTES = 8 << 20
_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000
"""Of an object that s3 receives in parts; ten are in memory at once."""
_CONDITIONAL = ("s3://", "gs://", "gcs://", "az://", "abfs://", "abfss://")
_CHECKED: dict[str, dict[str, Any]] = {key: {"validate_content": True} for key in ("az", "abfs", "abfss")}
"""So that a store refuses at once what arrives wrong; s3 does without being asked."""
_NEEDED = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs"}
_CHANCE = random.SystemRandom()
"""Of its own: the generators that others seed must not feel a server's faults."""
_QUERY = re.compile(r"(\w+://[^\s?'\")]+)[?][^\s'\")]*")
T = TypeVar("T")


class RemoteError(OSError):
    """A server that does not deliver, for now: the same command may work later."""


class ContentError(OSError):
    """A server that delivers other bytes than it should; the message goes to whoever knows the remedy."""


class StoppedError(Exception):
    """Whoever wanted the bytes does not want them any longer."""


class MissingError(UserError):
    """A server that has no such file."""


class Version(NamedTuple):
    """What distinguishes one content of a file from another without reading it."""

    num_bytes: int | None
    mark: str | None
    """Entity tag or time of change; None where the server gives neither."""

    @property
    def stamp(self) -> str | None:
        """None: nothing is known, so it must be read to be known."""
        return None if self.mark is None else f"{self.num_bytes} {self.mark}"


def shown(url: str) -> str:
    """The URL as it may be printed."""
    parts = urlsplit(url)
    if parts.scheme == "s3" and "=" not in url:
        return url  # its ? is part of a pattern
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def version(url: str, *, storage: dict[str, Any], num_attempts: int) -> Version:
    system = _file_system(url, storage, silence_s=ANSWER_TIMEOUT_S, retries=False)
    found = _tried(url, lambda: system.info(url), num_attempts=num_attempts)
    mark = next((found[key] for key in ("ETag", "Last-Modified", "LastModified") if found.get(key)), None)
    return Version(found.get("size"), None if mark is None else str(mark))


def listing(pattern: str, *, storage: dict[str, Any]) -> list[str]:
    """The URLs of an s3 pattern."""
    system = _file_system(pattern, storage)
    found = _tried(pattern, lambda: system.glob(pattern), num_attempts=1)
    return [str(system.unstrip_protocol(name)) for name in found]


@contextlib.contextmanager
def copied(url: str, place: Path, *, storage: dict[str, Any], num_attempts: int) -> Iterator[Version]:
    """The file of `url` stands at `place` within the block."""

    def fetch() -> Version:
        found = version(url, storage=storage, num_attempts=1)
        try:
            _file_system(url, storage).get_file(url, str(place))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # is not the server's fault, and does not pass
                raise UserError(f"{place}: {error.strerror}; make room there, then give the same command again") from None
            raise
        num_bytes = place.stat().st_size
        if found.num_bytes is not None and num_bytes != found.num_bytes:
            raise RemoteError(f"{num_bytes:,} of {found.num_bytes:,} bytes came")
        return found

    try:
        yield _tried(url, fetch, num_attempts=num_attempts)
    finally:
        place.unlink(missing_ok=True)


def fetch(
    url: str, write: Callable[[bytes], object], *, num_bytes: int, storage: dict[str, Any], silence_s: float, stop: threading.Event
) -> None:
    """One attempt to hand all bytes of `url`, of which `num_bytes` are expected, to `write`, one piece after the other.

    `stop` ends it at once, even if the server is silent. What `write` raises ends it, too.
    """
    system = _file_system(url, storage, silence_s=silence_s, retries=False)

    async def transfer() -> None:
        if url.startswith("s3://"):
            for start in range(0, num_bytes, _S3_CHUNK_BYTES):
                write(await system._cat_file(url, start=start, end=min(start + _S3_CHUNK_BYTES, num_bytes)))
        else:
            await system._get_file(url, _Writer(write))

    _until_stopped(system, transfer, stop)


def _until_stopped(system: Any, transfer: Callable[[], Coroutine[Any, Any, object]], stop: threading.Event | None) -> None:
    """`transfer`, in the loop of an asynchronous file system; nothing is moved after this function."""
    import asyncio

    finished = threading.Event()

    async def whole() -> None:
        try:
            await transfer()
        finally:
            finished.set()

    future = asyncio.run_coroutine_threadsafe(whole(), system.loop)
    while not wait([future], timeout=0.1).done:
        if stop is not None and stop.is_set():
            future.cancel()
            finished.wait(5)
            raise StoppedError
    future.result()


class _Writer:
    """As much of a file as fsspec asks for before it writes to one."""

    read = tell = close = None

    def __init__(self, write: Callable[[bytes], object]):
        self.write = write


def tried(
    url: str,
    action: Callable[[], T],
    *,
    num_attempts: int,
    first_pause_s: float,
    stop: threading.Event | None = None,
    report: Callable[[str], None] | None = None,
    what: str = "read",
) -> T:
    """The result of `action`, which is tried again after a growing and uneven pause, as others are turned away with us.

    `report` receives what goes wrong: of the first failure, which passes as a rule, only if it took long.
    """
    for attempt in range(1, num_attempts + 1):
        began_s = time.monotonic()
        try:
            return action()
        except (UserError, StoppedError):
            raise
        except Exception as error:
            # every storage has exceptions of its own, and all of them mean that this shard was not delivered
            _refuse_hopeless(url, error)
            if attempt == num_attempts:
                if isinstance(error, ContentError):
                    raise
                tries = f" after {num_attempts} attempts" if num_attempts > 1 else ""
                raise RemoteError(f"{shown(url)}: cannot be {what}{tries} ({_said(error)})") from None
            if report is not None and (attempt > 1 or time.monotonic() - began_s > SLOW_S):
                said = _said(error).removeprefix(f"{shown(url)}: ")
                report(f"{shown(url)}: {said}; attempt {attempt + 1} of {num_attempts} follows")
        pause_s = min(first_pause_s * 2 ** (attempt - 1), LONGEST_PAUSE_S) * _CHANCE.uniform(0.5, 1.5)
        if stop is None:
            time.sleep(pause_s)
        elif stop.wait(pause_s):
            raise StoppedError
    raise AssertionError


def _tried(url: str, action: Callable[[], T], *, num_attempts: int) -> T:
    return tried(url, action, num_attempts=num_attempts, first_pause_s=FIRST_PAUSE_S, report=_report)


def _report(text: str) -> None:
    print(f"data_prep: {text}", file=sys.stderr, flush=True)


def _refuse_hopeless(url: str, error: Exception) -> None:
    if isinstance(error, TypeError) and "unexpected keyword" in str(error):  # s3fs takes any option until it is used
        raise _wrong_options(url, error) from None
    statuses = [getattr(found, "status", None) for found in _chain(error)]
    status = next((status for status in statuses if isinstance(status, int)), None)
    names = {kind.__name__ for found in _chain(error) for kind in type(found).__mro__}
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        if status is None and names & {"ClientConnectorError", "TimeoutError", "ServerDisconnectedError"}:
            return
        raise MissingError(f"{shown(url)}: there is no such file; mend the address, or put it back") from None
    if status in (401, 403) or isinstance(error, PermissionError) or names & {"NoCredentialsError"}:
        raise UserError(
            f"{shown(url)}: access is refused; give credentials (AWS_*, ~/.netrc or storage), "
            "or the storage option anon=true for public buckets"
        ) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _said(error: Exception) -> str:
    """fsspec raises FileNotFoundError for whatever goes wrong with a web server; what it was is the cause."""
    root = error.__cause__ or error
    return _QUERY.sub(r"\1", " ".join(str(root).split())) or type(root).__name__


def _file_system(url: str, storage: dict[str, Any], *, silence_s: float = READ_TIMEOUT_S, retries: bool = True) -> Any:
    """Without `retries` of its own, of which s3 has two layers, a caller's are all there are."""
    import fsspec

    protocol = url.partition("://")[0]
    if find_spec(_NEEDED.get(protocol, "fsspec")) is None:
        raise UserError(f"{protocol}://: {_NEEDED[protocol]} is not installed; pip install 'wide-mlps[remote]'")
    options = dict(storage)
    if protocol in ("http", "https"):
        import aiohttp

        # no limit on the whole of a large shard, one on silence; proxies and ~/.netrc count, as for any command
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True, **options.get("client_kwargs", {})}
    elif protocol == "s3":
        limits: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": silence_s}
        if not retries:
            limits["retries"] = {"total_max_attempts": 1}
        options["config_kwargs"] = limits | dict(options.get("config_kwargs", {}))
    try:
        system = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise _wrong_options(url, error) from None
    if protocol == "s3" and not retries:
        system.retries = 1
    return system


def _wrong_options(url: str, error: Exception) -> UserError:
    return UserError(f"storage: {url.partition('://')[0]} does not take these options ({error})")


def join(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *names])


def upload(
    place: Path, url: str, *, storage: dict[str, Any], num_attempts: int = NUM_ATTEMPTS, stop: threading.Event | None = None
) -> None:
    """Afterwards the bytes of `place` stand at `url`: the store's own checksum says so, or they were read back.

    The object appears whole or not at all: stores publish what is complete, and what arrived wrong is taken away again. `stop`
    ends it at once; parts of a large object that was stopped are for the store's life-cycle rule to remove.
    """
    num_bytes = place.stat().st_size
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))

    def put(system: Any) -> None:
        if url.startswith("file://"):
            with atomic_file(Path(system._strip_protocol(url))) as file, open(place, "rb") as source:
                shutil.copyfileobj(source, file)
        elif system.async_impl:
            more = {"chunksize": part_bytes} if url.startswith("s3://") else _CHECKED.get(url.partition("://")[0], {})
            _until_stopped(system, lambda: system._put_file(str(place), url, **more), stop)
        else:
            system.put_file(str(place), url)

    with open(place, "rb") as file:
        marks = _marks(file, part_bytes=part_bytes)
    _write(url, put, marks, storage=storage, num_attempts=num_attempts, stop=stop)


def write_bytes(data: bytes, url: str, *, storage: dict[str, Any], only_if_new: bool = False) -> bool:
    """False: `only_if_new`, and another object stands there. Whether two writers at the same moment are told apart is the
    store's doing: s3, gs and az write under a condition; the others are asked first."""
    marks = _marks(io.BytesIO(data), part_bytes=_PART_BYTES)
    conditional = only_if_new and url.startswith(_CONDITIONAL)
    is_ours = True

    def put(system: Any) -> None:
        nonlocal is_ours
        try:
            if only_if_new and not conditional and system.exists(url):
                raise FileExistsError
            if url.startswith("file://"):
                write_atomic(Path(system._strip_protocol(url)), data)
            else:
                system.pipe_file(url, data, **({"mode": "create"} if conditional else {}))
        except FileExistsError:  # an attempt whose answer was lost has left ours
            is_ours = system.cat_file(url) == data

    _write(url, put, marks, storage=storage, num_attempts=NUM_ATTEMPTS, is_ours=lambda: is_ours)
    return is_ours


def read_bytes(url: str, *, storage: dict[str, Any]) -> bytes:
    """MissingError: there is none."""
    found: bytes = _tried(url, lambda: _file_system(url, storage).cat_file(url), num_attempts=NUM_ATTEMPTS)
    return found


def names_under(url: str, *, storage: dict[str, Any]) -> list[str]:
    """All objects below, sorted, as `join` takes them; none where there is no such place in a bucket."""

    def found() -> list[str]:
        system = _file_system(url, storage)
        above = system._strip_protocol(url).rstrip("/") + "/"
        return sorted(name.removeprefix(above) for name in system.find(above, withdirs=False) if name.startswith(above))

    return _tried(url, found, num_attempts=NUM_ATTEMPTS)


def remove(urls: Sequence[str], *, storage: dict[str, Any]) -> None:
    """What is gone already is no error."""
    for url in urls:
        with contextlib.suppress(MissingError):
            _tried(url, partial(_file_system(url, storage).rm_file, url), num_attempts=NUM_ATTEMPTS)


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
            said.append(b64decode(value).hex() if isinstance(value, str) else bytes(value or b"").hex())
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
    num_attempts: int,
    stop: threading.Event | None = None,
    is_ours: Callable[[], bool] = lambda: True,
) -> None:
    """`put`, until the store holds what it was given, or something else that is to stay."""
    if url.startswith(("http://", "https://")):
        raise UserError(f"{shown(url)}: a web server is read, not written; name a store (s3://, gs://, az://, hf://)")

    def attempt() -> None:
        system = _file_system(url, storage, retries=False)
        put(system)
        if not is_ours():
            return
        is_whole = marks.in_store(system.info(url))
        if is_whole is None:  # such as s3 with keys of its own
            digest = hashlib.sha256()
            for start in range(0, marks.num_bytes, _S3_CHUNK_BYTES):
                digest.update(system.cat_file(url, start=start, end=min(start + _S3_CHUNK_BYTES, marks.num_bytes)))
            is_whole = digest.hexdigest() == marks.sha256
        if not is_whole:
            system.rm_file(url)
            raise RemoteError("the store holds other bytes than it was given")

    try:
        tried(url, attempt, num_attempts=num_attempts, first_pause_s=FIRST_PAUSE_S, stop=stop, report=_report, what="written")
    except MissingError:
        raise MissingError(f"{shown(url)}: there is no such bucket; mend the address, or make the bucket first") from None
