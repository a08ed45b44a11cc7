"""A run's second place, in a store (`checkpoint.mirror`): with it run_dir may lie on each node's
own disk, and a node that is lost takes nothing along.

    MIRROR/starts/0003.json                     who has begun start 3, of which run, and where
    MIRROR/checkpoints/step-00000120/           as in RUN; whole as soon as its sha256.json is there, which comes last
    MIRROR/checkpoints/best.json
    MIRROR/config.yaml, tracking/journal.jsonl  and the other RECORDS, as in RUN: a copy of a mirror
    is a run RUN/mirror/state.json                       which run's mirror that is, and which of
    its starts RUN's records are of

Before anything is read in RUN, on every node, by one process after the other (`bring`):
1. The newest start is read. RUN has to be of that run already, or empty, with the same settings.
2. Unless RUN has been part of that start, or is at a later step, it takes over the mirror's
   records. delivered.json is read before the journal, and written behind it, so that it never names
   lines that the journal has not.
3. The newest checkpoint that is newer than RUN's own is fetched and held to its hashes; in the
   place of a damaged one, that before it. On the first rank's node the best comes along. 4.
   state.json.

Once the ranks have joined (`agreed_checkpoint` in loop/train.py):
5. The first rank begins the next start: of several that try only one can write its number. An older
   start that wakes up again finds it before anything that it makes whole or removes, and ends: the
   newest start alone changes the mirror.
6. The newest whole checkpoint of all nodes and of the mirror counts. Where a node lacks it, or has
   other bytes, one that has it gives it to the mirror, and the others fetch it.

Behind training, by a thread of the first rank (`MirrorWriter`), of the checkpoints that the mirror
lacks the newest first:
7. its four files, each of which the store confirms (remote.py); 8. the records, so that no
   checkpoint is ahead of its journal;
9. the look at the starts (5), then sha256.json; 10. best.json; 11. what no rule keeps goes, its
   sha256.json first.
12. The records follow every RECORDS_S, and at the end.

A crash anywhere leaves the newest checkpoint that was whole, and what is half there goes with the
next one. A store that refuses (down, full, credentials that expired) costs training nothing: it is
tried again with growing pauses, warned of, and named at the end.

Long because one protocol is easier to hold to in one place.
"""  # noqa: E501 (a table)

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from data_prep.errors import SettingsError, UserError
from data_prep.progress import doing
from data_prep.publish import (
    Holder,
    Superseded,
    atomic_directory,
    remove_leftovers,
    sole_writer,
    withdraw,
    write_atomic,
    write_json,
)
from data_prep.remote import (
    MissingError,
    RemoteError,
    StoppedError,
    copied,
    join,
    names_under,
    read_bytes,
    remove,
    shown,
    upload,
    write_bytes,
)
from data_prep.settings import differences, dump, parse_yaml, validate
from pretrain.checkpoints.card import CONFIG, MODEL, CheckpointError
from pretrain.checkpoints.checkpoint import HASHES, OPTIMIZER, TRAINER, Checkpoint, fault_of
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    RESULT,
    WEIGHTS,
    check_settings,
    checkpoint_dir,
    checkpoints_dir,
    finished_result,
    is_checkpoint_name,
    list_checkpoints,
    may_change,
    step_of,
)
from pretrain.config import TrainingSettings
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

if TYPE_CHECKING:
    from pretrain.checkpoints.files import Retention

_FILES = (MODEL, OPTIMIZER, CONFIG, TRAINER)
_DELIVERED, _IDENTITY = "tracking/delivered.json", "tracking/identity.json"
RECORDS = (
    CONFIG_FILE,
    WEIGHTS,
    "micro_batch.json",
    _IDENTITY,
    "tracking/journal.jsonl",
    _DELIVERED,
    RESULT,
)
"""In the order in which they are written; they are read the other way round."""
_BEST = "checkpoints/best.json"
RECORDS_S, FINAL_S = 60.0, 120.0
"""How often the records are brought there; how long the end of training waits for a store that
refuses."""
_BYTES_EACH = 8 << 20
"""Of a journal: each time it has grown by so much, it is brought there more seldom."""
GRACE_SHARE = 0.9
"""Of checkpoint.grace_s: the rest is for the last lines."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _WARN_AGAIN_S = 2.0, 300.0, 600.0
_LAST_RECORDS_S = 10.0
_LOOK_S = 0.2


def bring(settings: TrainingSettings, world: World) -> None:
    """Steps 1 to 4. `settings` have been checked against what RUN holds."""
    mirror = Mirror.of(settings)
    if mirror is None:
        return
    notice = f"{settings.run_dir}: waiting for another rank of this node, which reads {mirror}"
    with (
        doing(f"{mirror}: looking for what {settings.run_dir} lacks", enabled=world.is_first),
        mirror.held(notice),
    ):
        mirror.bring(settings, is_first=world.is_first)
        if world.is_first and finished_result(mirror.run_dir, settings):
            mirror.complete()
    check_settings(mirror.run_dir, settings)  # it may hold more now


class Mirror:
    def __init__(self, run_dir: Path, url: str, storage: Mapping[str, Any]):
        self.run_dir, self._url, self._storage = run_dir, url, dict(storage)
        self._number = 0
        """Of the start that this process has begun."""
        self._sent: dict[str, bytes] = {}
        self.whole: dict[int, bytes | None] = {}
        """By step, what its sha256.json says; None: not read yet."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> "Mirror | None":
        wanted = settings.checkpoint
        return (
            None
            if wanted.mirror is None
            else cls(Path(settings.run_dir), wanted.mirror, wanted.mirror_storage)
        )

    def __str__(self) -> str:
        return f"checkpoint.mirror: {shown(self._url)}"

    @contextmanager
    def held(self, notice: str = "") -> Iterator[None]:
        """At a start; by one process of a node, or of all that share RUN. Who could not ask what is
        there does not begin anew."""
        try:
            with _alive(), sole_writer(self.run_dir / "mirror", wait=True, notice=notice):
                yield
        except RemoteError as error:
            remedy = (
                "try again when it can be reached, or set checkpoint.mirror=null to go on from"
                " run_dir alone"
            )
            raise UserError(f"checkpoint.mirror: {error}; {remedy}") from None
        except UserError as error:
            raise (
                error
                if str(error).startswith(str(self))
                else UserError(f"checkpoint.mirror: {error}")
            ) from None

    # ---- 1 to 4: what RUN lacks

    def bring(self, settings: TrainingSettings, *, is_first: bool) -> None:
        newest, state = self._newest_start(), self._state()
        if (
            newest is None and is_first
        ):  # who may not write there learns it before torch is imported
            write_bytes(b"", self._at("starts", "probe"), storage=self._storage)
            self._remove("starts/probe")
        if newest is None:
            return
        own, has_newest_records = list_checkpoints(self.run_dir), self._is_newest(state, newest)
        if not state:
            self._check_settings(settings, newest)
        if not has_newest_records:
            self.look()
            self._write_state(
                newest | {"number": newest["number"] - 1}, fetched=state.get("fetched", [])
            )  # if killed, once more
            if not own or max(self.whole, default=-1) >= step_of(own[-1]):
                self._take_records(settings, newest)
        brought = self.fetch_newer(step_of(own[-1]) if own else -1, is_first=is_first)
        if brought is not None and is_first:
            self._fetch_best(brought)
        if not has_newest_records:
            self._write_state(newest, fetched=self._state()["fetched"])

    def _newest_start(self) -> dict[str, Any] | None:
        numbers = [
            int(number)
            for name in self._names("starts")
            if (number := name.removesuffix(".json")).isdigit()
        ]
        if not numbers:
            return None
        return {
            "number": max(numbers),
            **json.loads(self._read("starts", _start_file(max(numbers)))),
        }

    def _state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "mirror" / "state.json").read_text())
        except FileNotFoundError:
            return {}
        # of a run whose mirror was another until now: what RUN has is newer than whatever is there
        return found if found["mirror"] == self._url else found | {"number": sys.maxsize}

    def _is_newest(self, state: Mapping[str, Any], newest: Mapping[str, Any]) -> bool:
        has_begun = list_checkpoints(self.run_dir) or (self.run_dir / RESULT).exists()
        if state["run"] != newest["run"] if state else has_begun:
            raise SettingsError(
                f"{self} belongs to another run ({_who(newest)}) than {self.run_dir}; name another"
                " mirror"
            )
        return bool(state) and state["number"] >= newest["number"]

    def _write_state(self, start: Mapping[str, Any], *, fetched: list[int]) -> None:
        state = {
            "mirror": self._url,
            "run": start["run"],
            "number": start["number"],
            "fetched": fetched,
        }
        write_json(self.run_dir / "mirror" / "state.json", state)

    def _check_settings(self, settings: TrainingSettings, newest: Mapping[str, Any]) -> None:
        with suppress(MissingError):  # killed before it had brought that there: nothing of worth
            begun = parse_yaml(self._read(CONFIG_FILE).decode(), Path(CONFIG_FILE))
            with suppress(SettingsError):  # the differences will name what is no setting any more
                begun = validate(type(settings), begun).model_dump(mode="json")
            wanted = settings.model_dump(mode="json")
            changes = differences(begun, wanted, is_free=may_change)
            if changes:
                fault = f"belongs to a run with other settings ({changes}; {_who(newest)})"
                raise SettingsError(f"{self} {fault}; name another mirror")

    def _take_records(self, settings: TrainingSettings, newest: Mapping[str, Any]) -> None:
        for name in reversed(RECORDS):
            place = self.run_dir / name
            try:
                content = self._read(name)
            except MissingError:
                if name == RESULT and place.exists():  # made longer elsewhere
                    withdraw(place)
                continue
            if name == CONFIG_FILE:
                begun = validate(type(settings), parse_yaml(content.decode(), place))
                content = dump(begun.model_copy(update={"run_dir": settings.run_dir})).encode()
            elif name == _IDENTITY:  # a store beside the runs of that node
                content = content.replace(
                    _store_in(newest["beside"]), _store_in(_beside(self.run_dir))
                )
            place.parent.mkdir(exist_ok=True)
            write_atomic(place, content)

    def fetch_newer(self, than: int, *, is_first: bool) -> Checkpoint | None:
        """The newest whole one of the mirror that is newer than this step. Of a node that only
        reads, what was fetched sooner goes: no rule of the first rank's removes it."""
        self.look()
        remove_leftovers(checkpoints_dir(self.run_dir))  # of who was killed here
        for step in sorted((step for step in self.whole if step > than), reverse=True):
            try:
                found = self.fetch(step)
            except (CheckpointError, MissingError) as error:
                print(
                    f"{self}: the checkpoint of step {step} is damaged there ({error}); trying the"
                    " one before",
                    file=sys.stderr,
                )
                self.whole[step] = b""  # no other's hashes, so whoever has it brings it again
                continue
            state = self._state()
            if state and not is_first:
                for path in list_checkpoints(self.run_dir):
                    if step_of(path) in state["fetched"] and step_of(path) != step:
                        withdraw(path)
                self._write_state(state, fetched=[step])
            return found
        return None

    def fetch(self, step: int) -> Checkpoint:
        place = checkpoint_dir(self.run_dir, step)
        with atomic_directory(place) as directory:
            for name in (*_FILES, HASHES):
                part = directory / f"{name}.part"
                with copied(self._at("checkpoints", place.name, name), part, storage=self._storage):
                    part.rename(directory / name)
            if fault := fault_of(directory, needed=_FILES):
                raise CheckpointError(fault)
        return Checkpoint.read(place)

    def _fetch_best(self, newest: Checkpoint) -> None:
        best = json.loads((newest.directory / TRAINER).read_text())["best"]
        if (
            best
            and best["step"] in self.whole
            and not checkpoint_dir(self.run_dir, best["step"]).exists()
        ):
            with suppress(CheckpointError, MissingError):  # of no use to who goes on
                self.fetch(best["step"])

    # ---- 5 and 6: the ranks have joined

    def begin(self) -> None:
        """Step 5, in the first rank that has claimed RUN."""
        with self.held():
            while True:
                newest, state = self._newest_start(), self._state()
                if newest is not None and not self._is_newest(state, newest):
                    raise Superseded(
                        f"{self}: another start has begun meanwhile ({_who(newest)}); this one"
                        " changes nothing"
                    )
                number = newest["number"] + 1 if newest else 1
                run = state.get("run") or uuid4().hex
                start = {
                    "run": run,
                    "beside": _beside(self.run_dir),
                    "run_dir": str(self.run_dir.absolute()),
                } | asdict(Holder())
                record = json.dumps(start, indent=1).encode()
                if write_bytes(
                    record,
                    self._at("starts", _start_file(number)),
                    storage=self._storage,
                    only_if_new=True,
                ):
                    break
            self._number = number
            self._write_state(start | {"number": number}, fetched=[])
            self.look()
            if not (self.run_dir / RESULT).exists():
                remove([self._at(RESULT)], storage=self._storage)
            self.send_records()  # whoever comes next knows what this run is

    def newest(self, *, is_first: bool) -> Checkpoint | None:
        """Of RUN and the mirror; it is in RUN now."""
        own, fault = None, None
        try:
            own = Checkpoint.newest(self.run_dir)
        except CheckpointError as error:
            fault = error
        with self.held():
            brought = self.fetch_newer(step_of(own.directory) if own else -1, is_first=is_first)
        if brought is None and fault is not None:
            raise fault
        if brought is None and own is None and is_first and self.whole:
            remedy = (
                "put it back (an older version of its objects, if the store keeps them), or name"
                " another mirror to begin anew"
            )
            raise CheckpointError(f"{self}: no checkpoint there is whole; {remedy}")
        return brought or own

    def give(self, place: Path) -> None:
        with self.held():
            self.look()
            self.push(place)

    def receive(self, step: int) -> Checkpoint:
        with self.held():
            return self.fetch(step)

    # ---- 7 to 12: behind training

    def look(self) -> None:
        """What is whole there."""
        found = [Path(name) for name in self._names("checkpoints")]
        steps = {
            step_of(path.parent)
            for path in found
            if path.name == HASHES and is_checkpoint_name(str(path.parent))
        }
        self.whole = {step: self.whole.get(step) for step in sorted(steps)}

    def has(self, place: Path) -> bool:
        """These bytes of that step."""
        step = step_of(place)
        if step in self.whole and self.whole[step] is None:
            self.whole[step] = self._read("checkpoints", place.name, HASHES)
        return self.whole.get(step) == (place / HASHES).read_bytes()

    def push(self, place: Path, *, stop: threading.Event | None = None) -> None:
        """Steps 7 to 9, of one checkpoint of RUN."""
        step, hashes = step_of(place), (place / HASHES).read_bytes()
        if self.has(place):
            return
        if step in self.whole:
            self._check_is_newest()
            self._remove(f"checkpoints/{place.name}/{HASHES}")
            del self.whole[step]
        for name in _FILES:
            self._check_is_newest()  # that start may have these files there already, whole
            upload(
                place / name,
                self._at("checkpoints", place.name, name),
                storage=self._storage,
                stop=stop,
            )
        if self._number:
            self.send_records()
        self._check_is_newest()
        write_bytes(hashes, self._at("checkpoints", place.name, HASHES), storage=self._storage)
        self.whole[step] = hashes

    def lacking(self, *, beside: Collection[Path] = ()) -> Path | None:
        """Of RUN's checkpoints the newest that is not there."""
        for place in reversed(list_checkpoints(self.run_dir)):
            with suppress(FileNotFoundError):  # it has just been removed
                if place not in beside and not self.has(place):
                    return place
        return None

    def settle(self, retention: "Retention") -> None:
        """Steps 10 and 11, by the rules of RUN, once its newest checkpoint is there."""
        from pretrain.checkpoints.files import (
            Best,
            superfluous,
        )  # and torch, which `bring` does without

        found, newest = (
            [checkpoint_dir(self.run_dir, step) for step in sorted(self.whole)],
            list_checkpoints(self.run_dir)[-1],
        )
        if newest not in found:
            return
        if _BEST not in self._sent:
            with suppress(MissingError):
                self._sent[_BEST] = self._read(_BEST)
        judged = [
            json.loads((newest / TRAINER).read_text())["best"],
            json.loads(self._sent.get(_BEST, b"null")),
        ]
        best = next((Best(**each) for each in judged if each and each["step"] in self.whole), None)
        if best is not None:
            self._send(_BEST, json.dumps(asdict(best)).encode())
        gone = {
            path.name for path in superfluous(found, newest=newest, retention=retention, best=best)
        }
        names = [
            name for name in self._names("checkpoints") if is_checkpoint_name(name.split("/")[0])
        ]
        gone |= {name.split("/")[0] for name in names} - {
            path.name for path in found
        }  # begun, and never whole
        names = [f"checkpoints/{name}" for name in names if name.split("/")[0] in gone]
        if names:
            self._check_is_newest()
            self._remove(*sorted(names, key=lambda name: not name.endswith(HASHES)))
            self.whole = {
                step: hashes
                for step, hashes in self.whole.items()
                if checkpoint_dir(self.run_dir, step).name not in gone
            }

    def send_records(self) -> int:
        """Those that have changed; how many bytes all of them have."""
        found = {
            name: (self.run_dir / name).read_bytes()
            for name in reversed(RECORDS)
            if (self.run_dir / name).exists()
        }
        changed = [
            name for name in RECORDS if name in found and found[name] != self._sent.get(name)
        ]
        if changed:
            self._check_is_newest()
        for name in changed:
            self._send(name, found[name])
        return sum(map(len, found.values()))

    def complete(self) -> None:
        """Of a run that has been finished here, what the store did not take at its end."""
        newest, state = self._newest_start(), self._state()
        if newest is None or not state or state["number"] != newest["number"]:
            return
        self._number = newest["number"]
        self.look()
        while (place := self.lacking()) is not None:
            self.push(place)
        if RESULT not in self._names():
            self.send_records()

    def _check_is_newest(self) -> None:
        newest = self._newest_start() if self._number else None
        if newest is not None and newest["number"] > self._number:
            raise Superseded(
                f"{self}: a newer start has taken over ({_who(newest)}); this one changes nothing"
                " there"
            )

    # ---- the store

    def _at(self, *names: str) -> str:
        return join(self._url, *names)

    def _names(self, *below: str) -> list[str]:
        return names_under(self._at(*below), storage=self._storage)

    def _read(self, *names: str) -> bytes:
        return read_bytes(self._at(*names), storage=self._storage)

    def _send(self, name: str, content: bytes) -> None:
        if self._sent.get(name) != content:
            write_bytes(content, self._at(name), storage=self._storage)
            self._sent[name] = content

    def _remove(self, *names: str) -> None:
        remove([self._at(name) for name in names], storage=self._storage)


class MirrorWriter:
    """The thread of the first rank; others ask it and tell it."""

    def __init__(
        self, mirror: Mirror, retention: "Retention", *, report: Callable[[dict[str, float]], None]
    ):
        self._mirror, self._retention, self._report = mirror, retention, report
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._is_offered = self._is_working = self._is_closing = False
        self._fault, self._said, self._said_s = "", "", 0.0
        self._num_failures, self._pause_s, self._failing_since_s = 0, _FIRST_PAUSE_S, 0.0
        self.defect: Exception | None = None
        """It ends training, at the next checkpoint: a newer start, or a mistake of ours."""
        self._is_settled = True
        self._brought: list[Path] = []
        """Once is enough, also where the rules have removed it there since, and not here yet."""
        self.holding: int | None = None
        """The step that is being read in RUN, and stays there meanwhile."""
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        self.offer()
        self._thread.start()

    def offer(self) -> None:
        """RUN has something new."""
        with self._changed:
            self._is_offered = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether all that was offered is there."""
        with self._changed:
            return self._changed.wait_for(
                self._is_done, timeout_s if self._thread.is_alive() else 0
            )

    def catch_up(self, left_s: Callable[[], float] | None) -> None:
        """Waits until the last checkpoint is there. Within `left_s`, where somebody is about to end
        this process; else a store that is slow has all the time that it needs, and one that refuses
        FINAL_S."""
        self._pause_s = _FIRST_PAUSE_S
        self.offer()
        while not self.wait(_LOOK_S) and self.defect is None:
            PROGRESS.touch()
            if (
                left_s is None
                and self._fault
                and time.monotonic() - self._failing_since_s > FINAL_S
            ):
                return  # `close` says so
            if left_s is not None and left_s() <= 0:
                why = (
                    self._fault or "checkpoint.grace_s has passed"
                )  # before the thread says that it was stopped
                self._stop.set()
                last, whole = (
                    list_checkpoints(self._mirror.run_dir)[-1:],
                    max(self._mirror.whole, default=None),
                )
                counts = (
                    "there is none to go on from"
                    if whole is None
                    else f"that of step {whole:,} counts"
                )
                if last:
                    self._warn(
                        f"the checkpoint of step {step_of(last[0]):,} is not whole there, so"
                        f" {counts} ({why})"
                    )
                return

    def close(self, *, finished: bool) -> None:
        """The last records, when nothing more is written. An error where a run that is finished is
        not all there."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        with _alive():
            self._thread.join(FINAL_S if finished else _LAST_RECORDS_S)
        if finished and not self.wait(0):
            why = self.defect or self._fault or "the store has not answered in time"
            raise CheckpointError(
                f"{self._mirror}: it is not complete ({why}); the same command brings there what it"
                " lacks"
            )

    def _is_done(self) -> bool:
        return not (self._is_offered or self._is_working or self._fault or self.defect)

    def _work(self) -> None:
        is_closing, pause_s = False, 0.0
        while not is_closing and self.defect is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_offered or self._is_closing, pause_s)
                is_closing, self._is_offered, self._is_working = self._is_closing, False, True
            fault, pause_s = "", self._pause_s
            try:
                pause_s = RECORDS_S * max(1.0, self._bring() / _BYTES_EACH)
            except StoppedError:
                fault, is_closing = "it was stopped", True
            except Superseded as error:
                self.defect = error
            except (OSError, UserError) as error:
                fault = str(error)
            except Exception as error:  # noqa: BLE001 (it belongs to the trainer, who meets it at the next checkpoint)
                self.defect = error
            with self._changed:
                self._note(fault)
                self._is_working = False
                self._changed.notify_all()

    def _bring(self) -> int:
        """Steps 7 to 12; the bytes of the records."""
        while (place := self._mirror.lacking(beside=self._brought)) is not None:
            began_s, self.holding = time.monotonic(), step_of(place)
            try:
                self._mirror.push(place, stop=self._stop)
                self._brought.append(place)
                self._is_settled = False
                self._settle()
            except (OSError, UserError):
                if place.exists():  # else it made way before it was held
                    raise
            finally:
                self.holding = None
            self._report({"usage/mirror_upload_s": time.monotonic() - began_s})
        if not self._is_settled:  # which failed the last time
            self._settle()
        return self._mirror.send_records()

    def _settle(self) -> None:
        self._mirror.settle(self._retention)
        self._is_settled = True

    def _note(self, fault: str) -> None:
        """Warns of what is new, and now and then of what lasts; tells when it is over."""
        if not fault:
            if self._fault:
                self._warn("it is up to date again")
            self._fault, self._said, self._pause_s = "", "", _FIRST_PAUSE_S
            return
        now_s = time.monotonic()
        if not self._fault:
            self._failing_since_s = now_s
        self._num_failures += 1
        self._report({"usage/mirror_failures": float(self._num_failures)})
        self._fault, self._pause_s = fault, min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        kind = re.sub(r"\d+", "", fault)  # whichever checkpoint it is of
        if not self._stop.is_set() and (kind != self._said or now_s - self._said_s > _WARN_AGAIN_S):
            self._said, self._said_s = kind, now_s
            self._warn(f"{fault}. Training goes on, and it is tried again")

    def _warn(self, text: str) -> None:
        print(f"WARNING: {self._mirror}: {text}", file=sys.stderr, flush=True)


@contextmanager
def _alive() -> Iterator[None]:
    """What is fetched shows no progress by itself; remote.py gives up a store that is silent."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_LOOK_S):
            PROGRESS.touch()

    thread = threading.Thread(target=touch, name="mirror-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _start_file(number: int) -> str:
    return f"{number:04d}.json"


def _who(start: Mapping[str, Any]) -> str:
    return (
        f"start {start['number']}, of {start['run_dir']} by process {start['pid']} on"
        f" {start['node']} since {start['since']}"
    )


def _beside(run_dir: Path) -> str:
    return str(run_dir.parent.resolve())


def _store_in(place: str) -> bytes:
    """As RunIdentity names the store beside a run."""
    return json.dumps(f"sqlite:///{place}/mlflow.db").encode()
