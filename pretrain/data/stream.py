"""`data.stream`: train on shards in their order of arrival, without an index.

webdataset opens the shards, groups members into samples, shuffles the samples in a buffer and
decodes labels. Each pass distributes the shards again over all ranks and their parallel readers. A
rank begins its next pass when its shards end, so all ranks have the same number of steps. The
samples depend only on the shard list, seed, ranks and first position. A resumed run begins a new
pass.

The readers are threads, not worker processes of a DataLoader. Workers would keep `pipe:` commands
alive after the end, hide one-line errors, and fork a process that uses CUDA.

A batch is made in these steps:

1. One thread for each open shard gathers samples. After a read error, the thread opens the shard
   again and skips earlier samples.
2. The samples of the open shards alternate, and pass through webdataset's shuffle buffer.
3. Threads of the loader decode chunks of samples, in order.
4. One thread (the taker) copies decoded samples into batches. It logs, counts and skips unusable
   samples.
5. Threads of the loader call `finish`.
"""

import gzip
import io
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from data_prep import remote
from data_prep.clients import client, shown
from data_prep.errors import UserError
from data_prep.images import Rejection, decode_square
from data_prep.limits import cause_of
from data_prep.manifest import PICTURES
from data_prep.tar import walk
from pretrain.data.bad_samples import BadSampleLog, BadSamples
from pretrain.data.datasets import STORES, StreamData, TrainingData
from pretrain.data.loader import (
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
"""Largest number of shards that a rank reads at the same time. Without shuffle it reads one."""
CHUNK, CHUNKS_AHEAD = 16, 4
"""Number of samples in a chunk (the unit that threads pass on), and number of chunks read ahead
from each open shard."""
NUM_NAMED = 1 << 16
"""Number of recent positions whose shard and key are kept, for the log of skipped steps."""
MOST_IN_A_ROW = 1000
"""Number of consecutive unusable samples after which a rank fails."""
_DRAINED_BYTES, _LAST_WORDS_S = 1 << 20, 1.0
_BUFFER_BYTES = 1 << 18
_GZIP = b"\x1f\x8b"


class Sample(NamedTuple):
    shard: str
    key: str
    members: dict[str, bytes]


class Decoded(NamedTuple):
    shard: str
    key: str
    image_HWC: NDArray[np.uint8] | None
    """Pixels; None if the sample is unusable."""
    label: int
    reason: str


class Stream:
    """Samples of a stream that one rank reads. The id of a sample is its position in training."""

    def __init__(self, data: StreamData, *, seed: int, world: World):
        self.num_samples, self.stored_size = data.num_samples, data.image_size
        self.parts = data.parts
        self._data, self._settings, self._world = data, data.settings, world
        self._key = int(hash64(hex_key(data.content_hash), seed) >> 1)
        self._classes = {name: number for number, name in enumerate(data.classes)}
        self._stop, self._commands = threading.Event(), set[Any]()
        self._names: dict[int, tuple[str, str]] = {}
        """Shard and key of recent samples by position. Only the taker thread writes them."""

    def names(self, ids: Ids) -> list[tuple[str, str]]:
        return [
            self._names.get(position, ("no longer known", str(position)))
            for position in ids.tolist()
        ]

    def remember(self, position: int, sample: Decoded) -> None:
        self._names[position] = sample.shard, sample.key
        if len(self._names) > NUM_NAMED:
            del self._names[next(iter(self._names))]

    def end_waits(self) -> None:
        self._stop.set()
        for command in list(self._commands):
            _end(command.proc)  # reading from a silent command would never end

    close = end_waits

    # ---- from the list of shards to samples

    def samples(self, *, consumed: int) -> Generator[Sample]:
        """Yield samples without end, for a training that continues after `consumed` samples."""
        import webdataset  # type: ignore[import-untyped]

        is_shuffled, count = self._settings.shuffle != "none", len(self._data.urls)
        num_open = min(NUM_OPEN, count // self._world.num_ranks) if is_shuffled else 1
        lanes = [
            self._read_ahead(self._lane(number, num_open, consumed=consumed))
            for number in range(num_open)
        ]
        try:
            alternating = (
                sample
                for lane in itertools.cycle(lanes)
                for sample in itertools.islice(lane, CHUNK)
            )
            if not is_shuffled or not (size := self._settings.shuffle_buffer):
                yield from alternating
                return
            generator = random.Random(int(hash64(self._key, consumed, self._world.rank)))
            yield from webdataset.shuffle(size, initial=size, rng=generator)(alternating)
        finally:
            self.end_waits()
            for lane in lanes:
                lane.close()

    def _read_ahead(self, samples: Iterator[Sample]) -> Generator[Sample]:
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as thread:
            chunks = (
                thread.submit(list, itertools.islice(samples, CHUNK)) for _ in itertools.count()
            )
            yield from _in_order(chunks, num_ahead=CHUNKS_AHEAD)

    def shards(self, lane: int, num_open: int, *, consumed: int) -> Iterator[str]:
        """Yield the shards of parallel reader `lane` (of `num_open` readers), without end."""
        urls, first = self._data.urls, self._world.rank + self._world.num_ranks * lane
        for number in itertools.count():
            order = np.arange(len(urls))
            if self._settings.shuffle != "none":
                key = int(hash64(self._key, consumed, number) >> 1)
                order = permute(order, size=len(urls), key=key)
            for each in order[first :: self._world.num_ranks * num_open].tolist():
                yield urls[each]

    def _lane(self, lane: int, num_open: int, *, consumed: int) -> Iterator[Sample]:
        num_empty = 0
        for url in self.shards(lane, num_open, consumed=consumed):
            num_empty += 1
            for sample in self._samples_of(url):
                num_empty = 0
                yield sample
            if num_empty > len(self._data.urls):
                raise UserError(
                    "data.dataset",
                    f"{shown(url)} and the shards before it have no samples",
                    "use tars with KEY.jpg and KEY.cls for each sample",
                    code="empty",
                )

    def _samples_of(self, url: str) -> Iterator[Sample]:
        """Yield the samples of a shard, also after a read error (step 1 of the module's list)."""
        source: Iterator[Sample] | None = None
        num_given = 0

        def take() -> Sample | None:
            nonlocal source
            if source is None:
                source = itertools.islice(self._opened(url), num_given, None)
            try:
                return next(source, None)
            except BaseException:
                source = None
                raise

        def report(text: str) -> None:
            print(f"pretrain: {text}", file=sys.stderr, flush=True)

        try:
            while (sample := remote.tried(url, take, report=report, stop=self._stop)) is not None:
                num_given += 1
                yield sample
        except remote.ContentError as error:
            fix = "Upload the shard again"
            raise remote.RemoteError(shown(url), str(error), fix, code="damaged") from None

    def _opened(self, url: str) -> Iterator[Sample]:
        """Yield the samples of a shard, without the members that training does not read."""
        from webdataset.tariterators import group_by_keys  # type: ignore[import-untyped]

        label, shard = self._settings.label.partition(":")[0], shown(url)
        with self._stream(url) as stream:
            try:
                for group in group_by_keys(_members(shard, stream)):
                    members = {
                        name: data for name, data in group.items() if isinstance(data, bytes)
                    }
                    used = [name for name in members if name == label or self._is_image(name)]
                    if len(used) < 2:  # the error message lists all members
                        used = list(members)
                    kept = {name: members[name] for name in used}
                    yield Sample(shard, group["__key__"], kept)
            except (zlib.error, EOFError, ValueError, gzip.BadGzipFile) as error:
                problem = f"the shard cannot be read ({error.args[0]})"  # args[1:] hold the URL
                raise remote.ContentError(problem) from None

    @contextmanager
    def _stream(self, url: str) -> Iterator[IO[bytes]]:
        scheme, storage = urlsplit(url).scheme, self._settings.storage
        if scheme in STORES or (scheme in ("http", "https") and storage):
            whole = {} if scheme in STORES else {"block_size": 0}  # without range requests
            with closing(client(url, storage).open(url, "rb", **whole)) as file:
                yield file
            return
        from webdataset import gopen

        try:
            stream = gopen(url)
        except PermissionError as error:
            raise UserError(
                "data.dataset",
                f"{shown(url)} cannot be read ({cause_of(error)})",
                "make the file readable",
                code="unreadable",
            ) from None
        with self._command(stream) if hasattr(stream, "proc") else closing(stream) as opened:
            yield opened

    @contextmanager
    def _command(self, pipe: Any) -> Iterator[IO[bytes]]:
        """Yield the output of a `pipe:` command, and check its exit status.

        webdataset's own check would print the command with its secrets.
        """
        status = None
        self._commands.add(pipe)
        try:
            yield pipe.stream
            while pipe.stream.read(_DRAINED_BYTES):
                pass  # an early close of the pipe would end the command with an error
            status = pipe.proc.wait()
        except OSError:
            with suppress(subprocess.TimeoutExpired):  # a failed command may have caused the error
                status = pipe.proc.wait(timeout=_LAST_WORDS_S)
            if not status:
                raise
        finally:
            self._commands.discard(pipe)
            _end(pipe.proc)
            with suppress(OSError):
                pipe.close()
        if status:
            raise OSError(f"the command failed with exit code {status}")

    # ---- from samples to images and labels

    def decode(self, samples: list[Sample]) -> list[Decoded]:
        manifest, decoded = self._data.parts[0].manifest, list[Decoded]()
        shape = (self.stored_size, self.stored_size, 3)
        for sample in samples:
            try:
                label, image_HWC = self._label(sample), np.empty(shape, np.uint8)
                decode_square(
                    self._image(sample),
                    image_HWC,
                    crop=manifest.crop,
                    interpolation=manifest.interpolation,
                )
                decoded.append(Decoded(sample.shard, sample.key, image_HWC, label, ""))
            except Rejection as error:
                decoded.append(Decoded(sample.shard, sample.key, None, 0, str(error)))
        return decoded

    def _is_image(self, name: str) -> bool:
        chosen = self._settings.image_member
        if chosen is None:
            return f".{name.rpartition('.')[2]}" in PICTURES
        return name == chosen.lower().lstrip(".")

    def _image(self, sample: Sample) -> bytes:
        images = [name for name in sample.members if self._is_image(name)]
        if len(images) == 1:
            return sample.members[images[0]]
        raise Rejection(
            "several_images" if images else "no_image",
            f"the sample has {_listed(sample)}: set data.image_member"[:200],
        )

    def _label(self, sample: Sample) -> int:
        from webdataset.autodecode import basichandlers  # type: ignore[import-untyped]

        kind, _, path = self._settings.label.partition(":")
        if kind not in sample.members:
            raise Rejection("no_label", f"no member ends in .{kind}; {_label_hint(sample)}")
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
                f"{str(value)[:40]!r} is neither a number from 0 to {len(self._classes) - 1} nor a"
                " class of data.eval_dataset",
            )
        return value


def _in_order(jobs: Iterator[Future[list[T]]], *, num_ahead: int) -> Generator[T]:
    submitted = deque(itertools.islice(jobs, num_ahead))
    while submitted:
        yield from submitted.popleft().result()
        submitted.extend(itertools.islice(jobs, 1))


def _members(shard: str, stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the regular files of a tar or tar.gz as dictionaries for webdataset's `group_by_keys`.
    Stop at the end mark of the tar."""
    position = 0
    content: Any = io.BufferedReader(_Raw(stream), _BUFFER_BYTES)
    if content.peek(len(_GZIP)).startswith(_GZIP):
        content = gzip.GzipFile(fileobj=content)

    def read(offset: int, num_bytes: int) -> bytes:
        nonlocal position
        data: bytes = content.read(offset - position + num_bytes)[offset - position :]
        position = offset + num_bytes
        return data

    for member in walk(read, refuse_links=False):
        data = read(member.offset, member.num_bytes)
        if len(data) < member.num_bytes:
            raise EOFError(f"truncated in member {member.name}")
        is_meta = member.name.startswith("__") and member.name.split("/")[0].endswith("__")
        if not is_meta:
            yield {"fname": member.name, "data": data, "__url__": shard}


class _Raw(io.RawIOBase):
    """Raw stream with `readinto`, which `io.BufferedReader` needs."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _end(command: "subprocess.Popen[bytes]") -> None:
    """Kill the command and all its child processes, because the processes of a pipeline outlive
    their shell and keep its output open."""
    with suppress(psutil.Error, ProcessLookupError):
        command.send_signal(signal.SIGSTOP)  # stops new children
        for each in psutil.Process(command.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
    command.kill()


def _listed(sample: Sample) -> str:
    return " ".join(f".{name}" for name in sample.members)


def _label_hint(sample: Sample) -> str:
    with suppress(ValueError):
        tree = json.loads(sample.members.get("json", b"{}"))
        if keys := [key for key, value in tree.items() if isinstance(value, int | str)]:
            return f".json has {', '.join(keys)}: set data.label=json:FIELD"[:200]
    return f"the sample has {_listed(sample)}: set data.label"[:200]


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
        bad_samples: BadSampleLog,
        waits: Waits[T],
    ):
        self._stream, self._finish, self._waits, self._pin = stream, finish, waits, pin
        self._positions = plan.sequence(consumed=consumed, rank=rank)
        self._buffers, self._pool = BufferPool(), lone_threads(num_threads, pin=pin)
        self._taker = lone_threads(1, pin=pin)
        self._samples = stream.samples(consumed=consumed)
        chunks = iter(lambda: list(itertools.islice(self._samples, CHUNK)), [])
        jobs = (self._pool.submit(stream.decode, chunk) for chunk in chunks)
        self._decoded = _in_order(jobs, num_ahead=2 * num_threads)
        self._bad_samples, self._num_in_a_row = bad_samples, 0
        self._ahead = deque(self._taker.submit(self._take) for _ in range(prefetch))

    def __next__(self) -> T:
        finished: Any = self._waits(self._ahead.popleft())  # type: ignore[arg-type]
        self._ahead.append(self._taker.submit(self._take))
        return self._waits(finished)

    def end_waits(self) -> None:
        self._stream.end_waits()

    def close(self) -> None:
        self.end_waits()
        for pool in (self._taker, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._samples.close()

    def _take(self) -> Future[T]:
        """Fill a batch and submit it to `finish`. Only the taker thread calls this, so samples stay
        in order."""
        positions, num_bad = next(self._positions), 0
        images = self._buffers.pictures(len(positions), self._stream.stored_size, pin=self._pin)
        images_BHWC, labels = images.numpy(), list[int]()
        for place, position in enumerate(positions.tolist()):
            while (sample := next(self._decoded)).image_HWC is None:
                num_bad += 1
                self._skip(sample, position)
            self._num_in_a_row = 0
            images_BHWC[place] = sample.image_HWC
            labels.append(sample.label)
            self._stream.remember(position, sample)
        labels_B = torch.tensor(labels)
        batch = Batch(
            images_BHWC=images,
            labels_B=labels_B.pin_memory() if self._pin else labels_B,
            epochs=positions // self._stream.num_samples,
            samples=positions,
            mix_keys=positions // 2,
            num_bad=num_bad,
        )
        return self._pool.submit(self._finish, batch)

    def _skip(self, sample: Decoded, position: int) -> None:
        bad = Unreadable(0, position, sample.shard, sample.key, sample.reason)
        self._bad_samples.note(bad, None, known_as=(sample.shard, sample.key))
        self._num_in_a_row += 1
        if self._num_in_a_row > MOST_IN_A_ROW:
            raise UserError(
                "data.dataset",
                f"{self._num_in_a_row:,} samples in a row cannot be used; the last one is"
                f" {sample.shard}: {sample.key}: {sample.reason}",
                "change data.label, data.image_member or the shards",
                code="too-many-faults",
            )


def open_reader(
    data: TrainingData, *, seed: int, world: World, store: ShardStore | None
) -> ShardReader | Stream:
    if isinstance(data, StreamData):
        return Stream(data, seed=seed, world=world)
    return ShardReader(data.parts, image_size=data.image_size, store=store)


def batches_of(
    reader: ShardReader | Stream,
    order: Line,
    plan: BatchPlan,
    *,
    log: Path | None = None,
    previous_in: int | None = None,
    node_ranks: range | None = None,
    waits: Waits[T] = Future.result,
    **how: Any,
) -> BatchSource[T]:
    """Return the batches of a `Stream` or a `ShardReader`. `log`: file for bad samples. For the
    other arguments see `training_batches`."""
    if isinstance(reader, Stream):
        return StreamBatches(reader, plan, bad_samples=BadSampleLog(log), waits=waits, **how)
    return training_batches(
        reader,
        order,
        plan,
        bad_samples=BadSamples(reader, log=log),
        previous_in=previous_in,
        node_ranks=node_ranks,
        waits=waits,
        **how,
    )
