"""What a run trains on: the sizes of its pictures, and what is said where they do not fit."""

from pathlib import Path
from typing import Any

import pytest

from data_prep.cli import main as data_prep
from pretrain.config import DataSettings, MixedDataset
from pretrain.data.datasets import load_training_data


@pytest.fixture(scope="module")
def kept(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures in files of their own sizes, made for 24 px."""
    out = tmp_path_factory.mktemp("kept") / "kept"
    words = [f"source.path={shapes}-images", f"out={out}", "image_size=24", "encoding=keep", "num_workers=1"]
    assert data_prep(["build", "--source", "folder", *words]) == 0
    return out


def settings(dataset: Path, *also: Path, **more: Any) -> DataSettings:
    return DataSettings(dataset=str(dataset), also=tuple(MixedDataset(dataset=str(each)) for each in also), **more)


def test_pictures_of_their_own_sizes_are_read_at_that_of_the_others(shapes: Path, kept: Path) -> None:
    for order in ((shapes, kept), (kept, shapes)):
        data = load_training_data(settings(*order, image_size=16))
        assert data.image_size == 16 and len(data.parts) == 2 and data.classes == data.parts[0].manifest.classes
    assert load_training_data(settings(kept, image_size=40)).image_size == 40
    assert load_training_data(settings(shapes, image_size=40)).image_size == 40


@pytest.mark.parametrize("more", [{}, {"image_size": 24}])
def test_a_mixture_with_stored_sizes_is_told_which_size_will_do(shapes: Path, kept: Path, more: dict[str, int]) -> None:
    for order in ((shapes, kept), (kept, shapes)):
        with pytest.raises(ValueError, match=rf"^data.image_size: .*{kept}.*(such as|set data.image_size=) ?16$"):
            load_training_data(settings(*order, **more))


def test_a_kept_size_is_proposed_where_none_is_said(kept: Path) -> None:
    with pytest.raises(ValueError, match=rf"data.image_size: missing; {kept} keeps .*, such as 24$"):
        load_training_data(settings(kept))
