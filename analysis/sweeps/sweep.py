"""Errors of many runs by a variable: one place for each panel (facet), line (hue) and x.

A place has one result for each seed, equal in all variables. Results that differ in a variable
other than x, hue and facet are an error, because their mean has no meaning. Shapes that only swap
tokens and channels are one width and count once.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.output import Result
from analysis.results import VARIABLES, last_of_each_run
from analysis.sweeps.statistics import kendall, optimum
from data_prep.errors import UserError
from data_prep.settings import nearest

Names = Sequence[str]
NORMAL, PERMUTED = "normal", "RP"
KINDS = {"mlp": "MLP", "mixer": "MLP-Mixer", "smixer": "S-Mixer", "sw_mlp": "SW-MLP"}
WIDTHS = ("width", "hidden_width")
OF_SHAPES = {
    *("tokens", "channels", "log_cs", "patch_size", "model", "parameters", "multiply_adds"),
    "compute",
}
"""Variables in which mirrored shapes differ."""
LENGTHS = {"epochs", "compute", "samples", "step"}
TITLES = {
    "width": "width m",
    "hidden_width": "greatest width gamma m",
    "density": "density p",
    "channels": "channels C",
    "tokens": "tokens S",
    "log_cs": "ln(C / S)",
    "log2_omega": "log2 Ω",
    "depth": "depth L",
    "patch_size": "patch size P (px)",
    "global_batch_size": "batch size",
    "images": "training images N",
    "compute": "compute C (3 MACs x samples)",
    "parameters": "parameters P",
}


def with_variables(results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the results with a column for each variable and each axis of the plans, and the names
    of the axes."""
    labels = pd.DataFrame(map(json.loads, results.labels), index=results.index).map(_number)
    axes = labels.drop(columns=[name for name in labels if name in {*results, *VARIABLES}])
    permuted, depth = results.permuted_blocks, results.depth
    some = permuted.map("RP in {:.0f} of ".format) + depth.map("{:.0f}".format)
    data = results.assign(
        kind=results.kind.map(KINDS).fillna(results.model),
        mixing=some.mask(permuted == depth, PERMUTED)
        .mask(permuted == 0, NORMAL)
        .where(permuted.notna()),
        log_cs=np.log(results.channels.astype(float) / results.tokens.astype(float)),
        log2_omega=np.log2(results.omega.astype(float)).round(),
        epochs=results.epochs.astype(float).round(1),
        augmented=results.augmented.map({True: "+ DA", False: "no DA"}),
    )
    return pd.concat([data, axes], axis=1), list(labels)


def _number(word: Any) -> Any:
    try:
        return float(word)
    except ValueError:
        return word


def words_of(values: Sequence[Any], names: Names) -> str:
    """Return the name of a line or panel."""
    words = []
    for value, name in zip(values, names, strict=True):
        if pd.isna(value):
            continue
        if name == "log2_omega":
            words.append(f"Ω = 2^{value:.0f}")
        else:
            is_number = isinstance(value, int | float)
            words.append(f"{TITLES.get(name, name)} {value:g}" if is_number else str(value))
    return ", ".join(words)


def groups_of(
    results: pd.DataFrame, x: str, hue: Names, facet: Names
) -> tuple[pd.DataFrame, list[str]]:
    """Return the results with the columns `panel`, `line` and `x`, sorted, after checking that all
    results at a place are equal but for the seed."""
    data, axes = with_variables(results)
    for name in filter(None, (x, *hue, *facet)):
        if name not in (*axes, *VARIABLES):
            fix = nearest(name, [*axes, *VARIABLES])
            problem = "is not a variable or an axis of these plans"
            raise UserError(name, problem, fix, code="unknown-name")
    data = data.assign(x=data[x] if x else "")
    data = data[data.x.notna()]
    if data.empty:
        raise UserError(x, "is not known for any result", "choose another x", code="empty")
    for column, names in (("panel", facet), ("line", hue)):
        data[column] = [
            words_of(values, names) for values in data[[*names]].itertuples(index=False)
        ]
    is_number = data.x.map(lambda value: isinstance(value, int | float)).all()
    order = {name: pd.factorize(data[name])[0] for name in ("panel", "line", "x")}
    order |= {"x": data.x.astype(float)} if is_number else {}
    data = data.iloc[
        pd.DataFrame(order).reset_index(drop=True).sort_values([*order], kind="stable").index
    ]
    for _, place in data.groupby(["panel", "line", "x"], sort=False):
        _check_place(place, x, axes)
    return data, axes


def _check_place(place: pd.DataFrame, x: str, axes: Names) -> None:
    def varying(rows: pd.DataFrame, names: Names) -> list[str]:
        return [name for name in names if rows[name].nunique(dropna=False) > 1]

    is_width = x in WIDTHS
    own = ["seed", "own_seed", *(("tokens", "channels") if is_width else ())]
    same_seed = [rows for _, rows in place.groupby(own, dropna=False) if len(rows) > 1]
    names = [name for name in varying(place, VARIABLES) if not (is_width and name in OF_SHAPES)]
    if names or same_seed:
        rows = same_seed[0] if same_seed else place
        names += varying(rows, [axis for axis in axes if axis != "name"])
        raise UserError(
            x or "--hue",
            f"{' and '.join(rows.run.iloc[[0, -1]])} are at the same place"
            f" and differ in {', '.join(names) or 'no variable'}",
            f"give --hue or --facet {names[0]}" if names else "leave out one of them",
            code="conflict",
        )


def places_of(
    results: pd.DataFrame, x: str, hue: Names = (), facet: Names = (), task: str | None = None
) -> pd.DataFrame:
    """Return one row for each place. Each seed counts once in means and deviations; `errors` are
    those of the seeds, `minus_normal` the differences between RP and normal Mixers of one seed."""
    data = results[results.error.notna()]
    if task is not None:
        data = data[data.task == task]
    if data.empty:
        tasks = ", ".join(sorted(results.task.unique())) or "none"
        raise UserError("--task", "no result has an accuracy", f"tasks: {tasks}", code="empty")
    if not LENGTHS & {x, *hue, *facet}:
        data = last_of_each_run(data)
    data, _ = groups_of(data, x, hue, facet)
    data["num_results"] = 1
    place, seed = ["panel", "line", "x"], ["seed", "own_seed"]
    others = {name: "first" for name in data if name not in (*place, *seed, "error", "num_results")}
    means = {"error": "mean", "num_results": "sum"} | others
    seeds = data.groupby([*place, *seed], sort=False, dropna=False).agg(means).reset_index()
    groups = [name for name in (*hue, *facet) if name != "mixing"]
    # a Mixer's normal counterpart differs in nothing else
    alike = [*groups, "x"] if "mixing" in (*hue, *facet) else [
        *dict.fromkeys([*groups, *(name for name in VARIABLES if name not in ("mixing", "model"))])
    ]  # fmt: skip
    is_normal = seeds.mixing == NORMAL
    normal = seeds[is_normal].drop_duplicates([*alike, *seed])[[*alike, *seed, "error"]]
    seeds = seeds.merge(normal, on=[*alike, *seed], how="left", suffixes=("", "_normal"))
    seeds["minus_normal"] = (seeds.error - seeds.error_normal).mask(
        seeds.mixing.isna() | (seeds.mixing == NORMAL)
    )
    grouped = seeds.groupby(place, sort=False)
    places = grouped.agg(
        error_mean=("error", "mean"),
        error_sd=("error", "std"),
        num_seeds=("error", "size"),
        num_results=("num_results", "sum"),
        num_test=("num_test", "first"),
        errors=("error", list),
        minus_normal_mean=("minus_normal", "mean"),
        minus_normal_sd=("minus_normal", "std"),
        minus_normal=("minus_normal", lambda values: values.dropna().tolist()),
    ).reset_index()
    # seeds share their test images
    variance = places.error_mean * (1 - places.error_mean) / places.num_test.astype(float)
    return places.assign(binomial_se=variance**0.5)


def facts_of(places: pd.DataFrame, x: str) -> dict[str, Any]:
    """Return Kendall's tau of each line against a width, the optimum of each line against
    ln(C / S), and a summary of all differences between RP and normal Mixers."""
    lines = []
    for (panel, line), own in places.groupby(["panel", "line"], sort=False):
        pairs = own[["x", "errors"]].explode("errors").astype(float) if x == "log_cs" else None
        lines.append(
            {
                "facet": panel,
                "hue": line,
                "kendall": kendall(own.x.tolist(), own.error_mean.tolist())
                if x in WIDTHS
                else None,
                "optimum": optimum(pairs.x, pairs.errors) if pairs is not None else None,
            }
        )
    changes = places.minus_normal.explode().dropna().astype(float)
    summary = {"pairs": len(changes), "mean": changes.mean(), "lower": int((changes < 0).sum())}
    return {"lines": lines, "rp_minus_normal": summary if len(changes) else None}


def lines_of(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines for the console."""
    lines = []
    for line in facts["lines"]:
        name = ", ".join(filter(None, [line["facet"], line["hue"]])) or "all"
        if found := line["kendall"]:
            lines.append(
                f"{name}: Kendall's tau {found['tau']:.2f} over {found['num']} widths,"
                f" exact p {found['p']:.2g}"
            )
        if found := line["optimum"]:
            interval = f"[{found['low']:.2f}, {found['high']:.2f}]"
            side = "inside" if found["has_zero"] else "outside"
            lines.append(
                f"{name}: least error at ln(C / S) = {found['at']:.2f} {interval}; 0 is {side}"
            )
    if found := facts["rp_minus_normal"]:
        lines.append(
            f"RP - normal: {100 * found['mean']:+.2f} points over {found['pairs']} pairs of a"
            f" seed, {found['lower']} of them lower"
        )
    return lines


def sweep(
    results: pd.DataFrame, x: str, hue: Names = (), facet: Names = (), task: str | None = None
) -> Result:
    places = places_of(results, x, hue, facet, task)
    from analysis.sweeps.pictures import draw_sweep

    facts = facts_of(places, x)
    figure = draw_sweep(places, facts, TITLES.get(x, x))
    choices = {"x": x, "hue": [*hue], "facet": [*facet], "task": task}
    rows = places.rename(columns={"panel": "facet", "line": "hue"})
    return Result(rows, {**choices, **facts}, {"": figure}, printed=lines_of(facts))
