"""Shards behind http(s) and in s3, through fsspec: which version stands there, a copy of it for as long as it is read, its bytes.

Invariants: a copy is whole (as long as the server says) or there is none; what may pass is tried again, with a growing pause; what
will not pass (no such file, no right to it) is reported at once. Storage options hold secrets: they go to fsspec alone. Query
strings may hold secrets, too, not least those that a server redirects to: no error shows one.
"""

import contextlib
import errno
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from data_prep.settings import UserError

NUM_ATTEMPTS, FIRST_PAUSE_S = 4, 0.5
LONGEST_PAUSE_S = 30.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, ANSWER_TIMEOUT_S = 30, 60, 10
"""The last is for questions that a server answers without reading a shard; of a web server each is asked in two ways."""
SLOW_S = 5.0
_S3_CHUNK_BYTES = 8 << 20
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
    import asyncio

    system = _file_system(url, storage, silence_s=silence_s, retries=False)
    finished = threading.Event()

    async def transfer() -> None:
        try:
            if url.startswith("s3://"):
                for start in range(0, num_bytes, _S3_CHUNK_BYTES):
                    write(await system._cat_file(url, start=start, end=min(start + _S3_CHUNK_BYTES, num_bytes)))
            else:
                await system._get_file(url, _Writer(write))
        finally:
            finished.set()

    future = asyncio.run_coroutine_threadsafe(transfer(), system.loop)
    while not wait([future], timeout=0.1).done:
        if stop.is_set():
            future.cancel()
            finished.wait(5)  # nothing is written after this function
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
                raise RemoteError(f"{shown(url)}: cannot be read{tries} ({_said(error)})") from None
            if report is not None and (attempt > 1 or time.monotonic() - began_s > SLOW_S):
                what = _said(error).removeprefix(f"{shown(url)}: ")
                report(f"{shown(url)}: {what}; attempt {attempt + 1} of {num_attempts} follows")
        pause_s = min(first_pause_s * 2 ** (attempt - 1), LONGEST_PAUSE_S) * _CHANCE.uniform(0.5, 1.5)
        if stop is None:
            time.sleep(pause_s)
        elif stop.wait(pause_s):
            raise StoppedError
    raise AssertionError


def _tried(url: str, action: Callable[[], T], *, num_attempts: int) -> T:
    def report(text: str) -> None:
        print(f"data_prep: {text}", file=sys.stderr, flush=True)

    return tried(url, action, num_attempts=num_attempts, first_pause_s=FIRST_PAUSE_S, report=report)


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
