"""The cache of remote shards: whole and right or not there, one download a node, never above its bound, whatever fails or dies."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.manifest import Shard
from pretrain.shard_cache import ShardCache
from pretrain.shard_cache.fetching import Patience
from tests.data_prep.stock import Web, forget_credentials, web

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
    found = {path.stem for path in directory.glob("*.tar")}
    assert found == {hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.tar")}
    return found


def parts(directory: Path) -> list[Path]:
    return list(directory.glob("*.part"))


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_shard_is_fetched_verified_and_kept(tmp_path: Path, shards: list[Shard], server: tuple[str, Web]) -> None:
    for _ in range(2):
        with closing(cache(tmp_path / "cache")) as ours, ours.hold(shards[0]) as held:
            assert hashlib.sha256(held.path.read_bytes()).hexdigest() == shards[0].sha256
    assert server[1].gets == {"0.tar": 1}
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", f"{shards[0].sha256}.tar"]
