"""`data.stream`: stock shards that are trained on as they come, opened, grouped and decoded by the
package webdataset.

Each pass over the shards deals them out anew, to all ranks and to the few that a rank reads side by
side; when a rank's shards end, its next pass begins, so every rank has as many steps as the others.
What a start reads is a function of (list, seed, ranks, position it starts from): it neither knows
nor skips what an earlier start has read.

How a batch comes about: 1. a thread for each shard that is open gathers samples; 2. they are taken
in turn, through webdataset's shuffle buffer; 3. threads of the loader decode them; 4. the last
looks after what did not decode, and calls `finish`. A shard that breaks is opened again, and what
it has given already passed over; a sample that cannot be used is noted, counted, and the next one
of its batch shown in its place; a batch without one that can be used takes the next samples.

Long because whatever ends, breaks or is silent between a shard and a batch is met here.
"""

import itertools
import json
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tarfile import EOFHeaderError, HeaderError, ReadError, SubsequentHeaderError  # type: ignore[attr-defined]
from typing import IO, Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from torch import Tensor

from data_prep import remote
from data_prep.clients import client
from data_prep.errors import UserError
from data_prep.images import Rejection, decode_square
from data_prep.manifest import PICTURES
from pretrain.data.bad_samples import BadSampleLog, BadSamples
from pretrain.data.datasets import STORES, StreamData, TrainingData
from pretrain.data.loader import (
    SMALLEST_PART,
    Batch,
    BatchSource,
    BufferPool,
    Waits,
    lone_threads,
    training_batches,
)
from pretrain.data.order import BatchPlan, Ids, Line, hash64, hex_key, permute
from pretrain.data.reader import ShardReader, Unreadable
from pretrain.data.store import ShardStore
from pretrain.ranks.world import World

T = TypeVar("T")
NUM_OPEN = 4
"""Shards that a rank reads side by side, where it has as many; one, where they are not shuffled."""
CHUNK, CHUNKS_AHEAD = 16, 4
"""Samples that pass from thread to thread at once; and how many such are read ahead of each
shard."""
NUM_NAMED = 1 << 16
"""Positions whose shard and key are remembered, for the log of skipped steps."""
MOST_IN_A_ROW = 1000
"""Samples without one that can be used, before a rank gives up."""
_DRAINED_BYTES, _LAST_WORDS_S = 1 << 20, 1.0
_META = re.compile(r"__[^/]*__($|/)")
"""Members that are of no sample."""


class Sample(NamedTuple):
    shard: str
    key: str
    members: dict[str, bytes]


class Stream:
    """What one rank reads, in the place of a `ShardReader`. Its samples are known by the positions
    that they came to stand at."""

    def __init__(self, data: StreamData, *, seed: int, world: World, log: Path | None = None):
        self.num_samples, self.stored_size, self.parts = (
            data.num_samples,
            data.image_size,
            data.parts,
        )
        self._data, self._settings, self._world, self.bad_samples = (
            data,
            data.settings,
            world,
            BadSampleLog(log),
        )
        self._key = int(hash64(hex_key(data.content_hash), seed) >> 1)
        self._classes = {name: number for number, name in enumerate(data.classes)}
        self._stop, self._commands = threading.Event(), set[Any]()
        self._named: dict[int, tuple[str, str]] = {}
        self._naming = threading.Lock()

    def names(self, ids: Ids) -> list[tuple[str, str]]:
        return [
            self._named.get(position, ("not known any more", str(position)))
            for position in ids.tolist()
        ]

    def end_waits(self) -> None:
        self._stop.set()
        for command in list(self._commands):
            _end(command.proc)  # which may be silent

    close = end_waits

    # ---- from the list of shards to samples
    # ----------------------------------------------------------------------

    def samples(self, *, consumed: int) -> Generator[Sample]:
        """Without end, of a start at this position. Raises what keeps a shard from being read."""
        import webdataset  # type: ignore[import-untyped]

        is_shuffled, count = self._settings.shuffle != "none", len(self._data.urls)
        num_open = min(NUM_OPEN, count // self._world.num_ranks) if is_shuffled else 1
        lanes = [
            self._ahead(self._lane(number, num_open, consumed=consumed))
            for number in range(num_open)
        ]
        try:
            in_turn = (
                sample
                for lane in itertools.cycle(lanes)
                for sample in itertools.islice(lane, CHUNK)
            )
            size = self._settings.shuffle_buffer if is_shuffled else 0
            generator = random.Random(int(hash64(self._key, consumed, self._world.rank)))
            yield from (
                webdataset.shuffle(size, initial=size, rng=generator)(in_turn) if size else in_turn
            )
        finally:
            self.end_waits()
            for lane in lanes:
                lane.close()

    def _ahead(self, samples: Iterator[Sample]) -> Generator[Sample]:
        """They are read ahead in a thread of their own."""
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as thread:
            chunks = deque(
                thread.submit(list, itertools.islice(samples, CHUNK)) for _ in range(CHUNKS_AHEAD)
            )
            while True:
                yield from chunks.popleft().result()
                chunks.append(thread.submit(list, itertools.islice(samples, CHUNK)))

    def shards(self, lane: int, num_open: int, *, consumed: int) -> Iterator[str]:
        """Of one of the `num_open` that this rank reads side by side; without end."""
        urls, first = self._data.urls, self._world.rank + self._world.num_ranks * lane
        for number in itertools.count():
            order = np.arange(len(urls))
            if self._settings.shuffle != "none":
                order = permute(
                    order, size=len(urls), key=int(hash64(self._key, consumed, number) >> 1)
                )
            yield from (
                urls[each] for each in order[first :: self._world.num_ranks * num_open].tolist()
            )

    def _lane(self, lane: int, num_open: int, *, consumed: int) -> Iterator[Sample]:
        num_empty = 0
        for url in self.shards(lane, num_open, consumed=consumed):
            num_empty += 1
            for sample in self._samples_of(url):
                num_empty = 0
                yield sample
            if num_empty > len(self._data.urls):
                raise UserError(
                    f"data.dataset: {remote.shown(url)} and the shards before it hold no samples; a"
                    " sample is KEY.jpg, KEY.cls"
                )

    def _samples_of(self, url: str) -> Iterator[Sample]:
        source: Iterator[Sample] | None = None
        num_given = 0

        def take() -> Sample | None:
            nonlocal source
            if source is None:
                source = self._opened(url)
                for _ in itertools.islice(source, num_given):
                    pass  # what was given before it broke
            try:
                return next(source, None)
            except BaseException:
                source = None
                raise

        def report(words: str) -> None:
            print(f"pretrain: {words}", file=sys.stderr, flush=True)

        while (sample := remote.tried(url, take, report=report, stop=self._stop)) is not None:
            num_given += 1
            yield sample

    def _opened(self, url: str) -> Iterator[Sample]:
        """The samples of a shard by webdataset's rules, without what training does not look at."""
        from webdataset.tariterators import group_by_keys  # type: ignore[import-untyped]

        shard, wanted, chosen = (
            remote.shown(url),
            self._settings.label.partition(":")[0],
            self._settings.image_member,
        )
        with self._stream(url) as stream:
            try:
                for found in group_by_keys(_members(shard, stream)):
                    members = {
                        name: data for name, data in found.items() if isinstance(data, bytes)
                    }
                    kept = {
                        name: data
                        for name, data in members.items()
                        if name == wanted or _is_picture(name, chosen)
                    }
                    if len(kept) < 2:  # the message of why it cannot be used names the others
                        kept |= {
                            name: data if name == "json" else b""
                            for name, data in members.items()
                            if name not in kept
                        }
                    yield Sample(shard, found["__key__"], kept)
            except (
                tarfile.TarError,
                zlib.error,
                EOFError,
                ValueError,
            ) as error:  # with the stream's own words behind it
                raise remote.RemoteError(str(error.args[0])) from None

    @contextmanager
    def _stream(self, url: str) -> Iterator[IO[bytes]]:
        if (scheme := urlsplit(url).scheme) in STORES or (
            scheme in ("http", "https") and self._settings.storage
        ):
            whole = (
                {"block_size": 0} if scheme not in STORES else {}
            )  # a web server may know no ranges
            with closing(
                client(url, self._settings.storage, retries=False).open(url, "rb", **whole)
            ) as file:
                yield file
            return
        from webdataset import gopen

        try:
            stream = gopen(url)
        except PermissionError as error:
            raise UserError(
                f"data.dataset: {remote.shown(url)}: cannot be read ({error.strerror}); mend its"
                " rights"
            ) from None
        if not hasattr(stream, "proc"):
            with closing(stream):
                yield stream
            return
        self._commands.add(stream)
        try:
            yield (
                stream.stream
            )  # without webdataset's words around it, which show the whole command, secrets and all
            while stream.stream.read(_DRAINED_BYTES):
                # behind the end of the tar: else our closing would end the command, and its status
                # say nothing
                pass
            status = stream.proc.wait()
        except remote.RemoteError:
            with suppress(
                subprocess.TimeoutExpired
            ):  # the output that ended too soon is a consequence
                if status := stream.proc.wait(timeout=_LAST_WORDS_S):
                    raise remote.RemoteError(f"its command ended with {status}") from None
            raise
        finally:
            self._commands.discard(stream)
            _end(stream.proc)
            with suppress(OSError):
                stream.close()
        if status:
            raise remote.RemoteError(f"its command ended with {status}")

    # ---- from samples to pictures and labels
    # ----------------------------------------------------------------------

    def decode(
        self, samples: list[Sample], positions: Ids, images_BHWC: Tensor
    ) -> tuple[list[int], list[Unreadable]]:
        """Fills the pictures; (labels, what could not be used)."""
        manifest, images = self._data.parts[0].manifest, images_BHWC.numpy()
        labels, bad = [0] * len(samples), []
        for place, sample in enumerate(samples):
            try:
                labels[place] = self._label(sample)
                decode_square(
                    self._picture(sample),
                    images[place],
                    crop=manifest.crop,
                    interpolation=manifest.interpolation,
                )
            except Rejection as error:
                bad.append(
                    Unreadable(place, int(positions[place]), sample.shard, sample.key, str(error))
                )
        with self._naming:
            self._named |= {
                position: (each.shard, each.key)
                for position, each in zip(positions.tolist(), samples, strict=True)
            }
        return labels, bad

    def forget_names(self) -> None:
        with self._naming:
            while len(self._named) > NUM_NAMED:
                del self._named[next(iter(self._named))]

    def _picture(self, sample: Sample) -> bytes:
        found = [name for name in sample.members if _is_picture(name, self._settings.image_member)]
        if len(found) == 1:
            return sample.members[found[0]]
        listed = " ".join(f".{name}" for name in sample.members)
        raise Rejection(
            "several_images" if found else "no_image",
            f"of {listed}; data.image_member names the picture's ending"[:200],
        )

    def _label(self, sample: Sample) -> int:
        from webdataset.autodecode import basichandlers  # type: ignore[import-untyped]

        kind, _, path = self._settings.label.partition(":")
        if kind not in sample.members:
            raise Rejection("no_label", f"no member ends in .{kind}; {_where_else(sample)}")
        try:
            value = basichandlers(f".{kind}", sample.members[kind])
            for key in path.split(".") if path else ():
                value = value[key]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Rejection(
                "bad_label", f"{self._settings.label}: {type(error).__name__} {str(error)[:100]}"
            ) from None
        if isinstance(value, str):
            value = self._classes.get(value.strip(), value)
        if type(value) is not int or not 0 <= value < len(self._classes):
            raise Rejection(
                "bad_label",
                f"{str(value)[:40]!r} is no number from 0 to {len(self._classes) - 1} and no class"
                " of data.eval_dataset",
            )
        return value


class _Header(tarfile.TarInfo):
    """To tarfile one that is damaged or missing is the end of the archive, and the samples behind
    it would be lost unseen."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(tarfile)
        except (EOFHeaderError, SubsequentHeaderError):
            raise
        except HeaderError as error:
            raise ReadError(f"is damaged or cut behind byte {tarfile.offset:,} ({error})") from None


def _members(shard: str, stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Those that webdataset looks at, up to the end mark."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as archive:
        for member in archive:
            if member.isreg() and not _META.match(member.name):
                data = archive.extractfile(member)
                assert data is not None
                yield {"fname": member.name, "data": data.read(), "__url__": shard}
            archive.members = []  # type: ignore[attr-defined]


def _end(command: "subprocess.Popen[bytes]") -> None:
    """With all that it has started: the members of a shell's pipeline outlive their shell, and keep
    its output open."""
    with suppress(psutil.Error, ProcessLookupError):
        command.send_signal(signal.SIGSTOP)  # it starts no more
        for each in psutil.Process(command.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
    command.kill()


def _is_picture(name: str, chosen: str | None) -> bool:
    return (
        f".{name.rpartition('.')[2]}" in PICTURES
        if chosen is None
        else name == chosen.lower().lstrip(".")
    )


def _where_else(sample: Sample) -> str:
    """The setting that may help."""
    with suppress(ValueError):
        tree = json.loads(sample.members.get("json", b"{}"))
        if keys := [key for key, value in tree.items() if isinstance(value, int | str)]:
            return f".json has {', '.join(keys)}: set data.label=json:FIELD"[:200]
    return f"it has {' '.join(f'.{name}' for name in sample.members)}: set data.label"[:200]


class StreamBatches(Generic[T]):
    """The micro-batches of a rank, without end."""

    def __init__(
        self,
        stream: Stream,
        plan: BatchPlan,
        *,
        rank: int,
        consumed: int,
        num_threads: int,
        prefetch: int,
        pin: bool,
        finish: Callable[[Batch], T],
        waits: Waits[T],
    ):
        self._stream, self._finish, self._waits, self._pin, self._num_threads = (
            stream,
            finish,
            waits,
            pin,
            num_threads,
        )
        self._positions, self._samples = (
            plan.sequence(consumed=consumed, rank=rank),
            stream.samples(consumed=consumed),
        )
        self._buffers, self._pool = BufferPool(), lone_threads(num_threads, pin=pin)
        self._taker = lone_threads(1, pin=pin)
        self._ahead: deque[Future[T]] = deque()
        for _ in range(prefetch):
            self._request()

    def __next__(self) -> T:
        batch = self._waits(self._ahead.popleft())
        self._request()
        return batch

    def end_waits(self) -> None:
        self._stream.end_waits()

    def close(self) -> None:
        self.end_waits()
        for pool in (self._taker, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._samples.close()

    def _request(self) -> None:
        done: Future[T] = Future()
        self._ahead.append(done)
        self._taker.submit(_for(done, self._take), next(self._positions), done)

    def _take(self, positions: Ids, done: Future[T], num_passed: int = 0) -> None:
        """In the taker's thread, so that batches take their samples in their order; but for one
        whose first were all of no use (`num_passed`), which takes the next that come."""
        samples = list(itertools.islice(self._samples, len(positions)))
        assert len(samples) == len(positions), "the stream has ended with an error"
        images = self._buffers.pictures(len(samples), self._stream.stored_size, pin=self._pin)
        num_parts = max(1, min(self._num_threads, len(samples) // SMALLEST_PART))
        parts = [
            slice(len(samples) * part // num_parts, len(samples) * (part + 1) // num_parts)
            for part in range(num_parts)
        ]
        decoded = [
            self._pool.submit(self._stream.decode, samples[part], positions[part], images[part])
            for part in parts
        ]
        self._pool.submit(
            _for(done, self._put_together), positions, images, parts, decoded, done, num_passed
        )  # which begins when all of them have

    def _put_together(
        self,
        positions: Ids,
        images: Tensor,
        parts: list[slice],
        decoded: list[Future[tuple[list[int], list[Unreadable]]]],
        done: Future[T],
        num_passed: int,
    ) -> None:
        found = [each.result() for each in decoded]
        labels = torch.tensor([label for some, _ in found for label in some])
        bad = {
            part.start + each.place: each
            for part, (_, some) in zip(parts, found, strict=True)
            for each in some
        }
        if len(bad) == len(positions):
            num_passed += len(bad)
            for each in bad.values():
                self._stream.bad_samples.note(
                    each, int(positions[0]), known_as=(each.shard, each.key)
                )
            if num_passed > MOST_IN_A_ROW:
                fault = f"none of {num_passed:,} samples in a row can be used"
                raise UserError(
                    f"data.dataset: {fault}; the last is {each.shard}: {each.key}: {each.reason}"
                )
            self._taker.submit(_for(done, self._take), positions, done, num_passed)
            return
        for place, each in bad.items():
            stand_in = next(
                other % len(positions)
                for other in itertools.count(place + 1)
                if other % len(positions) not in bad
            )
            images[place], labels[place] = images[stand_in], labels[stand_in]
            self._stream.bad_samples.note(
                each, int(positions[stand_in]), known_as=(each.shard, each.key)
            )
        self._stream.forget_names()
        batch = Batch(
            images_BHWC=images,
            labels_B=labels.pin_memory() if self._pin else labels,
            epochs=positions // self._stream.num_samples,
            samples=positions,
            mix_keys=positions // 2,
            num_bad=len(bad) + num_passed,
        )
        done.set_result(self._finish(batch))


def _for(done: Future[Any], work: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong belongs to whoever waits for the batch."""

    def run(*arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)

    return run


def open_reader(
    data: TrainingData,
    *,
    seed: int,
    world: World,
    store: ShardStore | None,
    log: Path | None = None,
) -> ShardReader | Stream:
    """What training reads; `log`: of bad samples."""
    if isinstance(data, StreamData):
        return Stream(data, seed=seed, world=world, log=log)
    return ShardReader(data.parts, image_size=data.image_size, store=store)


def batches_of(
    reader: ShardReader | Stream,
    order: Line,
    plan: BatchPlan,
    *,
    bad_samples: BadSamples | None = None,
    previous_in: int | None = None,
    waits: Waits[T] = Future.result,
    **how: Any,
) -> BatchSource[T]:
    """Of either, by the words of `training_batches`."""
    if isinstance(reader, Stream):
        return StreamBatches(reader, plan, waits=waits, **how)
    return training_batches(
        reader, order, plan, bad_samples=bad_samples, previous_in=previous_in, waits=waits, **how
    )
