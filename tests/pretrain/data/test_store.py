"""The store of shards: whole and right or not there, one download a node, never above its bound,
whatever fails or dies."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import remote
from data_prep.errors import UserError
from data_prep.remote import StoppedError
from pretrain.data.store import store as module
from pretrain.data.store.directory import Claim, File, StoreDirectory
from pretrain.data.store.store import ShardStore
from tests.data_prep.stock import Web, forget_credentials, s3_server, web
from tests.moments import wait_until
from tests.pretrain.data.tiny import few_files
from tests.pretrain.shard_walker import Walkers

SIZE = 40_000
NUM_SHARDS = 8
SHARD_0 = "0.tar"
Server = tuple[str, Web]
SECRET, OPTIONS = "key=secret-word", {"params": {"key": "secret-word"}}
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    for name, value in {
        "NUM_ATTEMPTS": 4,
        "SILENCE_S": 0.3,
        "WAIT_S": 20,
        "LOOK_AGAIN_S": 0.1,
    }.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    forget_credentials(monkeypatch)
    found = tmp_path / "far"
    found.mkdir()
    for number in range(NUM_SHARDS):
        data = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8).tobytes()
        (found / f"{number}.tar").write_bytes(data)
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with web(folder) as found:
        yield found


@pytest.fixture
def shards(folder: Path, server: Server) -> list[File]:
    return [far(folder / f"{number}.tar", server[0]) for number in range(NUM_SHARDS)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def far(path: Path, address: str) -> File:
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return File(f"{address}/{path.name}", f"{sha256}.tar", len(data), sha256)


def opened(place: Path, *, room: int = NUM_SHARDS, **more: Any) -> ShardStore:
    return ShardStore(
        place, setting="data.cache_dir", max_bytes=room * SIZE, **{"storage": {}, **more}
    )


@contextmanager
def holding(store: ShardStore, file: File) -> Iterator[Path]:
    yield store.hold(file)
    store.release([file])


def use(store: ShardStore, *files: File) -> None:
    for file in files:
        store.hold(file)
        store.release([file])


def cached(place: Path) -> set[str]:
    """The hashes of the files under final names, each of which is what its name says."""
    found = set()
    for path in place.glob("*.tar"):
        with suppress(FileNotFoundError):  # evicted while we look
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
            found.add(path.stem)
    return found


def hashes(shards: list[File], *numbers: int) -> set[str]:
    return {shards[number].sha256 for number in numbers}


def test_a_shard_is_fetched_verified_and_kept(
    place: Path, shards: list[File], server: Server
) -> None:
    for _ in range(2):
        with closing(opened(place)) as ours, holding(ours, shards[0]) as path:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == shards[0].sha256
    assert server[1].gets == {SHARD_0: 1}
    assert place.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in place.iterdir()) == [".lock", shards[0].name]


@pytest.mark.parametrize(
    ("faults", "num_lines"),
    [([500, 503, 429], 1), (["stall"], 0), (["cut", "cut"], 1), (["wrong"], 0)],
)
def test_what_may_pass_is_tried_again_and_whoever_waits_is_told(
    place: Path,
    shards: list[File],
    server: Server,
    faults: list[Any],
    num_lines: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once in a while, and not at the first fault, which passes as a rule."""
    address, state = server
    state.key, state.faults = SECRET, {f"{number}.tar": list(faults) for number in range(2)}
    before = random.getstate()
    with closing(opened(place, storage=OPTIONS, hosts=[server[0]])) as ours:
        use(ours, *shards[:2])
    assert cached(place) == hashes(shards, 0, 1) and state.gets == dict.fromkeys(
        (SHARD_0, "1.tar"), len(faults) + 1
    )
    assert random.getstate() == before, "the order of training must not feel a server"
    said = capsys.readouterr().err
    assert len(said.splitlines()) == num_lines and "secret-word" not in said
    assert not said or re.match(
        rf"waiting for {re.escape(address)}/0.tar: .*; attempt 3 of 4 follows", said
    )


@pytest.mark.parametrize(
    ("fault", "num_gets", "words"),
    [
        (
            "wrong",
            4,
            (
                r"delivers sha256 [0-9a-f]{64} instead of {sha256} that the manifest promises.*; it"
                r" was changed"
            ),
        ),
        ("cut", 4, r"cannot be read after 4 attempts"),
        ("stall", 4, r"cannot be read after 4 attempts"),
        (500, 4, r"cannot be read after 4 attempts \(500"),
        (404, 1, r"there is no such file; mend the address"),
        (403, 2, r"access is refused; give credentials"),  # once more, with credentials read anew
    ],
)
def test_what_stays_is_one_line_without_secrets_and_leaves_nothing(
    place: Path, shards: list[File], server: Server, fault: Any, num_gets: int, words: str
) -> None:
    address, state = server
    state.key, state.faults = SECRET, {SHARD_0: [fault] * 9}
    words = words.replace("{sha256}", shards[0].sha256)
    with closing(opened(place, storage=OPTIONS, hosts=[server[0]])) as ours:
        with pytest.raises(UserError, match=f"^{re.escape(address)}/0.tar: {words}") as caught:
            ours.hold(shards[0])
        assert "secret-word" not in str(caught.value)
        assert state.gets == {SHARD_0: num_gets}
        assert cached(place) == set() and not [*place.glob("*.part")]
        use(ours, shards[1])
        assert cached(place) == hashes(shards, 1)


def test_a_longer_and_a_shorter_file_and_a_missing_server_are_named(
    place: Path, folder: Path, shards: list[File]
) -> None:
    data, source = (
        (folder / SHARD_0).read_bytes(),
        f"http://me:secret-word@127.0.0.1:9/0.tar?{SECRET}",
    )
    with closing(opened(place, room=1)) as ours:
        for wrong, words in [
            (data * 20, "delivers more than the 40,000 bytes"),
            (data[:-9], "39,991 of the 40,000"),
        ]:
            (folder / SHARD_0).write_bytes(wrong)
            with pytest.raises(UserError, match=words):
                ours.hold(shards[0])
        words = "^http://127.0.0.1:9/0.tar: cannot be read after 4 attempts"
        with pytest.raises(UserError, match=words) as caught:
            ours.hold(shards[0]._replace(source=source))
    assert (
        "secret-word" not in str(caught.value)
        and cached(place) == set()
        and not [*place.glob("*.part")]
    )


def test_s3_gives_the_same_in_pieces_and_says_what_is_missing(
    tmp_path: Path, folder: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("data_prep.remote.RANGE_BYTES", SIZE * 2 // 5)
    place = tmp_path / "cache"
    with s3_server(folder) as storage:
        there = [far(folder / f"{number}.tar", "s3://pictures/some") for number in range(3)]
        missing = File("s3://pictures/some/gone.tar", f"{'0' * 64}.tar", SIZE, "0" * 64)
        changed = there[0]._replace(name=f"{'1' * 64}.tar", sha256="1" * 64)
        with closing(opened(place, storage=json.loads(storage), hosts=["s3://"])) as ours:
            ours.fetch_ahead(there)
            use(ours, *there)
            assert cached(place) == {file.sha256 for file in there}
            with pytest.raises(
                UserError, match=r"^s3://pictures/some/gone.tar: there is no such file"
            ):
                ours.hold(missing)
            words = r"^s3://pictures/some/0.tar: delivers sha256 [0-9a-f]{64} instead of 111"
            with pytest.raises(UserError, match=words):
                ours.hold(changed)
        wrong = json.loads(storage) | {"wrong": 1}
        words = "^storage: s3 does not take these options"
        with (
            closing(opened(tmp_path / "other", storage=wrong, hosts=["s3://"])) as ours,
            pytest.raises(UserError, match=words),
        ):
            ours.hold(there[0])
    assert not [*place.glob("*.part")]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_a_killed_process_leaves_is_never_trusted(
    place: Path, shards: list[File], server: Server, fresh: bool
) -> None:
    server[1].faults = {SHARD_0: ["stall"]}
    ours = opened(place, room=1)
    walkers = Walkers(place, room_bytes=SIZE, lists=[(shards[:2], 1)])
    wait_until(lambda: server[1].gets == {SHARD_0: 1})
    walkers.processes[0].kill()
    walkers.processes[0].join()
    assert (place / f"{shards[0].name}.part").stat().st_size == SIZE and cached(place) == set()
    if fresh:
        ours.close()
        ours = opened(place, room=1)
        assert not [*place.glob("*.part")] and not list(place.glob("*.user"))
    # the dead one's room is to be had, for its own shard as for another
    with closing(ours), holding(ours, shards[0 if fresh else 1]) as path:
        assert cached(place) == {path.stem} and not [*place.glob("*.part")]


def test_four_processes_fetch_each_shard_once(
    place: Path, shards: list[File], server: Server
) -> None:
    walkers = Walkers(
        place, room_bytes=NUM_SHARDS * SIZE, lists=[(shards, ahead) for ahead in (0, 0, 3, 7)]
    )
    assert walkers.finish() == 4 * [[file.sha256 for file in shards]]
    assert server[1].gets == {f"{number}.tar": 1 for number in range(NUM_SHARDS)}
    assert sorted(path.suffix for path in place.iterdir() if path.suffix) == [".tar"] * NUM_SHARDS


def test_the_bound_holds_while_processes_walk_in_different_orders(
    place: Path, shards: list[File]
) -> None:
    room, generator = 3 * SIZE + SIZE // 2, random.Random(7)
    orders = [generator.sample(shards, len(shards)) * 3 for _ in range(3)]
    place.mkdir(mode=0o700)
    walkers, sampled, walk = (
        Walkers(place, room_bytes=room, lists=[(order, 2) for order in orders]),
        list[int](),
        True,
    )
    while walk:
        walk = any(walker.exitcode is None for walker in walkers.processes)
        sampled.append(occupied(place))  # also when all have ended: with three in it
        time.sleep(0.002)
    assert walkers.finish() == [[file.sha256 for file in order] for order in orders]
    assert 2 * SIZE < max(sampled) <= room
    assert not [*place.glob("*.part")] and len(cached(place)) == 3


def occupied(place: Path) -> int:
    """By shards, whole or on their way; a file may be renamed, or go, while we look, and is then
    counted once at most."""
    sizes = {}
    for entry in os.scandir(place):
        if entry.name.endswith((".tar", ".part")):
            with suppress(FileNotFoundError):
                sizes[entry.inode()] = entry.stat().st_size
    return sum(sizes.values())


def test_the_longest_unused_goes_first(place: Path, shards: list[File]) -> None:
    with closing(opened(place, room=3)) as ours:
        use(ours, *(shards[number] for number in (0, 1, 2, 0, 3)))
        assert cached(place) == hashes(shards, 0, 2, 3)
        ours.hold(shards[2])
        use(ours, shards[0])
        ours.release([shards[2]])  # until now it was in use
        use(ours, shards[4], shards[5])
        assert cached(place) == hashes(shards, 2, 4, 5)


def test_what_is_held_stays_and_whoever_needs_room_waits(
    place: Path, shards: list[File], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    with closing(opened(place, room=2)) as ours, closing(opened(place, room=2)) as others:
        use(ours, shards[0])
        ours.hold(shards[0])  # which is there
        others.hold(shards[1])  # which is fetched
        words = r"no room for .*/2.tar .* raise data.cache_gb"
        with closing(opened(place, room=2)) as third, pytest.raises(UserError, match=words):
            third.hold(shards[2])
        assert cached(place) == hashes(shards, 0, 1)


def test_read_ahead_leaves_room_that_somebody_waits_for(
    place: Path, folder: Path, shards: list[File], server: Server
) -> None:
    (folder / "big.tar").write_bytes(bytes(range(250)) * (2 * SIZE // 250))
    big = far(folder / "big.tar", server[0])
    with (
        ThreadPoolExecutor() as pool,
        closing(opened(place, room=2)) as ours,
        closing(opened(place, room=2)) as others,
    ):
        for file in shards[:2]:
            ours.hold(file)
        waiting = pool.submit(others.hold, big)
        wait_until(
            lambda: any(
                f'"waiting_bytes": {2 * SIZE}' in path.read_text() for path in place.glob("*.user")
            )
        )
        ours.fetch_ahead([shards[3]])
        ours.release([shards[0]])
        time.sleep(3 * module.LOOK_AGAIN_S)
        assert "3.tar" not in server[1].gets
        ours.release([shards[1]])
        waiting.result()
        assert cached(place) == {big.sha256}
        others.release([big])
        wait_until(lambda: cached(place) == hashes(shards, 3))


def test_a_held_shard_is_no_open_file(place: Path, shards: list[File]) -> None:
    """Of which the usual limit is 1,024."""
    with closing(opened(place)) as ours:
        use(ours, shards[0])
        with few_files():
            for file in shards:
                ours.hold(file)


def test_a_shard_above_the_bound_and_a_hash_that_is_none_are_refused(
    place: Path, shards: list[File], server: Server
) -> None:
    with closing(
        ShardStore(place, setting="data.cache_dir", max_bytes=SIZE - 1, storage={})
    ) as ours:
        with pytest.raises(UserError, match=r"more than the whole cache of .*raise data.cache_gb"):
            ours.hold(shards[0])
        outside = shards[0]._replace(name="../../outside.tar", sha256="../../outside")
        with pytest.raises(UserError, match=r"sha256 '../../outside' in the manifest is none"):
            ours.hold(outside)
        ours.fetch_ahead([*shards, outside._replace(num_bytes=1)])
        time.sleep(module.LOOK_AGAIN_S)
    assert server[1].gets == {}


def test_read_ahead_takes_what_fits_in_order_and_gives_up_nothing_for_what_is_needed_later(
    place: Path, shards: list[File], server: Server
) -> None:
    with (
        closing(opened(place, room=3, num_threads=1)) as ours,
        closing(opened(place, room=3, num_threads=1)) as others,
    ):
        use(ours, shards[7])
        ours.fetch_ahead(shards[:6])
        # what was used goes for what will be used
        wait_until(lambda: cached(place) == hashes(shards, 0, 1, 2))
        others.fetch_ahead([shards[6], shards[5], shards[0], shards[4]])
        # 2 is needed after two others, and 6 at once; 5 is needed after one other, as is 1, so 1
        # stays
        wait_until(lambda: cached(place) == hashes(shards, 0, 1, 6))
        time.sleep(3 * module.LOOK_AGAIN_S)
        assert cached(place) == hashes(shards, 0, 1, 6)
        assert server[1].gets == {f"{number}.tar": 1 for number in (7, 0, 1, 2, 6)}


def test_hold_comes_before_what_was_read_ahead_and_takes_what_is_needed_last(
    place: Path, shards: list[File]
) -> None:
    with (
        closing(opened(place, room=3, num_threads=1)) as ours,
        closing(opened(place, room=3, num_threads=1)) as others,
    ):
        ours.fetch_ahead(shards[:6])
        wait_until(lambda: len(cached(place)) == 3)
        with holding(others, shards[7]):
            assert cached(place) == hashes(shards, 0, 1, 7)
        wait_until(lambda: cached(place) == hashes(shards, 0, 1, 2))
        with holding(ours, shards[0]), holding(ours, shards[1]), holding(ours, shards[2]):
            assert not [*place.glob("*.part")]
        wait_until(lambda: cached(place) == hashes(shards, 3, 4, 5))


def test_what_fails_in_the_background_is_said_to_whoever_needs_it(
    place: Path, shards: list[File], folder: Path
) -> None:
    data = (folder / SHARD_0).read_bytes()
    (folder / SHARD_0).unlink()
    with closing(opened(place, num_threads=1)) as ours:
        ours.fetch_ahead(shards[:2])
        wait_until(lambda: cached(place) == hashes(shards, 1))
        with pytest.raises(UserError, match=r"/0.tar: there is no such file"):
            ours.hold(shards[0])
        (folder / SHARD_0).write_bytes(data)
        use(ours, shards[0])


def test_a_new_list_replaces_what_has_not_begun(
    place: Path, shards: list[File], server: Server, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 30)
    server[1].faults = {SHARD_0: ["stall"]}
    with closing(opened(place, num_threads=1)) as ours:
        ours.fetch_ahead(shards[:4])
        wait_until(lambda: server[1].gets == {SHARD_0: 1})
        ours.fetch_ahead([shards[5], shards[0]])
        server[1].gate.set()
        wait_until(lambda: len(cached(place)) == 2)
    assert server[1].gets == {SHARD_0: 1, "5.tar": 1}


def test_closing_ends_a_download_and_every_wait(
    place: Path, shards: list[File], server: Server, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 150)
    server[1].faults = {SHARD_0: ["stall"] * 9}
    ours = opened(place)
    ours.fetch_ahead(shards[:1])
    wait_until(lambda: server[1].gets == {SHARD_0: 1})
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ours.hold, shards[0])
        ours.close()
        assert isinstance(waiting.exception(), StoppedError)
    assert not [thread for thread in threading.enumerate() if thread.name == "shard-store"]
    assert sorted(path.name for path in place.iterdir()) == [".lock"]


def test_a_file_that_somebody_changed_is_fetched_again_and_one_only_touched_is_not(
    place: Path, shards: list[File], server: Server
) -> None:
    with closing(opened(place)) as ours:
        with holding(ours, shards[0]) as path:
            good = path.read_bytes()
        for wrong in (good[:-1], b"", good[:-1] + bytes([good[-1] ^ 1])):
            path.write_bytes(wrong)
            with holding(ours, shards[0]):
                assert path.read_bytes() == good
        assert server[1].gets == {SHARD_0: 4}
        os.utime(path)
        use(ours, shards[0])
        assert server[1].gets == {SHARD_0: 4}
        path.unlink()
        path.symlink_to("/dev/null")
        with holding(ours, shards[0]):
            assert path.read_bytes() == good and not path.is_symlink()
            # written to while it is held: what is seen must not be called right at the end
            path.write_bytes(good[:-1] + b"?")
        with holding(ours, shards[0]):
            assert path.read_bytes() == good


def test_threads_of_one_process_share_it(place: Path, shards: list[File]) -> None:
    def walk(seed: int) -> None:
        for file in random.Random(seed).sample(shards, len(shards)):
            with holding(ours, file) as path:
                assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256

    with closing(opened(place, room=4)) as ours, ThreadPoolExecutor(4) as pool:
        list(pool.map(walk, range(4)))
    assert len(cached(place)) == 4


def test_a_fork_neither_lets_go_of_its_parents_shards_nor_keeps_them(
    place: Path, shards: list[File]
) -> None:
    with closing(opened(place, room=2)) as ours:
        ours.hold(shards[0])
        ours.hold(shards[1])
        child = os.fork()
        if child == 0:
            del ours
            os._exit(0)
        os.waitpid(child, 0)
        with closing(opened(place, room=2)) as others:
            assert others.directory.make_room([shards[2]]) == SIZE
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(60)
            os._exit(0)
        try:
            ours.release(shards[:2])
            with holding(ours, shards[2]), holding(ours, shards[3]):
                assert cached(place) == hashes(shards, 2, 3)
        finally:
            os.kill(sleeper, signal.SIGKILL)
            os.waitpid(sleeper, 0)


def test_a_directory_that_others_could_have_filled_is_refused(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "file").write_bytes(b"")
    for name, words in (
        ("open", "others may write there"),
        ("link", "is a link, which others may turn"),
        ("file", "is no directory"),
    ):
        with pytest.raises(UserError, match=f"{name}: {words}.*data.cache_dir"):
            opened(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        UserError, match=r"mine: belongs to user .* cannot be trusted; name a directory of your own"
    ):
        opened(tmp_path / "mine")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for two shards."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    words = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={(3 * SIZE) // 4096 * 4096},mode=700",
        "tmpfs",
        str(place),
    ]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_and_a_read_only_one_are_one_line(tiny_disk: Path, shards: list[File]) -> None:
    with closing(opened(tiny_disk)) as ours:
        for file in shards[:2]:
            ours.hold(file)
        with pytest.raises(
            UserError, match=r"its disk is full; free some of it, lower data.cache_gb"
        ):
            ours.hold(shards[2])
        assert cached(tiny_disk) == hashes(shards, 0, 1) and not [*tiny_disk.glob("*.part")]
        ours.release(shards[:2])
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(
        UserError, match=r"cannot be written to; name another directory as data.cache_dir"
    ):
        opened(tiny_disk)


def test_a_disk_without_room_for_a_list_of_wants_is_one_line_and_harms_nobody_else(
    tiny_disk: Path, shards: list[File]
) -> None:
    with closing(opened(tiny_disk)) as ours, closing(opened(tiny_disk)) as others:
        use(others, shards[0])
        ours.fetch_ahead([shards[0]])
        others.fetch_ahead([shards[0]])
        with open(tiny_disk / "of-others", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        many = [shards[0]._replace(name=f"{number:064x}.tar") for number in range(500)]
        records = [path.read_text() for path in sorted(tiny_disk.glob("*.user"))]
        assert len(records) == 2 and all(shards[0].name in record for record in records)
        for each in (ours, others):
            with pytest.raises(UserError, match=r"its disk is full; free some of it"):
                each.fetch_ahead(many)
        assert [
            path.read_text().rstrip("\0") for path in sorted(tiny_disk.glob("*.user"))
        ] == records
        with holding(others, shards[0]):
            assert cached(tiny_disk) == hashes(shards, 0)
        (tiny_disk / "of-others").unlink()
        with holding(ours, shards[1]), holding(others, shards[0]):
            assert cached(tiny_disk) == hashes(shards, 0, 1)


def test_a_record_that_cannot_be_written_hides_no_error(
    place: Path, shards: list[File], folder: Path, monkeypatch: Patch
) -> None:
    (folder / SHARD_0).unlink()
    with closing(opened(place)) as ours:
        claim, real = StoreDirectory.claim, StoreDirectory.publish_record

        def claimed(directory: StoreDirectory, *words: Any, **how: Any) -> Claim:
            found = claim(directory, *words, **how)
            monkeypatch.setattr(StoreDirectory, "publish_record", refused)
            return found

        def refused(directory: StoreDirectory) -> None:
            raise OSError("Input/output error")

        monkeypatch.setattr(StoreDirectory, "claim", claimed)
        with pytest.raises(UserError, match=r"/0.tar: there is no such file"):
            ours.hold(shards[0])
        monkeypatch.setattr(StoreDirectory, "publish_record", real)
        monkeypatch.setattr(StoreDirectory, "claim", claim)
        use(ours, shards[1])


def test_read_ahead_without_room_looks_again_now_and_then_and_does_not_spin(
    place: Path, shards: list[File], monkeypatch: Patch
) -> None:
    asked: list[int] = []

    def claim(directory: StoreDirectory, file: File, *, place: int, keep: bool) -> Claim:
        asked.append(place)
        return Claim.HAS_NO_ROOM

    monkeypatch.setattr(StoreDirectory, "claim", claim)
    with closing(opened(place, num_threads=2)) as ours:
        ours.fetch_ahead(shards)
        began_s = time.monotonic()
        wait_until(lambda: len(asked) >= 6)
        num_asked, took_s = len(asked), time.monotonic() - began_s
    # somebody who spins asks six times at once
    assert set(asked) == {0} and num_asked <= 2 * (1 + took_s / module.LOOK_AGAIN_S)


def test_room_is_taken_in_the_order_of_need_by_whichever_thread(
    place: Path, shards: list[File], monkeypatch: Patch
) -> None:
    taken: list[str] = []
    real = StoreDirectory.claim

    def claim(directory: StoreDirectory, file: File, *, place: int, keep: bool) -> Claim:
        time.sleep(0.05 / (place + 1))  # the first one is the slowest
        taken.append(file.name)
        return real(directory, file, place=place, keep=keep)

    monkeypatch.setattr(StoreDirectory, "claim", claim)
    with closing(opened(place)) as ours:
        ours.fetch_ahead(shards)
        wait_until(lambda: len(cached(place)) == len(shards))
    assert list(dict.fromkeys(taken)) == [file.name for file in shards]
