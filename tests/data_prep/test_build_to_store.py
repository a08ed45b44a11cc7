"""A dataset that is built, indexed or merged to a URL has the bytes of a local one, whatever fails
or is killed on the way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import remote
from data_prep.build import shards
from data_prep.build.destination import Destination, occupy
from data_prep.build.parts import record_path
from data_prep.cli import main
from data_prep.errors import UserError
from data_prep.remote import names_under, read_bytes
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, files_of, forked, write_classes, write_files
from tests.data_prep.stock import sample, write_stock
from tests.moments import Strike
from tests.stores import Store

pytestmark = pytest.mark.processes
CUT = ("samples_per_shard=4", "max_reject_share=0.2", "name=animals")


@pytest.fixture
def store(store_server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    store_server.faults.clear()
    yield store_server
    store_server.faults.clear()
    url, how = store_server.url, {"storage": store_server.storage}
    remote.remove([url(name) for name in names_under(url(), **how)], **how)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_classes(tmp_path_factory.mktemp("made") / "source", {"ant": 9, "bee": 6})
    return write_files(root, {"ant/zero.jpg": b""})


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """What a build on this disk writes: 16 inputs in 4 shards."""
    assert build(source, source.parent / "whole", *CUT) == 0
    return files_of(source.parent / "whole")


def words(source: Path, store: Store, work: Path, *more: str) -> list[str]:
    given = [
        f"source.path={source}",
        "image_size=16",
        "source.val_share=0",
        f"out_storage={json.dumps(store.storage)}",
    ]
    return [
        "build",
        "--source",
        "folder",
        "--out",
        store.url("out"),
        "--work",
        str(work),
        *CUT,
        *given,
        *more,
    ]


def in_store(store: Store, dataset: str = "out") -> dict[str, bytes]:
    names = names_under(store.url(dataset), storage=store.storage)
    return {name: read_bytes(store.url(dataset, name), storage=store.storage) for name in names}


def run(*words: str) -> int:
    return main([*words, "num_workers=1"])


def test_a_store_gets_what_a_disk_gets_the_manifest_last(
    tmp_path: Path,
    store: Store,
    source: Path,
    whole: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
) -> None:
    store.requests.clear()
    assert run(*words(source, store, tmp_path / "work")) == 0
    told = capsys.readouterr()
    assert (
        f"{store.url('out')}: 2 classes" in told.out
        and "most often (1): empty, such as ant/zero.jpg" in told.out
    )
    assert in_store(store) == whole
    assert {path.name for path in (tmp_path / "work").iterdir()} == {".lock"}
    written = [
        line
        for line in store.requests
        if line.startswith(("PUT", "POST")) and ("out" in line or "upload" in line)
    ]
    assert len(written) == len(whole) + 1  # each of them once, and the mark
    if store.scheme != "gs":  # there the name is in the body
        assert [
            name in written[place] for name, place in ((".building.json", 0), ("manifest.json", -1))
        ] == [True, True]
    before = len(written)
    assert (
        run(*words(source, store, tmp_path / "other")) == 0
    )  # finished: nothing but the mark is written
    assert in_store(store) == whole and len(store.requests) > before
    refused(
        run(*words(source, store, tmp_path / "work", "seed=1")),
        "seed: 1, was 0",
        "name another out",
    )
    assert in_store(store) == whole


def test_kills_at_any_moment_change_no_byte(
    tmp_path: Path, store: Store, source: Path, whole: dict[str, bytes]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    codes = []
    for moment in (45, 120):
        with forked(
            tmp_path / "log", *words(source, store, work), prepare=Strike(work, moment).arm
        ) as child:
            codes.append(child.wait())
        assert (
            "manifest.json" not in in_store(store)
            or codes[-1] == 0
            or in_store(store).items() >= whole.items()
        )
    assert codes[0] == -9
    assert run(*words(source, store, work)) == 0
    assert in_store(store) == whole


@pytest.mark.stores  # s3, too: a kill does as much, and it takes time
def test_a_store_that_fails_ends_the_build_in_one_line_and_the_same_command_goes_on(
    tmp_path: Path, store: Store, source: Path, whole: dict[str, bytes], refused: Refused
) -> None:
    store.fail(500, path="train-000002.tar|resumable|upload", count=1000)
    assert run(*words(source, store, tmp_path / "work")) != 0
    assert "manifest.json" not in in_store(store)
    store.faults.clear()
    assert run(*words(source, store, tmp_path / "work")) == 0
    assert in_store(store) == whole


def test_two_builders_and_strangers_are_refused(
    tmp_path: Path, store: Store, source: Path, refused: Refused
) -> None:
    out, how = store.url("out"), {"storage": store.storage}
    store.fail(500, path="rejected.jsonl|upload", count=0 if store.scheme == "gs" else 1000)
    if store.scheme != "gs":
        assert run(*words(source, store, tmp_path / "work")) != 0
        refused(
            run(*words(source, store, tmp_path / "other")),
            f"out: {out} is being written by process ",
            f"--work {tmp_path / 'work'}",
            code=75,
        )
        store.faults.clear()
    remote.remove([store.url("out", name) for name in names_under(out, **how)], **how)
    assert run(*words(tmp_path / "nowhere", store, tmp_path / "second")) == 2
    assert not names_under(out, **how)  # nothing was begun, so others may begin there
    remote.write_bytes(b"mine", store.url("out", "thesis.tex"), **how)
    refused(
        run(*words(source, store, tmp_path / "third")),
        f"out: {out} holds thesis.tex, and no dataset was begun there",
    )


def test_a_work_directory_is_of_one_place(tmp_path: Path, store: Store) -> None:
    place = Destination(
        out=store.url("one"), work=str(tmp_path / "work"), out_storage=store.storage
    )
    record_path(place.directory, "").parent.mkdir(parents=True)
    for _ in range(2):
        occupy(place)
    other = store.url("two")
    with pytest.raises(
        UserError,
        match=f"^work: .*has unfinished work for {store.url('one')}; name another directory",
    ):
        occupy(place.model_copy(update={"out": other}))
    assert not names_under(other, storage=store.storage)


@pytest.mark.parametrize(
    ("theirs", "told", "code"),
    [(b"{}", "is being written by", 75), (b"", "give the same command again", 2)],
    ids=["taken over", "emptied"],
)
def test_a_builder_whose_place_is_no_longer_its_own_publishes_nothing(
    tmp_path: Path,
    store: Store,
    source: Path,
    whole: dict[str, bytes],
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    theirs: bytes,
    told: str,
    code: int,
) -> None:
    mark, how = store.url("out", ".building.json"), {"storage": store.storage}
    deliver = shards.deliver_tar

    def and_lose_it(place: Any, shard: Any) -> str:
        stored = deliver(place, shard)
        remote.remove(
            [store.url("out", name) for name in names_under(store.url("out"), **how)], **how
        )
        if theirs:
            remote.write_bytes(theirs, mark, **how)
        return stored

    monkeypatch.setattr(shards, "deliver_tar", and_lose_it)
    refused(run(*words(source, store, tmp_path / "work")), told, code=code)
    assert set(in_store(store)) <= {".building.json"}
    remote.remove([mark], **how)
    monkeypatch.undo()
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    assert run(*words(source, store, tmp_path / "work")) == 0
    assert in_store(store) == whole


def test_tasks_share_a_work_directory_and_a_damaged_part_is_found(
    tmp_path: Path, store: Store, source: Path, whole: dict[str, bytes], refused: Refused
) -> None:
    out, work = store.url("out"), tmp_path / "work"
    merge = [
        "merge",
        out,
        "--work",
        str(work),
        "--storage",
        json.dumps(store.storage),
        "--workers",
        "1",
    ]
    assert run(*words(source, store, work), "--task", "0/2") == 0
    refused(
        main(merge),
        "2 of 4 shards cannot be merged (train-000001 is not written); run the tasks 1/2 again",
    )
    assert run(*words(source, store, work), "--task", "1/2") == 0
    assert not list(work.glob("*.tar"))
    remote.write_bytes(b"other bytes", store.url("out", "train-000002.tar"), storage=store.storage)
    refused(main(merge), "(train-000002.tar is not as it was written); run the tasks 0/2 again")
    assert run(*words(source, store, work), "--task", "0/2") == 0
    assert main(merge) == 0
    assert in_store(store) == whole
    assert main(merge) == 0  # again: nothing to do


def test_an_index_of_shards_in_a_store_lies_beside_them(
    tmp_path: Path, store: Store, refused: Refused
) -> None:
    stock = [
        write_stock(tmp_path / f"s-{number}.tar", [sample(10 * number + row) for row in range(3)])
        for number in range(2)
    ]
    for shard in stock:
        remote.upload(shard, store.url("in", shard.name), storage=store.storage)
    options: list[Any] = [f"storage={json.dumps(store.storage)}", "image_size=16", "name=stock"]
    assert (
        run(
            "index",
            "--out",
            str(tmp_path / "local"),
            "--train",
            store.url("in", "s-{0..1}.tar"),
            *options,
        )
        == 0
    )
    there = [
        "--out",
        store.url("out"),
        "--work",
        str(tmp_path / "work"),
        f"out_storage={json.dumps(store.storage)}",
    ]
    assert run("index", *there, "--train", store.url("in", "s-{0..1}.tar"), *options) == 0
    assert in_store(store) == files_of(tmp_path / "local")
    refused(run("index", *there, "--train", str(stock[0]), *options), "lies on this disk")

    half, there = (
        ["subset", str(tmp_path / "local"), "--count", "3"],
        ["--work", str(tmp_path / "w"), "--storage", json.dumps(store.storage)],
    )
    assert main([*half, "--out", str(tmp_path / "half")]) == 0
    for _ in range(2):
        assert main([*half, "--out", store.url("half"), *there]) == 0
        assert in_store(store, "half") == files_of(tmp_path / "half")
    refused(
        main([*half, "--seed", "1", "--out", store.url("half"), *there]),
        "holds another dataset (half)",
    )


def test_a_store_needs_a_place_for_unfinished_work(
    source: Path, tmp_path: Path, refused: Refused
) -> None:
    given = ["build", "--source", "folder", f"source.path={source}"]
    refused(
        main([*given, "--out", "s3://pictures/out"]),
        "work: s3://pictures/out is a store",
        "--work DIR",
    )
    refused(
        main([*given, "--out", str(tmp_path / "out"), "--work", str(tmp_path)]),
        "work: goes with an out that is a URL",
    )
