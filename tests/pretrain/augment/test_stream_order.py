"""Check the order of work on CUDA streams without a GPU: a recorder replaces torch's streams,
events and device tensors.

For each stream and the host, it records the work that is known to be finished (by waiting for
events). Access to memory before its work is known to be finished is an error. Other errors are
copies from memory that is not pinned, and use of another stream's tensor without `record_stream`.
Device work runs at once, so values equal the CPU's.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.augment.augmentation import Prepared
from pretrain.augment.feed import Ahead, Feed, finish_for, on_device
from pretrain.data.loader import Batch, evaluation_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader
from pretrain.ranks.collectives import Exchange, Moment
from pretrain.ranks.world import World
from tests.pretrain.data.tiny import loaded

GPU = torch.device("cuda", 0)
numbers = itertools.count()


class Stream:
    """A stream, or the host as `HOST`. `known`: numbers of the work that is finished before its
    next work."""

    def __init__(self, device: object = None):  # noqa: ARG002
        self.device, self.known, self.last = GPU, set[int](), -1

    def work(self) -> int:
        self.last = next(numbers)
        self.known.add(self.last)
        return self.last

    def wait_event(self, event: "Event") -> None:
        self.known |= event.known

    def wait_stream(self, other: "Stream") -> None:
        self.known |= other.known


MODEL, HOST = Stream(), Stream()
local = threading.local()


def current_stream(device: object = None) -> Stream:
    found: Stream = getattr(local, "stream", MODEL)
    return found


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, local.stream = current_stream(), chosen
    try:
        yield
    finally:
        local.stream = before


class Event:
    def __init__(self, **_unused: object):
        self.known = set[int]()

    def record(self, on: Stream | None = None) -> None:
        self.known = set((on or current_stream()).known)

    def synchronize(self) -> None:
        HOST.known |= self.known


class Recorded(torch.Tensor):
    """A tensor. `place`: pinned or cuda; `written`: the work that wrote it; `home`: the stream that
    allocated it."""

    place: str
    written: int
    home: Stream
    owners: set[Stream]

    @staticmethod
    def of(tensor: Tensor, place: str, by: Stream) -> "Recorded":
        found = plain(tensor).as_subclass(Recorded)
        found.place, found.written, found.home, found.owners = place, by.work(), by, {by}
        return found

    def record_stream(self, by: Stream) -> None:  # type: ignore[override]
        self.owners.add(by)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        me = args[0]
        if name == "__get__":
            owner = getattr(func, "__self__", None)
            if owner is torch.Tensor.is_cuda:
                return me.place == "cuda"
            if owner is torch.Tensor.device and me.place == "cuda":
                return GPU
            return super().__torch_function__(func, types, args, kwargs)
        if name == "to" and args[1] == GPU:
            if me.place != "cuda" and not kwargs.get("non_blocking"):
                raise AssertionError("the host waits for a copy")
            return (
                me
                if me.place == "cuda"
                else copied(me, Recorded.of(plain(me).clone(), "cuda", current_stream()))
            )
        if name == "copy_" and (me.place == "cuda") != (is_there(args[1])):
            plain(me).copy_(plain(args[1]))
            copied(args[1], me)
            me.written = current_stream().work()
            return me
        given = [*args, *kwargs.values(), *(args[0] if isinstance(args[0], list) else ())]
        used = [each for each in given if isinstance(each, Recorded)]
        by = current_stream() if any(each.place == "cuda" for each in used) else HOST
        for each in used:
            touch(each, by)
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, Recorded) and not hasattr(made, "place"):
            first = used[0]
            if (
                by is HOST or plain(made).data_ptr() == plain(first).data_ptr()
            ):  # a view, or host memory
                made.__dict__.update(first.__dict__)
            else:
                made = Recorded.of(made, "cuda", by)
        return made


def plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def is_there(tensor: Tensor) -> bool:
    return isinstance(tensor, Recorded) and tensor.place == "cuda"


def copied(source: Recorded, target: Recorded) -> Recorded:
    touch(source, current_stream() if source.place == "cuda" else HOST)
    if target.place == "pinned":
        target.home = HOST
    return target


def touch(tensor: Recorded, by: Stream) -> None:
    """Check an access. No `assert`, because pytest would print the tensor, which is an access."""
    if tensor.written not in by.known:
        raise AssertionError(
            f"{tensor.place} memory is used before who made it is known to be done"
        )
    if tensor.place == "cuda" and by not in tensor.owners:
        raise AssertionError("memory of one stream is used by another, without record_stream")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (MODEL, HOST):
        each.known = set()
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: Recorded.of(self, "pinned", HOST))
    for real in (torch.empty, torch.empty_like):

        def make(*args: Any, real: Any = real, pin_memory: bool = False, **words: Any) -> Tensor:
            made: Tensor = real(
                *(plain(each) if torch.is_tensor(each) else each for each in args), **words
            )
            return Recorded.of(made, "pinned", HOST) if pin_memory else made

        monkeypatch.setattr(torch, real.__name__, make)


class Augmentation:
    """The part of an augmentation that uses streams."""

    device = GPU

    def prepare(self, batch: Batch) -> Prepared:
        images = batch.images_BHWC.to(GPU, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        return Prepared(images, batch.labels_B.to(GPU, non_blocking=True))


def train(reader: ShardReader) -> None:
    order, plan = Order(reader.num_samples, 4), BatchPlan(48, 24, 2)
    augmentation: Any = Augmentation()
    batches = loaded(
        reader,
        order,
        plan,
        rank=1,
        consumed=0,
        num_threads=2,
        pin=True,
        finish=finish_for(augmentation),
    )
    with Feed(batches, augmentation) as feed:
        for positions in itertools.islice(plan.sequence(consumed=0, rank=1), 6):
            asked, prepared, given = Moment(GPU), next(feed).prepared, Moment(GPU)
            loss = prepared.images_BCHW.mean() + prepared.labels_B.float().mean()
            # the model's stream waits between the two moments
            written = prepared.images_BCHW.written  # type: ignore[attr-defined]
            assert [written in each.event.known for each in (asked, given)] == [False, True]
            exchange, (_, samples) = (
                Exchange(loss, loss * 2, flag=True, num_bad=3),
                order.locate(positions),
            )
            expected = (
                reader.images(samples).float().div(255).mean() + reader.labels[samples].mean()
            ).item()
            agreed = exchange.read()
            assert (agreed.loss, agreed.gradient_norm, agreed.own_loss) == pytest.approx(
                (expected, 2 * expected, expected), rel=1e-5
            )
            assert (agreed.votes, agreed.num_bad, agreed.applied) == (1, 3, True)


def judge(reader: ShardReader) -> None:
    seen = list[int]()
    with (
        evaluation_batches(
            reader, local_batch_size=50, world=World(0, 0, 1), num_threads=2, pin=True
        ) as stored,
        on_device(stored, GPU) as batches,
    ):
        for batch in batches:
            assert batch.mask_B is not None
            mask_B = batch.mask_B.to(GPU, non_blocking=True)
            right = (batch.labels_B >= 0) & mask_B & (batch.images_BHWC.flatten(1).sum(1) >= 0)
            seen += batch.samples[plain(right).numpy()].tolist()
    assert seen == list(range(240))


@pytest.mark.parametrize("work", [train, judge])
def test_memory_that_crosses_streams_is_waited_for_and_handed_over(
    reader: ShardReader, recorder: None, work: Any
) -> None:
    work(reader)


def test_an_error_or_the_end_of_the_batches_reaches_who_asks(
    reader: ShardReader, recorder: None
) -> None:
    def broken(batch: Batch) -> Batch:
        raise RuntimeError("no such picture")

    with (
        evaluation_batches(reader, local_batch_size=50, world=World(0, 0, 1), pin=True) as stored,
        Ahead(stored, broken, GPU) as ahead,
        pytest.raises(RuntimeError, match="no such picture"),
    ):
        next(ahead)
    assert not any(thread.name.startswith(("feed", "loader")) for thread in threading.enumerate())
