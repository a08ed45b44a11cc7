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
"""  # noqa: E501 (a table)

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from cluster.work import COMMANDS, Kind, Work, in_file, kept, place_of
from data_prep.errors import SettingsError, UserError
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
            raise UserError(
                f"grid.{name}", "the name is reserved", "choose another name", code="bad-value"
            )
        if self.each_pretrained and self.each_finetuned:
            raise UserError(
                "each_finetuned",
                "it excludes each_pretrained",
                "write two entries",
                code="conflict",
            )
        if self.checkpoints and not self.is_of_each:
            raise UserError(
                "checkpoints",
                "it needs each_pretrained or each_finetuned",
                "set one of them, or put pretrained=RUN@50epochs into the grid",
                code="missing-value",
            )
        if self.nodes is not None and self.gpus is not None:
            raise UserError(
                "gpus",
                "it excludes nodes, which books complete nodes",
                "omit one of the two",
                code="conflict",
            )
        if self.is_grid and self.run_dir is None:
            raise UserError(
                "run_dir",
                "a grid needs it",
                "name its axes, for example runs/{name}/{seed}",
                code="missing-value",
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
            raise UserError(
                "",
                f"{entry!r} is not an entry",
                "give the path of a config, or {config: PATH, overrides: [key=value]}",
                code="bad-value",
            )
    return tuple(validate(Entry, entry) for entry in entries)


Entries = Annotated[
    tuple[Entry, ...],
    BeforeValidator(_entries, json_schema_input_type=Entry | str | list[Entry | str]),
]


class Sections(Settings):
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
    figure: dict[str, Any] | None = Field(
        None, examples=[{"kind": "sweep", "x": "width", "hue": ["mixing"]}]
    )
    """The figure of the results, drawn last. `analysis figure PLAN --check` checks it."""


class PlanSettings(Sections):
    of_verb = "cluster/submit"
    demo: Sections | None = Field(None, examples=[{"pretrain": "configs/pretrain/demo_mlp.yaml"}])
    """A small variant on synthetic data for two CPU cores, run by `wide-mlps run PLAN --demo`. Its
    sections replace those above; without `figure` it has the figure above."""


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
    figure: Mapping[str, Any] | None = None
    is_demo: bool = False

    @property
    def name(self) -> str:
        """The file's name, which {name} in run_dir stands for; `_demo` is added for the demo."""
        return Path(self.path).stem + "_demo" * self.is_demo

    @property
    def words(self) -> list[str]:
        """The words by which a command gets this plan."""
        return [self.path, *["--demo"] * self.is_demo]

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

    def missing(self) -> list[UserError]:
        """Return an error for each input of unfinished members that is neither present nor written
        by a stage."""
        written = [place_of(work.writes) for stage in self.stages for work in stage.works]
        found: dict[str, UserError] = {}
        for stage in self.stages:
            for member in stage.undone():
                for error in member.work.missing(written):
                    found.setdefault(str(error), in_file(stage.name, error))
        return list(found.values())

    def stage(self, name: str) -> Stage:
        grids = {stage.name: stage for stage in self.stages if stage.entry.is_grid}
        if name in grids:
            return grids[name]
        raise SettingsError(
            self.path,
            f"it has no grid {name!r}",
            nearest(name, list(grids)) if grids else "name a stage with a grid",
            code="unknown-name",
        )

    @property
    def files(self) -> list[str]:
        """That its members come from, besides itself."""
        return sorted({work.config for stage in self.stages for work in stage.works})


def load_plan(path: str, *, is_demo: bool = False, snapshot: Path | None = None) -> Plan:
    """Read a plan, or its `demo:` section. With a snapshot, it and its members read the files as
    they were at the submission."""
    try:
        complete = load_settings(PlanSettings, path=kept(path, snapshot), overrides=[])
        settings: Sections = complete
        if is_demo:
            if complete.demo is None:
                raise SettingsError(
                    "demo",
                    "the plan has no such section",
                    "run it without --demo",
                    code="missing-value",
                )
            settings = complete.demo
        empty = Plan(path, (), settings.figure or complete.figure, is_demo)
        stages: list[Stage] = []
        for kind, command in COMMANDS.items():
            entries: tuple[Entry, ...] = getattr(settings, command.section)
            before = tuple(stages)
            for number, entry in enumerate(entries, start=1):
                name = command.section if len(entries) == 1 else f"{command.section}/{number}"
                try:
                    configs = [kept(config, snapshot) for config in entry.config]
                    members = _members(entry, kind, name, empty.name, before, configs)
                    stages.append(Stage(name, entry, kind, tuple(members)))
                except SettingsError as error:
                    raise in_file(name, error) from None
        return replace(empty, stages=tuple(stages))
    except SettingsError as error:
        raise in_file(path, error) from None


def load_checked(path: str, *, is_demo: bool = False) -> Plan:
    """Read a plan and check all of it; one error names every mistake."""
    plan = load_plan(path, is_demo=is_demo)
    if errors := [*_problems(plan)]:
        raise in_file(path, *errors[:20])
    return plan


def compressed(indices: Iterable[int]) -> str:
    """As sbatch's --array takes them: 0-3,7,9-10"""
    spans: list[list[int]] = []
    for index in indices:
        first = spans.pop()[:1] if spans and spans[-1][-1] == index - 1 else []
        spans.append([*first, index])
    return ",".join("-".join(map(str, span)) for span in spans)


def _problems(plan: Plan) -> Iterable[UserError]:
    """Yield every error of the plan's members."""
    if not plan.stages:
        sections = ", ".join(command.section for command in COMMANDS.values())
        yield UserError("", "the plan has no entries", f"add one of {sections}", code="empty")
    seen = dict[Path, str]()
    for stage in plan.stages:
        for member in stage.members:
            name = f"{stage.name}: member {member.index}" if stage.entry.is_grid else stage.name
            try:
                member.work.check()
            except UserError as error:
                yield in_file(name, error)
                continue
            if lost := _unavailable(member.work, plan):
                yield in_file(name, lost)
            place = place_of(member.work.writes)
            if place in seen:
                fix = "choose another one for one of them"
                if stage.entry.is_grid:
                    fix = "name each axis that differs in run_dir"
                problem = f"{seen[place]} writes {member.work.writes}, too"
                yield UserError(name, problem, fix, code="conflict")
            seen.setdefault(place, name)


def _unavailable(work: Work, plan: Plan) -> UserError | None:
    """Return the error of a member that reads a checkpoint which its run in this plan will not
    keep."""
    run, words = run_and_length(work.pretrained or "")
    for stage in plan.stages:
        for maker in stage.works if run and stage.kind in _EACH.values() else ():
            if place_of(run) not in map(place_of, maker.runs):
                if place_of(run) == place_of(maker.writes):
                    problem = f"{run} will have a run for each of its repetitions"
                    fix = "name one of them, or set each_finetuned"
                    return UserError("pretrained", problem, fix, code="conflict")
                continue
            if not words or parse_length(words).unit == "steps":
                continue
            kept = (*maker.settings.checkpoint.keep_at, maker.settings.train.duration)  # type: ignore[attr-defined]
            if parse_length(words) not in map(parse_length, kept):
                problem = f"{run} will keep {', '.join(kept)}, not {words}"
                fix = "add it to checkpoint.keep_at of that run"
                return UserError("pretrained", problem, fix, code="mismatch")
    return None


# ---- members of an entry
# ----------------------------------------------------------------------------------------------


def _members(
    entry: Entry, kind: Kind, stage: str, plan: str, before: tuple[Stage, ...], configs: list[str]
) -> Iterable[Member]:
    if kind == "build" and (entry.is_grid or entry.run_dir or entry.gpus is not None):
        raise SettingsError(
            "prepare",
            "grid, seeds, run_dir and gpus are not supported for datasets",
            "write an entry for each dataset",
            code="unsupported",
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
            raise SettingsError(
                "seeds",
                f"{COMMANDS[kind].section} uses no random numbers",
                "omit them",
                code="unsupported",
            )
        axes["seed"] = [
            Choice(str(seed), (f"{COMMANDS[kind].seed}={seed}",)) for seed in entry.seeds
        ]
    for name, choices in axes.items():
        labels = [choice.label for choice in choices]
        for label in labels:
            if labels.count(label) > 1:
                raise SettingsError(
                    name,
                    f"two of its values have the label {label!r}",
                    "write cases with own names",
                    code="conflict",
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
            f"each_{axis}",
            f"it needs a section {section!r} and one of {', '.join(readers)}",
            "add the section, or omit it",
            code="conflict",
        )
    for work in works:
        if not work.runs:
            raise SettingsError(
                f"each_{axis}",
                f"{work.writes} has a run for each fold of its dataset",
                "list these runs in a grid",
                code="unsupported",
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
        f"grid.{name}",
        f"{given!r} is not an axis",
        "give a list of values, or cases, for example {small: {model.width: 64}}",
        code="bad-value",
    )


def _label(name: str, value: Any) -> str:
    """Of a plain value: 1e-05, 50-epochs, mlp_b6_wi256."""
    text = value if isinstance(value, str) else json.dumps(value)
    label = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if isinstance(value, list | dict) or not label:
        raise SettingsError(
            f"grid.{name}",
            f"{text} has no short label",
            f"write cases: {{some_name: {{{name}: {text}}}}}",
            code="bad-value",
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
                "run_dir",
                f"the entry has no axis {name!r}",
                nearest(name, list(labels)),
                code="unknown-name",
            )
    return re.sub(r"\{([^{}]*)\}", lambda found: labels[found[1]], template)
