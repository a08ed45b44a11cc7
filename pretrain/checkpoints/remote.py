"""The copy of a run in a bucket (`checkpoint.remote`): a lost node costs no checkpoint.

    REMOTE/checkpoints/step-00000120/                 as in RUN; complete once it has sha256.json
    REMOTE/config.yaml, tracking/journal.jsonl, ...   the other RECORDS, as in RUN

If a run has a remote, run_dir may be on each node's own disk. If you download a remote, you get a
run directory.

Order of an upload of a checkpoint (uploader.py starts it):
1. its four files, each compared with the checksum of the bucket;
2. the records, so that no checkpoint is ahead of its event log;
3. its sha256.json.

An attempt fetches, on every node, before torch is imported (`fetch_run`):
1. The remote must belong to this run: it has the same run key, or RUN is empty and the settings
   are the same.
2. RUN gets the records of the remote if RUN is empty or the remote is at a later step.
   delivered.json is read before the event log and uploaded after it, so it never names lines
   that the event log lacks.
3. The newest complete checkpoint is fetched and its hashes are verified. A damaged checkpoint is
   reported, and the previous one is fetched instead.
4. The first rank also fetches the best checkpoint if RUN lacks it.

Once the ranks have joined (`agreed_checkpoint` in loop/train.py), all ranks resume from the newest
checkpoint of the first rank. The first rank uploads it if the remote lacks it, and the other nodes
fetch it.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.clients import MissingError, shown
from data_prep.errors import SettingsError, UserError
from data_prep.progress import doing
from data_prep.publish import atomic_directory, sole_writer, withdraw, write_atomic, write_json
from data_prep.remote import (
    RemoteError,
    copy_to,
    join,
    names_under,
    read_bytes,
    remove,
    upload,
    write_bytes,
)
from data_prep.settings import dump, parse_yaml, validate
from pretrain.checkpoints.card import CONFIG, MODEL, CheckpointError
from pretrain.checkpoints.checkpoint import HASHES, OPTIMIZER, TRAINER, Checkpoint, fault_of
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    RESULT,
    check_settings,
    checkpoint_dir,
    finished_result,
    is_checkpoint_name,
    list_checkpoints,
    other_settings,
    step_of,
)
from pretrain.config import TrainingSettings
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.record import RECORD

FIELD = "checkpoint.remote"
_FILES = (MODEL, OPTIMIZER, CONFIG, TRAINER)
_IDENTITY, _BEST = "tracking/identity.json", "checkpoints/best.json"
RECORDS = (
    _IDENTITY,
    CONFIG_FILE,
    RECORD,
    "micro_batch.json",
    _BEST,
    "tracking/journal.jsonl",
    "tracking/delivered.json",
    RESULT,
)
"""Records of a run, in the order of the upload. They are fetched in reverse order."""


def fetch_run(settings: TrainingSettings, world: World) -> None:
    """Fetch the files that RUN lacks. If the run is finished, upload its files. The caller has
    compared `settings` with RUN."""
    remote = Remote.of(settings)
    if remote is None:
        return
    with (
        doing(f"{remote}: fetching files for {settings.run_dir}", enabled=world.is_first),
        remote.locked(),
    ):
        remote.fetch_missing(settings, is_first=world.is_first)
        if world.is_first and finished_result(remote.run_dir, settings):
            remote.list_complete()
            for place in reversed(list_checkpoints(remote.run_dir)):
                remote.upload(place)
            remote.send_records()
    check_settings(remote.run_dir, settings)  # RUN may have a config now


class Remote:
    def __init__(self, run_dir: Path, url: str, storage: dict[str, Any]):
        self.run_dir, self._url, self._storage = run_dir, url, storage
        self._sent: dict[str, bytes] = {}
        self.complete: dict[int, bytes | None] = {}
        """Content of sha256.json of each complete checkpoint, by step. None if it has not been read
        yet."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> "Remote | None":
        wanted = settings.checkpoint
        if wanted.remote is None:
            return None
        return cls(Path(settings.run_dir), wanted.remote, wanted.remote_storage)

    def __str__(self) -> str:
        return f"{FIELD}: {shown(self._url)}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process of the node use the remote at a time. Raise UserError if the bucket
        cannot be reached. Otherwise the run would silently begin from scratch."""
        try:
            with PROGRESS.trusting(), sole_writer(self.run_dir / "remote", wait=True):
                yield
        except RemoteError as error:
            fix = f"Try again later, or set {FIELD}=null to resume from run_dir only"
            problem = f"{error.field}: {error.problem}"
            raise UserError(FIELD, problem, fix, code="unreachable") from None

    # ---- fetching

    def fetch_missing(self, settings: TrainingSettings, *, is_first: bool) -> None:
        own, theirs = _run_key(self._local(_IDENTITY)), _run_key(self._content(_IDENTITY))
        if theirs is None:
            if is_first:  # a read-only bucket ends the attempt before torch is imported
                write_bytes(b"", self._at("probe"), storage=self._storage)
                self.remove("probe")
            return
        steps = [step_of(path) for path in list_checkpoints(self.run_dir)]
        if own != theirs:
            if steps or (self.run_dir / RESULT).exists():
                raise self._belongs_to_another(f"than {self.run_dir}")
            config = self._content(CONFIG_FILE)  # a run may end before its first upload
            begun = parse_yaml(config.decode(), Path(CONFIG_FILE)) if config else None
            if begun is not None and (changes := other_settings(begun, settings)):
                raise self._belongs_to_another(f"with other settings ({changes})")
        self.list_complete()
        newest = max(steps, default=-1)
        if own != theirs or max(self.complete, default=-1) > newest:
            self._take_records(settings)
        fetched = self.fetch_newer(newest)
        if is_first:
            self._fetch_best()
        elif fetched is not None:
            self._keep_only(fetched)

    def _fetch_best(self) -> None:
        """Fetch the best checkpoint that best.json or the newest trainer.json names, if RUN lacks
        it."""
        found = {_best_step(self._local(_BEST))}
        for newest in list_checkpoints(self.run_dir)[-1:]:
            trainer = self._local(f"checkpoints/{newest.name}/{TRAINER}")
            found.add(_best_step(trainer, "best"))
        for step in found:
            if step is None or step not in self.complete:
                continue
            if checkpoint_dir(self.run_dir, step).exists():
                continue
            with suppress(CheckpointError, MissingError):  # training needs only the newest
                self.fetch(step)

    def best_step(self) -> int | None:
        return _best_step(self._content(_BEST))

    def _belongs_to_another(self, than: str) -> SettingsError:
        problem = f"{shown(self._url)} belongs to another run {than}"
        return SettingsError(FIELD, problem, f"Choose another {FIELD}", code="exists")

    def _take_records(self, settings: TrainingSettings) -> None:
        for name in reversed(RECORDS):
            place, content = self.run_dir / name, self._content(name)
            if content is None:
                if place.exists():
                    withdraw(place)
                continue
            if name == CONFIG_FILE:
                begun = validate(type(settings), parse_yaml(content.decode(), place))
                content = dump(begun.model_copy(update={"run_dir": settings.run_dir})).encode()
            elif name == _IDENTITY:
                content = _with_local_database(content, self.run_dir)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(place, content)

    def fetch_newer(self, than: int) -> Checkpoint | None:
        """Fetch the newest undamaged checkpoint after step `than`, or return None."""
        for step in sorted((step for step in self.complete if step > than), reverse=True):
            try:
                return self.fetch(step)
            except (CheckpointError, MissingError) as error:
                print(
                    f"WARNING: {self}: the checkpoint of step {step} is damaged ({error}). The"
                    " previous checkpoint is fetched instead",
                    file=sys.stderr,
                )
                self.complete[step] = b""  # differs from all hashes: it is uploaded again
        return None

    def fetch(self, step: int) -> Checkpoint:
        place = checkpoint_dir(self.run_dir, step)
        with atomic_directory(place) as directory:
            for name in (*_FILES, HASHES):
                url = self._at("checkpoints", place.name, name)
                copy_to(url, directory / name, storage=self._storage, room=directory)
            if fault := fault_of(directory, needed=_FILES):
                raise CheckpointError(str(self), f"step {step}: {fault}", code="damaged")
        return Checkpoint.read(place)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint of RUN and the remote, after copying it to the place that
        lacks it."""
        own, fault = None, None
        try:
            own = Checkpoint.newest(self.run_dir)
        except CheckpointError as error:
            fault = error
        with self.locked():
            self.list_complete()
            fetched = self.fetch_newer(step_of(own.directory) if own else -1)
            if fetched is None and own is not None:
                self.upload(own.directory)
        if fetched is None and fault is not None:
            raise fault
        if fetched is None and own is None and self.complete:
            fix = f"Restore older versions of its objects, or choose another {FIELD} to begin again"
            problem = f"every checkpoint in {shown(self._url)} is damaged"
            raise CheckpointError(FIELD, problem, fix, code="damaged")
        return fetched or own

    def receive(self, step: int) -> Checkpoint:
        """On another node, fetch the checkpoint that the first rank has chosen."""
        place = checkpoint_dir(self.run_dir, step)
        with self.locked():
            self.list_complete()
            if fault_of(place, needed=_FILES) is None and self._has(place):
                return Checkpoint.read(place)
            fetched = self.fetch(step)
            self._keep_only(fetched)
            return fetched

    def _keep_only(self, fetched: Checkpoint) -> None:
        """Remove the checkpoint that an earlier attempt fetched to this node."""
        record = self.run_dir / "remote" / "fetched.json"
        with suppress(FileNotFoundError):
            earlier = checkpoint_dir(self.run_dir, json.loads(record.read_text()))
            if earlier != fetched.directory:
                withdraw(earlier)
        write_json(record, step_of(fetched.directory))

    # ---- uploading

    def list_complete(self) -> list[str]:
        """Update `complete`. Return all files as `step-N/FILE`, including files of incomplete
        checkpoints."""
        found = names_under(self._at("checkpoints"), storage=self._storage)
        names = [name for name in found if is_checkpoint_name(name.split("/")[0])]
        steps = sorted(step_of(Path(name).parent) for name in names if name.endswith(f"/{HASHES}"))
        self.complete = {step: self.complete.get(step) for step in steps}
        return names

    def _has(self, place: Path) -> bool:
        """Return True if the remote has this step's checkpoint with the same hashes."""
        step = step_of(place)
        if step in self.complete and self.complete[step] is None:
            self.complete[step] = self._content(f"checkpoints/{place.name}/{HASHES}")
        return self.complete.get(step) == (place / HASHES).read_bytes()

    def upload(self, place: Path, *, stop: threading.Event | None = None) -> bool:
        """Upload a checkpoint of RUN. Return False if the remote already has it. All files are
        opened first, because the retention rules may remove them during the upload."""
        step, above = step_of(place), f"checkpoints/{place.name}"
        if self._has(place):
            return False
        with ExitStack() as opened:
            files = {
                name: opened.enter_context(open(place / name, "rb")) for name in (*_FILES, HASHES)
            }
            own, theirs = _run_key(self._local(_IDENTITY)), _run_key(self._content(_IDENTITY))
            if theirs not in (None, own):
                raise self._belongs_to_another(f"than {self.run_dir}")
            if step in self.complete:
                self.remove(f"{above}/{HASHES}")
            for name in _FILES:
                source = Path(f"/proc/self/fd/{files[name].fileno()}")
                upload(source, self._at(above, name), storage=self._storage, stop=stop)
            self.send_records()
            hashes = files[HASHES].read()
        write_bytes(hashes, self._at(above, HASHES), storage=self._storage)
        self.complete[step] = hashes
        return True

    def send_records(self) -> int:
        """Upload the records that have changed. Return the size of all records in bytes."""
        found = {name: self._local(name) for name in reversed(RECORDS)}
        if RESULT not in self._sent and found[RESULT] is None:
            self.remove(RESULT)  # the run was extended
        for name in RECORDS:
            content = found[name]
            if content is not None and content != self._sent.get(name):
                write_bytes(content, self._at(name), storage=self._storage)
                self._sent[name] = content
        return sum(len(content) for content in found.values() if content is not None)

    def remove(self, *names: str) -> None:
        remove([self._at(name) for name in names], storage=self._storage)

    def _at(self, *names: str) -> str:
        return join(self._url, *names)

    def _content(self, name: str) -> bytes | None:
        try:
            return read_bytes(self._at(name), storage=self._storage)
        except MissingError:
            return None

    def _local(self, name: str) -> bytes | None:
        try:
            return (self.run_dir / name).read_bytes()
        except FileNotFoundError:
            return None


def _run_key(identity: bytes | None) -> str | None:
    return None if identity is None else str(json.loads(identity)["run_key"])


def _best_step(content: bytes | None, *above: str) -> int | None:
    """Return the best checkpoint's step in a JSON record, below the keys `above`, or None."""
    try:
        found = json.loads(content or b"null")
        for key in above:
            found = found[key]
        return int(found["step"])
    except (KeyError, TypeError, ValueError):
        return None


def _with_local_database(identity: bytes, run_dir: Path) -> bytes:
    """Return the identity, with a tracking database next to RUN if its own is not on this
    machine."""
    fields = json.loads(identity)
    kind, _, place = fields["uri"].partition(":///")
    if kind == "sqlite" and not Path(place).parent.is_dir():
        fields["uri"] = f"sqlite:///{run_dir.parent.resolve()}/mlflow.db"
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"
