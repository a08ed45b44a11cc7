"""Common parts of the decisions: comparisons of groups of runs (arms) over seeds, Holm's correction,
and tables. Errors are in percent, differences in percentage points, brackets are 95 % intervals."""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from frame import markdown
from scipy import stats

from analysis.sweeps.statistics import holm
from analysis.sweeps.sweep import with_variables

LOGISTIC_ERROR = 17.13
"""Test error of logistic regression in percent, from `findings.py baseline data/fashion-mnist-6k`."""
TABLES = Path(__file__).parents[2] / "tests/analysis/points"
KINDS = ("normal", "RP")
Side = Literal["above", "below", "within"]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and both ends of its 95 % t-interval."""
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(np.mean(values)), float(ends.low), float(ends.high)


def is_outside(values: Sequence[float], bound: float) -> bool:
    """True if the 95 % t-interval of the mean is completely outside -bound to bound."""
    _, low, high = interval(values)
    return low > bound or high < -bound


def with_ends(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def with_interval(values: Sequence[float], sign: str = "") -> str:
    return with_ends(*interval(values), sign)


@dataclass(frozen=True)
class Comparison:
    """A one-sided t-test over seeds: the mean of `values` is above or below `bound`. "within" means
    two tests: the mean is above -bound and below bound."""

    rule: str
    words: str
    values: "pd.Series[float]"
    side: Side
    arms: tuple[str, ...]
    """Arms (groups of runs) that must beat logistic regression."""
    bound: float = 0.0
    equal: float = 1.0
    """Means count as equal if the interval of `values` is between -equal and equal."""

    @property
    def p(self) -> float:
        tests = {
            "above": [(self.bound, "greater")],
            "below": [(self.bound, "less")],
            "within": [(-self.bound, "greater"), (self.bound, "less")],
        }[self.side]
        return max(
            float(stats.ttest_1samp(self.values, bound, alternative=alternative).pvalue)
            for bound, alternative in tests
        )

    def outcome(self, corrected_p: float) -> str:
        _, low, high = interval(self.values)
        if math.isnan(corrected_p):
            return "not tested"
        if corrected_p < 0.05:
            return "yes"
        if self.side != "within" and low > -self.equal and high < self.equal:
            return "equal"
        is_reversed = {
            "above": high < self.bound,
            "below": low > self.bound,
            "within": low > self.bound or high < -self.bound,
        }[self.side]
        return "reversed" if is_reversed else "undecided"


def difference(
    rule: str, words: str, values: pd.DataFrame, a: str, b: str, side: Side
) -> Comparison:
    return Comparison(rule, f"{words}`{a}` minus `{b}`", values[a] - values[b], side, (a, b))


def decide(
    comparisons: Sequence[Comparison], weak: Set[str]
) -> tuple[dict[str, set[str]], list[str]]:
    """Return the outcome of each rule, and the table of the comparisons. Comparisons with `weak`
    arms are not tested, and Holm's correction does not count them."""
    is_tested = [weak.isdisjoint(each.arms) for each in comparisons]
    p = holm(pd.Series([each.p for each in comparisons]).where(is_tested))
    rows, outcomes = [], defaultdict[str, set[str]](set)
    for each, corrected in zip(comparisons, p, strict=True):
        outcomes[each.rule].add(outcome := each.outcome(corrected))
        end = " of 0" if each.side == "within" else ""
        words = f"{each.words} is {each.side} {each.bound:g}{end}"
        printed = "-" if math.isnan(corrected) else f"{corrected:.2g}"
        rows.append([each.rule, words, with_interval(each.values, "+"), printed, outcome])
    return outcomes, markdown(("rule", "prediction", "mean", "p", "holds"), rows)


def errors_and_rates(
    results: pd.DataFrame, axes: Sequence[str], num_runs: int
) -> tuple[pd.DataFrame, "pd.Series[float]"]:
    """Return the test errors in percent (a row for each seed, a column for each arm), and the
    learning rate of each arm."""
    data = with_variables(results)[0].assign(percent=100 * results.error)
    errors = data.pivot(index="seed", columns=[*axes], values="percent")
    if errors.size != num_runs or errors.isna().any(axis=None):
        plan = results.plan.iloc[0]
        sys.exit(f"{plan}: the table needs {num_runs} runs. Run `make findings`.")
    return errors, data.groupby([*axes], sort=False).lr.first()


def weak_arms(errors: pd.DataFrame, logistic: float = LOGISTIC_ERROR) -> set[str]:
    """Return the arms that do not beat logistic regression."""
    return {arm for arm in errors if errors[arm].mean() >= logistic}


def titled(arm: str, weak: Set[str]) -> str:
    return f"`{arm}`{' (weak)' * (arm in weak)}"


def conclude(conclusions: Mapping[str, bool]) -> str:
    found = [words for words, is_true in conclusions.items() if is_true]
    return " ".join(found) or "Undecided."


def slopes(values: pd.DataFrame, x: Sequence[float]) -> "pd.Series[float]":
    """Return the least-squares slope of each row against `x`."""
    return pd.Series(np.polyfit(x, values.T, 1)[0], values.index)
