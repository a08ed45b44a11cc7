"""What the heartbeat's sockets carry: JSON objects, one per line, never pickle; and who is at the other end."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

LONGEST_LINE = 1 << 16
Message = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    rank: int
    node: str
    pid: int

    @staticmethod
    def myself(rank: int) -> "Peer":
        return Peer(rank, socket.gethostname(), os.getpid())

    @staticmethod
    def of(message: Message) -> "Peer":
        return Peer(int(message["rank"]), str(message["node"]), int(message["pid"]))

    def as_message(self) -> Message:
        return asdict(self)

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"


class Garbage(Exception):  # noqa: N818
    """What came is no line of ours."""


class Wire:
    """One connection. Reading never blocks; a message is small, so sending one does not, either, unless nobody reads."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.is_open = True
        self._buffer = b""

    def send(self, message: Message) -> None:
        self.send_line(encoded(message))

    def send_line(self, line: bytes) -> None:
        """What does not fit is left out whole: the other end is frozen, or gone, and its silence will tell."""
        try:
            if self.socket.send(line) < len(line):
                self.is_open = False
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False

    def receive(self) -> Iterator[Message]:
        """All whole lines that have come; `is_open` says whether more may."""
        while True:
            try:
                data = self.socket.recv(LONGEST_LINE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                break
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            yield from map(_parsed, lines)
            if len(self._buffer) > LONGEST_LINE:
                raise Garbage("a line without end")
            if len(data) < LONGEST_LINE:
                break  # that was all; an end that has come, too, is seen next time

    def close(self) -> None:
        self.is_open = False
        self.socket.close()


def encoded(message: Message) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    assert len(line) <= LONGEST_LINE, len(line)
    return line


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise Garbage(str(error)) from None
    if not isinstance(message, dict):
        raise Garbage("no object")
    return message


def listen(address: str, *, is_one_node: bool) -> socket.socket:
    """On a free port of the interface that `address` names, or of all, where the name means something else here than elsewhere."""
    try:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if is_one_node or not _is_loopback(str(place[0])):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind(place)
            listener.listen(1024)
            return listener
    except OSError:
        pass  # a name that only the others can resolve, or an address that is translated on the way here
    return socket.create_server(("", 0), backlog=1024)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
