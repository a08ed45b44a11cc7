"""Decide the claims of docs/findings/ by their rules, from tests/analysis/points/findings_*.

    .venv/bin/python benchmarks/findings.py                   prints the result of each claim as Markdown
    .venv/bin/python benchmarks/findings.py baseline DATASET  fits logistic regression on a dataset
    .venv/bin/python benchmarks/findings.py cka               compares the features of the runs of `sparse`

`make findings` trains the runs and writes findings_*. Errors are in percent, differences in
percentage points. Brackets are 95 % intervals.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from fashion import fit
from frame import markdown
from scipy import stats

from analysis.cli import main as analysis
from analysis.sweeps.statistics import holm
from analysis.sweeps.sweep import lines_of, places_of, with_variables

TABLES = Path(__file__).parents[1] / "tests/analysis/points"
SPARSE_RUNS = "runs/plans/findings_sparse"
LOGISTIC_ERROR = 17.13
"""Test error of logistic regression in percent, from `baseline data/fashion-mnist-6k`."""
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Values of scikit-learn's C for logistic regression."""
KINDS = ("normal", "RP")
WORDS = {True: "yes", False: "no"}
Side = Literal["above", "below", "within"]


def baseline(dataset: str) -> tuple[float, float]:
    """Fit logistic regression on gray pixels. Return the C with the best accuracy on `val`, and the
    test error for this C."""
    name, seed = "logistic regression", 0
    best = max(PENALTIES, key=lambda c: fit(name, c, seed, dataset, "val")["top1"])
    return best, 100 * (1 - fit(name, best, seed, dataset, "test")["top1"])


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and both ends of its 95 % t-interval."""
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(np.mean(values)), float(ends.low), float(ends.high)


def with_interval(values: Sequence[float], sign: str = "") -> str:
    mean, low, high = interval(values)
    return f"{mean:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


@dataclass(frozen=True)
class Comparison:
    """A one-sided t-test over seeds: the mean of `values` is above or below `bound`. "within" are
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


def weak_arms(errors: pd.DataFrame) -> set[str]:
    """Return the arms that do not beat logistic regression."""
    return {arm for arm in errors if errors[arm].mean() >= LOGISTIC_ERROR}


def titled(arm: str, weak: Set[str]) -> str:
    return f"`{arm}`{' (weak)' * (arm in weak)}"


def conclude(conclusions: Mapping[str, bool]) -> str:
    found = [words for words, is_true in conclusions.items() if is_true]
    return " ".join(found) or "Undecided."


def locality(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/locality.md."""
    errors, rates = errors_and_rates(results, ("pixels", "network"), 120)
    in_order, permuted = errors["in-order"], errors["permuted"]
    cost = permuted - in_order
    weak = weak_arms(in_order)
    outcomes, decisions = decide(
        [
            Comparison("2", "cost: `mixer`", cost["mixer"], "above", ("mixer",)),
            difference("3", "cost: ", cost, "mixer", "rp", "above"),
            difference("3", "cost: ", cost, "mixer", "sparse", "above"),
            Comparison("4", "cost: `kronecker-2`", cost["kronecker-2"], "above", ("kronecker-2",)),
            difference("4", "cost: ", cost, "kronecker-2", "monarch-2", "above"),
            difference("5", "permuted: ", permuted, "sparse", "dense-patch", "below"),
            difference("6", "permuted: ", permuted, "mixer", "dense-patch-small", "below"),
        ],
        weak,
    )
    conclusion = conclude(
        {
            "Width by itself does not explain the Mixer's error.": outcomes["2"] == {"yes"},
            "Locality does not explain the Mixer's error.": outcomes["2"] == {"equal"},
            "Permuted pixels help the Mixer.": outcomes["2"] == {"reversed"},
            "Width helps without locality.": outcomes["5"] == {"yes"},
            "Width does not help without locality.": outcomes["5"] == {"equal"},
        }
    )
    controls = {name: interval(cost[name]) for name in ("dense", "dense-2")}
    if any(low > 1 or high < -1 for _, low, high in controls.values()):
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


BATCHES = [f"{schedule}-{epochs}" for schedule in ("cosine", "constant") for epochs in (10, 40)]
"""Schedules and epochs that rule 6 of `mlp` compares."""


def mlp(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/mlp.md."""
    errors, rates = errors_and_rates(results, ("arm",), 100)
    weak = weak_arms(errors)
    gain = errors["inverted-mixup"] - errors["inverted"]
    other_gain = errors["standard-wide-mixup"] - errors["standard-wide"]
    arms = ("inverted-mixup", "inverted", "standard-wide-mixup", "standard-wide")
    comparisons = [
        *(
            difference(rule, "", errors, a, b, "below")
            for rule, a, b in (
                ("1", "inverted", "standard-wide"),
                ("1", "inverted", "standard-deep"),
                ("2 GELU", "deep-gelu", "standard-deep"),
                ("2 skip paths", "deep-skip", "deep-gelu"),
                ("2 bottleneck", "inverted", "deep-skip"),
                ("3", "inverted", "standard"),
                ("4", "cosine-40-batch-128", "inverted"),
                ("4", "inverted-mixup", "inverted"),
            )
        ),
        Comparison(
            "5",
            "MixUp's effect: `inverted` minus `standard-wide`",
            gain - other_gain,
            "below",
            arms,
        ),
        *(
            difference(f"6 {case}", "", errors, f"{case}-batch-512", f"{case}-batch-32", "below")
            for case in BATCHES
        ),
    ]
    outcomes, decisions = decide(comparisons, weak)
    sixth = {case: outcomes[f"6 {case}"] == {"yes"} for case in BATCHES}
    is_constant_only = [*sixth.values()] == [False, False, True, True]
    conclusion = conclude(
        {
            "The inverted bottleneck is better at equal compute.": outcomes["1"] == {"yes"},
            "Table 1's difference can be a difference of compute.": outcomes["3"] == {"yes"}
            and outcomes["1"] != {"yes"},
            "Augmentation helps at this size.": outcomes["4"] == {"yes"},
            "The inverted bottleneck gains more from augmentation.": outcomes["5"] == {"yes"},
            "Larger batches are better at equal epochs.": all(sixth.values()),
            "Learning-rate decay removes the benefit of large batches.": is_constant_only,
        }
    )
    table = [
        [titled(arm, weak), with_interval(errors[arm]), f"{rate:g}"] for arm, rate in rates.items()
    ]
    steps = [
        [f"`{a}` minus `{b}`", with_interval(errors[a] - errors[b], "+")]
        for schedule in ("cosine", "constant")
        for few, many in ((32, 128), (128, 512))
        for a, b in [(f"{schedule}-40-batch-{many}", f"{schedule}-10-batch-{few}")]
    ]
    return [
        *markdown(("arm", "test error", "learning rate"), table),
        "",
        *decisions,
        "",
        conclusion,
        "",
        *markdown(("equal steps, four times as many images", "difference"), steps),
    ]


def slopes(values: pd.DataFrame, x: Sequence[float]) -> "pd.Series[float]":
    """Return the least-squares slope of each row against `x`."""
    return pd.Series(np.polyfit(x, values.T, 1)[0], values.index)


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


def gain(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/gain.md."""
    errors, rates = errors_and_rates(results, ("init", "width"), 50)
    data = with_variables(results)[0]
    losses = data.pivot(index="seed", columns=["init", "width"], values="train_loss")
    default, effect = losses["default"], losses["spectral"] - losses["default"]
    effect_on_error = errors["spectral"] - errors["default"]
    weak = weak_arms(errors["default"]) & weak_arms(errors["spectral"])
    narrow, middle, _, wide, widest = default
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
        weak,
    )  # fmt: skip
    deteriorates, helps, helps_wide, is_sparse, generalizes = (
        outcomes[rule] == {"yes"} for rule in "12345"
    )
    conclusion = conclude(
        {
            "The initial scale causes a part of the deterioration.": deteriorates
            and helps
            and is_sparse,
            "The gain helps, but not through sparsity.": deteriorates and helps and not is_sparse,
            "The initial scale does not cause the deterioration.": deteriorates
            and outcomes["2"] == {"equal"},
            "No deterioration was seen.": not deteriorates,
            "The effect is not only at the most extreme sparsity.": deteriorates
            and helps
            and helps_wide,
            "The gain improves generalization.": deteriorates and generalizes,
            "The gain harms training.": outcomes["2"] == {"reversed"},
        }
    )
    _, low, high = interval(effect[narrow])
    if low > 0.05 or high < -0.05:
        conclusion = "The control fails, so the rules are not tested."
    table = [
        [
            f"{m:,}{' (weak)' * (m in weak)}",
            *(with_interval(losses[init, m]) for init in ("default", "spectral")),
            with_interval(effect[m], "+"),
            *(with_interval(errors[init, m]) for init in ("default", "spectral")),
            " / ".join(f"{rates[init, m]:g}" for init in ("default", "spectral")),
        ]
        for m in default
    ]
    header = (
        "m",
        "training loss, default",
        "spectral",
        "effect",
        "test error, default",
        "spectral",
        "learning rates",
    )
    part = f"Effect at m = {widest:,} divided by the difference of rule 1: {effect[widest].mean() / rise.mean():.2f}."
    return [*markdown(header, table), "", *decisions, "", conclusion, "", part]


WIDTHS = {
    "sparse": {"sparse-m256": 256, "sparse-m512": 512, "sparse-m1024": 1_024},
    "mixer": {"mixer-c4": 504, "mixer-c8": 696, "mixer-c32": 1_024},
    "rp": {"rp-c4": 504, "rp-c8": 696, "rp-c32": 1_024},
}
"""Width m of the networks of `sparse` in each slope."""
DENSITIES = ("sparse-p1", "sparse-p8", "sparse-m1024", "sparse-p256")
"""SW-MLPs of m = 1,024, the densest one first."""
UNTRAINED = "-untrained"


def cka_pairs() -> list[tuple[str, str]]:
    """Return the pairs of runs whose features `sparse` compares."""
    seeds = range(50, 55)
    networks = [
        *((mixer, other) for mixer in ("mixer-c32", "rp-c32") for other in DENSITIES),
        *((f"{mixer}{UNTRAINED}", f"sparse-m1024{UNTRAINED}") for mixer in ("mixer-c32", "rp-c32")),
    ]
    pairs = [(f"{a}-seed-{seed}", f"{b}-seed-{seed}") for a, b in networks for seed in seeds]
    pairs += [
        (f"{name}-seed-{seed}", f"{name}-seed-{50 + (seed - 49) % 5}")
        for name in ("mixer-c32", "rp-c32", "sparse-m1024")
        for seed in seeds
    ]
    return [(f"{SPARSE_RUNS}/{a}", f"{SPARSE_RUNS}/{b}") for a, b in pairs]


def similarities_of(entries: pd.DataFrame, values: Literal["cka", "floor"]) -> pd.DataFrame:
    """Return the mean over equal depths for each seed (rows) and pair of networks (columns)."""
    diagonal = entries[entries.on_diagonal]
    names = diagonal.run_a.str.extract(r"([^/]+)-seed-(?P<seed>\d+)$").rename(columns={0: "a"})
    names["b"] = diagonal.run_b.str.extract(r"([^/]+)-seed-\d+$", expand=False)
    means = diagonal[values].groupby([names.seed, names.a, names.b]).mean()
    return means.unstack(["a", "b"])


def falls_with_width(
    rule: str, errors: pd.DataFrame, widths: Mapping[str, int], weak: Set[str]
) -> Comparison:
    used = [name for name in widths if name not in weak]
    is_tested = len(used) > 1
    values = slopes(
        errors[used if is_tested else [*widths]],
        [math.log2(widths[name]) for name in (used if is_tested else widths)],
    )
    words = f"slope against log2(m), {' '.join(f'`{name}`' for name in widths)}"
    return Comparison(rule, words, values, "below", () if is_tested else (*widths,), equal=0)


def sparse(results: pd.DataFrame, entries: pd.DataFrame | None = None) -> list[str]:
    """Decide docs/findings/sparse.md. `entries` is the table of `analysis cka`."""
    if entries is None:
        entries = pd.read_parquet(TABLES / "findings_sparse_cka.parquet")
    errors, rates = errors_and_rates(results, ("network",), 65)
    weak = weak_arms(errors)
    similarity, floor = (similarities_of(entries, values) for values in ("cka", "floor"))
    mlp_name = "sparse-m1024"
    comparisons = [falls_with_width("1", errors, WIDTHS["sparse"], weak)]
    ceilings = {}
    for kind, name in zip(KINDS, ("mixer", "rp"), strict=True):
        mixer = f"{name}-c32"
        arms, words = (mixer, mlp_name), f"CKA of `{mixer}` and `{mlp_name}` minus "
        own, dense = similarity[mixer, mlp_name], similarity[mixer, "sparse-p1"]
        ceilings[mixer] = (similarity[mixer, mixer] + similarity[mlp_name, mlp_name]) / 2
        comparisons += [
            falls_with_width(f"2 {kind}", errors, WIDTHS[name], weak),
            Comparison(f"3 {kind}", f"`{mixer}` minus `{mlp_name}`", errors[mixer] - errors[mlp_name], "within", arms, 1),
            Comparison(f"4 {kind}", f"{words}floor", own - floor[mixer, mlp_name], "above", arms, equal=0),
            Comparison(f"5 {kind}", f"{words}ceiling", own - ceilings[mixer], "above", arms, -0.1, equal=0),
            Comparison(f"6 {kind}", f"{words}CKA with `sparse-p1`", own - dense, "above", (*arms, "sparse-p1"), equal=0),
        ]  # fmt: skip
    outcomes, decisions = decide(comparisons, weak)
    conclusions = []
    for kind in KINDS:
        own_outcomes = [*outcomes["1"], *(next(iter(outcomes[f"{n} {kind}"])) for n in range(2, 7))]
        has_errors, has_features = (
            set(part) == {"yes"} for part in (own_outcomes[:3], own_outcomes[3:])
        )
        conclusion = conclude(
            {
                "The claim holds.": has_errors and has_features,
                "SW-MLPs have the Mixer's errors.": has_errors and not has_features,
                "SW-MLPs have the Mixer's features.": has_features and not has_errors,
                "The claim fails.": "reversed" in own_outcomes,
            }
        )
        conclusions += [f"{kind} Mixer: {conclusion}", ""]
    table = [
        [titled(name, weak), with_interval(errors[name]), f"{rate:g}"]
        for name, rate in rates.items()
    ]
    features = [
        [
            f"`{a}`, `{b}`",
            with_interval(similarity[a, b]),
            with_interval(floor[a, b]),
            with_interval(ceilings[a]) if b == mlp_name else "-",
        ]
        for a, b in similarity
        if a != b
    ]
    narrow = "`{}-c4` minus `sparse-m512`: {}."
    return [
        *markdown(("network", "test error", "learning rate"), table),
        "",
        *markdown(("networks", "CKA", "floor", "ceiling"), features),
        "",
        *decisions,
        "",
        *conclusions,
        " ".join(
            narrow.format(name, with_interval(errors[f"{name}-c4"] - errors["sparse-m512"], "+"))
            for name in ("mixer", "rp")
        ),
    ]


CLAIMS = {"width": width, "locality": locality, "mlp": mlp}

if __name__ == "__main__":
    if sys.argv[1:2] == ["baseline"]:
        print("C = {}, test error {:.2f} %".format(*baseline(sys.argv[2])))
    elif sys.argv[1:] == ["cka"]:
        (a, b), *others = cka_pairs()
        out = f"{TABLES / 'findings_sparse_cka'}"
        options = ["--split", "test", "--count", "2560", "--out", out]
        more = [word for pair in others for word in ("--pair", *pair)]
        sys.exit(analysis(["cka", a, b, "data/fashion-mnist-6k", *options, *more]))
    else:
        for name, lines_of_claim in CLAIMS.items():
            table = pd.read_parquet(TABLES / f"findings_{name}.parquet")
            print(*lines_of_claim(table), sep="\n")
