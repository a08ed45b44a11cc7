"""A plan's `figure:` as the commands that make it: `analysis points`, then the verb of its kind."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.points import collect, read_points, write
from cluster.plan_file import Member, Plan
from data_prep.errors import SettingsError


def command_of(plan: Plan, *, out: Path, partial: bool, kept: Sequence[Path] = ()) -> list[str]:
    """What draws it, once its points are written. `kept`: files of points, in the place of the
    plan's runs."""
    figure = plan.figure
    if figure is None:
        raise SettingsError(
            f"{plan.path}: it has no `figure:`; add one, such as figure: {{kind: sweep, x: width,"
            " hue: kind}"
        )
    if figure.kind == "cka":
        if kept:
            raise SettingsError(
                f"{plan.path}: kind cka looks at the weights of runs; leave --points out"
            )
        words = _cka(plan, partial=partial)
    else:
        name = Path(plan.path).stem
        points = (
            [point for point in read_points(kept) if point.plan == name]
            if kept
            else collect([plan], partial=partial)
        )
        points = [point for point in points if figure.task in (None, point.task)]
        if not points:
            raise SettingsError(
                f"{plan.path}: nothing that it draws is finished; wide-mlps run {plan.path}"
            )
        path = out.with_name(f"{out.name}-points.parquet")
        write(points, path)
        words = [figure.kind, str(path)]
    words += ["--x", figure.x] if figure.x else []
    for name, values in (("--hue", figure.hue), ("--facet", figure.facet)):
        words += [name, ",".join(values)] if values else []
    return [*words, "--out", str(out)]


def _cka(plan: Plan, *, partial: bool) -> list[str]:
    """Each run of the first pretraining entry beside those of the others that have the same values
    on the axes that both have."""
    stages = [stage for stage in plan.stages if stage.kind == "pretrain"]
    undone = [member.work.writes for stage in stages for member in stage.undone()]
    if undone and not partial:
        raise SettingsError(
            f"{undone[0]}: not finished; run the plan to its end, or give --partial"
        )
    pairs = list(
        _pairs(
            list(stages[0].members), [member for stage in stages[1:] for member in stage.members]
        )
    )
    pairs = [
        (one, other) for one, other in pairs if one.work.is_finished() and other.work.is_finished()
    ]
    if not pairs:
        raise SettingsError(
            f"{plan.path}: there is no finished pair of runs of its first entry and another"
        )
    settings = pairs[0][0].work.settings
    words = ["cka", pairs[0][0].work.writes, pairs[0][1].work.writes, pairs[0][0].work.datasets[0]]
    for one, other in pairs[1:]:
        words += ["--and", one.work.writes, other.work.writes]
    return [*words, "--split", str(settings.data.eval_split)]  # type: ignore[attr-defined]


def _pairs(ones: list[Member], others: list[Member]) -> Iterator[tuple[Member, Member]]:
    for one in ones:
        for other in others:
            shared = (one.labels.keys() & other.labels.keys()) - {"config"}
            if all(one.labels[axis] == other.labels[axis] for axis in shared):
                yield one, other
