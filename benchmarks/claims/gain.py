import pandas as pd
from claims.decisions import (
    Comparison,
    conclude,
    decide,
    errors_and_rates,
    is_outside,
    weak_arms,
    with_interval,
)
from frame import markdown

from analysis.sweeps.sweep import with_variables


def gain(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/gain.md."""
    errors, rates = errors_and_rates(results, ("init", "width"), 50)
    data = with_variables(results)[0]
    losses = data.pivot(index="seed", columns=["init", "width"], values="train_loss")
    default, effect = losses["default"], losses["spectral"] - losses["default"]
    effect_on_error = errors["spectral"] - errors["default"]
    weak = weak_arms(errors["default"]) & weak_arms(errors["spectral"])
    narrow, middle, _, wide, widest = widths = sorted(default)
    control_fails = is_outside(effect[narrow], 0.05)
    rise = default[widest] - default[middle]
    on_loss, on_error = (
        f"effect on the {name} at m = " for name in ("training loss", "test error")
    )
    near = {"equal": 0.05}
    outcomes, decisions = decide(
        [
            Comparison("1", f"training loss at m = {widest:,} minus m = {middle:,}", rise, "above", (widest, middle), **near),
            Comparison("2", f"{on_loss}{widest:,}", effect[widest], "below", (widest,), **near),
            Comparison("3", f"{on_loss}{wide:,}", effect[wide], "below", (wide,), **near),
            Comparison("4", f"{on_loss}{widest:,} minus m = {narrow:,}", effect[widest] - effect[narrow], "below", (widest, narrow), **near),
            Comparison("5", f"{on_error}{widest:,}", effect_on_error[widest], "below", (widest,)),
        ],
        {*widths} if control_fails else weak,
    )  # fmt: skip
    holds, fails = (
        {rule for rule, found in outcomes.items() if found <= values}
        for values in ({"yes"}, {"equal", "reversed"})
    )
    conclusion = conclude(
        {
            "The initial scale causes a part of the deterioration.": holds >= {"1", "2", "4"},
            "The gain helps, but not through sparsity.": holds >= {"1", "2"} and "4" in fails,
            "The initial scale does not cause the deterioration.": "1" in holds
            and outcomes["2"] == {"equal"},
            "No deterioration was seen.": "1" in fails,
            "The effect is not only at the most extreme sparsity.": holds >= {"1", "2", "3"},
            "The gain improves generalization.": holds >= {"1", "5"},
            "The gain harms training.": outcomes["2"] == {"reversed"},
        }
    )
    if control_fails:
        conclusion = "The control fails, so the rules are not tested."
    table = [
        [
            f"{m:,}{' (weak)' * (m in weak)}",
            *(with_interval(losses[init, m]) for init in ("default", "spectral")),
            with_interval(effect[m], "+"),
            *(with_interval(errors[init, m]) for init in ("default", "spectral")),
            *(f"{rates[init, m]:g}" for init in ("default", "spectral")),
        ]
        for m in widths
    ]
    header = (
        "m",
        "training loss, default",
        "training loss, spectral",
        "effect",
        "test error, default",
        "test error, spectral",
        "rate, default",
        "rate, spectral",
    )
    part = f"Effect at m = {widest:,} divided by the difference of rule 1: {effect[widest].mean() / rise.mean():.2f}."
    return [*markdown(header, table), "", *decisions, "", conclusion, "", part]
