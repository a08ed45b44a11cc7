"""What each process will need next, for the others to see when they make room."""

import json
import os
import secrets
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from pretrain.data.shard_cache.files import let_go, open_file, plain_errors, stands, try_lock

SUFFIX = ".wants"


@dataclass(frozen=True)
class AllWants:
    places: dict[str, int]
    """sha256 -> how many shards the process that needs it first will need before it."""
    waiting_bytes: int
    """Of the shards that processes cannot go on without, and for which there was no room yet."""


class Wants:
    """Of one process. Both methods are called within the room."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._file: FileIO | None = None
        self._path = directory / f"{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"

    def publish(self, wanted: list[str], *, waiting_bytes: int) -> None:
        if self._file is None or not stands(self._file, self._path):
            self._file = open_file(self._path, os.O_RDWR | os.O_CREAT)
            assert try_lock(self._file, exclusive=True), "the name is ours alone"
        data = json.dumps({"wanted": wanted, "waiting_bytes": waiting_bytes}).encode()
        os.ftruncate(self._file.fileno(), 0)  # what a full disk cuts short, wants nothing
        with plain_errors(self.directory):
            view = memoryview(data)
            while view:
                view = view[os.pwrite(self._file.fileno(), view, len(data) - len(view)) :]

    def withdraw(self) -> None:
        if self._file is not None:
            if stands(self._file, self._path):
                self._path.unlink()
            let_go(self._file)
            self._file = None

    def forget(self) -> None:
        """They are our parent's."""
        if self._file is not None:
            self._file.close()


def read_wants(directory: Path) -> AllWants:
    """Of all processes that live; within the room, so that nobody is writing."""
    places: dict[str, int] = {}
    waiting = 0
    for path in sorted(directory.glob("*" + SUFFIX)):
        with open_file(path, os.O_RDONLY) as file:
            if try_lock(file, exclusive=True):  # its process is dead
                path.unlink()
                continue
            try:
                found = json.loads(file.readall())
            except ValueError:  # its disk is full
                continue
        waiting += found["waiting_bytes"]
        for place, sha256 in enumerate(found["wanted"]):
            places[sha256] = min(place, places.get(sha256, place))
    return AllWants(places, waiting)
