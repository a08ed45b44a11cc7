from collections.abc import Sequence, Set

import pandas as pd
from claims.decisions import (
    Comparison,
    conclude,
    decide,
    difference,
    errors_and_rates,
    is_outside,
    titled,
    weak_arms,
    with_interval,
)
from frame import markdown


def locality(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/locality.md."""
    errors, rates = errors_and_rates(results, ("pixels", "network"), 120)
    permuted, cost = errors["permuted"], errors["permuted"] - errors["in-order"]
    comparisons = [
        Comparison("2", "cost: `mixer`", cost["mixer"], "above", ("mixer",)),
        difference("3", "cost: ", cost, "mixer", "rp", "above"),
        difference("3", "cost: ", cost, "mixer", "sparse", "above"),
        Comparison("4", "cost: `kronecker-2`", cost["kronecker-2"], "above", ("kronecker-2",)),
        difference("4", "cost: ", cost, "kronecker-2", "monarch-2", "above"),
        difference("5", "permuted: ", permuted, "sparse", "dense-patch", "below"),
        difference("6", "permuted: ", permuted, "mixer", "dense-patch-small", "below"),
    ]
    return lines_of(errors, rates, comparisons, weak_arms(errors["in-order"]), ("dense", "dense-2"))


def lines_of(
    errors: pd.DataFrame,
    rates: "pd.Series[float]",
    comparisons: Sequence[Comparison],
    weak: Set[str],
    controls: Sequence[str],
) -> list[str]:
    """Return the tables of errors and decisions, and the conclusion."""
    in_order, permuted = errors["in-order"], errors["permuted"]
    cost = permuted - in_order
    outcomes, decisions = decide(comparisons, weak)
    conclusion = conclude(
        {
            "Width by itself does not explain the Mixer's error.": outcomes["2"] == {"yes"},
            "Locality does not explain the Mixer's error.": outcomes["2"] == {"equal"},
            "Permuted pixels help the Mixer.": outcomes["2"] == {"reversed"},
            "The Mixer is not tested.": outcomes["2"] == {"not tested"},
            "Width helps without locality.": outcomes["5"] == {"yes"},
            "Width does not help without locality.": outcomes["5"] == {"equal"},
        }
    )
    if any(is_outside(cost[name], 1) for name in controls):
        conclusion = "The control fails, so the rules are not tested."
    table = [
        [
            titled(name, weak),
            *(with_interval(each[name]) for each in (in_order, permuted)),
            with_interval(cost[name], "+"),
            f"{rates['in-order', name]:g} / {rates['permuted', name]:g}",
        ]
        for name in rates["in-order"].index
    ]
    header = ("network", "in order", "permuted", "cost", "learning rates")
    return [*markdown(header, table), "", *decisions, "", conclusion]
