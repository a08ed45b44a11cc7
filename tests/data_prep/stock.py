"""Stock shards written by webdataset, their indexed datasets, and servers for the shards."""

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import webdataset
from PIL import Image

from data_prep.cli import main
from data_prep.manifest import load_manifest, load_paths
from pretrain.data.reader import open_split
from tests.data_prep.samples import encoded, picture, tar_of

Members = dict[str, bytes]


def sample(number: int, *, kind: str = "JPEG", **more: Any) -> dict[str, Any]:
    """Return a sample with an image of 40 x 30 pixels and the class `number % 3`."""
    suffix = {"JPEG": "jpg", "PNG": "png"}[kind]
    return {
        "__key__": f"{number:05d}",
        suffix: encoded(picture(seed=number), kind),
        "cls": number % 3,
        **more,
    }


def write_stock(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=True, mtime=0.0) as writer:
        for each in samples:
            writer.write(each)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(members, kind=tarfile.PAX_FORMAT))
    return path


def index(out: Path, train: list[Path | str] | Path | str, *words: str) -> int:
    """Run the real `index`. Return its exit code."""
    patterns = train if isinstance(train, list) else [train]
    flags = [word for pattern in patterns for word in ("--train", str(pattern))]
    return main(
        ["index", "--out", str(out), *flags, "image_size=16", "num_workers=1", "name=stock", *words]
    )


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line of stderr. Only a slow machine's progress lines may precede it."""
    *before, last = capsys.readouterr().err.splitlines()
    assert all("/s " in line for line in before), before
    return last


def rejects(out: Path) -> dict[str, str]:
    """Return the rejection reason of each path."""
    lines = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert all(len(line["sha256"]) == 64 and line["detail"] for line in lines)
    return {line["path"]: line["reason"] for line in lines}


def hashes(folder: Path) -> dict[str, str]:
    found = {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.tar"))
    }
    assert found
    return found


def read(directory: Path, split: str = "train") -> tuple[np.ndarray[Any, Any], list[int]]:
    reader = open_split(directory, load_manifest(directory), split)
    return reader.images(np.arange(reader.num_samples)).numpy(), reader.labels.tolist()


def seen(data: bytes) -> np.ndarray[Any, Any]:
    """Return the central square as Pillow reads it."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side, left = min(image.size), (image.width - min(image.size)) / 2
    return np.asarray(
        image.resize((16, 16), Image.Resampling.BICUBIC, box=(left, 0, left + side, side))
    )


def paths(directory: Path, split: str = "train") -> list[str]:
    return [
        path
        for shard in load_manifest(directory).splits[split].shards
        for path in load_paths(directory, shard)
    ]


class Web:
    """A web server for a folder. `faults[name]` are replies to the first GETs of a file, before
    good replies."""

    def __init__(self, folder: Path):
        self.folder, self.faults, self.gets = folder, dict[str, list[Any]](), dict[str, int]()
        self.marks = True
        self.ranges = False
        """True if the server supports Range and If-Range."""
        self.gate = threading.Event()
        """A "stall" waits for this event after half of the file."""
        self._counting = threading.Lock()
        self.key = ""
        """A query that every request must have."""
        self.headers = list[str]()
        """Headers of all requests."""
        self.moved_to = ""
        """Another server, to which requests for tars are redirected."""

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        name, _, query = request.path.lstrip("/").partition("?")
        path = self.folder / name
        self.headers.append(str(request.headers))
        if self.moved_to and path.suffix in (".tar", ".gz"):
            request.send_response(302)
            request.send_header("Location", f"{self.moved_to}/{name}")
            request.send_header("Content-Length", "0")
            return request.end_headers()
        if query != self.key:
            return self._status(request, 403)
        if not path.is_file():
            return self._status(request, 404)
        data = path.read_bytes()
        fault: Any = None
        if with_body:
            with self._counting:
                self.gets[name] = self.gets.get(name, 0) + 1
                fault = self.faults[name].pop(0) if self.faults.get(name) else None
        elif self.faults.get(name) and isinstance(self.faults[name][0], int):
            fault = self.faults[name].pop(0)
        if isinstance(fault, int):
            return self._status(request, fault)
        mark, begin, end = hashlib.md5(data, usedforsecurity=False).hexdigest(), 0, len(data)
        if self.ranges and request.headers.get("If-Range") == mark:
            begin = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        request.send_response(206 if begin else 200)
        request.send_header("Content-Length", str(end - begin))
        if begin:
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{end}")
        if self.marks:
            request.send_header("ETag", mark)
        request.end_headers()
        if fault == "wrong":
            data = data[:-1] + bytes([data[-1] ^ 1])
        data = data[begin:]
        half = len(data) // 2
        if with_body:
            with suppress(ConnectionError):  # the client may have disconnected
                request.wfile.write(data[:half])
                if fault == "stall":
                    self.gate.wait(30)
                request.wfile.write(b"" if fault == "cut" else data[half:])
        return None

    def _status(self, request: BaseHTTPRequestHandler, status: int) -> None:
        request.send_response(status)
        request.send_header("Content-Length", "0")
        request.end_headers()


@contextmanager
def web(folder: Path) -> Iterator[tuple[str, Web]]:
    """Yield the address and the server's state."""
    state = Web(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self, with_body=True)

        def do_HEAD(self) -> None:
            state.answer(self, with_body=False)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        state.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


def forget_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Yield the storage options, as JSON, of an s3 server. Its bucket `pictures` has the folder's
    tars as some/NAME."""
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    address = f"http://{host}:{port}"
    with urlopen(Request(f"{address}/moto-api/reset", method="POST")):
        pass  # remove data of an earlier server in this process
    keys = {
        "aws_access_key_id": "me",
        "aws_secret_access_key": "secret-word",
        "region_name": "us-east-1",
    }
    client = boto3.client("s3", endpoint_url=address, **keys)
    client.create_bucket(Bucket="pictures")
    for path in sorted(folder.glob("*.tar")):
        client.put_object(Bucket="pictures", Key=f"some/{path.name}", Body=path.read_bytes())
    client.close()
    try:
        yield json.dumps({"endpoint_url": address, "key": "me", "secret": "secret-word"})
    finally:
        moto.stop()
