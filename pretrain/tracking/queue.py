"""The runs whose event logs a tracking database has not received completely, and the turn of the
one process that delivers them.

    RUNS/.mlflow.db.queue/KEY           the path of a run
    RUNS/.mlflow.db.queue/.lock         held by the process that delivers
    RUNS/.mlflow.db.queue/next/.lock    held by a process that asks for the turn

1. Each deliverer adds its run, then tries to take the turn. If another process has the turn, that
   process delivers the run.
2. A process that must write itself (`pretrain serve`, `pretrain sync`, a deliverer whose run has
   ended and still waits) asks for the turn: the process that has the turn then steps back.
3. A killed process leaves no lock, and its runs stay in the queue for the next process.

An MLflow server takes many writers, so a run that uses a server has its own queue in
RUN/tracking/queue.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from data_prep.publish import is_held, make_directory, sole_writer, write_atomic

SQLITE = "sqlite:///"


def database_path(uri: str) -> Path | None:
    """Return the file of an SQLite database; None for a server."""
    path = uri.removeprefix(SQLITE).partition("?")[0]
    is_file = uri.startswith(SQLITE) and path not in ("", ":memory:")
    return Path(path).absolute() if is_file and not path.startswith("file:") else None


class Queue:
    """The queue of the database `uri`. `run_dir`: the run that asks."""

    def __init__(self, uri: str, run_dir: Path):
        database = database_path(uri)
        self.directory = (
            run_dir.absolute() / "tracking" / "queue"
            if database is None
            else database.with_name(f".{database.name}.queue")
        )

    def add(self, key: str, run_dir: Path) -> None:
        """Add a run, unless the queue has it."""
        if not (self.directory / key).exists():
            make_directory(self.directory)
            write_atomic(self.directory / key, str(run_dir.absolute()).encode())

    def remove(self, key: str) -> None:
        (self.directory / key).unlink(missing_ok=True)

    def runs(self) -> dict[str, Path]:
        """Return the run directories by key."""
        entries = (path for path in self.directory.iterdir() if path.name.isalnum())
        return {path.name: Path(path.read_text()) for path in sorted(entries) if not path.is_dir()}

    def turn(self, *, wait: bool = False) -> AbstractContextManager[None]:
        """Hold the turn while the block runs; `Busy` if another process has it."""
        return sole_writer(self.directory, wait=wait)

    def request(self, *, wait: bool = False) -> AbstractContextManager[None]:
        """Ask for the turn while the block runs; `Busy` if another process asks."""
        return sole_writer(self.directory / "next", wait=wait)

    def is_requested(self) -> bool:
        return is_held(self.directory / "next")[0]
