"""The `figure:` of a plan, drawn from the results of its runs."""

import shlex
from dataclasses import replace

import pandas as pd

from analysis.output import Result
from analysis.results import results_of_plans
from cluster.plan_file import Member, Plan
from data_prep.errors import SettingsError, UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import load_manifest


def figure(plan: Plan, results: pd.DataFrame | None = None, *, partial: bool = False) -> Result:
    """`results`: a results table to use instead of the plan's runs."""
    settings = plan.figure
    if settings is None:
        fix = "add one, such as figure: {kind: sweep, x: width, hue: kind}"
        raise SettingsError(plan.path, "it has no `figure:`", fix, code="missing-value")
    if settings.kind == "cka":
        if results is not None:
            problem = "a figure of kind cka reads the weights of runs"
            raise UserError("--points", problem, "leave it out", code="conflict")
        return _cka(plan, partial=partial)
    if results is None:
        results = results_of_plans([plan], partial=partial)
    results = results[results.plan == plan.name]
    if settings.task is not None:
        results = results[results.task == settings.task]
    if results.empty:
        fix = f"run it with wide-mlps run {shlex.join(plan.words)}"
        raise SettingsError(plan.path, "none of its runs is finished", fix, code="empty")
    if settings.kind == "scaling":
        from analysis.scaling.study import scaling

        result = scaling(results)
    elif settings.kind == "curves":
        from analysis.sweeps.curves import curves

        result = curves(results, settings.hue, settings.facet)
    else:
        from analysis.sweeps.sweep import sweep

        result = sweep(results, settings.x or "", settings.hue, settings.facet)
    return replace(result, results=results)


def _cka(plan: Plan, *, partial: bool) -> Result:
    """Compare each run of the first pretraining entry with those runs of the other entries that
    have the same values on the axes that both have."""
    stages = [stage for stage in plan.stages if stage.kind == "pretrain"]
    unfinished = [member.work.writes for stage in stages for member in stage.undone()]
    if unfinished and not partial:
        fix = "run the plan to its end, or give --partial"
        raise SettingsError(unfinished[0], "the run is not finished", fix, code="unfinished")
    pairs = [
        (one.work.writes, other.work.writes)
        for one in stages[0].members
        for stage in stages[1:]
        for other in stage.members
        if _is_pair(one, other) and not {one.work.writes, other.work.writes} & {*unfinished}
    ]
    if not pairs:
        problem = "it has no finished pair of a run of its first entry and another run"
        raise SettingsError(plan.path, problem, "run the plan", code="empty")
    from analysis.features.cka import compare_features
    from analysis.features.mixings import Images

    work = stages[0].members[0].work
    dataset, split = work.datasets[0], str(work.settings.data.eval_split)  # type: ignore[attr-defined]
    manifest = load_manifest(local_copy(dataset, storage=None))
    return compare_features(Images(dataset, manifest, split), pairs)


def _is_pair(one: Member, other: Member) -> bool:
    shared = (one.labels.keys() & other.labels.keys()) - {"config"}
    return all(one.labels[axis] == other.labels[axis] for axis in shared)
