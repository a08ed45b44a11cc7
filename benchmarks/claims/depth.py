import math

import pandas as pd
from claims.decisions import (
    KINDS,
    Comparison,
    decide,
    errors_and_rates,
    interval,
    slopes,
    titled,
    weak_arms,
    with_interval,
)
from frame import markdown

from analysis.sweeps.sweep import with_variables


def depth(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/depth.md."""
    errors, rates = errors_and_rates(results, ("mixing", "network"), 50)
    gap = errors["RP"] - errors["normal"]
    weak = weak_arms(errors["normal"]) | weak_arms(errors["RP"])
    data = with_variables(results)[0].assign(rise=results.loss - results.train_loss)
    rises = data.groupby(["mixing", "network"]).rise.mean()
    networks = [*rates["normal"].index]
    table = [
        [
            titled(name, weak),
            *(with_interval(errors[kind, name]) for kind in KINDS),
            with_interval(gap[name], "+"),
            " / ".join(f"{rises[kind, name]:.2f}" for kind in KINDS),
            " / ".join(f"{rates[kind, name]:g}" for kind in KINDS),
        ]
        for name in networks
    ]
    header = ("network", *KINDS, "gap", "test minus training loss", "learning rates")
    used = [name for name in networks if name not in weak]
    if len(used) < 3:
        verdict = "Not tested: fewer than three depths beat logistic regression."
        return [*markdown(header, table), "", verdict]
    slope = slopes(gap[used], [math.log2(int(name.partition("-")[2])) for name in used])
    first, last = used[0], used[-1]
    outcomes, decisions = decide(
        [
            Comparison("1", f"gap of `{first}`", gap[first], "above", ()),
            Comparison("2", "slope of the gap against log2(depth)", slope, "below", (), equal=0),
            Comparison("3", f"gap of `{last}`", gap[last], "below", (), bound=1),
        ],
        set(),
    )
    begins_worse, falls, is_reached = (outcomes[rule] == {"yes"} for rule in "123")
    not_worse = f"RP-Mixers are not worse at `{last}`"
    conclusions = {
        "The claim holds: RP-Mixers begin worse and reach normal Mixers.": begins_worse
        and falls
        and is_reached,
        f"The claim fails: RP-Mixers are still worse at `{last}`.": not is_reached
        and interval(gap[last])[1] > 0,
        "The claim fails: the gap grows with depth.": interval(slope)[1] > 0,
        f"{not_worse}; a deficit at limited depth is not shown.": is_reached and not begins_worse,
        f"{not_worse}; a fall with depth is not shown.": is_reached and begins_worse,
    }
    first_true = next((words for words, is_true in conclusions.items() if is_true), "Undecided.")
    return [*markdown(header, table), "", *decisions, "", first_true]
