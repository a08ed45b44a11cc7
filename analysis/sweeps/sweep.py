"""Errors of many runs against a variable.

Results with the same panel (facet), line (hue) and x form a place, with one result for each seed.
If results at a place differ in other variables, the command fails, because their mean has no
meaning. Shapes that only swap tokens and channels have the same width and are averaged first.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.output import Result
from analysis.results import VARIABLES, last_of_each_run
from analysis.sweeps.statistics import holm, kendall, optimum
from data_prep.errors import UserError
from data_prep.settings import nearest

Names = Sequence[str]
PLACE, SEED = ["facet", "hue", "x"], ["seed", "own_seed"]
NORMAL = "normal"
KINDS = {"mlp": "MLP", "mixer": "MLP-Mixer", "smixer": "S-Mixer", "sw_mlp": "SW-MLP"}
WIDTHS = ("width", "hidden_width")
OF_SHAPES = {
    *("tokens", "channels", "log_cs", "patch_size", "model", "parameters", "multiply_adds"),
    "compute",
}
"""Variables that may differ between shapes with swapped tokens and channels."""
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
    """Return the results with a column for each variable and axis of the plans, and the names of
    the axes. Targets NAME-seed-N are samples of NAME."""
    labels = pd.DataFrame(map(json.loads, results.labels), index=results.index)
    numbers = labels.apply(pd.to_numeric, errors="coerce").astype(object)
    axes = numbers.where(numbers.notna(), labels)
    permuted, depth = results.permuted_blocks, results.depth
    some = permuted.map("RP in {:.0f} of ".format) + depth.map("{:.0f}".format)
    mixing = some.mask(permuted == depth, "RP").mask(permuted == 0, NORMAL)
    target = results.target.astype(str).str.replace(r"-seed-\d+$", "", regex=True)
    data = results.assign(
        target=target,
        target_hash=results.target_hash.where(results.target == target),
        kind=results.kind.map(KINDS).fillna(results.model),
        mixing=mixing.where(permuted.notna()),
        log_cs=np.log(results.channels.astype(float) / results.tokens.astype(float)),
        log2_omega=np.log2(results.omega.astype(float)).round(),
        epochs=results.epochs.astype(float).round(1),
        augmented=results.augmented.map({True: "+ DA", False: "no DA"}),
    )
    own = [name for name in axes if name not in data]
    return pd.concat([data, axes[own]], axis=1), [*axes]


def _words_of(values: Sequence[Any], names: Names) -> str:
    words = []
    for value, name in zip(values, names, strict=True):
        if name == "log2_omega" and pd.notna(value):
            words.append(f"Ω = 2^{value:.0f}")
        elif isinstance(value, str):
            words.append(value)
        elif pd.notna(value):
            words.append(f"{TITLES.get(name, name)} {value:g}")
    return ", ".join(words)


def are_numbers(values: "pd.Series[Any]") -> bool:
    return bool(values.map(lambda value: isinstance(value, int | float)).all())


def grouped(results: pd.DataFrame, x: str, hue: Names, facet: Names) -> pd.DataFrame:
    """Return sorted results with the columns `facet`, `hue` and `x`. Raise UserError if results
    with the same values differ in more than the seed."""
    data, axes = with_variables(results)
    for name in filter(None, (x, *hue, *facet)):
        if name not in (*axes, *VARIABLES):
            fix = nearest(name, [*axes, *VARIABLES])
            problem = "this is not a variable or an axis of these plans"
            raise UserError(name, problem, fix, code="unknown-name")
    data = data.assign(x=data[x] if x else "")
    data = data[data.x.notna()]
    if data.empty:
        raise UserError(x, "no result has this variable", "choose another x", code="empty")
    for column, names in (("facet", facet), ("hue", hue)):
        data[column] = [_words_of(values, names) for values in data[[*names]].to_numpy()]
    for column in PLACE:
        is_sorted = column == "x" and are_numbers(data.x)
        data[f"_{column}"] = data.x.astype(float) if is_sorted else pd.factorize(data[column])[0]
    data = data.sort_values([f"_{column}" for column in PLACE], kind="stable")
    for _, place in data.groupby(PLACE, sort=False):
        _check_place(place, x, axes)
    return data.drop(columns=[f"_{column}" for column in PLACE])


def _check_place(place: pd.DataFrame, x: str, axes: Names) -> None:
    own, free = SEED, set[str]()
    if x in WIDTHS:
        own, free = [*SEED, "tokens", "channels"], OF_SHAPES
    is_repeated = place.duplicated(own, keep=False)
    known = (*VARIABLES, "target_hash")
    names = [name for name in known if name not in free and _differs(place, name)]
    if names or is_repeated.any():
        rows = place[is_repeated] if is_repeated.any() else place
        names += [axis for axis in axes if axis != "name" and _differs(rows, axis)]
        raise UserError(
            x or "--hue",
            f"{' and '.join(rows.run.iloc[[0, -1]])} have the same x, line and panel"
            f" and differ in {', '.join(names) or 'no variable'}",
            f"give --hue or --facet {names[0]}" if names else "remove one of them",
            code="conflict",
        )


def _differs(rows: pd.DataFrame, name: str) -> bool:
    return bool(rows[name].nunique(dropna=False) > 1)


def places_of(
    results: pd.DataFrame, x: str, hue: Names = (), facet: Names = (), task: str | None = None
) -> pd.DataFrame:
    """Return one row for each place. Results of a seed are averaged first. `errors` is in the
    order of `seeds`; `minus_normal` has the difference RP - normal of each seed."""
    data = results[results.error.notna()]
    if task is not None:
        data = data[data.task == task]
    if data.empty:
        tasks = ", ".join(sorted(results.task.unique())) or "none"
        raise UserError(
            "--task", "no result has an accuracy", f"choose one of {tasks}", code="empty"
        )
    if not LENGTHS & {x, *hue, *facet}:
        data = last_of_each_run(data)
    data = grouped(data, x, hue, facet)
    seeds = data.groupby([*PLACE, *SEED], sort=False, dropna=False)
    size, error = seeds.error.transform("size"), seeds.error.transform("mean")
    data = data.assign(num_results=size, error=error).drop_duplicates([*PLACE, *SEED])
    # the normal counterpart of an RP Mixer differs only in mixing
    names = [name for name in (*hue, *facet) if name != "mixing"]
    if "mixing" not in (*hue, *facet):
        names += [name for name in VARIABLES if name not in ("mixing", "model", *names)]
    alike = [*names, *(["x"] if "mixing" in (*hue, *facet) else []), *SEED]
    normal = data[data.mixing == NORMAL].drop_duplicates(alike)[[*alike, "error"]]
    data = data.merge(normal, on=alike, how="left", suffixes=("", "_normal"))
    is_permuted = data.mixing.notna() & (data.mixing != NORMAL)
    data["seeds"] = (
        data[SEED].astype(object).where(data[SEED].notna(), "").astype(str).agg(" ".join, axis=1)
    )
    data["minus_normal"] = (data.error - data.error_normal).where(is_permuted)
    places = (
        data.groupby(PLACE, sort=False)
        .agg(
            error_mean=("error", "mean"),
            error_sd=("error", "std"),
            num_seeds=("error", "size"),
            num_results=("num_results", "sum"),
            num_test=("num_test", "first"),
            errors=("error", list),
            seeds=("seeds", list),
            minus_normal_mean=("minus_normal", "mean"),
            minus_normal=("minus_normal", lambda values: values.dropna().tolist()),
        )
        .reset_index()
    )
    # seeds share their test images
    variance = places.error_mean * (1 - places.error_mean) / places.num_test.astype(float)
    return places.assign(binomial_se=variance**0.5)


def lines_of(places: pd.DataFrame, x: str) -> pd.DataFrame:
    """Return a row of statistics for each line: Kendall's tau with Holm-corrected p for widths, the
    optimum for ln(C / S)."""
    lines = []
    for (facet, hue), own in places.groupby(["facet", "hue"], sort=False):
        statistics = {}
        if x in WIDTHS:
            statistics = kendall(own.x.tolist(), own.error_mean.tolist())
        elif x == "log_cs":
            each = own[["x", "errors", "seeds"]].explode(["errors", "seeds"])
            values = each[["x", "errors"]].astype(float)
            statistics = optimum(values.x, values.errors, each.seeds)
        lines.append({"facet": facet, "hue": hue, **statistics})
    found = pd.DataFrame(lines)
    return found.assign(p_holm=holm(found.p_falling)) if "p_falling" in found else found


def sweep(
    results: pd.DataFrame, x: str, hue: Names = (), facet: Names = (), task: str | None = None
) -> Result:
    places = places_of(results, x, hue, facet, task)
    from analysis.sweeps.pictures import draw_sweep

    lines, printed = lines_of(places, x), []
    changes = places.minus_normal.explode().dropna().astype(float)
    pairs = {"pairs": len(changes), "mean": changes.mean(), "lower": int((changes < 0).sum())}
    facts = {"x": x, "hue": [*hue], "facet": [*facet], "task": task, "rp_minus_normal": pairs}
    if len(lines.columns) > 2:
        printed.append(lines)
    if len(changes):
        words = f"{100 * changes.mean():+.2f} points over {len(changes)} pairs"
        printed.append(
            f"error, RP - normal: {words} of equal seed; RP is lower in {pairs['lower']}"
        )
    figure = draw_sweep(places, lines, TITLES.get(x, x))
    facts["lines"] = lines.to_dict("records")
    return Result(places, facts, {"": figure}, printed=printed)
