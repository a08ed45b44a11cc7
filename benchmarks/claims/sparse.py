import math
from collections.abc import Mapping, Set
from typing import Literal

import pandas as pd
from claims.decisions import (
    KINDS,
    TABLES,
    Comparison,
    conclude,
    decide,
    errors_and_rates,
    slopes,
    titled,
    weak_arms,
    with_interval,
)
from frame import markdown

RUNS = "runs/plans/findings_sparse"
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
    return [(f"{RUNS}/{a}", f"{RUNS}/{b}") for a, b in pairs]


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
    if not (is_tested := len(used) > 1):
        used = [*widths]
    values = slopes(errors[used], [math.log2(widths[name]) for name in used])
    words = f"slope against log2(m), {' '.join(f'`{name}`' for name in widths)}"
    return Comparison(rule, words, values, "below", () if is_tested else (*widths,), equal=0)


def sparse(results: pd.DataFrame, entries: pd.DataFrame | None = None) -> list[str]:
    """Decide docs/findings/sparse.md. `entries` is the table of `analysis cka`."""
    if entries is None:
        entries = pd.read_parquet(TABLES / "findings_sparse_cka.parquet")
    is_untrained = results.labels.str.contains(UNTRAINED)
    errors, rates = errors_and_rates(results[~is_untrained], ("network",), 65)
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
                "Not tested.": outcomes[f"3 {kind}"] == {"not tested"},
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
