"""Shards on http and s3 give the same dataset as on disk, for `index` and for later readers. A
server's faults are retried or reported in one line.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from data_prep.cli import main
from data_prep.manifest import load_manifest
from data_prep.remote import copy_to
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import files_of
from tests.data_prep.stock import Web, forget_credentials, index, last_line, sample, write_stock
from tests.errors import fails, printed_errors
from tests.moments import wait_until

NAMES = [f"s-{number:03d}.tar" for number in range(3)]
PATTERN = "s-{000..002}.tar"
pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_credentials(monkeypatch)
    monkeypatch.setattr("data_prep.remote.FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    for number, name in enumerate(NAMES):
        write_stock(folder / name, [sample(10 * number + row) for row in range(4)])
    return folder


@pytest.fixture
def shards(stock: Path, tmp_path: Path) -> Path:
    """Return a copy of the shards, to damage it."""
    return Path(shutil.copytree(stock, tmp_path / "in"))


def without_places(directory: Path) -> dict[str, Any]:
    tree = load_manifest(directory).model_dump(mode="json")
    for split in tree["splits"].values():
        for shard in split["shards"]:
            shard["file"] = Path(shard["file"]).name
    return tree


def same_but_for_places(one: Path, two: Path) -> None:
    assert without_places(one) == without_places(two)
    ours, theirs = files_of(one), files_of(two)
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"manifest.json", "versions.json"}:
        assert ours[name] == theirs[name], name


def test_http_gives_the_dataset_that_local_files_give(
    tmp_path: Path, shards: Path, server: tuple[str, Web]
) -> None:
    address, state = server
    assert index(tmp_path / "local", shards / PATTERN) == 0
    assert index(tmp_path / "http", f"{address}/{PATTERN}", "num_workers=2") == 0
    same_but_for_places(tmp_path / "local", tmp_path / "http")
    files = [shard.file for shard in load_manifest(tmp_path / "http").splits["train"].shards]
    assert files == [f"{address}/{name}" for name in NAMES]
    gets = dict(state.gets)
    assert gets == dict.fromkeys(NAMES, 1)
    assert index(tmp_path / "http", f"{address}/{PATTERN}") == 0
    assert state.gets == gets


def test_faults_that_pass_are_tried_again(
    tmp_path: Path, shards: Path, server: tuple[str, Web]
) -> None:
    address, state = server
    state.faults = {NAMES[0]: ["cut", "cut"], NAMES[1]: [500, 503], NAMES[2]: [None, "cut"]}
    assert index(tmp_path / "local", shards / PATTERN) == 0
    assert index(tmp_path / "http", f"{address}/{PATTERN}") == 0
    same_but_for_places(tmp_path / "local", tmp_path / "http")
    assert state.gets[NAMES[0]] == 3


@pytest.mark.parametrize(
    ("fault", "code", "kind"),
    [
        ("cut", 1, "unreachable"),
        (500, 1, "unreachable"),
        (404, 2, "missing-path"),
        (403, 2, "no-access"),
    ],
)
def test_faults_that_stay_are_one_line_and_leave_what_is_finished(
    tmp_path: Path,
    server: tuple[str, Web],
    fault: str | int,
    code: int,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, state = server
    state.faults = {NAMES[2]: [fault] * 20}
    out = tmp_path / "out"
    assert index(out, f"{address}/{PATTERN}", "num_attempts=2") == code
    assert printed_errors(last_line(capsys)) == [(f"{address}/{NAMES[2]}", kind)]
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob(".tmp-*"))
    before = state.gets.get(NAMES[0], 0)
    assert before == (1 if fault == "cut" else 0)
    state.faults = {}
    assert index(out, f"{address}/{PATTERN}") == 0
    assert state.gets[NAMES[0]] == 1


def test_a_full_disk_is_not_the_servers_fault(
    tmp_path: Path, server: tuple[str, Web], capsys: pytest.CaptureFixture[str]
) -> None:
    with fails("no-space", str(tmp_path)):
        url = f"{server[0]}/{NAMES[0]}"
        copy_to(url, Path("/dev/full"), storage={}, room=tmp_path, num_attempts=2)
    assert capsys.readouterr().err == ""  # no retry


@pytest.mark.parametrize("marks", [True, False])
def test_a_changed_object_is_refused_even_where_the_server_says_nothing_of_versions(
    tmp_path: Path, shards: Path, server: tuple[str, Web], marks: bool, refused: Refused
) -> None:
    address, state = server
    state.marks = marks
    out = tmp_path / "out"
    assert index(out, f"{address}/{PATTERN}") == 0
    write_stock(shards / NAMES[1], [sample(90 + row) for row in range(4)])
    refused(index(out, f"{address}/{PATTERN}"), f"{address}/{NAMES[1]}: ", "[changed]")
    assert state.gets == (
        {**dict.fromkeys(NAMES, 1), NAMES[1]: 2} if marks else dict.fromkeys(NAMES, 2)
    )


def test_a_key_of_a_web_server_goes_through_storage_and_nowhere_else(
    tmp_path: Path, server: tuple[str, Web], capsys: pytest.CaptureFixture[str]
) -> None:
    address, state = server
    state.key = "key=secret-word"
    storage = "storage={params: {key: secret-word}}"
    assert index(tmp_path / "none", f"{address}/{PATTERN}") == 2
    assert index(tmp_path / "out", f"{address}/{PATTERN}", storage) == 0
    assert not any(b"secret-word" in data for data in files_of(tmp_path / "out").values())
    state.faults = {NAMES[0]: [500] * 9}
    capsys.readouterr()
    assert index(tmp_path / "other", f"{address}/{PATTERN}", storage, "num_attempts=1") == 1
    said = last_line(capsys)
    assert printed_errors(said) == [(f"{address}/{NAMES[0]}", "unreachable")]
    assert "secret-word" not in said


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, refused: Refused) -> None:
    refused(
        index(tmp_path / "out", "http://127.0.0.1:9/a.tar", "num_attempts=2"),
        "data_prep: http://127.0.0.1:9/a.tar: ",
        "[unreachable]",
        code=1,
    )


def test_a_server_that_does_not_answer_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("data_prep.remote.ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("data_prep.remote.SLOW_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never replies
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        assert index(tmp_path / "out", address, "num_attempts=2") == 1
    *_, first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"data_prep: {address}: ") and first.endswith("attempt 2 of 2 follows")
    assert printed_errors(last) == [(address, "unreachable")]


def test_all_damaged_shards_are_named_in_one_run(
    tmp_path: Path, shards: Path, server: tuple[str, Web], refused: Refused
) -> None:
    for name in NAMES[1:]:
        (shards / name).write_bytes(b"<html>please sign in</html>" * 50)
    for place in (shards, server[0]):
        damaged = [f"{place}/{name}: the tar is damaged at byte 0" for name in NAMES[1:]]
        refused(
            index(tmp_path / "out", f"{place}/{PATTERN}"),
            f"data_prep: {damaged[0]}: ",
            f"(and 1 more: {damaged[1]}",
            "[damaged]",
        )
        shutil.rmtree(tmp_path / "out")


def test_a_classes_file_of_windows_begins_with_a_mark_and_one_of_another_encoding_is_refused(
    tmp_path: Path, shards: Path, refused: Refused
) -> None:
    classes, word = tmp_path / "classes.txt", f"classes_file={tmp_path / 'classes.txt'}"
    classes.write_bytes(b"caf\xe9\ndog\ncat\n")
    refused(index(tmp_path / "out", shards / PATTERN, word), "[unreadable]")
    classes.write_text("ant\r\nbee\r\ncat\r\n", encoding="utf-8-sig")
    assert index(tmp_path / "out", shards / PATTERN, word) == 0
    assert load_manifest(tmp_path / "out").classes == ("ant", "bee", "cat")


# ---- later readers


def every_verb(
    dataset: Path | str, storage: str, out: Path, *, num_workers: int = 1
) -> dict[str, int]:
    """Run each command. Return the exit codes."""
    words = {
        "verify": ["--workers", str(num_workers)],
        "stats": ["--recompute", "--workers", str(num_workers)],
        "preview": ["--out", str(out / "sheet.png")],
        "dedup": ["--out", str(out / "list.jsonl"), "--workers", "1"],
    }
    return {
        verb: main([verb, str(dataset), "--storage", storage, *more])
        for verb, more in words.items()
    }


def test_storage_that_is_no_json_is_one_line_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path), "--storage", "secret-word"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert printed_errors(said) == [("--storage", "bad-value")]
    assert "secret-word" not in said


def test_every_verb_reads_from_a_web_server_that_asks_for_a_key(
    tmp_path: Path, server: tuple[str, Web], capsys: pytest.CaptureFixture[str]
) -> None:
    address, state = server
    state.key = "key=secret-word"
    storage = {"params": {"key": "secret-word"}}
    assert index(tmp_path / "http", f"{address}/{PATTERN}", f"storage={json.dumps(storage)}") == 0
    assert set(
        every_verb(tmp_path / "http", json.dumps(storage), tmp_path, num_workers=2).values()
    ) == {0}
    assert set(every_verb(tmp_path / "http", "{}", tmp_path).values()) == {2}
    said = capsys.readouterr().err
    assert (f"{address}/{NAMES[0]}", "no-access") in printed_errors(said)
    assert "secret-word" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_verb_leaves_no_copy_of_a_shard(
    tmp_path: Path, server: tuple[str, Web], number: signal.Signals
) -> None:
    address, state = server
    assert index(tmp_path / "http", f"{address}/{PATTERN}") == 0
    state.faults, state.gets = {name: ["stall"] for name in NAMES}, {}
    words = [sys.executable, "-m", "data_prep", "verify", str(tmp_path / "http"), "--workers", "2"]
    # a short path, because it contains the workers' socket
    with TemporaryDirectory(dir="/tmp") as folder:
        verb = subprocess.Popen(
            words, env={**os.environ, "TMPDIR": folder}, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: len(state.gets) >= 2, lives=lambda: verb.poll() is None)
        workers = psutil.Process(verb.pid).children(recursive=True)
        verb.send_signal(number)
        verb.wait(30)
        psutil.wait_procs(workers, timeout=30)
        assert not [
            path
            for place in (folder, tmp_path / "http")
            for path in Path(place).rglob("*")
            if path.suffix == ".tar"
        ]
