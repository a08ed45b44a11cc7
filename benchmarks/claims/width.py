import math
import sys

import pandas as pd
from claims.decisions import KINDS, LOGISTIC_ERROR, interval, with_ends, with_interval
from frame import markdown

from analysis.sweeps.sweep import lines_of, places_of, with_variables

WORDS = {True: "yes", False: "no"}


def width(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/width.md."""
    data = with_variables(results)[0].assign(percent=100 * results.error)
    errors, rates = (
        data.pivot(index=["channels", "tokens"], columns=["mixing", "seed"], values=values)
        for values in ("percent", "lr")
    )
    if errors.shape != (7, 10) or errors.isna().any(axis=None):
        sys.exit(
            "width: the table needs 7 shapes x 2 mixings x 5 seeds. Run `make findings CLAIM=width`."
        )
    shapes = [
        [
            *(f"{number:,.0f}" for number in (c, s, c * s)),
            *(with_interval(row[kind]) for kind in KINDS),
            " / ".join(f"{rates.loc[c, s][kind].iloc[0]:g}" for kind in KINDS),
        ]
        for (c, s), row in errors.iterrows()
    ]
    optima, trends = (
        lines_of(places_of(results, x, ["mixing"]), x).set_index("hue") for x in ("log_cs", "width")
    )
    rules = []
    for kind in KINDS:
        own, optimum, trend = errors[kind].droplevel("tokens"), optima.loc[kind], trends.loc[kind]
        narrow, wide = (own.loc[64] - own.loc[c] for c in (8, 512))
        at, low, high = (optimum[name] / math.log(2) for name in ("at", "low", "high"))
        holds = [
            interval(narrow)[2] < 0 and interval(wide)[2] < 0,
            low <= 1 and high >= -1,
            trend.tau < 0 and trend.p_holm < 0.05,
        ]
        weak = [f"{c:.0f}" for c, errors_of in own.iterrows() if errors_of.mean() >= LOGISTIC_ERROR]
        verdict = "The claim holds." if all(holds) else "The claim fails."
        if weak:
            verdict = f"Not tested: C = {', '.join(weak)} do not beat logistic regression."
        rules += [
            [kind, "1", f"C = 64 minus C = 8: {with_interval(narrow, '+')}; "
             f"minus C = 512: {with_interval(wide, '+')}", WORDS[holds[0]]],
            [kind, "2", f"least at log2(C / S) = {with_ends(at, low, high)}", WORDS[holds[1]]],
            [kind, "3", f"tau = {trend.tau:.2f}, p = {trend.p_holm:.3f}", WORDS[holds[2]]],
            [kind, "all", verdict, "-" if weak else WORDS[all(holds)]],
        ]  # fmt: skip
    return [
        f"Logistic regression has a test error of {LOGISTIC_ERROR:.2f} %.",
        "",
        *markdown(("C", "S", "m", *KINDS, "learning rates"), shapes),
        "",
        *markdown(("Mixer", "rule", "result", "holds"), rules),
    ]
