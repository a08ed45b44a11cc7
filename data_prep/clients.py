"""Types of web servers and buckets: their fsspec clients, and the meaning of client errors.

Storage options (arguments of a client, such as credentials) go only to a dataset's own host, never
to the target of a redirect. remote.py repeats requests, so the clients' own retries are turned off
as far as possible.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import SplitResult, urlsplit

from data_prep.errors import UserError

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 30, 60
_HARMLESS = re.compile(r"download(=(true|1|yes)?)?|([^=]*=)?\$.*", re.IGNORECASE)
"""Parts of a URL's query that are not secret: `download`, and variables that a shell or webdataset
expands."""
_LIKE_A_KEY = re.compile(r"pass|pwd|secret|token|key|sig|cred|auth", re.IGNORECASE)
_QUERY = re.compile(r"(\w+://[^\s?'\")]+)[?][^\s'\")]*|[?][^\s'\")]*=[^\s'\")]*")
_PLACE = re.compile(r"\w+://[^\s'\"]+")
_PLACE_IN_A_LIST = re.compile(r"[\w+.-]+://([^/]*@)?(\[[^]/]*\])?.*?(?=::|$)")
_COMMAND = re.compile(r"pipe:", re.IGNORECASE)
"""Prefix of a webdataset address that is a shell command. It is searched anywhere in an address,
because brace expansion can produce it."""
_RECORDED = re.compile(r"pipe:[\w./+-]+ \(sha256 [0-9a-f]{32}\)")
_ASSIGNMENT, _PROGRAM = re.compile(r"\w+=[\w./:@%+,=-]*"), re.compile(r"[\w./+-]+")
_EXPIRED = re.compile(
    r"expired|TokenRefreshRequired|RefreshError|TokenRetrievalError|SSOToken", re.IGNORECASE
)
_SKEWED = re.compile(
    r"RequestTimeTooSkewed|reasonable timeframe|date header too old", re.IGNORECASE
)
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
}
_NOT_ON_THE_HUB = {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}
_NO_CONNECTION = {"ClientConnectorError", "TimeoutError", "ServerDisconnectedError"}


class MissingError(UserError):
    """The server has no such file."""


# ---- types of servers


@dataclass(frozen=True)
class Bucket:
    """A type of server. Its methods get fsspec's client as `system`."""

    package: str
    extra: str
    credentials: str
    """Sources of credentials that the client reads, as text for messages."""
    public: str
    """Storage option that reads public data without credentials."""
    payer: str = ""
    """Storage option for buckets whose reader pays."""
    user_is_place: ClassVar[bool] = False
    """True if the part before @ in a URL (CONTAINER@ACCOUNT) names a container, not a user."""

    def host(self, parts: SplitResult) -> str:
        return f"{parts.scheme}://"

    def options(self, _url: str, storage: Mapping[str, Any], _silence_s: float) -> dict[str, Any]:
        return dict(storage)

    def stop_retries(self, system: Any) -> None:
        """Turn off the client's retries that no storage option turns off."""

    def info(self, system: Any, url: str) -> dict[str, Any]:
        return dict(system.info(url))

    def read(self, system: Any, url: str) -> bytes:
        return bytes(system.cat_file(url))

    async def put(self, system: Any, path: Path, url: str, _part_bytes: int) -> None:
        await system._put_file(str(path), url)


class Web(Bucket):
    def host(self, parts: SplitResult) -> str:
        host, port = parts.netloc.rpartition("@")[2].lower(), 443 if parts.scheme == "https" else 80
        return f"{parts.scheme}://{host.removesuffix(f':{port}')}"

    def options(self, url: str, storage: Mapping[str, Any], silence_s: float) -> dict[str, Any]:
        guard = {"middlewares": [_own_headers(url, storage)]} if storage else {}
        # use proxies and ~/.netrc, as other programs do
        own = {"timeout": _timeout(silence_s), "trust_env": True}
        return {**storage, "client_kwargs": own | storage.get("client_kwargs", {}) | guard}


class S3(Bucket):
    def options(self, _url: str, storage: Mapping[str, Any], silence_s: float) -> dict[str, Any]:
        limits = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": silence_s}
        own = {**limits, "retries": {"total_max_attempts": 1}}
        return {**storage, "config_kwargs": own | storage.get("config_kwargs", {})}

    def stop_retries(self, system: Any) -> None:
        system.retries = 1

    def info(self, system: Any, url: str) -> dict[str, Any]:
        with self._reasons(system, url):
            return super().info(system, url)

    def read(self, system: Any, url: str) -> bytes:
        with self._reasons(system, url):
            return super().read(system, url)

    @contextmanager
    def _reasons(self, system: Any, url: str) -> Iterator[None]:
        """Repeat a failed HEAD request as a GET, because only the reply to a GET gives a reason."""
        try:
            yield
        except OSError as error:
            if _status(error) in (400, 403):
                system.cat_file(url, start=0, end=1)
            raise

    async def put(self, system: Any, path: Path, url: str, part_bytes: int) -> None:
        await system._put_file(str(path), url, chunksize=part_bytes)


class Gcs(Bucket):
    def options(self, _url: str, storage: Mapping[str, Any], silence_s: float) -> dict[str, Any]:
        return {"requests_timeout": _timeout(silence_s), **storage}

    def stop_retries(self, system: Any) -> None:
        # gcsfs has no option for its six attempts, which take half a minute and print tracebacks
        system._request = MethodType(type(system)._request.__wrapped__, system)


class Azure(Bucket):
    user_is_place = True

    def host(self, parts: SplitResult) -> str:
        return f"az://{parts.netloc.partition('@')[2]}"

    def options(self, url: str, storage: Mapping[str, Any], silence_s: float) -> dict[str, Any]:
        import fsspec

        system = fsspec.get_filesystem_class(urlsplit(url).scheme)
        limits = {"connection_timeout": CONNECT_TIMEOUT_S, "read_timeout": int(silence_s) or 1}
        return {**limits, **system._get_kwargs_from_urls(url), **storage}

    def stop_retries(self, system: Any) -> None:
        system.service_client._config.retry_policy.total_retries = 0

    async def put(self, system: Any, path: Path, url: str, _part_bytes: int) -> None:
        with open(path, "rb") as file:  # `_put_file` never ends if the container is missing
            await system._pipe_file(url, file, validate_content=True)


class Hub(Bucket):
    def info(self, system: Any, url: str) -> dict[str, Any]:
        return dict(system.info(url, refresh=True, expand_info=True))


_WEB = Web("aiohttp", "remote", "~/.netrc", "none")
_AZURE = Azure("adlfs", "azure", "AZURE_STORAGE_* with account_name, az login", "anon=true")
KINDS: dict[str, Bucket] = {
    "http": _WEB,
    "https": _WEB,
    "s3": S3("s3fs", "remote", "AWS_*, aws configure", "anon=true", "requester_pays=true"),
    "gs": Gcs(
        "gcsfs",
        "gcs",
        "gcloud auth application-default login",
        "token=anon",
        "requester_pays=PROJECT",
    ),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
    "hf": Hub("huggingface_hub", "hf", "HF_TOKEN, hf auth login", "token=false"),
}
SCHEMES = "http(s)://, s3://, gs://, az:// or hf://"


def _timeout(silence_s: float) -> Any:
    """Return a timeout that limits silence of the server, not the time for a large shard."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)


def kind_of(url: str) -> Bucket | None:
    return KINDS.get(url.partition("://")[0])


def client(url: str, storage: Mapping[str, Any], *, silence_s: float = READ_TIMEOUT_S) -> Any:
    """Return fsspec's client for a URL, with its own retries turned off."""
    import fsspec

    scheme, kind = url.partition("://")[0], kind_of(url)
    if kind is None and scheme != "file":
        problem, fix = f"{scheme}:// is not supported", f"use {SCHEMES}"
        raise UserError(shown(url), problem, fix, code="unsupported")
    if kind is not None and find_spec(kind.package) is None:
        problem, fix = (
            f"{kind.package} is not installed",
            f"run pip install 'wide-mlps[{kind.extra}]'",
        )
        raise UserError(f"{scheme}://", problem, fix, code="missing-library")
    options = kind.options(url, storage, silence_s) if kind else dict(storage)
    try:
        system = fsspec.filesystem(scheme, use_listings_cache=False, **options)
    except (TypeError, ValueError, ImportError, FileNotFoundError) as error:
        raise _wrong_options(url, error) from None
    if kind is not None:
        kind.stop_retries(system)
    return system


def renew(url: str) -> None:
    """Drop the cached client, so that the next client reads the credentials again. Temporary
    credentials expire during a run."""
    import fsspec

    fsspec.get_filesystem_class(url.partition("://")[0]).clear_instance_cache()


# ---- hosts of storage options


def host_of(url: str) -> str:
    """Return the host that receives the storage options for a URL. All buckets of one type count as
    one host."""
    parts = urlsplit(url)
    kind = KINDS.get(parts.scheme)
    return kind.host(parts) if kind else f"{parts.scheme}://"


def options_for(url: str, storage: Mapping[str, Any], *, hosts: Collection[str]) -> dict[str, Any]:
    """Return the storage options if the URL's host is in `hosts`, else {}."""
    return dict(storage) if host_of(url) in hosts else {}


class _OwnHeaders(NamedTuple):
    """An aiohttp middleware that removes the headers of the storage options after a redirect to
    another host."""

    host: str
    names: tuple[str, ...]

    async def __call__(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if host_of(str(request.url)) != self.host:
            for name in self.names:
                request.headers.popall(name, None)
        return await handler(request)


def _own_headers(url: str, options: Mapping[str, Any]) -> _OwnHeaders:
    own = options.get("client_kwargs", {})
    names = {*options.get("headers", {}), *own.get("headers", {})}
    names |= {
        header
        for key, header in (("auth", "Authorization"), ("cookies", "Cookie"))
        if key in options or key in own
    }
    return _OwnHeaders(host_of(url), tuple(sorted(names)))


# ---- text without secrets


def shown(url: str) -> str:
    """Return the URL for messages, without secrets."""
    if is_command(url):
        return f"pipe:{_program(url)} ..."
    parts, kind = urlsplit(url), kind_of(url)
    if not parts.netloc and parts.scheme in ("", "file"):
        return url
    has_user = "@" in parts.netloc and not (kind and kind.user_is_place and parts.password is None)
    if kind not in (None, _WEB) and "=" not in url and not has_user:
        return url  # a ? is a wildcard, not a query
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_command(url: str) -> bool:
    return _COMMAND.search(url) is not None


def _program(command: str) -> str:
    """Return the program of a command: its first word that sets no variable. Other words may be
    secrets."""
    words = _COMMAND.split(command, maxsplit=1)[1].split()
    first = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    return first if _PROGRAM.fullmatch(first) else "command"


def recorded(url: str) -> str:
    """Return an address (or several, joined by ::) as records may show it. A command is replaced by
    its program and a hash."""
    return "::".join(
        f"pipe:{_program(part)} (sha256 {hashlib.sha256(part.encode()).hexdigest()[:32]})"
        if is_command(part) and not is_record(part)
        else part
        for part in url.split("::")
    )


def is_record(command: str) -> bool:
    """Return True for the recorded form of a command, which cannot be run."""
    return _RECORDED.fullmatch(command) is not None


def without_secrets(url: str, *, remedy: str, field: str = "") -> str:
    """Return `url` (an address, or several joined by ::). Raise UserError if it has a password, or
    a query that may be a key. Commands are not checked, because `recorded` hides them."""
    addresses = "::".join(part for part in url.split("::") if not is_command(part))
    for found in _PLACE_IN_A_LIST.finditer(addresses):
        if secret := _secret_in(found[0]):
            problem = f"{shown(found[0])} contains {secret}, which records would show"
            raise UserError(field, problem, remedy, code="bad-value")
    return url


def _secret_in(place: str) -> str | None:
    parts, kind = urlsplit(place), kind_of(place)
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    is_variable = (password or user).startswith("$")
    is_place = kind is None or kind.user_is_place
    if not is_variable and (colon or (user and not is_place)):
        return "a password"
    is_web = parts.scheme in ("http", "https")
    if parts.scheme == "file" or not (is_web or "=" in parts.query + parts.fragment):
        return None  # ? and # belong to a name or a pattern
    for word in filter(None, [*parts.query.split("&"), parts.fragment]):
        name, has_value, _ = word.partition("=")
        if not _HARMLESS.fullmatch(word) and (kind or _LIKE_A_KEY.search(name)):
            return f"{name}=..." if has_value else "a query"
    return None


# ---- meaning of errors


def refuse_hopeless(url: str, error: Exception) -> None:
    """Raise a UserError for a permanent fault. Return if another attempt may succeed."""
    place, kind = shown(url), kind_of(url) or _WEB
    facts, status = _facts(error), _status(error)
    names = {each.__name__ for cause in _chain(error) for each in type(cause).__mro__}
    is_missing = status in (404, 410) or (
        status is None and isinstance(error, FileNotFoundError) and not names & _NO_CONNECTION
    )
    if isinstance(error, TypeError) and "unexpected keyword" in str(error):
        raise _wrong_options(url, error) from None  # s3fs accepts any option until it is used
    if isinstance(error, ValueError) and "Invalid endpoint" in str(error):
        fix = "write it as https://HOST:PORT"
        raise UserError(
            "storage.endpoint_url", "it is not an address", fix, code="bad-value"
        ) from None
    if type(error).__name__ == "HfUriError":
        fix = "write it as hf://datasets/USER/NAME/FILE"
        raise UserError(place, "it is not a Hugging Face address", fix, code="bad-value") from None
    if names & _NOT_ON_THE_HUB:
        problem = "the file does not exist, or you have no access to it"
        fix = f"correct the address (hf://datasets/USER/NAME/FILE), or log in ({kind.credentials})"
    elif "NoSuchBucket" in facts or "ContainerNotFound" in facts:
        problem, fix = "the bucket does not exist", "correct the address, or create the bucket"
    elif is_missing:
        problem, fix = "the file does not exist", "correct the address, or restore the file"
    else:
        if found := _no_access(kind, error, facts, names):
            raise UserError(place, *found, code="no-access") from None
        return
    raise MissingError(place, problem, fix, code="missing-path") from None


def _no_access(
    kind: Bucket, error: Exception, facts: str, names: set[str]
) -> tuple[str, str] | None:
    """Return (problem, fix) if credentials, a fee or a wrong clock is the cause, else None."""
    if kind.payer and re.search("requester.?pays", facts, re.IGNORECASE):
        return "the reader pays for access", f"accept the fee with the storage option {kind.payer}"
    if _SKEWED.search(facts):
        return (
            "the server reports that this machine's clock is wrong",
            "set the clock (timedatectl)",
        )
    if not (is_refused(error) or names & _NO_CREDENTIALS or "Forbidden: " in facts):
        return None
    if is_refused(error) and _EXPIRED.search(facts):
        return (
            "the credentials have expired",
            f"renew them ({kind.credentials}, or the setting storage)",
        )
    payer = f", {kind.payer} if the reader pays" if kind.payer else ""
    give = f"give credentials ({kind.credentials}, or the setting storage)"
    fix = f"{give}; storage options for public data: {kind.public}{payer}"
    return "access is denied", fix


def is_refused(error: Exception) -> bool:
    """Return True if other credentials might help."""
    return (
        isinstance(error, PermissionError)
        or _status(error) in (401, 403)
        or bool(_EXPIRED.search(_facts(error)))
    )


def words_of(error: Exception) -> str:
    """Return the error's text without queries of URLs. fsspec raises FileNotFoundError for any
    fault of a web server, with the fault as `__cause__`."""
    root = error.__cause__ or error
    return _QUERY.sub(r"\1", " ".join(str(root).split())) or type(root).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error, from any attribute that a client uses."""
    for found in _chain(error):
        reply = getattr(found, "response", None)
        if isinstance(reply, dict):  # botocore
            return int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        for each in (found, reply):
            for name in ("status", "status_code", "code"):
                if isinstance(value := getattr(each, name, None), int):
                    return value
    return None


def _facts(error: Exception) -> str:
    """Return types, codes and messages of an error and its causes, without addresses, because
    addresses can contain any word."""
    texts = (
        f"{type(each).__name__} {getattr(each, 'error_code', '')} {each}" for each in _chain(error)
    )
    return _PLACE.sub("", " ".join(texts))


def _wrong_options(url: str, error: Exception) -> UserError:
    if "account_name" in str(error):
        fix = "set AZURE_STORAGE_ACCOUNT_NAME, or the storage option account_name"
        return UserError(shown(url), "the account is missing", fix, code="missing-value")
    scheme = url.partition("://")[0]
    problem = f"{scheme} does not take these options ({error})"
    return UserError("storage", problem, "remove the wrong option", code="bad-value")
