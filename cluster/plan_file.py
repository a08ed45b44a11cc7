"""A plan file: datasets, pretraining and what is done with the checkpoints: a graph whose entries
may have a grid. No torch here.

    prepare: [configs/data_prep/demo_pretrain.yaml, configs/data_prep/demo_transfer.yaml]
    pretrain:
      config: configs/pretrain/demo_mlp.yaml              # or a list: an axis called `config`
      overrides: ["train.duration=2 epochs"]              # for all members
      grid:                                               # further axes, in this order
        optimizer.lr: [1e-4, 1e-3]                        # a setting and its values
        shape:                                            # or cases: settings that go together, under a name
          narrow: {model.width: 64, model.depth: 8}
          wide: {model.width: 256, model.depth: 2}
      seeds: [0, 1, 2]                                    # the last axis
      run_dir: runs/plans/{name}/{shape}-lr-{optimizer.lr}-seed-{seed}
      max_concurrent: 4
    probe: {config: configs/probe/demo.yaml, each_pretrained: true, run_dir:
    "runs/plans/{name}/probe-{pretrained}"}
    finetune: {config: configs/finetune/demo.yaml, each_pretrained: true, run_dir:
    "runs/plans/{name}/tune-{pretrained}"}
    evaluate: {config: configs/evaluate/demo.yaml, each_finetuned: true, run_dir:
    "runs/plans/{name}/views-{finetuned}"}
    knn: [...]
    export: [...]

A section is one entry or a list of them; an entry is the path of a config, or a mapping. An entry
with axes is a grid: many runs, on SLURM the tasks of one array. Member i is a function of this file
alone: the first axis turns slowest, the seeds fastest, and what is finished keeps its number. What
waits for what is not written down, it follows from the resolved configs: an entry waits for those
that write the datasets and the checkpoints that it reads. What no entry writes must be there
already.

Long because it is one format: what a file may say, the members that follow from it, and all that
can be wrong with it.
"""

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.work import COMMANDS, Kind, Work, in_file, kept, place_of
from data_prep.errors import SettingsError
from data_prep.settings import Settings, apply_override, load_settings, nearest, validate
from pretrain.checkpoints.run import run_and_length
from pretrain.config import parse_length


def _several(value: object) -> object:
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


_EACH: Mapping[str, Kind] = {"pretrained": "pretrain", "finetuned": "tune"}
"""Axes over the runs of a section."""
_SEVERAL = BeforeValidator(_several, json_schema_input_type=str | list[str])


class Entry(Settings):
    config: Annotated[tuple[str, ...], _SEVERAL] = Field(
        min_length=1, examples=["configs/probe/demo.yaml"]
    )
    """The file that members are changes of; several are the first axis, `config`, called by the
    names of the files."""
    overrides: tuple[str, ...] = Field((), examples=[["train.duration=2 epochs"]])
    """key.path=value, as on the command line, for all members."""
    each_pretrained: bool = False
    """An axis `pretrained`, every run of the section `pretrain`. `evaluate` also takes the dataset
    and the split that each was judged on, unless the entry names others."""
    each_finetuned: bool = False
    """For knn, evaluate and export: an axis `finetuned`, every run of the section `finetune`, of
    one with seeds that of each seed; else as each_pretrained."""
    checkpoints: tuple[str, ...] = Field((), examples=[["50 epochs", "100 epochs"]])
    """With one of these: not the last checkpoint of each run, but those that its checkpoint.keep_at
    keeps; {pretrained} in run_dir has the length, too."""
    grid: dict[str, Any] = Field(default_factory=dict, examples=[{"optimizer.lr": [0.0001, 0.001]}])
    """Axes: a setting with a list of values, or any name with cases, {case: {setting: value, ...},
    ...}."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1, examples=[[0, 1, 2]])
    """Of the training (pretrain, finetune), the heads (probe) or the views (evaluate)."""
    run_dir: str | None = Field(None, examples=["runs/plans/{name}/seed-{seed}"])
    """Where each member's run (or export) is: {name} is the file's own name, {AXIS} the member's
    value there, {seed} its seed."""
    max_concurrent: int | None = Field(None, ge=1, examples=[4])
    """At most so many members at a time, as a SLURM array's %; null: as many as SLURM has room
    for."""
    nodes: int | None = Field(None, ge=1, examples=[4])
    """Complete nodes of each member on SLURM; null: one node to pretrain a single run, otherwise a
    part of a node."""
    gpus: int | None = Field(None, ge=0, examples=[4])
    """GPUs of each member on SLURM, on one node and with their share of its CPUs and memory; null:
    one, or none to export."""
    sbatch: tuple[str, ...] = Field((), examples=[["--time=24:00:00"]])
    """Further options of sbatch for this job, such as --time=24:00:00 or, to prepare,
    --array=0-31."""

    @property
    def is_grid(self) -> bool:
        return len(self.config) > 1 or self.is_of_each or bool(self.grid) or self.seeds is not None

    @property
    def is_of_each(self) -> bool:
        return self.each_pretrained or self.each_finetuned

    @model_validator(mode="after")
    def _parts_fit(self) -> "Entry":
        for name in {"config", "seed", "name", *_EACH} & self.grid.keys():
            raise ValueError(
                f"grid.{name}: the name is taken; set {name if name == 'config' else 'another one'}"
            )
        if self.each_pretrained and self.each_finetuned:
            raise ValueError(
                "each_finetuned: true will not do with each_pretrained, which names the checkpoint,"
                " too; make two entries"
            )
        if self.checkpoints and not self.is_of_each:
            raise ValueError(
                "checkpoints: these are of runs; set each_pretrained, or name"
                " pretrained=RUN@50epochs in a grid"
            )
        if self.nodes is not None and self.gpus is not None:
            raise ValueError(
                "gpus: not valid with nodes, which books complete nodes. Leave out one of the two."
            )
        if self.is_grid and self.run_dir is None:
            raise ValueError(
                "run_dir: null will not do with a grid; name its axes, such as runs/{name}/{seed}"
            )
        return self


def _entries(given: Any) -> Any:
    if given == ():
        return ()  # the default
    entries = [
        {"config": entry} if isinstance(entry, str) else entry
        for entry in (given if isinstance(given, list) else [given])
    ]
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(
                f"{entry!r} will not do; give the path of a config, or {{config: PATH, overrides:"
                " [key=value]}"
            )
    return tuple(validate(Entry, entry) for entry in entries)


Entries = Annotated[
    tuple[Entry, ...],
    BeforeValidator(_entries, json_schema_input_type=Entry | str | list[Entry | str]),
]


VARIABLES = ("width", "hidden_width", "density", "channels", "tokens", "log_cs", "log2_omega", "gamma", "depth", "patch_size",
             "mixing", "kind", "model", "parameters", "multiply_adds", "epochs", "images", "samples", "compute", "lr", "optimizer",
             "global_batch_size", "augmented", "views", "task", "target")  # fmt: skip
"""What results differ in, besides the axes of their plan: columns of `analysis points`, and log_cs
= ln(C / S), log2_omega rounded, mixing = normal or RP."""


class FigureSettings(Settings):
    """What `analysis figure PLAN` draws, the last thing that a plan does. A variable is of
    VARIABLES, else an axis of the plan."""

    kind: Literal["sweep", "curves", "scaling", "cka"]
    """sweep: errors by x; curves: losses while training; scaling: laws; cka: features of the first
    entry's runs beside those of the others with the same values on the axes that both have."""
    x: str | None = Field(None, examples=["width"])
    """Of a sweep, what stands on its axis."""
    hue: Annotated[tuple[str, ...], _SEVERAL] = Field((), examples=["mixing"])
    """What makes lines."""
    facet: Annotated[tuple[str, ...], _SEVERAL] = Field((), examples=["target"])
    """What makes panels."""
    task: str | None = Field(None, examples=["probe"])
    """Results of this alone, a column of the points: pretrain, probe, tune, evaluate, ..."""

    @model_validator(mode="after")
    def _has_x(self) -> "FigureSettings":
        if (self.kind == "sweep") != (self.x is not None):
            raise ValueError("x: is for kind sweep, which needs it; such as width")
        return self


class PlanSettings(Settings):
    of_verb = "cluster/submit"
    prepare: Entries = Field((), examples=["configs/data_prep/demo_pretrain.yaml"])
    """Datasets to make, by `data_prep build`."""
    pretrain: Entries = Field((), examples=["configs/pretrain/demo_mlp.yaml"])
    """Runs of `pretrain train`."""
    probe: Entries = Field((), examples=["configs/probe/demo.yaml"])
    """Runs of `finetune probe`."""
    finetune: Entries = Field((), examples=["configs/finetune/demo.yaml"])
    """Runs of `finetune tune`."""
    knn: Entries = Field((), examples=["configs/knn/demo.yaml"])
    """Runs of `finetune knn`."""
    evaluate: Entries = Field((), examples=["configs/evaluate/demo.yaml"])
    """Runs of `finetune evaluate`."""
    export: Entries = Field((), examples=["configs/export/demo.yaml"])
    """Exports, by `finetune export`; they wait for what judges the same checkpoint, which their
    model cards tell of."""
    figure: FigureSettings | None = Field(
        None, examples=[{"kind": "sweep", "x": "width", "hue": ["mixing"]}]
    )
    """What is drawn of the results, last."""


@dataclass(frozen=True)
class Choice:
    """One value of an axis: how run directories call it, and what it sets."""

    label: str
    overrides: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    """What it sets where the entry does not."""


@dataclass(frozen=True)
class Member:
    index: int
    work: Work
    own: tuple[str, ...]
    """The overrides in which it differs from the others."""
    labels: Mapping[str, str]
    """What run directories call it: its value on each axis."""


@dataclass(frozen=True)
class Stage:
    """An entry, and on SLURM a job (to prepare: two)."""

    name: str
    """Its section, and if that has several entries its number there: probe, finetune/2."""
    entry: Entry
    kind: Kind
    members: tuple[Member, ...]

    @property
    def works(self) -> list[Work]:
        return [member.work for member in self.members]

    @property
    def num_gpus(self) -> int | None:
        """GPUs of each member; None: as its job script needs."""
        return (
            0
            if self.entry.gpus is None and self.kind == "export" and self.entry.is_grid
            else self.entry.gpus
        )

    def title(self, member: Member) -> str:
        """As lists and messages call it."""
        return f"{self.name} {member.index}" if self.entry.is_grid else self.name

    def undone(self) -> list[Member]:
        return [member for member in self.members if not member.work.is_finished()]

    def array(self, indices: Iterable[int]) -> str:
        """What sbatch's --array takes for some of its members."""
        return compressed(indices) + (
            f"%{self.entry.max_concurrent}" if self.entry.max_concurrent else ""
        )


@dataclass(frozen=True)
class Plan:
    path: str
    stages: tuple[Stage, ...]
    """Each after those that it waits for."""
    figure: FigureSettings | None = None

    def after(self, stage: Stage) -> list[Stage]:
        """Those that write what it reads."""
        read = {
            place_of(run_and_length(path)[0]) for work in stage.works for path in work.reads_from
        }

        def is_read(place: Path) -> bool:
            """It, or something in it: RUN/checkpoints/step-..., RUN/seed-0."""
            return any(path.is_relative_to(place) for path in read)

        def tells_of(other: Stage) -> bool:
            """An export's model card has what others have found of the same checkpoint."""
            is_judge = stage.kind == "export" and other.kind != "export"
            return is_judge and bool(
                {work.pretrained for work in other.works}
                & {work.pretrained for work in stage.works} - {None}
            )

        return [
            other
            for other in self.stages
            if tells_of(other) or any(is_read(place_of(work.writes)) for work in other.works)
        ]

    def missing(self) -> list[str]:
        """What unfinished members read that neither is there nor is written by a stage: a line
        each."""
        written = [place_of(work.writes) for stage in self.stages for work in stage.works]
        found: dict[str, None] = {}
        for stage in self.stages:
            for member in stage.undone():
                found |= dict.fromkeys(
                    f"{stage.name}: {line}" for line in member.work.missing(written)
                )
        return list(found)

    def stage(self, name: str) -> Stage:
        grids = {stage.name: stage for stage in self.stages if stage.entry.is_grid}
        if name in grids:
            return grids[name]
        raise SettingsError(
            f"{self.path}: it has no grid {name!r};"
            f" {nearest(name, list(grids)) if grids else 'it has none'}"
        )

    @property
    def files(self) -> list[str]:
        """That its members come from, besides itself."""
        return sorted({work.config for stage in self.stages for work in stage.works})


def load_plan(path: str, *, snapshot: Path | None = None) -> Plan:
    """With a snapshot, it and its members read what was kept at the submission."""
    try:
        settings = load_settings(PlanSettings, path=kept(path, snapshot), overrides=[])
        stages: list[Stage] = []
        for kind, command in COMMANDS.items():
            entries: tuple[Entry, ...] = getattr(settings, command.section)
            before = tuple(stages)
            for number, entry in enumerate(entries, start=1):
                name = command.section if len(entries) == 1 else f"{command.section}/{number}"
                try:
                    configs = [kept(config, snapshot) for config in entry.config]
                    members = _members(entry, kind, name, Path(path).stem, before, configs)
                    stages.append(Stage(name, entry, kind, tuple(members)))
                except SettingsError as error:
                    raise in_file(name, error) from None
        return Plan(path, tuple(stages), settings.figure)
    except SettingsError as error:
        raise in_file(path, error) from None


def load_checked(path: str) -> Plan:
    """The plan, if all of it will do: every mistake in one message."""
    plan = load_plan(path)
    problems = [f"{path}: {problem}" for problem in _problems(plan)]
    if problems:
        more = f"\n... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SettingsError("\n".join(problems[:20]) + more)
    return plan


def compressed(indices: Iterable[int]) -> str:
    """As sbatch's --array takes them: 0-3,7,9-10"""
    spans: list[list[int]] = []
    for index in indices:
        first = spans.pop()[:1] if spans and spans[-1][-1] == index - 1 else []
        spans.append([*first, index])
    return ",".join("-".join(map(str, span)) for span in spans)


def _problems(plan: Plan) -> Iterable[str]:
    """Everything that is wrong with its members."""
    if not plan.stages:
        yield (
            f"nothing to do; give it {', '.join(command.section for command in COMMANDS.values())}"
        )
    seen = dict[Path, str]()
    for stage in plan.stages:
        for member in stage.members:
            name = f"{stage.name}: member {member.index}" if stage.entry.is_grid else stage.name
            try:
                member.work.check()
            except ValueError as error:
                yield from (f"{name}: {line}" for line in str(error).splitlines())
                continue
            yield from (f"{name}: {line}" for line in _not_kept(member.work, plan))
            place = place_of(member.work.writes)
            if place in seen:
                mend = (
                    "name each axis that differs in run_dir"
                    if stage.entry.is_grid
                    else "give one of them another"
                )
                yield f"{name}: writes {member.work.writes}, as {seen[place]} does; {mend}"
            seen.setdefault(place, name)
    if plan.figure is not None:
        yield from (f"figure: {line}" for line in _not_drawn(plan, plan.figure))


def _not_drawn(plan: Plan, figure: FigureSettings) -> Iterable[str]:
    """A variable that there is not; and results on two datasets that nothing tells apart, which
    would be one line."""
    found = [
        (stage, member)
        for stage in plan.stages
        if stage.kind not in ("build", "export")
        for member in stage.members
    ]
    names = (*([figure.x] if figure.x else []), *figure.hue, *figure.facet)
    axes = {name for _, member in found for name in member.labels}
    for name in names:
        if name not in axes and name not in VARIABLES:
            yield (
                f"{name}: no axis of this plan, and no variable;"
                f" {nearest(name, [*axes, *VARIABLES])}"
            )
    if figure.kind not in ("sweep", "curves") or {"target", "task"} & set(names):
        return
    labels = {place_of(member.work.writes): member.labels for _, member in found}
    together: dict[tuple[str | None, ...], set[str]] = {}
    for stage, member in found:
        is_asked = figure.task in (None, stage.kind) or (
            figure.task == "scratch" and stage.kind == "tune"
        )
        judged = getattr(getattr(member.work.settings, "data", None), "eval_split", "") is not None
        if is_asked and judged and member.work.datasets:
            own = {
                **labels.get(place_of(run_and_length(member.work.pretrained or "")[0]), {}),
                **member.labels,
            }
            together.setdefault(
                tuple(own.get(name) for name in names if name not in VARIABLES), set()
            ).add(member.work.datasets[0])
    if not together:
        yield f"task: no member of this plan is a {figure.task} with a held-out split"
    for datasets in [each for each in together.values() if len(each) > 1][:1]:
        yield (
            f"members that it draws together are of {' and '.join(sorted(datasets))}; set facet:"
            " target, or draw one task"
        )


def _not_kept(work: Work, plan: Plan) -> Iterable[str]:
    """Where it reads RUN@LENGTH of a run of this plan that will not keep it, which shows before
    anything begins."""
    run, words = run_and_length(work.pretrained or "")
    for maker in (
        each for stage in plan.stages if stage.kind in _EACH.values() for each in stage.works if run
    ):
        if place_of(run) not in map(place_of, maker.runs):
            if place_of(run) == place_of(maker.writes):
                yield (
                    f"pretrained: {run} will hold a run for each of its repetitions; name one of"
                    " them, or set each_finetuned"
                )
            continue
        if not words:
            continue
        kept = (*maker.settings.checkpoint.keep_at, maker.settings.train.duration)  # type: ignore[attr-defined]
        if parse_length(words).unit != "steps" and parse_length(words) not in map(
            parse_length, kept
        ):
            yield (
                f"pretrained: {run} will keep {', '.join(kept)}, not {words}; add it to its"
                " checkpoint.keep_at"
            )


# ---- members of an entry
# ----------------------------------------------------------------------------------------------


def _members(
    entry: Entry, kind: Kind, stage: str, plan: str, before: tuple[Stage, ...], configs: list[str]
) -> Iterable[Member]:
    if kind == "build" and (entry.is_grid or entry.run_dir or entry.gpus is not None):
        raise SettingsError(
            "grid, seeds, run_dir and gpus are for runs; give each dataset an entry"
        )
    axes = _axes(entry, kind, before)
    for index, choices in enumerate(itertools.product(*axes.values())):
        values = {axis: each.label for axis, each in zip(axes, choices, strict=True)}
        labels = {"name": plan} | values
        record = {"plan": plan, "stage": stage, "member": str(index), "labels": values}
        recorded = (
            () if kind == "build" else (f"record={json.dumps(record, separators=(',', ':'))}",)
        )
        own = tuple(override for each in choices for override in each.overrides)
        defaults = tuple(override for each in choices for override in each.defaults)
        place = (
            ()
            if entry.run_dir is None
            else (_override(COMMANDS[kind].place, _filled(entry.run_dir, labels)),)
        )
        config = configs[[choice.label for choice in axes["config"]].index(choices[0].label)]
        yield Member(
            index,
            Work(kind, config, (*defaults, *entry.overrides, *own, *place, *recorded)),
            own,
            labels,
        )


def _axes(entry: Entry, kind: Kind, before: tuple[Stage, ...]) -> dict[str, list[Choice]]:
    axes = {"config": [Choice(Path(config).stem) for config in entry.config]}
    axes |= {
        axis: _of_each(axis, entry, kind, before)
        for axis in _EACH
        if getattr(entry, f"each_{axis}")
    }
    axes |= {name: _axis(name, given) for name, given in entry.grid.items()}
    if entry.seeds is not None:
        if not COMMANDS[kind].seed:
            raise SettingsError(f"seeds: {COMMANDS[kind].section} draws nothing; leave them out")
        axes["seed"] = [
            Choice(str(seed), (f"{COMMANDS[kind].seed}={seed}",)) for seed in entry.seeds
        ]
    for name, choices in axes.items():
        labels = [choice.label for choice in choices]
        for label in labels:
            if labels.count(label) > 1:
                raise SettingsError(
                    f"{name}: two of its values are called {label!r}; write cases with names for"
                    " them"
                )
    return axes


def _of_each(axis: str, entry: Entry, kind: Kind, before: tuple[Stage, ...]) -> list[Choice]:
    works = [work for stage in before if stage.kind == _EACH[axis] for work in stage.works]
    if not COMMANDS[kind].reads_checkpoint or not works:
        section = COMMANDS[_EACH[axis]].section
        readers = [
            each.section
            for each in list(COMMANDS.values())[list(COMMANDS).index(_EACH[axis]) + 1 :]
            if each.reads_checkpoint
        ]
        raise SettingsError(
            f"each_{axis}: true is for {', '.join(readers)} beside a section {section!r}"
        )
    for work in works:
        if not work.runs:
            raise SettingsError(
                f"each_{axis}: {work.writes} has a run for each fold, which its dataset counts;"
                " name them in a grid"
            )
    above, found = (
        os.path.commonpath([Path(run).parent for work in works for run in work.runs]),
        list[Choice](),
    )
    for work in works:
        data = work.settings.data  # type: ignore[attr-defined]
        judged = (
            _override("data.dataset", data.dataset),
            *([_override("data.split", data.eval_split)] if data.eval_split else []),
        )
        for run in work.runs:
            for at in [f"@{length.replace(' ', '')}" for length in entry.checkpoints] or [""]:
                label = _label(axis, f"{os.path.relpath(run, above or '.')}{at}")
                found.append(
                    Choice(
                        label,
                        (_override("pretrained", f"{run}{at}"),),
                        judged if kind == "evaluate" else (),
                    )
                )
    return found


def _axis(name: str, given: Any) -> list[Choice]:
    if isinstance(given, list) and given:
        return [Choice(_label(name, value), (_override(name, value),)) for value in given]
    if isinstance(given, dict) and given and all(isinstance(case, dict) for case in given.values()):
        return [
            Choice(case, tuple(_override(key, value) for key, value in changes.items()))
            for case, changes in given.items()
        ]
    raise SettingsError(
        f"grid.{name}: {given!r} will not do; give a list of values, or cases such as {{small:"
        " {model.width: 64}}"
    )


def _label(name: str, value: Any) -> str:
    """Of a plain value: 1e-05, 50-epochs, mlp_b6_wi256."""
    text = value if isinstance(value, str) else json.dumps(value)
    label = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if isinstance(value, list | dict) or not label:
        raise SettingsError(
            f"grid.{name}: {text} has no short name; write cases, {{some_name: {{{name}: {text}}}}}"
        )
    return label


def _override(key: str, value: Any) -> str:
    """Text that reads back to the same value."""
    if isinstance(value, str):
        tree: dict[str, Any] = {}
        try:
            apply_override(tree, f"value={value}")
        except SettingsError:
            return f"{key}={json.dumps(value)}"
        if tree == {"value": value}:
            return f"{key}={value}"
    return f"{key}={json.dumps(value)}"


def _filled(template: str, labels: dict[str, str]) -> str:
    for name in re.findall(r"\{([^{}]*)\}", template):
        if name not in labels:
            raise SettingsError(
                f"run_dir: there is no axis {name!r}; {nearest(name, list(labels))}"
            )
    return re.sub(r"\{([^{}]*)\}", lambda found: labels[found[1]], template)
