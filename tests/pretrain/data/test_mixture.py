"""Several datasets as one line: shares held in every stretch, each source in its own order, nothing kept but the position."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import DataSettings, MixedDataset
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.order import Mixture, Order, mixture_weights
from tests.data_prep.samples import change_manifest


def mixture(sizes: list[int], weights: tuple[int, ...]) -> Mixture:
    return Mixture(tuple(Order(size, 11 + number) for number, size in enumerate(sizes)), weights)


@pytest.mark.parametrize("weights", [(1,), (1, 1), (3, 1), (1, 5), (2, 3, 5), (7, 1, 1, 13), (1,) * 9, (999, 1000)])
def test_every_stretch_holds_the_shares_to_within_the_number_of_sources(weights: tuple[int, ...]) -> None:
    sources, places = mixture([50] * len(weights), weights).deal(np.arange(6000))
    shares = np.array(weights) / sum(weights)
    for start, end in itertools.combinations(range(0, 6001, 125), 2):
        counts = np.bincount(sources[start:end], minlength=len(weights))
        assert (np.abs(counts - shares * (end - start)) <= len(weights)).all(), (start, end)
    for source in range(len(weights)):  # the n-th of a source stands at the n-th of its positions
        assert places[sources == source].tolist() == list(range((sources == source).sum()))


def test_each_source_comes_in_its_own_order_and_epochs() -> None:
    mixed = mixture([7, 30, 11], (2, 3, 1))
    epochs, samples = mixed.locate(np.arange(900))
    for first, order in zip((0, 7, 37), mixed.orders, strict=True):
        mine = (samples >= first) & (samples < first + order.num_samples)
        expected_epochs, expected = order.locate(np.arange(mine.sum()))
        assert samples[mine].tolist() == (first + expected).tolist()
        assert epochs[mine].tolist() == expected_epochs.tolist()
        assert expected_epochs.max() > 3


def test_without_weights_an_epoch_holds_every_sample_of_all_sources_once() -> None:
    sizes = [7, 30, 11, 64]
    mixed = mixture(sizes, mixture_weights([None] * 4, sizes))
    for epoch in range(3):
        _, samples = mixed.locate(np.arange(epoch * 112, (epoch + 1) * 112))
        assert sorted(samples.tolist()) == list(range(112))


def test_a_position_does_not_depend_on_what_else_is_asked_for() -> None:
    mixed = mixture([7, 30, 11], (2, 3, 1))
    together = mixed.locate(np.arange(400))
    alone = [mixed.locate(np.array([place])) for place in range(400)]
    assert [int(samples[0]) for _, samples in alone] == together[1].tolist()
    assert [int(epochs[0]) for epochs, _ in alone] == together[0].tolist()


def test_numbers_of_a_long_run_over_large_datasets_stay_exact() -> None:
    """Against Python's integers, at the end of 800 epochs of 14 million samples and more."""
    weights = mixture_weights([None, None, None], [14_197_122, 1_281_167, 60_000])
    positions = np.arange(800 * 15_000_000, 800 * 15_000_000 + 50)
    _, places = mixture([10, 10, 10], weights).deal(positions)
    total = sum(weights)
    for position, place in zip(positions.tolist(), places.tolist(), strict=True):
        before, after = position * weights[0] // total, (position + 1) * weights[0] // total
        assert place == before if after > before else place < position - before + 1


def test_shares_that_64_bits_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.weight: .* are too fine; give weights with fewer digits"):
        mixture_weights([999.999999, 999.999998, 999.999997], [1, 1, 1])
    with pytest.raises(ValueError, match="too fine"):
        mixture_weights([None, None], [2**31, 1])


def test_a_dataset_that_is_named_twice_comes_in_two_orders(shapes: Path) -> None:
    """Else each picture would stand beside itself, and MixUp mix it with itself."""
    again = MixedDataset(dataset=str(shapes))
    data = load_training_data(DataSettings(dataset=str(shapes), also=(again,)))
    assert data.classes == data.parts[0].manifest.classes
    _, samples = data.order(seed=3, global_batch_size=24).locate(np.arange(480))
    assert sorted(samples.tolist()) == list(range(480))
    assert (samples[0::2] % 240 == samples[1::2] % 240).mean() < 0.1


def test_classes_that_are_but_numbers_are_not_taken_for_each_other(shapes: Path, tmp_path: Path) -> None:
    for name, count in (("eight", 8), ("eight_too", 8), ("nine", 9)):
        shutil.copytree(shapes, tmp_path / name)
        names = [str(number) for number in range(count)]
        change_manifest(tmp_path / name, lambda manifest, names=names: manifest.update(classes=names))

    def mixed(*names: str) -> TrainingData:
        first, *others = (str(tmp_path / name) for name in names)
        return load_training_data(
            DataSettings(dataset=first, also=tuple(MixedDataset(dataset=other) for other in others))
        )

    assert len(mixed("eight", "eight_too").classes) == 8
    with pytest.raises(ValueError, match=r"data\.also: the classes of .*nine and of .*eight are bare numbers, 9 and 8"):
        mixed("eight", "nine")
    named = load_training_data(DataSettings(dataset=str(shapes), also=(MixedDataset(dataset=str(tmp_path / "nine")),)))
    assert len(named.classes) == 17


def test_weights_are_reduced() -> None:
    assert mixture_weights([3.0, 1.5], [10, 10]) == (2, 1)
    assert mixture_weights([None, None], [100, 250]) == (2, 5)
    assert mixture_weights([0.001, 1000], [1, 1]) == (1, 1_000_000)
