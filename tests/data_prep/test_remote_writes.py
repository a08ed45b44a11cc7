"""Files in a bucket are complete and verified, and never replace another user's files, whatever the
network does."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep import remote
from data_prep.clients import MissingError
from data_prep.remote import (
    RemoteError,
    StoppedError,
    join,
    names_under,
    read_bytes,
    upload,
    write_bytes,
)
from tests.errors import fails
from tests.stores import Store

pytestmark = pytest.mark.processes
SIZES = {"small": 10_000, "large": 11 << 20}
"""Bytes. The large file has more than two parts; the last part is partly filled."""


@pytest.fixture
def store(store_server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote, "_PART_BYTES", 5 << 20)
    store_server.faults.clear()
    store_server.requests.clear()
    return store_server


def made(folder: Path, size: str) -> Path:
    place = folder / size
    place.write_bytes((bytes(range(251)) * (SIZES[size] // 251 + 1))[: SIZES[size]])
    return place


def test_what_is_written_is_listed_read_and_removed(tmp_path: Path, store: Store) -> None:
    url, how = store.url("a b", "out"), {"storage": store.storage}
    assert names_under(url, **how) == []
    upload(made(tmp_path, "large"), join(url, "deep", "large"), **how)
    write_bytes(b"small", join(url, "small"), **how)
    write_bytes(b"", join(url, "empty"), **how)
    assert names_under(url, **how) == ["deep/large", "empty", "small"]
    assert read_bytes(join(url, "deep", "large"), **how) == (tmp_path / "large").read_bytes()
    remote.remove([join(url, name) for name in ("deep/large", "empty", "small", "never")], **how)
    assert names_under(url, **how) == []
    with pytest.raises(MissingError):
        read_bytes(join(url, "small"), **how)


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.stores)])
@pytest.mark.parametrize("fault", [500, "cut", "lost", "wrong"])
def test_a_fault_is_tried_again(tmp_path: Path, store: Store, fault: Any, size: str) -> None:
    url, place = store.url("faults", f"{fault}-{size}"), made(tmp_path, size)
    store.fail(fault)
    upload(place, url, storage=store.storage)
    assert not store.faults[0].count
    assert read_bytes(url, storage=store.storage) == place.read_bytes()


def test_bytes_that_are_always_wrong_are_not_left_there(tmp_path: Path, store: Store) -> None:
    url = store.url("wrong", "object")
    store.fail("wrong", count=1000)
    with pytest.raises(RemoteError):
        upload(made(tmp_path, "small"), url, storage=store.storage)
    store.faults.clear()
    assert names_under(store.url("wrong"), storage=store.storage) == []


def test_our_attempts_are_all_that_a_store_in_trouble_sees(store: Store) -> None:
    store.fail(500, method="GET|HEAD", count=1000)
    for question in (read_bytes, names_under):
        store.requests.clear()
        with pytest.raises(RemoteError):
            question(store.url("trouble", "object"), storage=store.storage)
        assert len(store.requests) <= 2 * remote.NUM_ATTEMPTS


def test_what_cannot_be_asked_after_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload has replaced a complete file, for example an earlier event log, so it is kept."""
    url, how = store.url("kept", "journal"), {"storage": store.storage}
    write_bytes(b"old", url, **how)

    def silent(*_: Any, **__: Any) -> None:
        raise TimeoutError

    def half(_url: str, write: Any, **__: Any) -> None:
        write(b"n")

    for number, (name, answer) in enumerate(
        (("remote._info", silent), ("remote.fetch", silent), ("remote.fetch", half))
    ):
        new = b"new%d" % number
        with monkeypatch.context() as patch:
            # so that the file must be read back
            patch.setattr(remote._Checksums, "match", lambda *_: None)
            patch.setattr(f"data_prep.{name}", answer)
            with pytest.raises(RemoteError):
                write_bytes(new, url, **how)
        assert read_bytes(url, **how) == new


def test_a_server_that_is_silent_is_left_when_nobody_waits_any_more(
    tmp_path: Path, store: Store
) -> None:
    store.fail("stall", count=1000)
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    began_s = time.monotonic()
    with pytest.raises(StoppedError):
        upload(made(tmp_path, "small"), store.url("silent"), storage=store.storage, stop=stop)
    assert time.monotonic() - began_s < 30  # the silence is longer
    store.gate.set()


def test_a_web_server_and_a_bucket_that_is_not_there_are_one_line_each(
    tmp_path: Path, store: Store
) -> None:
    place = made(tmp_path, "small")
    with fails("unsupported", "https://example.invalid/x"):
        upload(place, "https://example.invalid/x", storage={})
    with fails("missing-path", f"{store.scheme}://nowhere/x", kind=MissingError):
        upload(place, f"{store.scheme}://nowhere/x", storage=store.storage)
