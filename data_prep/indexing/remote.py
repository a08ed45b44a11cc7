"""Shards behind http(s) and in s3, through fsspec: which version stands there, and a copy of it for as long as it is read.

Invariants: a copy is whole (as long as the server says) or there is none; what may pass is tried again, with a growing pause; what
will not pass (no such file, no right to it) is said at once. Storage options hold secrets: they go to fsspec alone. Query strings
may hold secrets, too, not least those that a server redirects to: no error shows one.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from data_prep.settings import UserError

NUM_ATTEMPTS, FIRST_PAUSE_S = 4, 0.5
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 30, 60
_QUERY = re.compile(r"(\w+://[^\s?'\")]+)[?][^\s'\")]*")
T = TypeVar("T")


class RemoteError(OSError):
    """A server that does not deliver, for now: the same command may work later."""


class MissingError(UserError):
    """A server that has no such file."""


class Version(NamedTuple):
    """What tells one content of a file from another without reading it."""

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
    found = _tried(url, lambda: _file_system(url, storage).info(url), num_attempts=num_attempts)
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
        _file_system(url, storage).get_file(url, str(place))
        num_bytes = place.stat().st_size
        if found.num_bytes is not None and num_bytes != found.num_bytes:
            raise RemoteError(f"{num_bytes:,} of {found.num_bytes:,} bytes came")
        return found

    try:
        yield _tried(url, fetch, num_attempts=num_attempts)
    finally:
        place.unlink(missing_ok=True)


def _tried(url: str, action: Callable[[], T], *, num_attempts: int) -> T:
    for attempt in range(1, num_attempts + 1):
        try:
            return action()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001
            # every storage has exceptions of its own, and all of them mean that this shard was not delivered
            _refuse_hopeless(url, error)
            if attempt == num_attempts:
                tries = f" after {num_attempts} attempts" if num_attempts > 1 else ""
                raise RemoteError(f"{shown(url)}: cannot be read{tries} ({_said(error)})") from None
        time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("at least one attempt")


def _refuse_hopeless(url: str, error: Exception) -> None:
    if isinstance(error, TypeError) and "unexpected keyword" in str(error):  # s3fs takes any option until it is used
        raise _wrong_options(url, error) from None
    statuses = [getattr(found, "status", None) for found in _chain(error)]
    status = next((status for status in statuses if isinstance(status, int)), None)
    names = {type(found).__name__ for found in _chain(error)}
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
    """fsspec says FileNotFoundError of whatever goes wrong with a web server; what it was is the cause."""
    root = error.__cause__ or error
    return _QUERY.sub(r"\1", " ".join(str(root).split())) or type(root).__name__


def _file_system(url: str, storage: dict[str, Any]) -> Any:
    import fsspec

    protocol = url.partition("://")[0]
    options = dict(storage)
    if protocol in ("http", "https"):
        options["client_kwargs"] = _http_client() | dict(options.get("client_kwargs", {}))
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise _wrong_options(url, error) from None


def _wrong_options(url: str, error: Exception) -> UserError:
    return UserError(f"storage: {url.partition('://')[0]} does not take these options ({error})")


def _http_client() -> dict[str, Any]:
    """No limit on the whole of a large shard, one on silence; proxies and ~/.netrc count, as for any command."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
    return {"timeout": timeout, "trust_env": True}
