"""A process of its own that walks through shards, for the tests of the cache that several share: `start({...})`.

It says "ready" once its cache is open, begins when it is told to, and prints what it found.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from data_prep.manifest import Shard
from pretrain.data.shard_cache import ShardCache
from pretrain.data.shard_cache.fetching import Patience
from tests.ranks import REPOSITORY


def start(directory: Path, *, room_bytes: int, shards: list[Shard], ahead: int = 0) -> subprocess.Popen[str]:
    """Holds one shard after the other, while the next `ahead` of them are fetched."""
    task = {
        "directory": str(directory),
        "room_bytes": room_bytes,
        "shards": [shard.model_dump(mode="json") for shard in shards],
        "ahead": ahead,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.pretrain.shard_walker", json.dumps(task)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def go(processes: list[subprocess.Popen[str]]) -> None:
    """All at once, when all are ready."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> list[str]:
    """The hash of each shard's bytes."""
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    found: list[str] = json.loads(out)
    return found


def _walk(task: dict[str, Any]) -> list[str]:
    shards = [Shard.model_validate(shard) for shard in task["shards"]]
    patience = Patience(num_attempts=3, first_pause_s=0.01, silence_s=30, wait_s=30)
    cache = ShardCache(Path(task["directory"]), max_bytes=task["room_bytes"], storage={}, patience=patience)
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for number, shard in enumerate(shards):
        if task["ahead"]:
            cache.fetch_ahead(shards[number : number + 1 + task["ahead"]])
        with cache.hold(shard) as held:
            found.append(hashlib.sha256(held.path.read_bytes()).hexdigest())
    cache.close()
    return found


if __name__ == "__main__":
    print(json.dumps(_walk(json.loads(sys.argv[1]))))
