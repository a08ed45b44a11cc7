"""Several datasets as one training set with one class list, one hash and one set of statistics."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest
from pretrain.cli import main
from pretrain.config import DataSettings, MixedDataset
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.reader import ShardReader
from tests.data_prep.samples import change_manifest, write_classes
from tests.errors import fails
from tests.pretrain.data.tiny import opened, packed
from tests.training import finish, start, write_config


def folder_dataset(root: Path, counts: dict[str, int], *, size: int = 16) -> Path:
    return packed(write_classes(root / "source", counts), root / "packed", f"image_size={size}")


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two datasets, (ant, bee, cat) and (bee, dog), with a common class."""
    root = tmp_path_factory.mktemp("animals")
    return (
        folder_dataset(root / "one", {"ant": 12, "bee": 9, "cat": 7}),
        folder_dataset(root / "two", {"bee": 5, "dog": 14}),
    )


def mixed(
    animals: tuple[Path, Path], *, weights: tuple[float, float] | None = None
) -> TrainingData:
    one, two = weights or (None, None)
    also = (MixedDataset(dataset=str(animals[1]), weight=two),)
    return load_training_data(
        DataSettings(dataset=str(animals[0]), eval_split=None, extra_datasets=also, weight=one)
    )


def test_classes_of_the_same_name_are_one_class(animals: tuple[Path, Path]) -> None:
    data = mixed(animals)
    assert data.classes == ("ant", "bee", "cat", "dog")
    reader = ShardReader(data.parts)
    assert reader.num_samples == data.num_samples == 47
    assert np.bincount(reader.labels).tolist() == [12, 14, 7, 14]
    for first, directory in ((0, animals[0]), (28, animals[1])):
        alone = opened(directory)
        ids = np.arange(alone.num_samples)
        assert torch.equal(reader.images(first + ids), alone.images(ids))
        names = load_manifest(directory).classes
        assert [data.classes[label] for label in reader.locate(first + ids).labels] == [
            names[label] for label in alone.labels
        ]


def test_without_weights_every_sample_comes_once_an_epoch_and_with_them_in_these_shares(
    animals: tuple[Path, Path],
) -> None:
    data = mixed(animals)
    line, length = data.order(seed=3, global_batch_size=8), data.epoch_size(global_batch_size=8)
    for epoch in range(3):
        _, samples = line.locate(np.arange(epoch * length, (epoch + 1) * length))
        assert sorted(samples.tolist()) == list(range(47))
    _, samples = (
        mixed(animals, weights=(1.0, 3.0))
        .order(seed=3, global_batch_size=8)
        .locate(np.arange(4000))
    )
    assert (samples < 28).sum() == 1000


def test_statistics_are_those_of_the_pictures_as_they_are_drawn(animals: tuple[Path, Path]) -> None:
    data = mixed(animals, weights=(1.0, 3.0))
    pixels = []
    for directory, times in zip(
        animals, (3 * 19, 28 * 3 * 3), strict=True
    ):  # repeated, so that the fractions are 1 to 3
        images = opened(directory)
        values = images.images(np.arange(images.num_samples)).double().view(-1, 3) / 255
        pixels.append((values, times))
    total = sum(len(values) * times for values, times in pixels)
    mean = sum(values.sum(dim=0) * times for values, times in pixels) / total
    square = sum((values**2).sum(dim=0) * times for values, times in pixels) / total
    found_mean, found_std = data.channel_statistics
    np.testing.assert_allclose(found_mean, mean, atol=1e-6)
    np.testing.assert_allclose(found_std, (square - mean**2).sqrt(), atol=1e-5)


def test_the_hash_names_datasets_splits_and_weights(animals: tuple[Path, Path]) -> None:
    alone = load_training_data(DataSettings(dataset=str(animals[0]), eval_split=None))
    assert alone.content_hash == load_manifest(animals[0]).content_hash
    assert alone.pixels_hash == load_manifest(animals[0]).pixels_hash
    as_read = [
        {"crop": "squash"},
        {"interpolation": "area"},
        {"channel_mean": (0.0, 0.0, 0.0)},
        {"image_size": 9},
        {},
    ]
    manifests = [load_manifest(animals[0]).model_copy(update=change) for change in as_read]
    assert (
        len({manifest.pixels_hash for manifest in manifests}) == 5
        and manifests[-1].pixels_hash == alone.pixels_hash
    )
    found = [
        alone,
        mixed(animals),
        mixed(animals, weights=(1.0, 1.0)),
        mixed((animals[1], animals[0])),
    ]
    assert len({data.content_hash for data in found} | {data.pixels_hash for data in found}) == 8


def test_pictures_of_other_sizes_do_not_mix(animals: tuple[Path, Path], tmp_path: Path) -> None:
    small = folder_dataset(tmp_path, {"ant": 3}, size=8)
    with fails("mismatch", "data.extra_datasets"):
        mixed((animals[0], small))


@pytest.mark.processes
def test_a_run_trains_on_a_mixture_and_judges_the_first(
    shapes: Path, other_shapes: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, dataset=shapes)
    also = f"data.extra_datasets=[{{dataset: {other_shapes}, weight: 1}}]"
    words = [also, "data.weight=2", "train.duration=12 steps", "train.eval_every=12 steps"]
    assert "finished" in finish(start(config, tmp_path / "run", *words))
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    classes = json.loads((newest / "config.json").read_text())["classes"]
    assert len(classes) == 13 and classes[:8] == list(load_manifest(shapes).classes)


def test_a_dataset_that_is_named_twice_comes_in_two_orders(shapes: Path) -> None:
    """Otherwise each image would be next to its copy, and MixUp would mix both."""
    again = MixedDataset(dataset=str(shapes))
    data = load_training_data(DataSettings(dataset=str(shapes), extra_datasets=(again,)))
    assert data.classes == data.parts[0].manifest.classes
    _, samples = data.order(seed=3, global_batch_size=24).locate(np.arange(480))
    assert sorted(samples.tolist()) == list(range(480))
    assert (samples[0::2] % 240 == samples[1::2] % 240).mean() < 0.1


def test_classes_that_are_but_numbers_are_not_taken_for_each_other(
    shapes: Path, tmp_path: Path
) -> None:
    for name, count in (("eight", 8), ("eight_too", 8), ("nine", 9)):
        shutil.copytree(shapes, tmp_path / name)
        names = [str(number) for number in range(count)]
        change_manifest(
            tmp_path / name, lambda manifest, names=names: manifest.update(classes=names)
        )

    def together(*names: str) -> TrainingData:
        first, *others = (str(tmp_path / name) for name in names)
        return load_training_data(
            DataSettings(
                dataset=first, extra_datasets=tuple(MixedDataset(dataset=other) for other in others)
            )
        )

    assert len(together("eight", "eight_too").classes) == 8
    with fails("mismatch", "data.extra_datasets"):
        together("eight", "nine")
    named = load_training_data(
        DataSettings(
            dataset=str(shapes), extra_datasets=(MixedDataset(dataset=str(tmp_path / "nine")),)
        )
    )
    assert len(named.classes) == 17


@pytest.fixture(scope="module")
def kept(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in files of different sizes, for 24 px."""
    return packed(
        f"{shapes}-images",
        tmp_path_factory.mktemp("kept") / "kept",
        "image_size=24",
        "encoding=keep",
    )


def settings(dataset: Path, *also: Path, **more: Any) -> DataSettings:
    return DataSettings(
        dataset=str(dataset),
        extra_datasets=tuple(MixedDataset(dataset=str(each)) for each in also),
        **more,
    )


def test_pictures_of_their_own_sizes_are_read_at_that_of_the_others(
    shapes: Path, kept: Path
) -> None:
    for order in ((shapes, kept), (kept, shapes)):
        data = load_training_data(settings(*order, image_size=16))
        assert (
            data.image_size == 16
            and len(data.parts) == 2
            and data.classes == data.parts[0].manifest.classes
        )
    assert load_training_data(settings(kept, image_size=40)).image_size == 40
    assert load_training_data(settings(shapes, image_size=40)).image_size == 40


@pytest.mark.parametrize("more", [{}, {"image_size": 24}])
def test_a_mixture_with_stored_sizes_is_told_which_size_will_do(
    shapes: Path, kept: Path, more: dict[str, int]
) -> None:
    for order in ((shapes, kept), (kept, shapes)):
        with fails("mismatch" if more else "missing-value", "data.image_size") as caught:
            load_training_data(settings(*order, **more))
        assert caught.value.fix.endswith("data.image_size=16")


@pytest.mark.parametrize(("image_size", "is_said"), [(16, False), (12, False), (24, True)])
def test_a_start_says_once_that_images_are_enlarged(
    shapes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    image_size: int,
    is_said: bool,
) -> None:
    monkeypatch.setattr("pretrain.cli.launch", lambda *_, **__: 0)
    words = [
        str(write_config(tmp_path, dataset=shapes)),
        f"run_dir={tmp_path / 'run'}",
        f"data.image_size={image_size}",
    ]
    assert main(["train", *words, "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("enlarged") == is_said and ("16 px" in said) is is_said
