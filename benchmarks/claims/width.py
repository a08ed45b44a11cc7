import math

import pandas as pd
from claims.decisions import (
    KINDS,
    LOGISTIC_ERROR,
    errors_and_rates,
    interval,
    weak_arms,
    with_ends,
    with_interval,
)
from frame import markdown

from analysis.sweeps.sweep import lines_of, places_of

WORDS = {True: "yes", False: "no"}


def width(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/width.md."""
    errors, shapes = errors_by_shape(results, 7)
    optima, trends = (
        lines_of(places_of(results, x, ["mixing"]), x).set_index("hue") for x in ("log_cs", "width")
    )
    rules = []
    for kind in KINDS:
        own, optimum, trend = errors[kind], optima.loc[kind], trends.loc[kind]
        differences, is_least = compare_shapes(own)
        at, low, high = (optimum[name] / math.log(2) for name in ("at", "low", "high"))
        holds = [is_least, low <= 1 and high >= -1, trend.tau < 0 and trend.p_holm < 0.05]
        weak = [f"{c:.0f}" for c in sorted(weak_arms(own))]
        verdict = "The claim holds." if all(holds) else "The claim fails."
        if weak:
            verdict = f"Not tested: C = {', '.join(weak)} do not beat logistic regression."
        rules += [
            [kind, "1", differences, WORDS[holds[0]]],
            [kind, "2", f"least at log2(C / S) = {with_ends(at, low, high)}", WORDS[holds[1]]],
            [kind, "3", f"tau = {trend.tau:.2f}, p = {trend.p_holm:.3f}", WORDS[holds[2]]],
            [kind, "all", verdict, "-" if weak else WORDS[all(holds)]],
        ]  # fmt: skip
    return [
        f"Logistic regression has a test error of {LOGISTIC_ERROR:.2f} %.",
        "",
        *shapes,
        "",
        *markdown(("Mixer", "rule", "result", "holds"), rules),
    ]


def errors_by_shape(results: pd.DataFrame, num_shapes: int) -> tuple[pd.DataFrame, list[str]]:
    """Return test errors in percent, by seed (rows) and by kind of Mixer and C (columns), and the
    table of the page."""
    axes = ("mixing", "channels", "tokens")
    errors, rates = errors_and_rates(results, axes, 10 * num_shapes)
    shapes = [
        [
            *(f"{number:,.0f}" for number in (c, s, c * s)),
            *(with_interval(errors[kind, c, s]) for kind in KINDS),
            " / ".join(f"{rates[kind, c, s]:g}" for kind in KINDS),
        ]
        for c, s in errors["normal"]
    ]
    errors = errors.droplevel("tokens", axis=1)
    return errors, markdown(("C", "S", "m", *KINDS, "learning rates"), shapes)


def compare_shapes(errors: pd.DataFrame) -> tuple[str, bool]:
    """Compare C = S = 64 with C = 8 and 512. Return the differences, and whether the error at C = S
    is lower than both."""
    narrow, wide = (errors[64] - errors[c] for c in (8, 512))
    words = f"C = 64 minus C = 8: {with_interval(narrow, '+')}; minus C = 512: {with_interval(wide, '+')}"
    return words, interval(narrow)[2] < 0 and interval(wide)[2] < 0
