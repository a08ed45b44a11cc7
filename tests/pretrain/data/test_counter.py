"""Counter-based numbers: uniform, independent of how they are asked for, and fixed for ever."""

import numpy as np

from pretrain.data.order import hash64, hex_key, uniform


def test_a_known_value_stays() -> None:
    assert int(hash64(1, 2, 3)) == KNOWN


def test_values_are_uniform_and_uncorrelated_between_neighbours() -> None:
    drawn = uniform(5, np.arange(200_000))
    counts, _ = np.histogram(drawn, bins=50, range=(0, 1))
    assert ((counts - 4000) ** 2 / 4000).sum() < 110  # 49 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    assert drawn.min() >= 0 and drawn.max() < 1


def test_the_order_and_number_of_parts_matter() -> None:
    assert len({int(hash64(*parts)) for parts in [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,), (2,)]}) == 6


def test_arrays_are_their_elements() -> None:
    rows = np.arange(7)
    assert hash64(3, rows, 9).tolist() == [int(hash64(3, row, 9)) for row in rows]


def test_a_hex_digest_becomes_a_key() -> None:
    assert hex_key("ff" * 32) == 2**63 - 1


KNOWN = 15205877802699428709
