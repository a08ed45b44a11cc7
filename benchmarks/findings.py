"""The claims of docs/findings.md, decided by their rules from tests/analysis/points/findings_*.

    .venv/bin/python benchmarks/findings.py                   prints the result of each claim as Markdown
    .venv/bin/python benchmarks/findings.py baseline DATASET  fits logistic regression on a dataset

`make findings` trains the runs and writes these tables. Errors are in percent, differences in
percentage points. Brackets are 95 % intervals.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from fashion import read_split
from frame import markdown
from scipy import stats
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from analysis.sweeps.sweep import lines_of, places_of, with_variables

TABLES = Path(__file__).parents[1] / "tests/analysis/points"
LOGISTIC_ERROR = 17.13
"""The output of `baseline data/fashion-mnist-6k`."""
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Values of scikit-learn's C for logistic regression."""
KINDS = ("normal", "RP")
WORDS = {True: "yes", False: "no"}


def baseline(dataset: str) -> tuple[float, float]:
    """Return the C that is best on `val`, and its test error, of logistic regression on gray
    pixels."""
    train, val, test = (
        (images.flatten(1).numpy(), labels.numpy())
        for images, labels in (read_split(split, dataset) for split in ("train", "val", "test"))
    )
    with threadpool_limits(1):  # more threads are slower at this size
        models = {
            c: LogisticRegression(C=c, max_iter=1000, tol=1e-3).fit(*train) for c in PENALTIES
        }
    best = max(models, key=lambda c: models[c].score(*val))
    return best, 100 * (1 - models[best].score(*test))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its t-interval."""
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(np.mean(values)), float(ends.low), float(ends.high)


def with_interval(values: Sequence[float], sign: str = "") -> str:
    mean, low, high = interval(values)
    return f"{mean:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def width(results: pd.DataFrame) -> list[str]:
    """Decide "Width at a fixed number of connections"."""
    data = with_variables(results)[0].assign(percent=100 * results.error)
    errors, rates = (
        data.pivot(index=["channels", "tokens"], columns=["mixing", "seed"], values=values)
        for values in ("percent", "lr")
    )
    if errors.shape != (7, 10) or errors.isna().any(axis=None):
        sys.exit(
            "width: the table has not 7 shapes x 2 mixings x 5 seeds. Run `make findings CLAIM=width`."
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
            [kind, "2", f"least at log2(C / S) = {at:.2f} [{low:.2f}, {high:.2f}]", WORDS[holds[1]]],
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


CLAIMS = {"width": width}

if __name__ == "__main__":
    if sys.argv[1:2] == ["baseline"]:
        print("C = {}, test error {:.2f} %".format(*baseline(sys.argv[2])))
    else:
        for name, decide in CLAIMS.items():
            print(*decide(pd.read_parquet(TABLES / f"findings_{name}.parquet")), sep="\n")
