"""A dataset of a plan is finished only if its recorded config equals the plan's."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.work import Work
from data_prep.cli import main as data_prep
from tests.data_prep.samples import encoded, picture, write_files
from tests.errors import fails

CONFIG = """
source: {kind: folder, path: photos, labels: photos.csv}
out: data/photos
image_size: 16
exclude: [duplicates.jsonl]
num_workers: 1
"""


def write(name: str, text: str) -> Callable[[], object]:
    return lambda: Path(name).write_text(text)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        _build()
    return place


@pytest.fixture
def built(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of data/photos, built from a folder with a label table and an exclusion list."""
    monkeypatch.chdir(shutil.copytree(original, tmp_path / "copy"))


def _build() -> None:
    write_files(
        Path("photos"), {f"{number}.jpg": encoded(picture(seed=number)) for number in range(8)}
    )
    Path("photos.csv").write_text(
        "file,label\n" + "".join(f"{number}.jpg,{'ab'[number % 2]}\n" for number in range(8))
    )
    Path("duplicates.jsonl").write_text('{"path": "0.jpg"}\n')
    Path("photos.yaml").write_text(CONFIG)
    assert data_prep(["build", "photos.yaml"]) == 0


@pytest.mark.parametrize(
    ("overrides", "change", "differs"),
    [
        ([], None, ""),
        # the bytes do not depend on these
        (["num_workers=2", "max_reject_fraction=0.5"], None, ""),
        ([], lambda: Path("photos").rename("archived"), ""),
        ([], lambda: Path("photos.csv").unlink(), ""),
        (["image_size=24"], None, "image_size: 24, was 16"),
        (["classes=[a]"], None, "classes: ['a'], was None"),
        (["samples_per_shard=3"], None, "samples_per_shard: 3, was 8192"),
        (["jpeg_quality=50"], None, "jpeg_quality: 50, was"),
        (["max_pixels=1000"], None, "max_pixels: 1000, was"),
        (["order=listed"], None, "order: listed, was shuffled"),
        (["exclude=[]"], None, "exclude: None, was"),
        ([], write("duplicates.jsonl", '{"path": "1.jpg"}\n'), "exclude: "),
        ([], write("photos.csv", "file,label\n0.jpg,a\n1.jpg,b\n"), "source.labels: table "),
        (["source.val_fraction=0.5"], None, "source.val_fraction: 0.5, was 0.1"),
    ],
)
def test_a_dataset_of_another_config_is_not_finished(
    built: None, overrides: list[str], change: Callable[[], object] | None, differs: str
) -> None:
    if change is not None:
        change()
    work = Work("build", "photos.yaml", tuple(overrides))
    assert work.state() == ("other settings" if differs else "finished")
    if differs:
        with fails("changed", "out") as error:
            work.is_finished()
        assert differs in str(error.value)
