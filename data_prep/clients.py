"""The clients of stores, which are fsspec's: how each kind is made, and what its errors mean to a
user.

Invariants: storage options go to a client and nowhere else, and to a dataset's own host only.
remote.py says how long a server may be silent and how often it is asked again, so a client's own
patience is turned off as far as it can be.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from data_prep.errors import UserError

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 30, 60


T = TypeVar("T")


class Kind(NamedTuple):
    package: str
    extra: str
    credentials: str
    """Where its client finds them."""
    public: str
    """The storage option for those who have none."""
    payer: str = ""
    """The storage option where the reader pays."""


_S3 = Kind("s3fs", "remote", "AWS_*, aws configure", "anon=true", "requester_pays=true")
_GS = Kind(
    "gcsfs", "gcs", "gcloud auth application-default login", "token=anon", "requester_pays=PROJECT"
)
_AZ = Kind("adlfs", "azure", "AZURE_STORAGE_* with account_name, az login", "anon=true")
_HTTP = Kind("aiohttp", "remote", "~/.netrc", "no key")
_HF = Kind("huggingface_hub", "hf", "HF_TOKEN, hf auth login", "token=false")
KINDS = {
    "http": _HTTP,
    "https": _HTTP,
    "s3": _S3,
    "gs": _GS,
    **dict.fromkeys(("az", "abfs", "abfss"), _AZ),
    "hf": _HF,
}
"""By scheme."""
SCHEMES = "http(s)://, s3://, gs://, az:// or hf://"
_HARMLESS = re.compile(r"download(=(true|1|yes)?)?|([^=]*=)?\$.*", re.IGNORECASE)
"""What a query may hold: all else could be a key, but for the name of a variable that a shell, or
webdataset, puts it in for."""
_LIKE_A_KEY = re.compile(r"pass|pwd|secret|token|key|sig|cred|auth", re.IGNORECASE)
_QUERY = re.compile(r"(\w+://[^\s?'\")]+)[?][^\s'\")]*|[?][^\s'\")]*=[^\s'\")]*")
_PLACE = re.compile(r"\w+://[^\s'\"]+")
_PLACE_IN_A_LIST = re.compile(r"[\w+.-]+://([^/]*@)?(\[[^]/]*\])?.*?(?=::|$)")
_COMMAND = re.compile(r"pipe:", re.IGNORECASE)
"""Anywhere in an address, as braces may put it together."""
_RECORDED = re.compile(r"pipe:[\w./+-]+ \(sha256 [0-9a-f]{32}\)")
_ASSIGNMENT, _PROGRAM = re.compile(r"\w+=[\w./:@%+,=-]*"), re.compile(r"[\w./+-]+")
_EXPIRED = re.compile(
    r"expired|RequestExpired|TokenRefreshRequired|RefreshError|TokenRetrievalError|SSOToken",
    re.IGNORECASE,
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


class MissingError(UserError):
    """A server that has no such file."""


def host_of(url: str) -> str:
    """The server that receives the storage options for a URL. All buckets of a store have one
    server."""
    parts = urlsplit(url)
    kind = KINDS.get(parts.scheme)
    if kind is _HTTP:
        host = parts.netloc.rpartition("@")[2].lower()
        return f"{parts.scheme}://{host.removesuffix(':443' if parts.scheme == 'https' else ':80')}"
    return f"az://{parts.netloc.partition('@')[2]}" if kind is _AZ else f"{parts.scheme}://"


def options_for(url: str, storage: Mapping[str, Any], *, hosts: Collection[str]) -> dict[str, Any]:
    """Return the storage options if the URL is on one of the hosts that they are meant for, else
    none."""
    return dict(storage) if host_of(url) in hosts else {}


class _OwnHeaders(NamedTuple):
    """An aiohttp middleware. A server that redirects to another host does not pass on the headers
    of the storage options."""

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


def shown(url: str) -> str:
    """The URL as it may be printed."""
    if is_command(url):
        return f"pipe:{_program(url)} ..."
    parts = urlsplit(url)
    if not parts.netloc and parts.scheme in ("", "file"):
        return url
    has_user = "@" in parts.netloc and (
        parts.password is not None or KINDS.get(parts.scheme) is not _AZ
    )
    if KINDS.get(parts.scheme, _HTTP) is not _HTTP and "=" not in url and not has_user:
        return url  # its ? is part of a pattern; CONTAINER@ACCOUNT is a place
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_command(url: str) -> bool:
    return _COMMAND.search(url) is not None


def _program(command: str) -> str:
    """The first word of a command without the variables that it sets. All other words may be
    secrets."""
    words = _COMMAND.split(command, maxsplit=1)[1].split()
    first = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    return first if _PROGRAM.fullmatch(first) else "command"


def recorded(url: str) -> str:
    """Return the address (or a list with :: between them) for records, which hold a command's
    program and hash only."""
    return "::".join(_record_of(part) if is_command(part) else part for part in url.split("::"))


def _record_of(command: str) -> str:
    if is_record(command):
        return command
    return f"pipe:{_program(command)} (sha256 {hashlib.sha256(command.encode()).hexdigest()[:32]})"


def is_record(command: str) -> bool:
    """True if this is a record of a command: the command itself has to be given again."""
    return _RECORDED.fullmatch(command) is not None


def without_secrets(url: str, *, remedy: str, field: str = "") -> str:
    """The address (or a list with :: between them), which records may hold. Refuses one with a
    password, or with what may be a key.

    Commands are not checked, for records hold none (`recorded`).
    """
    addresses = "::".join(part for part in url.split("::") if not is_command(part))
    for found in _PLACE_IN_A_LIST.finditer(addresses):
        place, parts = found[0], urlsplit(found[0])
        user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
        if not (password or user).startswith("$") and (
            colon or (user and KINDS.get(parts.scheme, _AZ) is not _AZ)
        ):
            raise UserError(
                f"{field}{shown(place)}: holds a password, which would stand in records; {remedy}"
            )
        if parts.scheme == "file" or (
            parts.scheme not in ("http", "https") and "=" not in parts.query + parts.fragment
        ):
            continue  # there ? and # are characters of a name or a pattern
        for word in filter(None, [*parts.query.split("&"), parts.fragment]):
            name, has_value, _ = word.partition("=")
            if not _HARMLESS.fullmatch(word) and (
                parts.scheme in KINDS or _LIKE_A_KEY.search(name)
            ):
                what = name if has_value else "a query"
                raise UserError(
                    f"{field}{shown(place)}: holds {what}, which would stand in records; {remedy}"
                )
    return url


def client(
    url: str, storage: dict[str, Any], *, silence_s: float = READ_TIMEOUT_S, retries: bool = True
) -> Any:
    """Without `retries` of its own, of which s3 has two layers, a caller's are all there are."""
    import fsspec

    protocol = url.partition("://")[0]
    kind = KINDS.get(protocol)
    if kind is None and protocol != "file":
        raise UserError(f"{shown(url)}: {protocol}:// is no store that can be read; use {SCHEMES}")
    if kind is not None and find_spec(kind.package) is None:
        raise UserError(
            f"{protocol}://: {kind.package} is not installed; pip install 'wide-mlps[{kind.extra}]'"
        )
    options = dict(storage)
    if protocol in ("http", "https", "gs"):
        import aiohttp

        # no limit on the whole of a large shard, one on silence; proxies and ~/.netrc count, as for
        # any command
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s
        )
        if protocol == "gs":
            options = {"requests_timeout": timeout} | options
        else:
            given = options.get("client_kwargs", {})
            guard = {"middlewares": [_own_headers(url, options)]} if storage else {}
            options["client_kwargs"] = {"timeout": timeout, "trust_env": True} | given | guard
    elif protocol == "s3":
        limits: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": silence_s}
        if not retries:
            limits["retries"] = {"total_max_attempts": 1}
        options["config_kwargs"] = limits | dict(options.get("config_kwargs", {}))
    elif kind is _AZ:
        patience = {"connection_timeout": CONNECT_TIMEOUT_S, "read_timeout": int(silence_s) or 1}
        options = (
            patience | fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url) | options
        )
    try:
        system = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except (TypeError, ValueError, ImportError, FileNotFoundError) as error:
        raise _wrong_options(url, error) from None
    if protocol == "s3" and not retries:
        system.retries = 1
    elif (
        protocol == "gs"
    ):  # sleeps for half a minute between six attempts of its own, and prints tracebacks
        system._request = MethodType(type(system)._request.__wrapped__, system)
    elif kind is _AZ:  # waits for a quarter of a minute before its first second attempt
        system.service_client._config.retry_policy.total_retries = 0
    return system


def renew(url: str) -> None:
    """The next client reads its credentials anew: those that a provider's chain gives expire in the
    middle of a run."""
    import fsspec

    fsspec.get_filesystem_class(url.partition("://")[0]).clear_instance_cache()


def info(url: str, storage: dict[str, Any], *, silence_s: float) -> dict[str, Any]:
    """What the store says of the file without reading it."""
    system = client(url, storage, silence_s=silence_s, retries=False)
    if url.startswith("hf://"):  # which remembers what it has once listed
        return dict(system.info(url, refresh=True, expand_info=True))
    found = asked(url, system, system.info)
    if found.get("type") == "directory":
        raise MissingError(f"{shown(url)}: is a folder, no file; name what is in it")
    return dict(found)


def asked(url: str, system: Any, question: Callable[[str], T]) -> T:
    """What the client answers; of s3 a refusal comes with its reason, which a HEAD is not given."""
    try:
        return question(url)
    except OSError as error:
        if url.startswith("s3://") and _status(error) in (400, 403):
            system.cat_file(url, start=0, end=1)
        raise


def is_refused(error: Exception) -> bool:
    """Whether other credentials might do."""
    return (
        isinstance(error, PermissionError)
        or _status(error) in (401, 403)
        or bool(_EXPIRED.search(_facts(error)))
    )


def refuse_hopeless(url: str, error: Exception) -> None:
    """What will not pass is an error of its own, with a remedy; all else is left to the caller."""
    if isinstance(error, TypeError) and "unexpected keyword" in str(
        error
    ):  # s3fs takes any option until it is used
        raise _wrong_options(url, error) from None
    if isinstance(error, ValueError) and "Invalid endpoint" in str(error):
        raise UserError(
            "storage.endpoint_url: is no address; write it as https://HOST:PORT"
        ) from None
    if type(error).__name__ == "HfUriError":
        raise UserError(
            f"{shown(url)}: is no address of the hub; write it as hf://datasets/USER/NAME/FILE"
        ) from None
    kind, facts, status = KINDS.get(url.partition("://")[0], _HTTP), _facts(error), _status(error)
    names = {each.__name__ for found in _chain(error) for each in type(found).__mro__}
    if names & _NOT_ON_THE_HUB:
        remedy = (
            f"mend the address (hf://datasets/USER/NAME/FILE), or give a token ({kind.credentials})"
        )
        raise MissingError(
            f"{shown(url)}: there is no such file, or you may not see it; {remedy}"
        ) from None
    if "NoSuchBucket" in facts or "ContainerNotFound" in facts:
        raise MissingError(
            f"{shown(url)}: there is no such bucket; mend the address, or make it"
        ) from None
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        if status is None and names & {
            "ClientConnectorError",
            "TimeoutError",
            "ServerDisconnectedError",
        }:
            return
        raise MissingError(
            f"{shown(url)}: there is no such file; mend the address, or put it back"
        ) from None
    if kind.payer and re.search("requester.?pays", facts, re.IGNORECASE):
        raise UserError(
            f"{shown(url)}: the reader pays there; agree by the storage option {kind.payer}"
        ) from None
    if _SKEWED.search(facts):
        raise UserError(
            f"{shown(url)}: the store finds this machine's clock wrong; set it (timedatectl), or"
            " ask who may"
        ) from None
    if is_refused(error) and _EXPIRED.search(facts):
        raise UserError(
            f"{shown(url)}: the credentials have expired; renew them ({kind.credentials}, or"
            " storage)"
        ) from None
    if is_refused(error) or names & _NO_CREDENTIALS or "Forbidden: " in facts:
        payer = f", {kind.payer} where the reader pays" if kind.payer else ""
        ways = (
            f"give credentials ({kind.credentials}, or storage), or the storage option"
            f" {kind.public} for what is public{payer}"
        )
        raise UserError(f"{shown(url)}: access is refused; {ways}") from None


def said(error: Exception) -> str:
    """fsspec raises FileNotFoundError for whatever goes wrong with a web server; what it was is the
    cause."""
    root = error.__cause__ or error
    return _QUERY.sub(r"\1", " ".join(str(root).split())) or type(root).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: Exception) -> int | None:
    """The answer of the server as a number of HTTP, wherever the client has put it."""
    for found in _chain(error):
        answer = getattr(found, "response", None)
        if isinstance(answer, dict):  # botocore's
            return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        for each in (found, answer):
            for name in ("status", "status_code", "code"):
                if isinstance(value := getattr(each, name, None), int):
                    return value
    return None


def _facts(error: Exception) -> str:
    """All that the chain of errors says: kinds, codes and messages, without addresses, which may be
    called anything."""
    told = (
        f"{type(each).__name__} {getattr(each, 'error_code', '')} {each}" for each in _chain(error)
    )
    return _PLACE.sub("", " ".join(told))


def _wrong_options(url: str, error: Exception) -> UserError:
    protocol = url.partition("://")[0]
    if "account_name" in str(error):
        return UserError(
            f"{shown(url)}: the account is missing; set AZURE_STORAGE_ACCOUNT_NAME, or the storage"
            " option account_name"
        )
    return UserError(f"storage: {protocol} does not take these options ({error})")
