"""The runs whose event logs a tracking database has not received completely.

    RUNS/.mlflow.db.queue/KEY       the path of a run
    RUNS/.mlflow.db.queue/.lock     held by the one process that delivers

A killed process leaves no lock, and its runs stay in the queue for the next process. An MLflow
server allows many writers, so each run with a server has its own queue in RUN/tracking/queue.
"""

from contextlib import suppress
from pathlib import Path

from data_prep.publish import make_directory, write_atomic

SQLITE = "sqlite:///"


def database_path(uri: str) -> Path | None:
    """Return the file of an SQLite database, or None for a server."""
    path = uri.removeprefix(SQLITE).partition("?")[0]
    is_file = uri.startswith(SQLITE) and path not in ("", ":memory:")
    return Path(path).absolute() if is_file and not path.startswith("file:") else None


class Queue:
    """Queue of a database. The process that holds `sole_writer(queue.directory)` delivers."""

    def __init__(self, uri: str, run_dir: Path):
        database = database_path(uri)
        self.directory = (
            run_dir.absolute() / "tracking" / "queue"
            if database is None
            else database.with_name(f".{database.name}.queue")
        )

    def add(self, key: str, run_dir: Path) -> None:
        """Add a run, or replace the old path of a run that was renamed."""
        entry, content = self.directory / key, str(run_dir.absolute()).encode()
        with suppress(FileNotFoundError, NotADirectoryError):
            if entry.read_bytes() == content:
                return
        make_directory(self.directory)
        write_atomic(entry, content)

    def remove(self, key: str) -> None:
        (self.directory / key).unlink(missing_ok=True)

    def runs(self) -> dict[str, Path]:
        runs = dict[str, Path]()
        for entry in sorted(self.directory.iterdir()):
            if entry.name.isalnum():
                with suppress(FileNotFoundError):  # another deliverer has just removed it
                    runs[entry.name] = Path(entry.read_text())
        return runs
