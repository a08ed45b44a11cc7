"""Object stores that tests start (moto's s3, gcp-storage-emulator, azurite), each behind a proxy
that makes faults.

s3 runs in `make test`; the others, and slow tests, run in `make stores` (the marker `stores`).
Tests without a server skip with a reason, except under REQUIRE_STORES=1.
"""

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from data_prep import remote
from pretrain.ranks.world import free_port
from tests.data_prep.stock import s3_server

BUCKET = "pictures"
AZURITE = (
    Path(os.environ.get("STORES", ".venv/stores")).absolute() / "node_modules/.bin/azurite-blob"
)
SECRET = "c2VjcmV0LXdvcmQ="


@dataclass
class Fault:
    """A fault of the next `count` requests with this method and path (patterns).

    A number: the status of the reply. cut: the connection ends before the server gets the
    request. lost: it ends after the server has acted. wrong: a byte of the content changes.
    stall: no reply until the gate opens.
    """

    kind: int | str
    method: str
    path: str
    count: int


@dataclass
class Store:
    scheme: str
    storage: dict[str, Any]
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def url(self, *names: str) -> str:
        return remote.join(f"{self.scheme}://{BUCKET}", *names)

    def fail(
        self, kind: int | str, *, method: str = "PUT|POST", path: str = "", count: int = 1
    ) -> None:
        self.faults.append(Fault(kind, method, path, count))

    def next_fault(self, method: str, address: str) -> int | str | None:
        self.requests.append(f"{method} {address}")
        for fault in self.faults:
            is_meant = re.fullmatch(fault.method, method) and re.search(fault.path, address)
            if fault.count and is_meant:
                fault.count -= 1
                return fault.kind
        return None


def proxy_of(store: Store, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with suppress(ConnectionError):
                super().handle_one_request()

        def forward(self) -> None:
            fault, body = store.next_fault(self.command, self.path), self.body()
            if isinstance(fault, int):
                return self.reply(fault, [], b"")
            if fault == "cut":
                return self.hang_up()
            if fault == "stall":
                store.gate.wait(60)
                return self.hang_up()
            if fault == "wrong" and body:
                body = another(body)
            backend = HTTPConnection(host, port, timeout=60)
            backend.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in (
                    "transfer-encoding",
                    "content-length",
                    "connection",
                    "expect",
                ):
                    backend.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                backend.putheader("Content-Length", str(len(body)))
            backend.putheader("Connection", "close")
            backend.endheaders(body)
            answer = backend.getresponse()
            data = answer.read()
            backend.close()
            if fault == "lost":
                return self.hang_up()
            if fault == "wrong" and not body:
                data = another(data)
            return self.reply(answer.status, answer.getheaders(), data)

        def body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                pieces = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def reply(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            length = len(data)
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = int(value)
                elif name.lower() not in (
                    "transfer-encoding",
                    "content-length",
                    "connection",
                    "keep-alive",
                ):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(data)

        def hang_up(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = forward

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def another(data: bytes) -> bytes:
    """Return the data with a changed byte in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@contextmanager
def _s3(folder: Path) -> Iterator[tuple[str, Callable[[str], dict[str, Any]]]]:
    with s3_server(folder) as options:
        storage = json.loads(options)
        yield storage["endpoint_url"], lambda address: storage | {"endpoint_url": address}


@contextmanager
def _gs(folder: Path) -> Iterator[tuple[str, Callable[[str], dict[str, Any]]]]:
    missing = [name for name in ("gcsfs", "gcp_storage_emulator") if find_spec(name) is None]
    if missing:
        no_server(f"{missing[0]} is not installed")
    from gcp_storage_emulator.server import create_server

    port = free_port()
    with create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET):
        yield f"http://127.0.0.1:{port}", lambda address: {"endpoint_url": address, "token": "anon"}


@contextmanager
def _az(folder: Path) -> Iterator[tuple[str, Callable[[str], dict[str, Any]]]]:
    if find_spec("adlfs") is None or not AZURITE.exists():
        no_server(f"{AZURITE} is not there: `make stores` installs it where npm is")
    port = free_port()
    words = [
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
    ]
    server = subprocess.Popen(
        [AZURITE, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        env=os.environ | {"AZURITE_ACCOUNTS": f"me:{SECRET}"},
        text=True,
    )
    assert server.stdout is not None
    try:
        if not any("successfully listens" in line for line in server.stdout):
            no_server("azurite does not start")
        # otherwise its pipe fills up
        reader = threading.Thread(target=server.stdout.read, daemon=True)
        reader.start()

        def storage(address: str) -> dict[str, Any]:
            return {
                "connection_string": (
                    f"AccountName=me;AccountKey={SECRET};BlobEndpoint={address}/me;"
                )
            }

        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(
            *storage(f"http://127.0.0.1:{port}").values()
        ) as client:
            client.create_container(BUCKET)
        yield f"http://127.0.0.1:{port}", storage
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


SERVERS = {"s3": _s3, "gs": _gs, "az": _az}
EACH = [
    pytest.param("s3"),
    *(pytest.param(name, marks=pytest.mark.stores) for name in ("gs", "az")),
]
"""Arguments of `pytest.mark.parametrize("store", EACH, indirect=True)` for a fixture that calls
`started`."""


def no_server(why: str) -> None:
    if os.environ.get("REQUIRE_STORES") == "1":
        pytest.fail(f"REQUIRE_STORES=1: {why}")
    pytest.skip(why)


@contextmanager
def started(scheme: str, folder: Path) -> Iterator[Store]:
    """Start an empty store with the bucket `pictures`, and only its own credentials."""
    with ExitStack() as stack:
        address, storage = stack.enter_context(SERVERS[scheme](folder))
        host, port = address.removeprefix("http://").split(":")
        store = Store(scheme, {})
        proxy = proxy_of(store, host, int(port))
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        store.storage |= storage(f"http://127.0.0.1:{proxy.server_port}")
        try:
            yield store
        finally:
            store.gate.set()
            proxy.shutdown()
            proxy.server_close()
