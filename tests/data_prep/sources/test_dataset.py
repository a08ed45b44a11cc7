"""Dataset objects become datasets without loss, whatever type their images have. Their mistakes are
one-line errors."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.build.build import build as build_dataset
from data_prep.build.config import BuildSettings
from data_prep.manifest import load_manifest
from data_prep.sources import dataset
from data_prep.sources.dataset import DatasetSettings, DatasetSource
from tests.data_prep.conftest import Refused
from tests.data_prep.sources.layouts import Pixels, build, listed, pixels, ppm_of, written
from tests.errors import fails

Make = Callable[[Pixels, int], Any]


class Pictures:
    """PIL images with classes and targets, like torchvision's CIFAR10."""

    def __init__(self, size: int, seed: int = 0):
        self.arrays = pixels(size, 20, 24, 3, seed=seed)
        self.targets = [number % 3 for number in range(size)]
        self.classes = ["ant", "bee", "cat"]
        self.num_fetched = 0

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        self.num_fetched += 1
        return Image.fromarray(self.arrays[place]), self.targets[place]


class Bare:
    """A dataset with only len() and [i]. `make` returns an item."""

    def __init__(self, size: int, make: Make):
        self.arrays, self.make = pixels(size, 20, 24, 3), make

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, place: int) -> Any:
        return self.make(self.arrays[place], place)


ITEMS: dict[str, Make] = {
    "array": lambda array, place: (array, place % 3),
    "numpy label": lambda array, place: (array, np.int64(place % 3)),
    "channels first": lambda array, place: (array.transpose(2, 0, 1), place % 3),
    "floats": lambda array, place: ((array / 255).astype(np.float32), place % 3),
    "gray": lambda array, place: (Image.fromarray(array[:, :, 0]), place % 3),
    "gray array": lambda array, place: (array[:, :, :1], place % 3),
    "clear": lambda array, place: (
        Image.fromarray(np.dstack([array, np.full((20, 24), 255, np.uint8)])),
        place % 3,
    ),
}
WRONG: dict[str, tuple[Make, str, str]] = {
    "negative": (lambda array, place: (array, -2 if place == 4 else 0), "mismatch", "item 4"),
    "beyond": (lambda array, place: (array, 3 if place == 4 else 0), "mismatch", "item 4"),
    "words": (lambda array, place: (array, "ant"), "bad-value", "item 0"),
    "half a label": (lambda array, place: (array, 0.5), "bad-value", "item 0"),
    "no pair": (lambda array, place: array, "bad-value", "item 0"),
    "raises": (lambda array, place: (array, 1 // (place - 4)), "bad-value", "item 4"),
    "normalized": (lambda array, place: (array / 255 - 0.5, 0), "bad-value", "normalization"),
    "integers": (lambda array, place: (array.astype(np.int64), 0), "bad-value", "int64"),
    "vector": (lambda array, place: (array.reshape(-1), 0), "bad-value", "(1440,)"),
    "nothing": (lambda array, place: (None, 0), "bad-value", "item 0"),
}


def bare(items: str, size: int) -> Bare:
    return Bare(size, ITEMS[items] if items in ITEMS else WRONG[items][0])


class Mislabeled(Pictures):
    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return Image.fromarray(self.arrays[place]), 1


def failing() -> None:
    raise RuntimeError("Dataset not found.\nUse download=True")


# ---- their contents


def source_of(factory: str, splits: dict[str, dict[str, Any]], **fields: object) -> DatasetSource:
    words = {"kind": "dataset", "factory": f"{__name__}:{factory}", "splits": splits}
    return DatasetSource(DatasetSettings.model_validate(words | fields))


def source_of_items(items: str) -> DatasetSource:
    return source_of(
        "bare", {"train": {"items": items, "size": 6}}, class_names=("ant", "bee", "cat")
    )


def test_a_build_of_an_object_keeps_pixels_labels_classes_and_splits(tmp_path: Path) -> None:
    splits = {"train": {"size": 7, "seed": 1}, "val": {"size": 4, "seed": 2}}
    words = [
        f"source.factory={__name__}:Pictures",
        f"source.splits={json.dumps(splits)}",
        "encoding=keep",
        "image_size=16",
    ]
    assert build("dataset", tmp_path / "out", *words) == 0
    assert load_manifest(tmp_path / "out").classes == ("ant", "bee", "cat")
    for split, arguments in splits.items():
        arrays = pixels(arguments["size"], 20, 24, 3, seed=arguments["seed"])
        assert written(tmp_path / "out", split) == {
            f"{split}/000000/{place:08d}": (ppm_of(array), place % 3)
            for place, array in enumerate(arrays)
        }


def test_torchvision_itself_goes_through_from_python(tmp_path: Path) -> None:
    source = {
        "kind": "dataset",
        "factory": "torchvision.datasets:FakeData",
        "splits": {"train": {"size": 5, "image_size": [3, 12, 12], "num_classes": 4}},
    }
    settings = {"source": source, "out": str(tmp_path / "fake"), "image_size": 12, "num_workers": 1}
    manifest = build_dataset(BuildSettings.model_validate_json(json.dumps(settings)))
    assert manifest.classes == ("0", "1", "2", "3")
    from torchvision.datasets import FakeData

    original = FakeData(size=5, image_size=(3, 12, 12), num_classes=4)
    assert written(tmp_path / "fake", "train") == {
        f"train/000000/{place:08d}": (
            ppm_of(np.asarray(original[place][0])),
            int(original[place][1]),
        )
        for place in range(5)
    }


@pytest.mark.parametrize("items", ITEMS)
def test_every_form_of_a_picture_comes_out_without_loss(items: str) -> None:
    source, arrays = source_of_items(items), pixels(6, 20, 24, 3)
    entries = listed(source)
    assert [entry.label for entry in entries] == [0, 1, 2, 0, 1, 2]
    for entry, array in zip(entries, arrays, strict=True):
        with Image.open(io.BytesIO(source.read(entry))) as image:
            if items.startswith("gray"):
                assert np.array_equal(np.asarray(image), array[:, :, 0])
            else:
                assert np.array_equal(np.asarray(image.convert("RGB")), array)


def test_a_torch_tensor_is_an_array_here() -> None:
    torch = pytest.importorskip("torch")
    array = pixels(20, 24, 3)
    assert dataset.encode(torch.from_numpy(array).permute(2, 0, 1)) == ppm_of(array)
    assert dataset.encode(torch.from_numpy(array).permute(2, 0, 1) / 255) == ppm_of(array)
    assert dataset.encode(torch.zeros(3, 5, 3)) == ppm_of(np.zeros((5, 3, 3), np.uint8))


def test_targets_spare_the_listing_from_fetching_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "CHUNK", 4)
    source = source_of("Pictures", {"train": {"size": 10, "seed": 9}})
    made = dataset._made(source.settings.factory, "train", '{"seed": 9, "size": 10}')
    entries = listed(source)
    assert made.num_fetched == 0
    assert [entry.locator for entry in entries] == [
        f"train/{place // 4:06d}/{place:08d}" for place in range(10)
    ]
    assert [source.read(entry) for entry in entries] == [ppm_of(array) for array in made.arrays]
    assert made.num_fetched == 10


def test_the_manifest_says_what_was_called_but_no_path_or_secret_and_other_arguments_are_another_dataset() -> (
    None
):
    given = {"train": {"root": "/home/somebody/data", "token": "SECRET"}}
    described = source_of("Pictures", given).describe()
    assert {key: described[key] for key in ("kind", "factory", "class_names")} == {
        "kind": "dataset",
        "factory": f"{__name__}:Pictures",
        "class_names": None,
    }
    assert "SECRET" not in str(described)
    assert "somebody" not in str(described)
    others = [
        {"train": given["train"] | change}
        for change in ({"root": "/home/else"}, {"token": "T"}, {"more": 1})
    ]
    assert all(source_of("Pictures", other).describe() != described for other in others)


# ---- mistakes


@pytest.mark.parametrize("items", WRONG)
def test_an_item_that_cannot_be_used_is_named(items: str) -> None:
    source, (_, code, words) = source_of_items(items), WRONG[items]
    with fails(code, "source.splits.train") as raised:
        for entry in listed(source):
            source.read(entry)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("factory", "arguments", "field", "code"),
    [
        ("missing", {}, "source.factory", "unknown-name"),
        ("Pictures.", {}, "source.factory", "unknown-name"),
        ("len", {"obj": 1}, "source.factory", "unknown-name"),
        ("failing", {}, "source.splits.train", "bad-value"),
        ("Pictures", {"sise": 3}, "source.splits.train", "bad-value"),
        ("Pictures", {"size": 0}, "source.splits.train", "empty"),
        ("bare", {"items": "array", "size": 3}, "source.class_names", "missing-value"),
    ],
)
def test_a_factory_that_fails_is_one_line(
    factory: str, arguments: dict[str, Any], field: str, code: str
) -> None:
    with fails(code, field) as raised:
        source_of(factory, {"train": arguments}).outline()
    assert "\n" not in str(raised.value)


def test_labels_that_are_not_what_targets_say_are_noticed() -> None:
    source = source_of("Mislabeled", {"train": {"size": 3}})
    entry = listed(source)[0]
    with fails("mismatch", "source.splits.train"):
        source.read(entry)


def test_a_mistake_reaches_the_command_line_as_one_line(tmp_path: Path, refused: Refused) -> None:
    for factory in (f"{__name__}:missing", "nothing"):
        words = [f"source.factory={factory}", "source.splits.train.size=3"]
        refused(build("dataset", tmp_path / "out", *words), "source.factory")
