"""Figures over many runs, from made-up points."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import kendalltau

from analysis.sweeps.statistics import kendall, num_orders, optimum


@pytest.mark.parametrize("values", [[1], [1, 2], [1, 2, 3, 4, 5, 6], [1, 1, 2, 2, 2], [1, 2, 2, 3, 4, 4], [1, 1, 1, 1, 2, 3]])
def test_orders_are_those_of_all_permutations(values: list[int]) -> None:
    wrong = Counter(sum(a > b for a, b in itertools.combinations(order, 2)) for order in itertools.permutations(values))
    ties, counts = list(Counter(values).values()), num_orders(list(Counter(values).values()))
    same = np.prod([np.prod(range(1, tie + 1)) for tie in ties])  # orders that look alike
    assert {at: int(count * same) for at, count in enumerate(counts)} == dict(sorted(wrong.items()))


@pytest.mark.parametrize("num", [2, 3, 6, 11, 25, 40])
def test_kendall_is_scipys_where_that_is_exact(num: int) -> None:
    random = np.random.default_rng(num)
    x, y = random.permutation(num).tolist(), random.normal(size=num).tolist()
    found = kendall(x, y)
    assert found is not None and found.num == num
    assert (found.tau, found.p) == pytest.approx(tuple(kendalltau(x, y, method="exact")), rel=1e-9)
    assert found.p_falling == pytest.approx(kendalltau(x, y, method="exact", alternative="less").pvalue, rel=1e-9)


def test_kendall_with_equal_values_is_that_of_all_permutations() -> None:
    x, y = [5, 1, 2, 4, 3], [0.1, 0.4, 0.4, 0.1, 0.3]
    found = kendall(x, y)
    assert found is not None and found.tau == pytest.approx(kendalltau(x, y).statistic)
    taus = [kendalltau(x, order).statistic for order in itertools.permutations(y)]
    assert found.p == pytest.approx(np.mean([abs(tau) >= abs(found.tau) - 1e-12 for tau in taus]))
    assert found.p_falling == pytest.approx(np.mean([tau <= found.tau + 1e-12 for tau in taus]))
    assert kendall([1, 2], [0.3, 0.3]) is None


def test_a_planted_optimum_is_found() -> None:
    x = np.repeat(np.linspace(-2.4, 2.4, 7), 3)
    exact = optimum(x.tolist(), (0.3 + 0.02 * (x - 0.5) ** 2).tolist())
    assert exact is not None and exact.at == pytest.approx(0.5) and exact.high - exact.low < 1e-9 and not exact.has_zero
    covered = []
    for seed in range(60):
        y = 0.3 + 0.02 * (x - 0.5) ** 2 + np.random.default_rng(seed).normal(scale=0.01, size=21)
        found = optimum(x.tolist(), y.tolist(), num_resamples=300)
        assert found is not None
        covered.append(found.low <= 0.5 <= found.high)
    assert 50 <= sum(covered) < 60
    falling = optimum([-1, 0, 1, 2], [0.4, 0.3, 0.22, 0.1])
    assert falling is not None and falling.at == 2
    assert optimum([0, 1, 1, 0], [1, 2, 3, 4]) is None
