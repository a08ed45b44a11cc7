"""The SQLite file that MLflow's store is where no server is named: it appears whole, or is refused in one line.

Runs that start together, on several nodes, want a fresh store at the same moment, and MLflow would have each of them migrate the
same file. So each makes a whole one under a name of its own beside it, and a hard link, which replaces nothing, gives it its name:
the first one wins and the others use it. This needs no locks: flock may not reach from node to node.

A file that is there is never migrated here. MLflow does so piece by piece, outside a transaction: a process that dies on the way
leaves a store that nobody can use, and others may be writing. What cannot be used is named with a remedy, and the runs' journals
hold all of it.
"""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from data_prep.publish import TEMPORARY_PREFIX, make_directory, sync
from data_prep.settings import UserError

LOCKED_S = 20.0
"""How long a reader waits for those that write."""
CLAIMED_S = 20.0
"""How long a process waits for another one to put a store in its place, where there are no hard links."""
_SCHEME = "sqlite:///"
_BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite writes beside a database and rolls back into whatever has its name."""
_SIGNS_OF_DAMAGE = ("malformed", "not a database", "no such table", "no such column")


@dataclass(frozen=True)
class Schema:
    """Of the MLflow that is installed."""

    newest: str
    known: Collection[str]
    """All revisions up to the newest."""
    make: Callable[[Path], None]
    """Makes a whole store where nothing is, and lets go of it."""


class EmbeddedStore:
    def __init__(self, path: Path):
        self.path = path
        self._file: tuple[int, int] | None = None

    @staticmethod
    def of(uri: str) -> "EmbeddedStore | None":
        """None for a server."""
        path = uri.removeprefix(_SCHEME).partition("?")[0]
        is_file = uri.startswith(_SCHEME) and path not in ("", ":memory:") and not path.startswith("file:")
        return EmbeddedStore(Path(path)) if is_file else None

    def open(self, schema: Schema) -> None:
        """Afterwards there is a whole store of this schema; otherwise a UserError says what is there, and what to do."""
        if not self.path.exists():
            self._make(schema)
        self._check(schema)
        self._file = self._identity()

    def check_in_place(self) -> None:
        """A store that was moved away while it was open would go on taking what nobody finds."""
        if self._file is not None and self._file != self._identity():
            raise UserError(
                f"{self.path}: was moved or removed while this run wrote to it; when the run has ended: sync it"
            )

    def words_of_damage(self, error: Exception) -> str | None:
        """The remedy, where the error is of a damaged file."""
        signs = [sign for sign in _SIGNS_OF_DAMAGE if sign in str(error)]
        return self._remedy(f"is damaged ({signs[0]})") if signs else None

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _make(self, schema: Schema) -> None:
        make_directory(self.path.parent)
        for end in _BESIDE:
            left = self.path.with_name(self.path.name + end)
            if left.exists() and not self.path.exists():  # in this order: whoever writes one has a store
                raise UserError(
                    f"{left}: was left by a store that is gone and would spoil a new one; move it away, too"
                )
        # made on this node and copied: hundreds of small writes, which take a shared file system long
        prefix = f"{TEMPORARY_PREFIX}{self.path.name}-"
        with (
            tempfile.TemporaryDirectory(prefix=prefix) as here,
            tempfile.TemporaryDirectory(prefix=prefix, dir=self.path.parent) as beside,
        ):
            local, made = Path(here) / self.path.name, Path(beside) / self.path.name
            schema.make(local)
            shutil.copyfile(local, made)
            sync(made)
            self._publish(made)
        sync(self.path.parent)

    def _publish(self, made: Path) -> None:
        try:
            os.link(made, self.path)
        except FileExistsError:
            pass  # another process was first
        except OSError:  # a file system without hard links
            self._publish_by_claim(made)

    def _publish_by_claim(self, made: Path) -> None:
        claim = self.path.with_name(f"{TEMPORARY_PREFIX}{self.path.name}.claim")
        try:
            claim.mkdir()
        except FileExistsError:
            end_s = time.monotonic() + CLAIMED_S
            while not self.path.exists():
                if time.monotonic() > end_s:
                    raise UserError(
                        f"{claim}: a process that was making the store seems to have died; remove this folder"
                    ) from None
                time.sleep(0.1)
            return
        try:
            if not self.path.exists():
                os.rename(made, self.path)
        finally:
            claim.rmdir()

    def _check(self, schema: Schema) -> None:
        uri = f"file:{quote(str(self.path.absolute()))}?mode=rw"  # makes no file; reads one that may only be read
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=LOCKED_S)) as connection:
                tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
                found = connection.execute("select version_num from alembic_version").fetchall() if tables else []
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                raise UserError(self._remedy("is no store of MLflow's")) from None
            raise UserError(
                f"{self.path}: cannot be read ({error}); try again, and see that the file system locks files: if it does not, give "
                "runs a server (MLFLOW_TRACKING_URI)"
            ) from None
        except sqlite3.DatabaseError as error:
            raise UserError(self._remedy(f"is damaged ({error})")) from None
        if len(found) != 1 or any(name.startswith("_alembic_tmp_") for name in tables):
            raise UserError(self._remedy("is a store that was never finished"))
        ((revision,),) = found
        if revision not in schema.known:
            raise UserError(self._remedy("is of a newer MLflow than this one: install that one. Or else"))
        if revision != schema.newest:
            command = f"cp {self.path} {self.path}.old && mlflow db upgrade {_SCHEME}{self.path.absolute()}"
            raise UserError(self._remedy(f"is of an older MLflow: when no run is writing, {command}. Or else"))

    def _remedy(self, fault: str) -> str:
        old = self.path.parent / "old-store"
        return (
            f"{self.path} {fault}: mkdir {old} && mv {self.path}* {old}; then `pretrain sync RUN` for every run of "
            f"{self.path.parent}, from whose journals it is made anew, whole"
        )
