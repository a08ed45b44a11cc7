"""A process of its own that walks through shards, for the tests of the store that several share: `start({...})`.

It says "ready" once its store is open, begins when it is told to, and prints what it found.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pretrain.data.store import store
from pretrain.data.store.directory import File
from tests.ranks import REPOSITORY


def start(directory: Path, *, room_bytes: int, files: list[File], ahead: int = 0) -> subprocess.Popen[str]:
    """Holds one file after the other, while the next `ahead` of them are fetched."""
    task = {"directory": str(directory), "room_bytes": room_bytes, "files": files, "ahead": ahead}
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
    """The hash of each file's bytes."""
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    found: list[str] = json.loads(out)
    return found


def _walk(task: dict[str, Any]) -> list[str]:
    files = [File(*file) for file in task["files"]]
    store.NUM_ATTEMPTS, store.FIRST_PAUSE_S, store.WAIT_S = 3, 0.01, 30
    place, room = Path(task["directory"]), task["room_bytes"]
    ours = store.ShardStore(place, setting="data.cache_dir", max_bytes=room, storage={})
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for number, file in enumerate(files):
        if task["ahead"]:
            ours.fetch_ahead(files[number : number + 1 + task["ahead"]])
        found.append(hashlib.sha256(ours.hold(file).read_bytes()).hexdigest())
        ours.release([file])
    ours.close()
    return found


if __name__ == "__main__":
    print(json.dumps(_walk(json.loads(sys.argv[1]))))
