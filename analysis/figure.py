"""The `figure:` section of a plan: its settings, and the figure drawn from the results of the
plan's runs."""

from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import Annotated, Literal

import pandas as pd
from pydantic import BeforeValidator, Field

from analysis.output import Result
from analysis.results import VARIABLES, results_of_plans
from cluster.plan_file import Plan
from data_prep.errors import SettingsError, UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import load_manifest
from data_prep.settings import Settings, nearest, validate

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: tuple([given] if isinstance(given, str) else given)),
]


class FigureSettings(Settings):
    """Settings of a plan's figure. A variable is one of VARIABLES or an axis of the plan."""

    kind: Literal["sweep", "curves", "scaling", "cka"]
    """Kind of figure. sweep: errors against x. curves: losses during training. scaling: scaling
    laws. cka: similarity of features, for runs of the plan's first pretraining entry and runs
    of other entries with equal values on common axes."""
    x: str | None = Field(None, examples=["width"])
    """Variable of a sweep's horizontal axis."""
    hue: Names = Field((), examples=["mixing"])
    """Variables that split a panel into lines, one for each value."""
    facet: Names = Field((), examples=["target"])
    """Variables that split the figure into panels, one for each value."""
    task: str | None = Field(None, examples=["probe"])
    """Show only results of this task, such as tune, or of this plan entry, such as pretrain/1."""
    accuracy: bool = False
    """Also draw the test accuracy (only for kind: curves)."""


def figure_settings(plan: Plan) -> FigureSettings:
    """Return the checked settings of the `figure:` section without reading runs."""
    if plan.figure is None:
        fix = "add one, such as figure: {kind: sweep, x: width, hue: kind}"
        raise SettingsError(plan.path, "the plan has no `figure:`", fix, code="missing-value")
    settings = validate(FigureSettings, dict(plan.figure))
    if settings.kind == "sweep" and settings.x is None:
        fix = "set x: width, for example"
        raise SettingsError("figure.x", "kind sweep needs x", fix, code="conflict")
    for name, kind in (("x", "sweep"), ("accuracy", "curves")):
        if settings.kind != kind and getattr(settings, name):
            problem = f"kind {settings.kind} does not use {name}"
            raise SettingsError(f"figure.{name}", problem, f"remove {name}", code="conflict")
    members = (member for stage in plan.stages for member in stage.members)
    known = [*VARIABLES, *dict.fromkeys(axis for member in members for axis in member.labels)]
    for name in (*filter(None, [settings.x]), *settings.hue, *settings.facet):
        if name not in known:
            problem = f"{name} is not a variable or an axis of the plan"
            raise SettingsError("figure", problem, nearest(name, known), code="unknown-name")
    return settings


def figure(plan: Plan, results: pd.DataFrame | None = None, *, partial: bool = False) -> Result:
    """Draw the figure. `results`: a results table to use instead of the plan's runs."""
    settings = figure_settings(plan)
    if settings.kind == "cka":
        if results is not None:
            problem = "kind cka reads weights, not results"
            raise UserError("--points", problem, "remove --points", code="conflict")
        return _cka(plan, partial=partial)
    if results is None:
        results = results_of_plans([plan], partial=partial)
    results = results[results.plan == plan.name]
    if settings.task is not None:
        results = results[(results[["task", "stage"]] == settings.task).any(axis=1)]
    _check_finished(plan, results)
    if settings.kind == "scaling":
        from analysis.scaling.study import scaling

        result = scaling(results)
    elif settings.kind == "curves":
        from analysis.sweeps.curves import curves

        lines = settings.hue, settings.facet
        result = curves(results, *lines, with_accuracy=settings.accuracy)
    else:
        from analysis.sweeps.sweep import sweep

        result = sweep(results, settings.x or "", settings.hue, settings.facet)
    return replace(result, results=results, inputs=(*result.inputs, plan.path))


def _check_finished(plan: Plan, found: Sized) -> None:
    if not len(found):
        fix = f"run the plan with wide-mlps run {' '.join(plan.words)}"
        raise SettingsError(plan.path, "no run of the plan is finished", fix, code="empty")


def _cka(plan: Plan, *, partial: bool) -> Result:
    stages = [stage for stage in plan.stages if stage.kind == "pretrain"]
    unfinished = [member.work.writes for stage in stages for member in stage.undone()]
    if unfinished and not partial:
        fix = "finish the plan, or give --allow-incomplete"
        raise SettingsError(unfinished[0], "the run is not finished", fix, code="unfinished")
    pairs = [pair for pair in _pairs(plan) if not {*pair} & {*unfinished}]
    _check_finished(plan, pairs)
    from analysis.features.cka import compare_features
    from analysis.features.mixings import Images

    work = stages[0].members[0].work
    dataset, split = work.datasets[0], str(work.settings.data.eval_split)  # type: ignore[attr-defined]
    manifest = load_manifest(local_copy(dataset, storage=None))
    return compare_features(Images(dataset, manifest, split), pairs)


def _pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield pairs of runs with the same values on common axes: one run of the first pretraining
    entry, one of another entry."""
    first, *others = [stage for stage in plan.stages if stage.kind == "pretrain"]
    for one in first.members:
        for other in (member for stage in others for member in stage.members):
            common = (one.labels.keys() & other.labels.keys()) - {"config"}
            if all(one.labels[axis] == other.labels[axis] for axis in common):
                yield one.work.writes, other.work.writes
