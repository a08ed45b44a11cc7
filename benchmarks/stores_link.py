"""Server and simulated link of stores.py: a directory over HTTP with range requests, also as S3
(HEAD, GET, path-style).

    python stores_link.py ROOT

The server prints its port, and serves /BUCKET/PATH for any bucket. Each request waits 20 ms, and all
responses share 100 MB/s. The link makes up for at most 20 ms of unused time, so late wake-ups do
not slow it. GET /.counts returns bytes, requests and CPU seconds immediately.
"""

import json
import os
import re
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LATENCY_S, BYTES_PER_S = 0.02, 100e6
BURST_S, PIECE_BYTES = 0.02, 1 << 18


class Link:
    """State of the simulated link that all connections share."""

    def __init__(self) -> None:
        self._lock, self._free_from_s = threading.Lock(), 0.0
        self.num_bytes = self.num_requests = 0

    def request(self) -> None:
        with self._lock:
            self.num_requests += 1
        time.sleep(LATENCY_S)

    def transmit(self, num_bytes: int) -> None:
        """Wait for the time that the link needs to send `num_bytes`."""
        with self._lock:
            self._free_from_s = (
                max(self._free_from_s, time.monotonic() - BURST_S) + num_bytes / BYTES_PER_S
            )
            self.num_bytes += num_bytes
            wait_s = self._free_from_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    link: Link
    root: Path

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        if self.path == "/.counts":
            counts = {
                "bytes": self.link.num_bytes,
                "requests": self.link.num_requests,
                "cpu_s": time.process_time(),
            }
            self._head(200, len(body := json.dumps(counts).encode()))
            self.wfile.write(body)
            return
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.link.request()
        path = self.root.joinpath(*Path(unquote(urlsplit(self.path).path)).parts[2:])
        if not path.is_file():
            self._head(404, 0)
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, end = 0, size
            if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, end = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size
            words = {
                "ETag": f'"{size:032x}"',
                "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
            }
            if asked:
                words["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self._head(206 if asked else 200, end - start, **words)
            while with_body and start < end:
                self.link.transmit(count := min(PIECE_BYTES, end - start))
                while count:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), start, count)
                    start, count = start + sent, count - sent

    def _head(self, status: int, num_bytes: int, **words: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(num_bytes),
            "Accept-Ranges": "bytes",
            **words,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def log_message(self, *unused: object) -> None:
        """Log nothing."""


class Listener(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def handle_error(self, *unused: object) -> None:
        """Ignore errors, because clients may close connections."""


def main() -> None:
    Handler.link, Handler.root = Link(), Path(sys.argv[1])
    server = Listener(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
