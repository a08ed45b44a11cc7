"""Errors of storage clients are one line with a fix. Credentials that a provider's chain renews
keep working."""

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data_prep import clients
from data_prep.clients import shown
from data_prep.errors import Code
from data_prep.remote import read_bytes, version
from tests.data_prep.stock import forget_credentials
from tests.errors import fails

Answer = tuple[int, bytes]


GCS = pytest.mark.stores
"""The import of gcsfs loads grpc, which has crashed a long test process in the C library."""


class Store:
    """A server on loopback with configurable replies."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], Answer] = lambda request: (500, b"")
        self.num_requests = 0
        self.address = ""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    forget_credentials(monkeypatch)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    found = Store()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.num_requests += 1
            status, body = found.answer(self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":  # HEAD replies give no reason
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def xml(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No.</Message></Error>".encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "status", "body", "code"),
    [
        ("s3://b/a", 403, xml("RequestTimeTooSkewed"), "no-access"),
        ("s3://b/a", 400, xml("ExpiredToken"), "no-access"),
        ("s3://b/a", 403, xml("AccessDenied"), "no-access"),
        ("s3://b/a", 404, xml("NoSuchBucket"), "missing-path"),
        pytest.param(
            "gs://b/a",
            400,
            "Bucket is a requester pays bucket but no user project provided.",
            "no-access",
            marks=GCS,
        ),
        pytest.param(
            "gs://b/a",
            401,
            "Anonymous caller does not have storage.objects.get access",
            "no-access",
            marks=GCS,
        ),
        pytest.param(
            "gs://b/a", 403, "me@x does not have storage.objects.get access", "no-access", marks=GCS
        ),
        pytest.param(
            "gs://b/a", 404, "The specified bucket does not exist.", "missing-path", marks=GCS
        ),
    ],
)
def test_a_refusal_is_one_line_and_asked_for_once_more_at_most(
    store: Store, url: str, status: int, body: str | bytes, code: Code
) -> None:
    data = (
        body
        if isinstance(body, bytes)
        else json.dumps({"error": {"code": status, "message": body}}).encode()
    )
    store.answer = lambda request: (status, data)
    storage = (
        {"key": "me", "secret": "word"}
        if url.startswith("s3")
        else {"token": "anon", "project": "mine"}
    )
    options = storage | {"endpoint_url": store.address}
    for ask in (partial(version, num_attempts=4), read_bytes)[
        url.startswith("s3") and status != 403 :
    ]:  # an s3 client takes long
        with fails(code, url) as caught:
            ask(url, storage=options)
        assert "\n" not in str(caught.value) and "word" not in str(caught.value)
    assert store.num_requests <= 8


def test_credentials_that_expire_in_the_middle_are_read_anew(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def renew(token: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {token}\naws_secret_access_key = x\n")

    good = "first"

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        is_good = f"Credential={good}/" in request.headers["Authorization"]
        return (200, b"content") if is_good else (400, xml("ExpiredToken"))

    store.answer, options = answer, {"endpoint_url": store.address}
    renew("first")
    assert read_bytes("s3://b/a", storage=options) == b"content"
    good = "second"
    with fails("no-access", "s3://b/a"):
        read_bytes("s3://b/a", storage=options)
    renew("second")
    assert read_bytes("s3://b/a", storage=options) == b"content"
    assert version("s3://b/a", storage=options, num_attempts=1).num_bytes == 7


def test_an_address_that_says_expired_is_no_expired_credential() -> None:
    error = OSError("500, message='Internal Server Error', url='https://host/expired/a.tar'")
    assert not clients.is_refused(error)
    clients.refuse_hopeless("https://host/expired/a.tar", error)  # raises nothing: it is retried


def test_a_client_that_cannot_be_made_is_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    bad_endpoint = {"endpoint_url": "minio:9000", "anon": True}
    cases: list[tuple[str, dict[str, Any], Code, str]] = [
        ("s3://b/a", {"endpoint_url": store.address}, "no-access", "s3://b/a"),
        ("s3://b/a", bad_endpoint, "bad-value", "storage.endpoint_url"),
        ("hf://datasets/me", {}, "bad-value", "hf://datasets/me"),
        ("ftp://b/a", {}, "unsupported", "ftp://b/a"),
    ]
    for url, storage, code, field in cases:
        with fails(code, field):
            version(url, storage=storage, num_attempts=4)
    monkeypatch.setattr(clients, "find_spec", lambda name: None)
    for scheme, extra in (("s3", "remote"), ("gs", "gcs"), ("az", "azure"), ("hf", "hf")):
        with fails("missing-library", f"{scheme}://") as caught:
            version(f"{scheme}://b/a", storage={}, num_attempts=1)
        assert f"wide-mlps[{extra}]" in caught.value.fix


def test_no_password_and_no_query_is_printed_and_a_place_is() -> None:
    for url in (
        "abfs://box@account.dfs.core.windows.net/a",
        "hf://datasets/me/mine@v1/a",
        "s3://b/a-?.tar",
        "gs://b/a b",
    ):
        assert shown(url) == url
    for url in (
        "s3://me:word@b/a",
        "s3://word@b/a",
        "az://c:word@b/a",
        "https://word@b/a?key=word",
        "gs://b/a?key=word",
    ):
        assert shown(url).endswith("://b/a")


def test_an_address_that_is_kept_holds_a_variable_or_no_secret() -> None:
    for url in (
        "https://h/a.tar?download=true::https://h/b.tar?token=${TOKEN}",
        "https://$ME:${WORD}@h/a.tar",
        "abfs://box@account.dfs.core.windows.net/a",
        "s3://b/a-?#.tar",
        "postgresql+psycopg2://me@h/runs?sslmode=require",
        "sqlite:////a@b:c/mlflow.db?mode=ro",
        "file:///a?key=b",
        "data/a@b:c?key=d",
    ):
        assert clients.without_secrets(url, remedy="") == url
    for url in (
        "a.tar::https://h/a.tar?token=word",
        "https://h/a.tar::https://word@h/b.tar",
        "https://me:a::word@h/b.tar",
        "https://h/${WHERE}/a.tar?download=word",
        "https://$ME:word@h/a.tar",
        "https://h/a.tar#word",
        "az://c:word@b/a",
        "abfs://c@account/a?sig=word",
        "s3://b/a b.tar?X-Amz-Signature=word",
        "mysql://me:word@h/runs",
        "mysql://h/runs?password=word",
        "pipe:curl https://h/a.tar::https://h/b.tar?token=word",
    ):
        with fails("bad-value") as caught:
            clients.without_secrets(url, remedy="go")
        assert "word" not in str(caught.value).replace("password", "")
