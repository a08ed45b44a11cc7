"""The synthetic archive: every image depends only on (seed, class, split, number). The two class
sets share attributes, but no class. Interrupted drawing resumes to the same files.
"""

import io
import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.publish import sole_writer
from data_prep.sources import SourceError, open_source
from data_prep.sources.synthetic import SyntheticSettings, class_set, picture_bytes
from tests.data_prep.samples import files_of, write_files


def draw(root: Path, *, num_workers: int = 1, **changes: Any) -> dict[str, bytes]:
    """Draw images into `root`. Return their contents."""
    fields = {"num_classes": 4, "num_train_per_class": 5, "num_val_per_class": 2, "image_size": 16}
    settings = SyntheticSettings(kind="synthetic", images_dir=str(root), **(fields | changes))
    open_source(settings, num_workers=num_workers).outline()
    return pictures(root)


def pictures(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(root).items() if name.endswith(".jpg")}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn") / "images"
    assert len(draw(root)) == 4 * (5 + 2)
    return root


@pytest.mark.processes
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, drawn: Path) -> None:
    assert draw(tmp_path / "images", num_workers=2) == pictures(drawn)


def test_more_pictures_and_more_classes_begin_with_the_same_ones(
    tmp_path: Path, drawn: Path
) -> None:
    more = draw(tmp_path / "images", num_classes=6, num_train_per_class=7, num_val_per_class=3)
    assert len(more) == 6 * (7 + 3)
    assert more.items() > pictures(drawn).items()


def test_another_seed_draws_other_pictures_of_the_same_classes(tmp_path: Path, drawn: Path) -> None:
    first, other = pictures(drawn), draw(tmp_path / "images", seed=1)
    assert first.keys() == other.keys()
    assert not set(first.values()) & set(other.values())


def test_the_class_sets_are_disjoint_and_each_has_every_attribute() -> None:
    a, b = (class_set(name, num_classes=48) for name in ("a", "b"))
    assert len({look.name for look in a + b}) == 96
    for looks in (a, b):
        assert [sorted(Counter(attribute).values()) for attribute in zip(*looks, strict=True)] == [
            [8] * 6,
            [12] * 4,
            [12] * 4,
        ]


def test_every_picture_is_another_jpeg_file_of_the_asked_for_size(drawn: Path) -> None:
    assert len(set(pictures(drawn).values())) == 28
    for data in pictures(drawn).values():
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (16, 16))


@pytest.mark.parametrize(
    ("quadrant", "place"), [("nw", (0, 0)), ("ne", (0, 1)), ("sw", (1, 0)), ("se", (1, 1))]
)
def test_the_object_stands_in_the_quadrant_that_its_class_names(
    quadrant: str, place: tuple[int, int]
) -> None:
    """Averaged over many images, only the main object stays: its quadrant has the most saturated
    colors."""
    look = next(
        look
        for look in class_set("a", num_classes=48)
        if (look.shape, look.quadrant) == ("square", quadrant)
    )
    saturation = np.zeros((2, 2))
    for number in range(30):
        data = picture_bytes(look, split="train", number=number, size=32, seed=0)
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("HSV"), np.float64)[..., 1]
        saturation += pixels.reshape(2, 16, 2, 16).mean(axis=(1, 3))
    assert np.unravel_index(saturation.argmax(), (2, 2)) == place


def test_a_kill_before_the_settings_are_recorded_is_resumed(tmp_path: Path, drawn: Path) -> None:
    root = write_files(tmp_path / "images", {".tmp-0123456789ab-begun.json": b"{"})
    assert draw(root) == pictures(drawn)
    assert not [*root.glob(".tmp-*")]


def test_interrupted_drawing_goes_on_to_the_same_files(tmp_path: Path, drawn: Path) -> None:
    root = tmp_path / "images"
    assert draw(root) == pictures(drawn)
    whole = files_of(root)
    # what a kill leaves: classes that are missing, and a class half drawn
    classes = sorted((root / "train").iterdir())
    shutil.rmtree(classes[0])
    half = classes[1].rename(root / "train" / f".tmp-{classes[1].name}")
    write_files(half, {"000004.jpg": b"half a pict", "000005.jpg": b""})
    untouched = sorted(classes[2].iterdir())
    times = [path.stat().st_mtime_ns for path in untouched]
    assert draw(root) == pictures(drawn)
    assert files_of(root) == whole
    assert [path.stat().st_mtime_ns for path in untouched] == times


def test_other_settings_are_refused_the_same_folder(tmp_path: Path) -> None:
    root = tmp_path / "images"
    draw(root)
    before = files_of(root)
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"num_train_per_class": 6},
        {"image_size": 24},
        {"class_set": "b"},
    ]
    for change in changes:
        with pytest.raises(SourceError, match="contains images from other settings"):
            draw(root, **change)
        assert files_of(root) == before


def test_a_second_builder_waits_for_the_first_to_draw(tmp_path: Path, drawn: Path) -> None:
    with sole_writer(tmp_path / "images"):
        second = threading.Thread(target=draw, args=(tmp_path / "images",))
        second.start()
        second.join(timeout=1)
        assert second.is_alive()
        assert not list((tmp_path / "images").rglob("*.jpg"))
    second.join(timeout=60)
    assert pictures(tmp_path / "images") == pictures(drawn)


def test_no_validation_pictures_means_no_such_split(tmp_path: Path) -> None:
    names = draw(tmp_path / "images", num_classes=2, num_val_per_class=0)
    assert {name.split("/")[0] for name in names} == {"train"}


def test_the_dataset_knows_its_source_but_no_path_of_this_machine(shapes: Path) -> None:
    source = json.loads((shapes / "manifest.json").read_text())["source"]
    counts = {"num_classes": 8, "num_train_per_class": 30, "num_val_per_class": 9}
    assert source == {"kind": "synthetic", "class_set": "a", "image_size": 20, "seed": 0} | counts
