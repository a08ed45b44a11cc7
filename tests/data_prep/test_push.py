"""`data_prep push` copies a dataset that a reader then finds complete, or not at all."""

from pathlib import Path

import pytest

from data_prep import push
from data_prep.cli import main
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
