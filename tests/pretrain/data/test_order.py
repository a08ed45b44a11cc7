"""The order contract: every sample exactly once per epoch, the same global batches for every world,
and resume anywhere.

Several datasets are one sequence with constant fractions, and each source has its own order. Random
numbers never change.
"""

import itertools

import numpy as np
import pytest

from pretrain.data.order import (
    BatchPlan,
    Mixture,
    Order,
    epoch_length,
    hash64,
    hex_key,
    mixture_weights,
    permute,
    uniform,
)
from tests.errors import fails

SIZES = [*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4099]


@pytest.mark.parametrize("key", [0, 1, 2**62])
def test_permute_is_a_permutation_at_every_size(key: int) -> None:
    for size in SIZES:
        assert np.array_equal(
            np.sort(permute(np.arange(size), size=size, key=key)), np.arange(size)
        ), size


def test_keys_give_different_permutations_without_a_pattern() -> None:
    """Over many keys every value has every place about equally often (chi-square against uniform, 8
    x 8 cells)."""
    size, keys = 8, 4000
    each_key = np.repeat(np.arange(keys, dtype=np.uint64), size)
    found = permute(np.tile(np.arange(size), keys), size=size, key=each_key).reshape(keys, size)
    counts = np.stack([np.bincount(column, minlength=size) for column in found.T])
    assert found[7].tolist() == permute(np.arange(size), size=size, key=7).tolist()
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 120  # 49 degrees of freedom: mean 49, standard deviation 10


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_every_epoch_holds_every_sample_once(shuffle: str) -> None:
    for size, (block_size, window_blocks) in itertools.product(
        SIZES, [(1, 1), (3, 2), (16, 4), (64, 100)]
    ):
        order = Order(size, 7, shuffle, block_size, window_blocks)  # type: ignore[arg-type]
        epochs, samples = order.locate(np.arange(3 * size))
        for epoch in range(3):
            assert np.array_equal(np.sort(samples[epochs == epoch]), np.arange(size)), (
                size,
                block_size,
                window_blocks,
            )


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_epochs_and_seeds_differ(shuffle: str) -> None:
    order = Order(500, 7, shuffle, 16, 4)  # type: ignore[arg-type]
    _, samples = order.locate(np.arange(1000))
    assert not np.array_equal(samples[:500], samples[500:])
    _, others = Order(500, 8, shuffle, 16, 4).locate(np.arange(500))  # type: ignore[arg-type]
    assert not np.array_equal(samples[:500], others)


def test_block_shuffle_reads_few_blocks_at_a_time() -> None:
    order = Order(6400, 1, "block", 64, 4)
    _, samples = order.locate(np.arange(6400))
    for window in np.split(samples, 25):
        # a window has 4 blocks of 64 neighbors, and each overlaps at most two aligned blocks
        assert len(np.unique(window // 64)) <= 8


def test_every_world_resumed_anywhere_continues_the_one_sequence_of_positions() -> None:
    """All batch sizes up to 12 and all worlds that divide them. (Later tests check the samples at
    each position.)"""
    for batch in range(1, 13):
        for ranks, local in worlds_of(batch):
            plan = BatchPlan(batch, local, ranks)
            for consumed in range(2 * batch):
                of_rank = [
                    itertools.islice(
                        plan.sequence(consumed=consumed, rank=rank), 2 * plan.accumulation_steps
                    )
                    for rank in range(ranks)
                ]
                positions = np.concatenate(
                    [part for parts in zip(*of_rank, strict=True) for part in parts]
                )
                assert positions.tolist() == list(range(consumed, consumed + 2 * batch)), (
                    batch,
                    ranks,
                    local,
                    consumed,
                )


def worlds_of(batch: int) -> list[tuple[int, int]]:
    """Return (ranks, local batch size) for every division of a global batch."""
    cuts = range(1, batch + 1)
    return [
        (ranks, local)
        for ranks, local in itertools.product(cuts, cuts)
        if batch % (ranks * local) == 0
    ]


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_the_end_of_an_epoch_is_what_was_asked_for(shuffle: str) -> None:
    for size, batch in itertools.product([5, 12, 37, 100], [1, 4, 9, 12]):
        for last_batch, expected in (
            ("carry", size),
            ("drop", size // batch * batch),
            ("pad", -(-size // batch) * batch),
        ):
            length = epoch_length(size, global_batch_size=batch, last_batch=last_batch)  # type: ignore[arg-type]
            assert length == expected
            if length == 0:
                continue
            epochs, samples = Order(size, 3, shuffle, 8, 2, length).locate(np.arange(3 * length))  # type: ignore[arg-type]
            for epoch in range(3):
                here = samples[epochs == epoch]
                assert len(here) == length
                assert len(np.unique(here[:size])) == min(
                    size, length
                )  # no sample twice before all have been used
                assert (
                    here[size:].tolist() == np.resize(here[:size], max(0, length - size)).tolist()
                )


def test_what_is_dropped_changes_from_epoch_to_epoch() -> None:
    epochs, samples = Order(37, 3, "full", length=36).locate(np.arange(36 * 60))
    left_out = {
        int((set(range(37)) - set(samples[epochs == epoch].tolist())).pop()) for epoch in range(60)
    }
    assert len(left_out) > 20


def test_the_order_of_this_version_is_this_order() -> None:
    """A checkpoint of this version must find the same order in later versions."""
    assert permute(np.arange(10), size=10, key=1).tolist() == LITERAL_FULL
    assert Order(10, 1, "block", 3, 2).locate(np.arange(10))[1].tolist() == LITERAL_BLOCK


LITERAL_FULL = [5, 2, 1, 8, 9, 7, 6, 4, 3, 0]
LITERAL_BLOCK = [5, 0, 1, 2, 3, 4, 9, 8, 7, 6]


def mixture(sizes: list[int], weights: tuple[int, ...]) -> Mixture:
    return Mixture(tuple(Order(size, 11 + number) for number, size in enumerate(sizes)), weights)


@pytest.mark.parametrize(
    "weights", [(1,), (1, 1), (3, 1), (1, 5), (2, 3, 5), (7, 1, 1, 13), (1,) * 9, (999, 1000)]
)
def test_every_stretch_holds_the_shares_to_within_the_number_of_sources(
    weights: tuple[int, ...],
) -> None:
    sources, places = mixture([50] * len(weights), weights).deal(np.arange(6000))
    shares = np.array(weights) / sum(weights)
    for start, end in itertools.combinations(range(0, 6001, 125), 2):
        counts = np.bincount(sources[start:end], minlength=len(weights))
        assert (np.abs(counts - shares * (end - start)) <= len(weights)).all(), (start, end)
    for source in range(len(weights)):  # sample n of a source is at the source's position n
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
    for line in (
        Order(101, 3, "block", 8, 3),
        Order(101, 3, "full", length=104),
        mixture([7, 30, 11], (2, 3, 1)),
    ):
        alone = [line.locate(np.array([place])) for place in range(230)]
        assert np.array_equal(np.concatenate(alone, axis=1), line.locate(np.arange(230)))


def test_numbers_of_a_long_run_over_large_datasets_stay_exact() -> None:
    """Compared with Python's integers after 800 epochs of 14 million samples and more."""
    weights = mixture_weights([None, None, None], [14_197_122, 1_281_167, 60_000])
    positions = np.arange(800 * 15_000_000, 800 * 15_000_000 + 50)
    _, places = mixture([10, 10, 10], weights).deal(positions)
    total = sum(weights)
    for position, place in zip(positions.tolist(), places.tolist(), strict=True):
        before, after = position * weights[0] // total, (position + 1) * weights[0] // total
        assert place == before if after > before else place < position - before + 1


def test_weights_are_reduced_and_refused_where_64_bits_cannot_tell_them_apart() -> None:
    assert mixture_weights([3.0, 1.5], [10, 10]) == (2, 1)
    assert mixture_weights([None, None], [100, 250]) == (2, 5)
    assert mixture_weights([0.001, 1000], [1, 1]) == (1, 1_000_000)
    for weights, sizes in (
        ([999.999999, 999.999998, 999.999997], [1, 1, 1]),
        ([None, None], [2**31, 1]),
    ):
        with fails("bad-value", "data.weight"):
            mixture_weights(weights, sizes)


def test_values_are_uniform_and_uncorrelated_between_neighbors() -> None:
    drawn = uniform(5, np.arange(200_000))
    counts, _ = np.histogram(drawn, bins=50, range=(0, 1))
    assert ((counts - 4000) ** 2 / 4000).sum() < 110  # 49 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    assert drawn.min() >= 0 and drawn.max() < 1


def test_a_hash_is_that_of_its_parts_in_their_order_for_ever() -> None:
    rows = np.arange(7)
    assert int(hash64(1, 2, 3)) == 15205877802699428709 and hex_key("ff" * 32) == 2**63 - 1
    assert (
        len({int(hash64(*parts)) for parts in [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,), (2,)]})
        == 6
    )
    assert hash64(3, rows, 9).tolist() == [int(hash64(3, row, 9)) for row in rows]
