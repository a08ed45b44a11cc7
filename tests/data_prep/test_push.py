"""`data_prep push` copies a complete dataset, or readers find none."""

import shutil
import threading
from pathlib import Path

import pytest

from data_prep import push
from data_prep.cli import main
from data_prep.manifest import load_manifest
from tests.data_prep.samples import files_of
from tests.errors import fails


@pytest.mark.processes
def test_a_pushed_dataset_is_complete_and_another_one_is_kept(
    shapes: Path, other_shapes: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/bucket/mine"
    assert main(["push", str(shapes), url]) == 0
    assert main(["verify", url]) == 0
    assert main(["push", str(shapes), url]) == 0
    with fails("exists", "URL"):
        push.push(other_shapes, url, storage={})


def test_a_failed_push_leaves_no_manifest(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, url: str, **options: object) -> None:
        raise OSError(28, "No space left on device", url)

    monkeypatch.setattr(push, "upload", fail)
    assert main(["push", str(shapes), f"file://{tmp_path}/bucket"]) == 1
    assert not (tmp_path / "bucket" / "manifest.json").exists()


def test_only_files_as_the_manifest_names_them_are_uploaded(shapes: Path, tmp_path: Path) -> None:
    mine, bucket = Path(shutil.copytree(shapes, tmp_path / "mine")), tmp_path / "bucket"
    (mine / "notes.txt").write_text("of the user")
    push.push(mine, f"file://{bucket}/a", storage={})
    assert {*files_of(bucket / "a")} == {*files_of(mine)} - {"notes.txt"}
    shard = mine / load_manifest(mine).splits["train"].shards[0].file
    shard.write_bytes(shard.read_bytes()[:-1])
    with fails("damaged", str(shard)):
        push.push(mine, f"file://{bucket}/b", storage={})
    shard.unlink()
    with fails("missing-path", str(shard)):
        push.push(mine, f"file://{bucket}/b", storage={})
    assert not (bucket / "b" / "manifest.json").exists()


@pytest.mark.processes
def test_a_refused_upload_stops_the_others(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, url: str, *, stop: threading.Event, **_: object) -> None:
        if path.suffix == ".jsonl":
            raise PermissionError(13, "refused", url)
        assert stop.wait(30)

    monkeypatch.setattr(push, "upload", refuse)
    with pytest.raises(PermissionError):
        push.push(shapes, f"file://{tmp_path}/bucket", storage={})
