"""The cache of remote shards: whole and right or not there, one download a node, never above its bound, whatever fails or dies."""

import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.manifest import Shard
from data_prep.remote import StoppedError
from data_prep.settings import UserError
from pretrain.data.shard_cache import Held, ShardCache
from pretrain.data.shard_cache.ahead import LOOK_AGAIN_S, ReadAhead
from pretrain.data.shard_cache.directory import Refusal
from pretrain.data.shard_cache.fetching import Patience
from tests.data_prep.stock import Web, forget_credentials, s3_server, web
from tests.moments import wait_until
from tests.pretrain.shard_walker import finish, go, start

SIZE = 40_000
NUM_SHARDS = 8
QUICK = Patience(num_attempts=4, first_pause_s=0.01, silence_s=0.3, wait_s=20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_credentials(monkeypatch)
    found = tmp_path / "far"
    found.mkdir()
    for number in range(NUM_SHARDS):
        data = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8).tobytes()
        (found / f"{number}.tar").write_bytes(data)
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, Web]]:
    with web(folder) as found:
        yield found


@pytest.fixture
def shards(folder: Path, server: tuple[str, Web]) -> list[Shard]:
    return [shard_of(folder / f"{number}.tar", server[0]) for number in range(NUM_SHARDS)]


def shard_of(path: Path, address: str) -> Shard:
    data = path.read_bytes()
    return Shard(
        name=f"train-{path.stem}",
        file=f"{address}/{path.name}",
        num_samples=1,
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        index_sha256="",
        paths_sha256="",
    )


def cache(directory: Path, *, room: int = NUM_SHARDS, patience: Patience = QUICK, **more: Any) -> ShardCache:
    return ShardCache(directory, max_bytes=room * SIZE, **{"storage": {}, "patience": patience, **more})


def cached(directory: Path) -> set[str]:
    """The hashes of the files under final names, each of which is what its name says."""
    found = set()
    for path in directory.glob("*.tar"):
        with suppress(FileNotFoundError):  # evicted while we look
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
            found.add(path.stem)
    return found


def parts(directory: Path) -> list[Path]:
    return list(directory.glob("*.part"))


def test_a_shard_is_fetched_verified_and_kept(tmp_path: Path, shards: list[Shard], server: tuple[str, Web]) -> None:
    for _ in range(2):
        with closing(cache(tmp_path / "cache")) as ours, ours.hold(shards[0]) as held:
            assert hashlib.sha256(held.path.read_bytes()).hexdigest() == shards[0].sha256
    assert server[1].gets == {"0.tar": 1}
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", f"{shards[0].sha256}.tar"]


@pytest.mark.parametrize("faults", [[500, 503, 429], ["stall"], ["cut", "cut"], ["wrong"], ["cut", "wrong", 500]])
def test_what_may_pass_is_tried_again(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web], faults: list[Any]
) -> None:
    server[1].faults = {"0.tar": list(faults)}
    before = random.getstate()
    with closing(cache(tmp_path / "cache")) as ours, ours.hold(shards[0]):
        assert cached(tmp_path / "cache") == {shards[0].sha256}
    assert server[1].gets == {"0.tar": len(faults) + 1}
    assert random.getstate() == before, "the order of training must not feel a server"


@pytest.mark.parametrize(("num_faults", "num_lines"), [(1, 0), (3, 1)])
def test_whoever_waits_for_a_failing_server_is_told(
    tmp_path: Path,
    shards: list[Shard],
    server: tuple[str, Web],
    num_faults: int,
    num_lines: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once in a while, and not at the first fault, which passes as a rule."""
    address, state = server
    state.key, state.faults = "key=secret-word", {f"{number}.tar": [500] * num_faults for number in range(3)}
    with closing(cache(tmp_path / "cache", storage={"params": {"key": "secret-word"}})) as ours:
        for number in range(3):
            ours.hold(shards[number]).release()
    said = capsys.readouterr().err
    assert len(said.splitlines()) == num_lines and "secret-word" not in said
    assert not said or re.match(rf"waiting for {re.escape(address)}/0.tar: 500.*; attempt 3 of 4 follows", said)


@pytest.mark.parametrize(
    ("fault", "num_gets", "words"),
    [
        ("wrong", 4, r"delivers sha256 [0-9a-f]{64} instead of {sha256} that the manifest promises.*; it was changed"),
        ("cut", 4, r"cannot be read after 4 attempts"),
        ("stall", 4, r"cannot be read after 4 attempts"),
        (500, 4, r"cannot be read after 4 attempts \(500"),
        (404, 1, r"there is no such file; mend the address"),
        (403, 1, r"access is refused; give credentials"),
    ],
)
def test_what_stays_is_one_line_without_secrets_and_leaves_nothing(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web], fault: Any, num_gets: int, words: str
) -> None:
    address, state = server
    state.key, state.faults = "key=secret-word", {"0.tar": [fault] * 9}
    words = words.replace("{sha256}", shards[0].sha256)
    with closing(cache(tmp_path / "cache", storage={"params": {"key": "secret-word"}})) as ours:
        with pytest.raises(UserError, match=f"^{re.escape(address)}/0.tar: {words}") as caught:
            ours.hold(shards[0])
        assert "secret-word" not in str(caught.value)
        assert state.gets == {"0.tar": num_gets}
        assert cached(tmp_path / "cache") == set() and not parts(tmp_path / "cache")
        with ours.hold(shards[1]):
            assert cached(tmp_path / "cache") == {shards[1].sha256}


def test_a_longer_and_a_shorter_file_are_named(tmp_path: Path, folder: Path, shards: list[Shard]) -> None:
    data = (folder / "0.tar").read_bytes()
    with closing(cache(tmp_path / "cache", room=1)) as ours:
        for wrong, words in [(data * 20, "delivers more than the 40,000 bytes"), (data[:-9], "39,991 of the 40,000")]:
            (folder / "0.tar").write_bytes(wrong)
            with pytest.raises(UserError, match=words):
                ours.hold(shards[0])
    assert cached(tmp_path / "cache") == set() and not parts(tmp_path / "cache")


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, shards: list[Shard]) -> None:
    gone = shards[0].model_copy(update={"file": "http://me:secret-word@127.0.0.1:9/0.tar?key=secret-word"})
    words = "^http://127.0.0.1:9/0.tar: cannot be read after 4 attempts"
    with closing(cache(tmp_path / "cache")) as ours, pytest.raises(UserError, match=words) as caught:
        ours.hold(gone)
    assert "secret-word" not in str(caught.value)


def test_s3_gives_the_same_in_pieces_and_says_what_is_missing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.remote._S3_CHUNK_BYTES", SIZE * 2 // 5)
    with s3_server(folder) as storage:
        there = [shard_of(folder / f"{number}.tar", "s3://pictures/some") for number in range(3)]
        missing = there[0].model_copy(update={"file": "s3://pictures/some/gone.tar", "sha256": "0" * 64})
        changed = there[0].model_copy(update={"sha256": "1" * 64})
        with closing(cache(tmp_path / "cache", storage=json.loads(storage))) as ours:
            ours.fetch_ahead(there)
            for shard in there:
                ours.hold(shard).release()
            assert cached(tmp_path / "cache") == {shard.sha256 for shard in there}
            with pytest.raises(UserError, match=r"^s3://pictures/some/gone.tar: there is no such file"):
                ours.hold(missing)
            with pytest.raises(
                UserError, match=r"^s3://pictures/some/0.tar: delivers sha256 [0-9a-f]{64} instead of 111"
            ):
                ours.hold(changed)
        wrong = json.loads(storage) | {"wrong": 1}
        words = "^storage: s3 does not take these options"
        with closing(cache(tmp_path / "other", storage=wrong)) as ours, pytest.raises(UserError, match=words):
            ours.hold(there[0])
    assert not parts(tmp_path / "cache")


@pytest.mark.parametrize("fresh", [True, False])
def test_what_a_killed_process_leaves_is_never_trusted(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web], fresh: bool
) -> None:
    server[1].faults = {"0.tar": ["stall"]}
    place, ours = tmp_path / "cache", cache(tmp_path / "cache", room=1)
    other = start(place, room_bytes=SIZE, shards=shards[:2], ahead=1)
    go([other])
    wait_until(lambda: server[1].gets == {"0.tar": 1})
    other.send_signal(signal.SIGKILL)
    other.communicate()
    # a second .part is there if it died while it looked whether there is room for that one, too
    assert (place / f"{shards[0].sha256}.part").stat().st_size == SIZE and cached(place) == set()
    if fresh:
        ours.close()
        ours = cache(place, room=1)
        assert not parts(place) and not list(place.glob("*.wants"))
    # the dead one's room is to be had, for its own shard as for another
    with closing(ours), ours.hold(shards[0 if fresh else 1]) as held:
        assert cached(place) == {held.path.stem} and not parts(place)


def test_four_processes_fetch_each_shard_once(tmp_path: Path, shards: list[Shard], server: tuple[str, Web]) -> None:
    place = tmp_path / "cache"
    walkers = [start(place, room_bytes=NUM_SHARDS * SIZE, shards=shards, ahead=ahead) for ahead in (0, 0, 3, 7)]
    go(walkers)
    for walker in walkers:
        assert finish(walker) == [shard.sha256 for shard in shards]
    assert server[1].gets == {f"{number}.tar": 1 for number in range(NUM_SHARDS)}
    assert sorted(path.suffix for path in place.iterdir() if path.suffix) == [".tar"] * NUM_SHARDS


def test_the_bound_holds_while_processes_walk_in_different_orders(tmp_path: Path, shards: list[Shard]) -> None:
    place, room = tmp_path / "cache", 3 * SIZE + SIZE // 2
    generator = random.Random(7)
    orders = [generator.sample(shards, len(shards)) * 3 for _ in range(3)]
    walkers = [start(place, room_bytes=room, shards=order, ahead=2) for order in orders]
    go(walkers)
    sampled, walk = list[int](), True
    while walk:
        walk = any(walker.poll() is None for walker in walkers)
        sampled.append(occupied(place))  # also when all have ended: with three in it
        time.sleep(0.002)
    for walker, order in zip(walkers, orders, strict=True):
        assert finish(walker) == [shard.sha256 for shard in order]
    assert 2 * SIZE < max(sampled) <= room
    assert not parts(place) and len(cached(place)) == 3


def occupied(place: Path) -> int:
    """By shards, whole or on their way; a file may be renamed, or go, while we look, and is then counted once at most."""
    sizes = {}
    for entry in os.scandir(place):
        if entry.name.endswith((".tar", ".part")):
            with suppress(FileNotFoundError):
                sizes[entry.inode()] = entry.stat().st_size
    return sum(sizes.values())


def test_the_longest_unused_goes_first(tmp_path: Path, shards: list[Shard]) -> None:
    with closing(cache(tmp_path / "cache", room=3)) as ours:
        for number in (0, 1, 2, 0, 3):
            ours.hold(shards[number]).release()
        assert cached(tmp_path / "cache") == {shards[number].sha256 for number in (0, 2, 3)}
        long = ours.hold(shards[2])
        ours.hold(shards[0]).release()
        long.release()  # until now it was in use
        ours.hold(shards[4]).release()
        ours.hold(shards[5]).release()
        assert cached(tmp_path / "cache") == {shards[number].sha256 for number in (2, 4, 5)}


def test_what_is_held_stays_and_whoever_needs_room_waits(tmp_path: Path, shards: list[Shard]) -> None:
    hasty = Patience(num_attempts=1, wait_s=0.2)
    with closing(cache(tmp_path / "cache", room=2)) as ours, closing(cache(tmp_path / "cache", room=2)) as others:
        held = [ours.hold(shards[0]), others.hold(shards[1])]
        third = cache(tmp_path / "cache", room=2, patience=hasty)
        with closing(third), pytest.raises(UserError, match=r"no room for .*/2.tar .* raise data.cache_gb"):
            third.hold(shards[2])
        assert cached(tmp_path / "cache") == {shards[0].sha256, shards[1].sha256}
        for each in held:
            each.release()
            each.release()


def test_read_ahead_leaves_room_that_somebody_waits_for(
    tmp_path: Path, folder: Path, shards: list[Shard], server: tuple[str, Web]
) -> None:
    place = tmp_path / "cache"
    (folder / "big.tar").write_bytes(bytes(range(250)) * (2 * SIZE // 250))
    big = shard_of(folder / "big.tar", server[0])
    found: list[Held] = []
    with closing(cache(place, room=2)) as ours, closing(cache(place, room=2)) as others:
        held = [ours.hold(shards[0]), ours.hold(shards[1])]
        waiting = threading.Thread(target=lambda: found.append(others.hold(big)))
        waiting.start()
        wait_until(lambda: any(f'"waiting_bytes": {2 * SIZE}' in path.read_text() for path in place.glob("*.wants")))
        ours.fetch_ahead([shards[3]])
        held[0].release()
        time.sleep(3 * LOOK_AGAIN_S)
        assert "3.tar" not in server[1].gets
        held[1].release()
        waiting.join()
        assert cached(place) == {big.sha256}
        found[0].release()
        wait_until(lambda: cached(place) == {shards[3].sha256})


def test_more_shards_may_be_held_than_the_usual_limit_of_open_files(tmp_path: Path, shards: list[Shard]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(cache(tmp_path / "before")) as ours, ExitStack() as held:
        for shard in shards:
            held.enter_context(ours.hold(shard))
        spare = len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare - 4, hard))
        with closing(cache(tmp_path / "before")) as ours, ExitStack() as held:
            for shard in shards:
                held.enter_context(ours.hold(shard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_above_the_bound_and_a_hash_that_is_none_are_refused(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web]
) -> None:
    with closing(ShardCache(tmp_path / "cache", max_bytes=SIZE - 1, storage={})) as ours:
        with pytest.raises(UserError, match=r"more than the whole cache of .*raise data.cache_gb"):
            ours.hold(shards[0])
        with pytest.raises(UserError, match=r"sha256 '../../outside' in the manifest is none"):
            ours.hold(shards[0].model_copy(update={"sha256": "../../outside"}))
        ours.fetch_ahead(shards)
    assert server[1].gets == {}


def test_read_ahead_takes_what_fits_in_order_and_gives_up_nothing_for_what_is_needed_later(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web]
) -> None:
    place = tmp_path / "cache"
    with (
        closing(cache(place, room=3, parallel_downloads=1)) as ours,
        closing(cache(place, room=3, parallel_downloads=1)) as others,
    ):
        ours.hold(shards[7]).release()
        ours.fetch_ahead(shards[:6])
        # what was used goes for what will be used
        wait_until(lambda: cached(place) == {shards[number].sha256 for number in (0, 1, 2)})
        others.fetch_ahead([shards[6], shards[5], shards[0], shards[4]])
        # 2 is needed after two others, and 6 at once; 5 is needed after one other, as is 1, so 1 stays
        wait_until(lambda: cached(place) == {shards[number].sha256 for number in (0, 1, 6)})
        time.sleep(3 * LOOK_AGAIN_S)
        assert cached(place) == {shards[number].sha256 for number in (0, 1, 6)}
        assert server[1].gets == {f"{number}.tar": 1 for number in (7, 0, 1, 2, 6)}


def test_hold_comes_before_what_was_read_ahead_and_takes_what_is_needed_last(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web]
) -> None:
    place = tmp_path / "cache"
    with (
        closing(cache(place, room=3, parallel_downloads=1)) as ours,
        closing(cache(place, room=3, parallel_downloads=1)) as others,
    ):
        ours.fetch_ahead(shards[:6])
        wait_until(lambda: len(cached(place)) == 3)
        with others.hold(shards[7]):
            assert cached(place) == {shards[number].sha256 for number in (0, 1, 7)}
        wait_until(lambda: cached(place) == {shards[number].sha256 for number in (0, 1, 2)})
        with ours.hold(shards[0]), ours.hold(shards[1]), ours.hold(shards[2]):
            assert not parts(place)
        wait_until(lambda: cached(place) == {shards[number].sha256 for number in (3, 4, 5)})


def test_what_fails_in_the_background_is_said_to_whoever_needs_it(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web], folder: Path
) -> None:
    data = (folder / "0.tar").read_bytes()
    (folder / "0.tar").unlink()
    with closing(cache(tmp_path / "cache", parallel_downloads=1)) as ours:
        ours.fetch_ahead(shards[:2])
        wait_until(lambda: cached(tmp_path / "cache") == {shards[1].sha256})
        with pytest.raises(UserError, match=r"/0.tar: there is no such file"):
            ours.hold(shards[0])
        (folder / "0.tar").write_bytes(data)
        ours.hold(shards[0]).release()


def test_a_new_list_replaces_what_has_not_begun(tmp_path: Path, shards: list[Shard], server: tuple[str, Web]) -> None:
    server[1].faults = {"0.tar": ["stall"]}
    patience = Patience(num_attempts=2, first_pause_s=0.01, silence_s=30)
    with closing(cache(tmp_path / "cache", parallel_downloads=1, patience=patience)) as ours:
        ours.fetch_ahead(shards[:4])
        wait_until(lambda: server[1].gets == {"0.tar": 1})
        ours.fetch_ahead([shards[5], shards[0]])
        server[1].gate.set()
        wait_until(lambda: len(cached(tmp_path / "cache")) == 2)
    assert server[1].gets == {"0.tar": 1, "5.tar": 1}


def test_closing_ends_a_download_and_every_wait(tmp_path: Path, shards: list[Shard], server: tuple[str, Web]) -> None:
    server[1].faults = {"0.tar": ["stall"] * 9}
    before = threading.active_count()
    ours = cache(tmp_path / "cache", patience=Patience(silence_s=150, wait_s=150))
    ours.fetch_ahead(shards[:1])
    wait_until(lambda: server[1].gets == {"0.tar": 1})
    found: list[BaseException] = []

    def needs() -> None:
        try:
            ours.hold(shards[0])
        except StoppedError as error:
            found.append(error)

    waiting = threading.Thread(target=needs)
    waiting.start()
    ours.close()
    waiting.join()
    assert len(found) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "shard-cache"], before
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock"]


def test_a_file_that_somebody_changed_is_fetched_again_and_one_only_touched_is_not(
    tmp_path: Path, shards: list[Shard], server: tuple[str, Web]
) -> None:
    with closing(cache(tmp_path / "cache")) as ours:
        path = ours.hold(shards[0])
        path.release()
        good = path.path.read_bytes()
        for wrong in (good[:-1], b"", good[:-1] + bytes([good[-1] ^ 1])):
            path.path.write_bytes(wrong)
            with ours.hold(shards[0]) as held:
                assert held.path.read_bytes() == good
        assert server[1].gets == {"0.tar": 4}
        os.utime(path.path)
        ours.hold(shards[0]).release()
        assert server[1].gets == {"0.tar": 4}
        path.path.unlink()
        path.path.symlink_to("/dev/null")
        with ours.hold(shards[0]) as held:
            assert held.path.read_bytes() == good and not held.path.is_symlink()
        with ours.hold(
            shards[0]
        ) as held:  # written to while it is held: what is seen must not be called right at the end
            held.path.write_bytes(good[:-1] + b"?")
        with ours.hold(shards[0]) as held:
            assert held.path.read_bytes() == good


def test_threads_of_one_process_share_it(tmp_path: Path, shards: list[Shard]) -> None:
    found: list[bool] = []

    def walk(seed: int) -> None:
        for shard in random.Random(seed).sample(shards, len(shards)):
            with ours.hold(shard) as held:
                found.append(hashlib.sha256(held.path.read_bytes()).hexdigest() == shard.sha256)

    with closing(cache(tmp_path / "cache", room=4)) as ours:
        threads = [threading.Thread(target=walk, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * (4 * NUM_SHARDS)
    assert len(cached(tmp_path / "cache")) == 4


def test_a_fork_neither_lets_go_of_its_parents_shards_nor_keeps_them(tmp_path: Path, shards: list[Shard]) -> None:
    with closing(cache(tmp_path / "cache", room=2)) as ours:
        ours.fetch_ahead(shards[:1])
        held = ours.hold(shards[0])
        done, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                held.release()
                with ours.hold(shards[1]):  # fetched by the child
                    os.write(tell, b"held")
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0 and os.read(done, 9) == b"held"
        others = cache(tmp_path / "cache", room=1, patience=Patience(wait_s=0.1))
        with closing(others), pytest.raises(UserError, match="no room"):
            others.hold(shards[2])
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(60)
            os._exit(0)
        try:
            held.release()
            with ours.hold(shards[2]), ours.hold(shards[3]):
                assert cached(tmp_path / "cache") == {shards[2].sha256, shards[3].sha256}
        finally:
            os.kill(sleeper, signal.SIGKILL)
            os.waitpid(sleeper, 0)
            os.close(done)
            os.close(tell)


def test_a_directory_that_others_could_have_filled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "file").write_bytes(b"")
    for name, words in [
        ("open", "others may write there"),
        ("link", "is a link, which others may turn"),
        ("file", "is no directory"),
    ]:
        with pytest.raises(UserError, match=f"{name}: {words}.*data.cache_dir"):
            cache(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match=r"mine: belongs to user .* cannot be trusted; name a directory of your own"):
        cache(tmp_path / "mine")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for two shards."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    words = ["mount", "-t", "tmpfs", "-o", f"size={(3 * SIZE) // 4096 * 4096},mode=700", "tmpfs", str(place)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_and_a_read_only_one_are_one_line(tiny_disk: Path, shards: list[Shard]) -> None:
    with closing(cache(tiny_disk)) as ours:
        held = [ours.hold(shard) for shard in shards[:2]]
        with pytest.raises(UserError, match=r"its disk is full; free some of it, lower data.cache_gb"):
            ours.hold(shards[2])
        assert cached(tiny_disk) == {shard.sha256 for shard in shards[:2]} and not parts(tiny_disk)
        for each in held:
            each.release()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(UserError, match=r"cannot be written to; name another directory as data.cache_dir"):
        cache(tiny_disk)


def test_a_disk_without_room_for_a_list_of_wants_is_one_line_and_harms_nobody_else(
    tiny_disk: Path, shards: list[Shard]
) -> None:
    with closing(cache(tiny_disk)) as ours, closing(cache(tiny_disk)) as others:
        others.hold(shards[0]).release()
        others.fetch_ahead([shards[0]])
        with open(tiny_disk / "of-others", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        many = [shards[0].model_copy(update={"sha256": f"{number:064x}"}) for number in range(500)]
        for each in (ours, others):
            with pytest.raises(UserError, match=r"its disk is full; free some of it"):
                each.fetch_ahead(many)
        with others.hold(shards[0]):
            assert cached(tiny_disk) == {shards[0].sha256}
        (tiny_disk / "of-others").unlink()
        with ours.hold(shards[1]), others.hold(shards[0]):
            assert cached(tiny_disk) == {shard.sha256 for shard in shards[:2]}


def test_read_ahead_without_room_looks_again_now_and_then_and_does_not_spin(shards: list[Shard]) -> None:
    asked: list[int] = []

    def reserve(shard: Shard, place: int) -> Refusal:
        asked.append(place)
        return Refusal.NO_ROOM

    ahead = ReadAhead(reserve, is_whole=lambda shard: False, num_threads=2)
    ahead.want(shards)
    ahead.go()
    began_s = time.monotonic()
    wait_until(lambda: len(asked) >= 6)
    num_asked, took_s = len(asked), time.monotonic() - began_s
    ahead.close()
    assert set(asked) <= {0, 1} and num_asked <= 2 * (
        1 + took_s / LOOK_AGAIN_S
    )  # somebody who spins asks six times at once


def test_room_is_taken_in_the_order_of_need_by_whichever_thread(shards: list[Shard]) -> None:
    taken: list[str] = []

    def reserve(shard: Shard, place: int) -> Callable[[], None]:
        time.sleep(0.05 / (place + 1))  # the first one is the slowest
        taken.append(shard.name)
        return lambda: None

    ahead = ReadAhead(reserve, is_whole=lambda shard: shard.name in taken, num_threads=4)
    ahead.want(shards)
    ahead.go()
    wait_until(lambda: len(taken) == len(shards))
    ahead.close()
    assert taken == [shard.name for shard in shards]
