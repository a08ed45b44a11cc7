"""The shard cache: copies are complete and verified or absent, a node downloads each once, and the
size limit holds after any fault."""

import gc
import hashlib
import os
import random
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
from data_prep.errors import Code, UserError
from data_prep.remote import StoppedError
from pretrain.data import store as module
from pretrain.data.store import File, ShardStore
from tests.data_prep.stock import Web, forget_credentials, web
from tests.errors import fails
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
    settings = {"NUM_ATTEMPTS": 4, "SILENCE_S": 10, "WAIT_S": 20, "LOOK_S": 0.02}
    for name, value in settings.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    forget_credentials(monkeypatch)
    folder = tmp_path / "far"
    folder.mkdir()
    for number in range(NUM_SHARDS):
        data = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8).tobytes()
        (folder / f"{number}.tar").write_bytes(data)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with web(folder) as served:
        yield served


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


def opened(place: Path, *, room: float = NUM_SHARDS, **more: Any) -> ShardStore:
    options = {"storage": {}, **more}
    return ShardStore(place, setting="data.cache_dir", max_bytes=int(room * SIZE), **options)


@contextmanager
def holding(store: ShardStore, *files: File) -> Iterator[list[Path]]:
    yield [store.hold(file) for file in files]
    store.release(files)


def use(store: ShardStore, *files: File) -> None:
    for file in files:
        with holding(store, file):
            pass


def cached(place: Path) -> set[str]:
    """Return the hashes of the complete copies, after comparing each file with the hash in its
    name."""
    hashes = set()
    for path in place.glob("*.tar"):
        with suppress(FileNotFoundError):  # removed meanwhile
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
            hashes.add(path.stem)
    return hashes


def hashes(shards: list[File], *numbers: int) -> set[str]:
    return {shards[number].sha256 for number in numbers}


def test_a_shard_is_fetched_verified_and_kept(
    place: Path, shards: list[File], server: Server
) -> None:
    for _ in range(2):
        with closing(opened(place)) as ours, holding(ours, shards[0]) as (path,):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == shards[0].sha256
    assert server[1].gets == {SHARD_0: 1}
    assert place.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in place.iterdir()) == [".locks", shards[0].name]


@pytest.mark.parametrize(
    ("faults", "num_lines"),
    [([500, 503, 429], 1), (["stall"], 0), (["cut", "cut"], 1), (["wrong"], 0)],
)
def test_a_passing_fault_is_tried_again_and_reported_if_it_lasts(
    place: Path,
    shards: list[File],
    server: Server,
    monkeypatch: Patch,
    faults: list[Any],
    num_lines: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, state = server
    state.key, state.faults = SECRET, {f"{number}.tar": list(faults) for number in range(2)}

    def fetch(url: str, *values: Any, silence_s: float, **more: Any) -> None:
        if "stall" in state.faults[url.rpartition("/")[2]]:
            silence_s = 1
        remote.fetch(url, *values, silence_s=silence_s, **more)

    monkeypatch.setattr(module, "fetch", fetch)
    before = random.getstate()
    with closing(opened(place, storage=OPTIONS, hosts=[address])) as ours:
        use(ours, *shards[:2])
    assert cached(place) == hashes(shards, 0, 1)
    assert state.gets == dict.fromkeys((SHARD_0, "1.tar"), len(faults) + 1)
    assert random.getstate() == before, "the order of training must not depend on a server"
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == num_lines and "secret-word" not in printed
    assert not printed or f"{address}/0.tar" in printed


@pytest.mark.parametrize(
    ("fault", "num_gets", "code"),
    [
        ("wrong", 4, "damaged"),
        ("cut", 4, "unreachable"),
        ("stall", 4, "unreachable"),
        (500, 4, "unreachable"),
        (404, 1, None),
        (403, 2, None),  # the second attempt reads credentials again
    ],
)
def test_a_lasting_fault_is_an_error_without_secrets_and_leaves_nothing(
    place: Path,
    shards: list[File],
    server: Server,
    fault: Any,
    num_gets: int,
    code: Code | None,
    monkeypatch: Patch,
) -> None:
    if "stall" in [fault]:
        monkeypatch.setattr(module, "SILENCE_S", 0.3)
    address, state = server
    state.key, state.faults = SECRET, {SHARD_0: [fault] * 9}
    with closing(opened(place, storage=OPTIONS, hosts=[address])) as ours:
        with pytest.raises(UserError) as caught:
            ours.hold(shards[0])
        assert code is None or (caught.value.field, caught.value.code) == (shards[0].source, code)
        assert shards[0].source in str(caught.value) and "secret-word" not in str(caught.value)
        assert state.gets == {SHARD_0: num_gets}
        assert cached(place) == set() and not [*place.glob("*.part")]
        use(ours, shards[1])
        assert cached(place) == hashes(shards, 1)


def test_a_file_of_another_length_and_a_missing_server_are_errors(
    place: Path, folder: Path, shards: list[File]
) -> None:
    data = (folder / SHARD_0).read_bytes()
    source = f"http://me:secret-word@127.0.0.1:9/0.tar?{SECRET}"
    with closing(opened(place, room=1)) as ours:
        (folder / SHARD_0).write_bytes(data * 20)
        with fails("damaged", shards[0].source):
            ours.hold(shards[0])
        (folder / SHARD_0).write_bytes(data[:-9])
        with fails("damaged", shards[0].source):
            ours.hold(shards[0])
        with fails("unreachable", "http://127.0.0.1:9/0.tar") as caught:
            ours.hold(shards[0]._replace(source=source))
    assert "secret-word" not in str(caught.value)
    assert cached(place) == set() and not [*place.glob("*.part")]


@pytest.mark.processes
def test_a_download_of_a_killed_process_is_never_trusted_and_gives_up_its_room(
    place: Path, shards: list[File], server: Server
) -> None:
    server[1].faults = {SHARD_0: ["stall"]}
    walkers = Walkers(place, room_bytes=SIZE, lists=[(shards[:2], 1)])
    wait_until(lambda: SHARD_0 in server[1].gets)
    walkers.processes[0].kill()
    walkers.processes[0].join()
    assert (place / f"{shards[0].name}.part").stat().st_size == SIZE and cached(place) == set()
    with closing(opened(place, room=1)) as ours:
        for file in shards[1], shards[0]:
            use(ours, file)
            assert cached(place) == {file.sha256} and not [*place.glob("*.part")]


@pytest.mark.processes
def test_four_processes_fetch_each_shard_once(
    place: Path, shards: list[File], server: Server
) -> None:
    lists = [(shards, ahead) for ahead in (0, 0, 3, 7)]
    walkers = Walkers(place, room_bytes=NUM_SHARDS * SIZE, lists=lists)
    assert walkers.finish() == 4 * [[file.sha256 for file in shards]]
    assert server[1].gets == {f"{number}.tar": 1 for number in range(NUM_SHARDS)}
    assert sorted(path.suffix for path in place.iterdir() if path.suffix) == [".tar"] * NUM_SHARDS


@pytest.mark.processes
def test_the_bound_holds_while_processes_walk_in_different_orders(
    place: Path, shards: list[File]
) -> None:
    room, generator = 3 * SIZE + SIZE // 2, random.Random(7)
    orders = [generator.sample(shards, len(shards)) * 3 for _ in range(3)]
    place.mkdir(mode=0o700)
    walkers = Walkers(place, room_bytes=room, lists=[(order, 2) for order in orders])
    sampled, runs = list[int](), True
    while runs:
        runs = any(walker.exitcode is None for walker in walkers.processes)
        sampled.append(occupied(place))  # also after the end
        time.sleep(0.002)
    assert walkers.finish() == [[file.sha256 for file in order] for order in orders]
    assert 2 * SIZE < max(sampled) <= room
    assert not [*place.glob("*.part")] and len(cached(place)) == 3


def occupied(place: Path) -> int:
    """Return the total bytes of the files. A file that is renamed meanwhile is included once."""
    sizes = {}
    for entry in os.scandir(place):
        if entry.name.endswith((".tar", ".part")):
            with suppress(FileNotFoundError):
                sizes[entry.inode()] = entry.stat().st_size
    return sum(sizes.values())


@pytest.mark.parametrize("seed", range(6))
def test_removals_follow_the_least_recently_used_order(
    place: Path, shards: list[File], seed: int
) -> None:
    """Random holds and releases, compared with a list in the order of use."""
    generator, room = random.Random(seed), 4
    held, unused = list[File](), list[File]()
    with closing(opened(place, room=room)) as ours:
        for _ in range(60):
            if held and (len(held) == room or generator.random() < 0.5):
                file = held.pop(generator.randrange(len(held)))
                ours.release([file])
                unused.append(file)
            else:
                file = generator.choice([each for each in shards if each not in held])
                ours.hold(file)
                held.append(file)
                if file in unused:
                    unused.remove(file)
                elif len(held) + len(unused) > room:
                    unused.pop(0)
            assert cached(place) == {each.sha256 for each in held + unused}
        ours.release(held)


def test_held_files_stay_and_hold_waits_for_room(
    place: Path, shards: list[File], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    with closing(opened(place, room=2)) as ours, closing(opened(place, room=2)) as others:
        use(ours, shards[0])
        ours.hold(shards[0])  # a copy that is present
        others.hold(shards[1])  # a copy that is fetched
        with closing(opened(place, room=2)) as third, fails("no-space", str(place)):
            third.hold(shards[2])
        assert cached(place) == hashes(shards, 0, 1)
        monkeypatch.setattr(module, "WAIT_S", 20)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(others.hold, shards[2])
            ours.release(shards[:1])
            waiting.result()
        assert cached(place) == hashes(shards, 1, 2)


def test_readers_of_the_same_store_release_idle_files_for_each_other(
    place: Path, shards: list[File]
) -> None:
    class Idle:
        def release_idle(self) -> None:
            ours.release(held)
            held.clear()

    with closing(opened(place, room=2)) as ours:
        held, idle = [file for file in shards[:2] if ours.hold(file)], Idle()
        ours.readers.add(idle)
        with holding(ours, shards[2]):
            assert not held


def test_a_held_shard_needs_no_open_file(place: Path, shards: list[File]) -> None:
    """The usual limit is 1,024 open files."""
    with closing(opened(place)) as ours:
        use(ours, shards[0])
        with few_files():
            for file in shards:
                ours.hold(file)


def test_too_large_shards_and_malformed_hashes_are_rejected(
    place: Path, shards: list[File], server: Server
) -> None:
    outside = shards[0]._replace(name="../../outside.tar", sha256="../../outside", num_bytes=1)
    with closing(opened(place, room=0.9)) as ours:
        with fails("no-space", "data.cache_gb"):
            ours.hold(shards[0])
        with fails("unsafe", shards[0].source):
            ours.hold(outside)
        ours.fetch_ahead([*shards, outside])
        wait_until(lambda: not ours._pending)
    assert server[1].gets == {}


def test_read_ahead_follows_its_order_and_removes_nothing_that_is_needed_sooner(
    place: Path, shards: list[File], server: Server, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "NUM_THREADS", 1)
    with closing(opened(place, room=3)) as ours:
        use(ours, shards[7])
        ours.fetch_ahead(shards[:6])
        wait_until(lambda: cached(place) == hashes(shards, 0, 1, 2))
        time.sleep(10 * module.LOOK_S)
        assert server[1].gets == {f"{number}.tar": 1 for number in (7, 0, 1, 2)}
        with closing(opened(place, room=3)) as others, holding(others, shards[0]):
            ours.fetch_ahead([shards[6], shards[1]])
            wait_until(lambda: cached(place) == hashes(shards, 0, 1, 6))


def test_hold_removes_the_file_that_read_ahead_needs_last(
    place: Path, shards: list[File], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "NUM_THREADS", 1)
    with closing(opened(place, room=3)) as ours:
        ours.fetch_ahead(shards[:6])
        wait_until(lambda: ours._ahead == shards[:3])
        with holding(ours, shards[7]):
            assert cached(place) == hashes(shards, 0, 1, 7)
        with holding(ours, *shards[:3]):
            assert cached(place) == hashes(shards, 0, 1, 2)
        wait_until(lambda: cached(place) == hashes(shards, 3, 4, 5))


def test_a_fault_of_read_ahead_is_reported_by_hold(
    place: Path, shards: list[File], folder: Path
) -> None:
    data = (folder / SHARD_0).read_bytes()
    (folder / SHARD_0).unlink()
    with closing(opened(place)) as ours:
        ours.fetch_ahead(shards[:2])
        wait_until(lambda: cached(place) == hashes(shards, 1))
        with pytest.raises(UserError, match=r"/0\.tar"):
            ours.hold(shards[0])
        (folder / SHARD_0).write_bytes(data)
        use(ours, shards[0])


def test_a_new_list_replaces_an_earlier_one(
    place: Path, shards: list[File], server: Server, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 30)
    monkeypatch.setattr(module, "NUM_THREADS", 1)
    server[1].faults = {SHARD_0: ["stall"]}
    with closing(opened(place)) as ours:
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
    assert sorted(path.name for path in place.iterdir()) == [".locks"]


def test_a_file_of_another_size_is_fetched_again_and_a_touched_one_is_not(
    place: Path, shards: list[File], server: Server
) -> None:
    with closing(opened(place)) as ours:
        with holding(ours, shards[0]) as (path,):
            good = path.read_bytes()
        for wrong in (good[:-1], b""):
            path.write_bytes(wrong)
            with holding(ours, shards[0]):
                assert path.read_bytes() == good
        os.utime(path)
        use(ours, shards[0])
        assert server[1].gets == {SHARD_0: 3}
        path.unlink()
        path.symlink_to("/dev/null")
        with holding(ours, shards[0]):
            assert path.read_bytes() == good and not path.is_symlink()


@pytest.mark.processes
def test_a_fork_neither_releases_its_parents_files_nor_keeps_them(
    place: Path, shards: list[File]
) -> None:
    with closing(opened(place, room=2)) as ours:
        for file in shards[:2]:
            ours.hold(file)
        child = os.fork()
        if child == 0:
            del ours
            os._exit(0)
        os.waitpid(child, 0)
        with closing(opened(place, room=2)) as others, fails("no-space"):
            others.make_room([shards[2]])
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(60)
            os._exit(0)
        try:
            ours.release(shards[:2])
            with holding(ours, *shards[2:4]):
                assert cached(place) == hashes(shards, 2, 3)
        finally:
            os.kill(sleeper, signal.SIGKILL)
            os.waitpid(sleeper, 0)


def test_a_directory_that_others_could_have_filled_is_rejected(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").write_bytes(b"")
    for name in ("open", "link", "file"):
        with fails("unsafe", str(tmp_path / name)):
            opened(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with fails("unsafe", str(tmp_path / "mine")):
        opened(tmp_path / "mine")


def test_a_full_disk_and_a_read_only_one_are_one_error(tmp_path: Path, shards: list[File]) -> None:
    """A real file system with room for two shards."""
    disk, size = tmp_path / "disk", (3 * SIZE) // 4096 * 4096
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        with closing(opened(disk)) as ours:
            with holding(ours, *shards[:2]), fails("no-space", str(disk)):
                ours.hold(shards[2])
            assert cached(disk) == hashes(shards, 0, 1) and not [*disk.glob("*.part")]
        del ours
        gc.collect()  # the file of locks is closed
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with fails("unreadable", str(disk)):
            opened(disk)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
