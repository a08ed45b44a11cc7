"""What reads a dataset again reads remote shards as `index` does: with its storage options, its patience and its checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.check.stats import stats
from data_prep.cli import main
from tests.data_prep.samples import files_of
from tests.data_prep.stock import Web, forget_credentials, index, s3_server, sample, write_stock

NAMES = ("s-0.tar", "s-1.tar")


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_credentials(monkeypatch)
    monkeypatch.setattr("data_prep.remote.FIRST_PAUSE_S", 0.01)
    for number, name in enumerate(NAMES):
        write_stock(tmp_path / "in" / name, [sample(10 * number + row) for row in range(4)])
    return tmp_path / "in"


def every_verb(dataset: Path, storage: str, out: Path) -> dict[str, int]:
    """The exit codes."""
    words = {
        "verify": ["--workers", "1"],
        "stats": ["--recompute", "--workers", "1"],
        "show": ["--out", str(out / "sheet.png")],
        "dedup": ["--out", str(out / "list.jsonl"), "--workers", "1"],
    }
    return {verb: main([verb, str(dataset), "--storage", storage, *more]) for verb, more in words.items()}


def test_every_verb_reads_from_s3_with_storage_options(tmp_path: Path, shards: Path) -> None:
    with s3_server(shards) as storage:
        assert index(tmp_path / "s3", "s3://pictures/some/*.tar", f"storage={storage}") == 0
        before = files_of(tmp_path / "s3")
        assert set(every_verb(tmp_path / "s3", storage, tmp_path).values()) == {0}
        assert files_of(tmp_path / "s3") == before
        assert index(tmp_path / "local", shards / "s-{0,1}.tar") == 0
        ours = stats(tmp_path / "s3", recompute=True, storage=json.loads(storage))
    theirs = stats(tmp_path / "local", recompute=True)
    for found in (ours, theirs):
        del found["dataset"]
    assert ours == theirs


def test_every_verb_reads_from_a_web_server_that_asks_for_a_key(
    tmp_path: Path, server: tuple[str, Web], capsys: pytest.CaptureFixture[str]
) -> None:
    address, state = server
    state.key = "key=secret-word"
    storage = {"params": {"key": "secret-word"}}
    assert index(tmp_path / "http", f"{address}/s-{{0,1}}.tar", f"storage={json.dumps(storage)}") == 0
    assert set(every_verb(tmp_path / "http", json.dumps(storage), tmp_path).values()) == {0}
    assert set(every_verb(tmp_path / "http", "{}", tmp_path).values()) == {2}
    said = capsys.readouterr().err
    assert f"{address}/s-0.tar: access is refused; give credentials" in said
    assert "secret-word" not in said


@pytest.mark.parametrize("fault", ["cut", 500])
def test_faults_that_pass_are_tried_again_and_others_are_named(
    tmp_path: Path, server: tuple[str, Web], fault: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    address, state = server
    assert index(tmp_path / "http", f"{address}/s-{{0,1}}.tar") == 0
    state.faults = {NAMES[1]: [fault, fault]}
    assert main(["verify", str(tmp_path / "http"), "--workers", "1"]) == 0
    state.faults = {NAMES[1]: [fault] * 99}
    capsys.readouterr()
    assert set(every_verb(tmp_path / "http", "{}", tmp_path).values()) == {1}
    said = capsys.readouterr()
    assert f"{address}/s-1.tar: cannot be read after 4 attempts" in said.out
    assert said.err.count(f"data_prep: {address}/s-1.tar: cannot be read after 4 attempts") == 3
    assert not list((tmp_path / "http").glob(".tmp-*"))


def test_wrong_options_are_one_line(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with s3_server(shards) as storage:
        assert index(tmp_path / "s3", "s3://pictures/some/*.tar", f"storage={storage}") == 0
        capsys.readouterr()
        assert main(["verify", str(tmp_path / "s3"), "--storage", '{"wrong": 1}', "--workers", "1"]) == 2
    assert "data_prep: storage: s3 does not take these options" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path / "s3"), "--storage", "secret-word"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "argument --storage: is not a JSON object; write it as" in said
    assert "secret-word" not in said
