"""A plan file: a graph of datasets, pretrainings and uses of their checkpoints. Imports no torch.

    prepare: [configs/data_prep/demo_pretrain.yaml, configs/data_prep/demo_transfer.yaml]
    pretrain:
      config: configs/pretrain/demo_mlp.yaml              # or a list: an axis called `config`
      overrides: ["train.duration=2 epochs"]              # for all members
      grid:                                               # further axes, in this order
        optimizer.lr: [1e-4, 1e-3]                        # a setting and its values
        shape:                                            # or cases: settings under a name
          narrow: {model.width: 64, model.depth: 8}
          wide: {model.width: 256, model.depth: 2}
      seeds: [0, 1, 2]                                    # the last axis
      run_dir: runs/plans/{name}/{shape}-lr-{optimizer.lr}-seed-{seed}
      max_concurrent: 4
    probe:
      config: configs/probe/demo.yaml
      for_each: pretrain                                  # an axis of all runs of `pretrain`
      run_dir: "runs/plans/{name}/probe-{pretrained}"

A section is an entry or a list of entries. An entry is the path of a config, or a mapping. An entry
with axes is a grid: its members are many runs, on SLURM the tasks of one array. Only this file
determines member i: the first axis changes slowest, the seeds change fastest. An entry waits for
the entries that write the datasets and checkpoints in its resolved config. All other inputs must
already exist.

This file is long because it has one format: its settings, their members, and all mistakes.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.work import COMMANDS, Kind, Work, in_file, kept, place_of
from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import BAD_INPUT
from data_prep.settings import Settings, apply_override, load_settings, nearest, validate
from pretrain.checkpoints.run import run_and_length
from pretrain.config import parse_length


def _several(value: object) -> object:
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


_EACH: Mapping[str, Kind] = {"pretrained": "pretrain", "finetuned": "tune"}
"""Axis of `for_each` -> kind of the runs."""
_SEVERAL = BeforeValidator(_several, json_schema_input_type=str | list[str])


class Entry(Settings):
    config: Annotated[tuple[str, ...], _SEVERAL] = Field(
        min_length=1, examples=["configs/probe/demo.yaml"]
    )
    """Config of the runs. Several configs make the first axis of a grid, `config`, with the file
    names as labels."""
    overrides: tuple[str, ...] = Field((), examples=[["train.duration=2 epochs"]])
    """Settings for all runs of the entry, as key.path=value."""
    for_each: Literal["pretrain", "finetune"] | None = None
    """Section whose runs this entry uses: the entry runs once for each run (and seed) of this
    section. The axis in the grid is `pretrained`, or `finetuned` for the section finetune.
    `evaluate` uses the dataset and split that the run was evaluated on, unless the entry sets them.
    """
    checkpoints: tuple[str, ...] = Field((), examples=[["50 epochs", "100 epochs"]])
    """Milestone checkpoints (see checkpoint.milestones) to use instead of the last checkpoint of
    each run. In run_dir, {pretrained} or {finetuned} then ends with the length, such as -50epochs.
    """
    grid: dict[str, Any] = Field(default_factory=dict, examples=[{"optimizer.lr": [0.0001, 0.001]}])
    """Grid axes. An axis is a setting with a list of values, or any name with cases ({case:
    {setting: value, ...}, ...}). Every combination is a run. Not valid in `prepare`."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1, examples=[[0, 1, 2]])
    """Repeat each run with these seeds, which set train.seed (pretrain, finetune), the seed of the
    heads (probe) or of the views (evaluate). Not valid in `prepare`, `knn` and `export`."""
    run_dir: str | None = Field(None, examples=["runs/plans/{name}/seed-{seed}"])
    """Run directory (or export) of each run; required for a grid. {name} is the name of the plan
    file, {seed} the seed, {AXIS} the label on a grid axis, such as {optimizer.lr}. Not valid in
    `prepare`."""
    max_concurrent: int | None = Field(None, ge=1, examples=[4])
    """Largest number of runs at the same time on SLURM (the 4 in sbatch's --array=0-31%4). null: no
    limit."""
    nodes: int | None = Field(None, ge=1, examples=[4])
    """Number of complete nodes for each run on SLURM. null: one node for an entry with one
    pretraining run, a part of a node for other runs."""
    gpus: int | None = Field(None, ge=0, examples=[4])
    """Number of GPUs for each run on SLURM, all on one node. The run gets the same fraction of the
    node's CPUs and memory. null: one GPU, none for an export, a complete node for one pretraining
    run. Not valid in `prepare`."""
    sbatch: tuple[str, ...] = Field((), examples=[["--time=24:00:00"]])
    """More options of sbatch for this entry, for example --array=0-31 to build a dataset in 32
    tasks."""

    @property
    def is_grid(self) -> bool:
        return len(self.config) > 1 or bool(self.for_each or self.grid) or self.seeds is not None

    @model_validator(mode="after")
    def _parts_fit(self) -> "Entry":
        for name in {"config", "seed", "name", *_EACH} & self.grid.keys():
            problem, fix = "the name is reserved", "choose another name"
            raise UserError(f"grid.{name}", problem, fix, code="bad-value")
        if self.checkpoints and not self.for_each:
            problem = "this setting needs for_each"
            fix = "set for_each: pretrain, or pretrained: [RUN@50epochs] in the grid"
            raise UserError("checkpoints", problem, fix, code="missing-value")
        if self.nodes is not None and self.gpus is not None:
            problem = "gpus requests a part of a node, and nodes requests complete nodes"
            raise UserError("gpus", problem, "omit one of the two", code="conflict")
        if self.is_grid and self.run_dir is None:
            fix = "name all axes, for example runs/{name}/{seed}"
            raise UserError("run_dir", "a grid needs a run_dir", fix, code="missing-value")
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
            fix = "give the path of a config, or {config: PATH, overrides: [key=value]}"
            raise UserError("", f"{entry!r} is not an entry", fix, code="bad-value")
    return tuple(validate(Entry, entry) for entry in entries)


Entries = Annotated[
    tuple[Entry, ...],
    BeforeValidator(_entries, json_schema_input_type=Entry | str | list[Entry | str]),
]


class Sections(Settings):
    prepare: Entries = Field((), examples=["configs/data_prep/demo_pretrain.yaml"])
    """Datasets to build with `data_prep build`."""
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
    """Exports with `finetune export`. An export waits for evaluations of its checkpoint, because
    the model card shows their results."""
    figure: dict[str, Any] | None = Field(
        None, examples=[{"kind": "sweep", "x": "width", "hue": ["mixing"]}]
    )
    """Figure of the results, drawn after all runs. To check the section, run `analysis figure PLAN
    --check`."""


class PlanSettings(Sections):
    of_verb = "cluster/submit"
    source: tuple[dict[str, Any], ...] = Field(
        (), examples=[[{"section": "C.4", "settings": {"optimizer.lr": 0.02}}]]
    )
    """Settings that a paper prints. An item names a section of the paper and, for each setting, all
    values in the runs. `where: {setting: value}` limits an item to some runs. `analysis paper`
    lists the items."""
    chosen: tuple[dict[str, Any], ...] = Field(
        (), examples=[[{"reason": "our seeds", "settings": {"train.seed": [0, 1]}}]]
    )
    """Settings that no paper prints, in the form of `source`, with a `reason` instead of `section`.
    """
    demo: Sections | None = Field(None, examples=[{"pretrain": "configs/pretrain/demo_mlp.yaml"}])
    """Small variant of the plan on few images for two CPU cores (`wide-mlps run PLAN --demo`). Its
    sections replace all sections of the plan, except `figure` if the demo has none."""


@dataclass(frozen=True)
class Choice:
    label: str
    """Name of the value in run directories and tables."""
    overrides: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    """Overrides with lower priority than the overrides of the entry."""


@dataclass(frozen=True)
class Member:
    index: int
    work: Work
    own: tuple[str, ...]
    """Overrides that only this member (run of the grid) has."""
    labels: Mapping[str, str]
    """Axis -> label of this member's value."""


@dataclass(frozen=True)
class Stage:
    """One entry of a plan. On SLURM, an entry is one job (two jobs for a dataset)."""

    name: str
    """Section of the entry. Several entries of a section are numbered: probe, finetune/2."""
    entry: Entry
    kind: Kind
    members: tuple[Member, ...]

    @property
    def works(self) -> list[Work]:
        return [member.work for member in self.members]

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs of each member; None: as the job script requests."""
        is_export = self.kind == "export" and self.entry.is_grid
        return 0 if self.entry.gpus is None and is_export else self.entry.gpus

    def title(self, member: Member) -> str:
        return f"{self.name} {member.index}" if self.entry.is_grid else self.name

    def undone(self) -> list[Member]:
        return [member for member in self.members if not member.work.is_finished()]


@dataclass(frozen=True)
class Plan:
    path: str
    stages: tuple[Stage, ...]
    """All stages; each comes after the stages whose output it reads."""
    figure: Mapping[str, Any] | None = None
    is_demo: bool = False
    source: tuple[Mapping[str, Any], ...] = ()
    chosen: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Value of {name} in run_dir: the plan file's name, with `_demo` for the demo."""
        return Path(self.path).stem + "_demo" * self.is_demo

    @property
    def drawn(self) -> str:
        return f"runs/plans/{self.name}"

    @property
    def words(self) -> list[str]:
        """Command-line arguments that select this plan."""
        return [self.path, *["--demo"] * self.is_demo]

    @property
    def files(self) -> list[str]:
        return sorted({work.config for stage in self.stages for work in stage.works})

    def after(self, stage: Stage) -> list[Stage]:
        """Return the stages that write the inputs of a stage and, for an export, the stages that
        use its checkpoint."""
        read = [
            place_of(run_and_length(path)[0]) for work in stage.works for path in work.reads_from
        ]
        exported = {work.pretrained for work in stage.works if stage.kind == "export"} - {None}
        found = []
        for other in self.stages:
            # an input may be below a place: RUN/checkpoints/step-..., RUN/seed-0
            places = [place_of(work.writes) for work in other.works]
            is_read = any(path.is_relative_to(place) for path in read for place in places)
            is_judge = other.kind != "export" and exported & {
                work.pretrained for work in other.works
            }
            if is_read or is_judge:
                found.append(other)
        return found

    def missing(self) -> list[UserError]:
        """Return an error for each missing input of unfinished members that no stage writes."""
        written = [place_of(work.writes) for stage in self.stages for work in stage.works]
        found: dict[str, UserError] = {}
        for stage in self.stages:
            for member in stage.undone():
                for error in member.work.missing(written):
                    found.setdefault(str(error), in_file(stage.name, error))
        return list(found.values())

    def stage(self, name: str) -> Stage:
        grids = {stage.name: stage for stage in self.stages if stage.entry.is_grid}
        if name not in grids:
            fix = nearest(name, list(grids)) if grids else "choose a plan with a grid"
            raise SettingsError(
                self.path, f"the plan has no grid {name!r}", fix, code="unknown-name"
            )
        return grids[name]


def load_plan(path: str, *, is_demo: bool = False, snapshot: Path | None = None) -> Plan:
    """Read a plan, or its `demo:` section. Files are read from `snapshot` if there is one."""
    try:
        complete = load_settings(PlanSettings, path=kept(path, snapshot), overrides=[])
        sections: Sections = complete
        if is_demo:
            if complete.demo is None:
                problem, fix = "the plan has no such section", "run it without --demo"
                raise SettingsError("demo", problem, fix, code="missing-value")
            sections = complete.demo
        rows = ((), ()) if is_demo else (complete.source, complete.chosen)
        plan = Plan(path, (), sections.figure or complete.figure, is_demo, *rows)
        for kind, command in COMMANDS.items():
            entries: tuple[Entry, ...] = getattr(sections, command.section)
            stages = []
            for number, entry in enumerate(entries, start=1):
                name = command.section if len(entries) == 1 else f"{command.section}/{number}"
                try:
                    members = _members(entry, kind, name, plan, snapshot)
                except SettingsError as error:
                    raise in_file(name, error) from None
                stages.append(Stage(name, entry, kind, tuple(members)))
            plan = replace(plan, stages=(*plan.stages, *stages))
        return plan
    except SettingsError as error:
        raise in_file(path, error) from None


def load_checked(path: str, snapshot: Path | None = None, *, is_demo: bool = False) -> Plan:
    """Read a plan and check it completely. Raise one SettingsError with up to 20 mistakes."""
    plan = load_plan(path, is_demo=is_demo, snapshot=snapshot)
    if errors := [*_problems(plan)]:
        problem, fix = f"{len(errors)} mistakes; 20 are listed", "correct these first"
        count = UserError("", problem, fix, code="bad-value")
        errors[20:] = [count] * (len(errors) > 20)
        raise in_file(path, *errors)
    return plan


def check_figure(plan: Plan) -> None:
    """Check the `figure:` section with `analysis figure --check`, if analysis is installed on this
    machine."""
    if plan.figure is None:
        return
    command = [sys.executable, "-m", "analysis", "figure", *plan.words, "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode == BAD_INPUT:
        problem = checked.stderr.strip().removeprefix("analysis: ")
        raise SettingsError(
            f"{plan.path}: figure", problem, "correct the section", code="bad-value"
        )


def compressed(indices: Iterable[int]) -> str:
    """Return numbers as in sbatch's --array: 0-3,7,9-10"""
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
                fix = "choose another run_dir for one of them"
                if stage.entry.is_grid:
                    fix = "add the names of all axes to run_dir, such as {seed}"
                problem = f"{seen[place]} also writes {member.work.writes}"
                yield UserError(name, problem, fix, code="conflict")
            seen.setdefault(place, name)


def _unavailable(work: Work, plan: Plan) -> UserError | None:
    """Return an error if a member reads a checkpoint that another run of the plan will not keep."""
    run, words = run_and_length(work.pretrained or "")
    for stage in plan.stages:
        for maker in stage.works if run and stage.kind in _EACH.values() else ():
            if place_of(run) not in map(place_of, maker.runs):
                if place_of(run) == place_of(maker.writes):
                    problem = f"{run} will contain several runs (repetitions)"
                    fix = "choose one of these runs, or set for_each: finetune"
                    return UserError("pretrained", problem, fix, code="conflict")
                continue
            if not words or parse_length(words).unit == "steps":
                continue
            lengths = (*maker.settings.checkpoint.milestones, maker.settings.train.duration)  # type: ignore[attr-defined]
            if parse_length(words) not in map(parse_length, lengths):
                problem = f"{run} will keep checkpoints of {', '.join(lengths)}, not of {words}"
                fix = f"add {words} to checkpoint.milestones of this run"
                return UserError("pretrained", problem, fix, code="mismatch")
    return None


# ---- members of an entry


def _members(
    entry: Entry, kind: Kind, stage: str, plan: Plan, snapshot: Path | None
) -> list[Member]:
    if kind == "build" and (entry.is_grid or entry.run_dir or entry.gpus is not None):
        problem = "grid, seeds, run_dir and gpus are not supported for datasets"
        fix = "write an entry for each dataset"
        raise SettingsError("prepare", problem, fix, code="unsupported")
    axes, members = _axes(entry, kind, plan.stages), []
    configs = {Path(config).stem: kept(config, snapshot) for config in entry.config}
    for index, choices in enumerate(itertools.product(*axes.values())):
        labels = {axis: each.label for axis, each in zip(axes, choices, strict=True)}
        own = [override for each in choices for override in each.overrides]
        overrides = [override for each in choices for override in each.defaults]
        overrides += [*entry.overrides, *own]
        if entry.run_dir is not None:
            place = _fill(entry.run_dir, {"name": plan.name} | labels)
            overrides.append(_override(COMMANDS[kind].place, place))
        if kind != "build":
            record = {"plan": plan.name, "stage": stage, "member": str(index), "labels": labels}
            overrides.append(f"record={json.dumps(record, separators=(',', ':'))}")
        work = Work(kind, configs[labels["config"]], tuple(overrides))
        members.append(Member(index, work, tuple(own), {"name": plan.name} | labels))
    return members


def _axes(entry: Entry, kind: Kind, before: tuple[Stage, ...]) -> dict[str, list[Choice]]:
    axes = {"config": [Choice(Path(config).stem) for config in entry.config]}
    for axis, source in _EACH.items():
        if COMMANDS[source].section == entry.for_each:
            axes[axis] = _axis_of_runs(axis, entry, kind, before)
    axes |= {name: _axis(name, given) for name, given in entry.grid.items()}
    if entry.seeds is not None:
        setting = COMMANDS[kind].seed
        if not setting:
            problem = f"{COMMANDS[kind].section} uses no random numbers"
            raise SettingsError("seeds", problem, "omit seeds", code="unsupported")
        axes["seed"] = [Choice(str(seed), (f"{setting}={seed}",)) for seed in entry.seeds]
    for name, choices in axes.items():
        labels = [choice.label for choice in choices]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            problem = f"two values of this axis have the label {twice!r}"
            raise SettingsError(name, problem, "give them different names", code="conflict")
    return axes


def _axis_of_runs(axis: str, entry: Entry, kind: Kind, before: tuple[Stage, ...]) -> list[Choice]:
    works = [work for stage in before if stage.kind == _EACH[axis] for work in stage.works]
    if not COMMANDS[kind].reads_checkpoint or not works:
        later = list(COMMANDS.values())[list(COMMANDS).index(_EACH[axis]) + 1 :]
        readers = ", ".join(each.section for each in later if each.reads_checkpoint)
        problem = (
            f"it needs an earlier {COMMANDS[_EACH[axis]].section!r}, and is valid in {readers}"
        )
        fix = "add the section, or omit for_each"
        raise SettingsError("for_each", problem, fix, code="conflict")
    for work in works:
        if not work.runs:
            problem = f"{work.writes} has a run for each fold of its dataset"
            fix = "list these runs in a grid"
            raise SettingsError("for_each", problem, fix, code="unsupported")
    above = os.path.commonpath([Path(run).parent for work in works for run in work.runs])
    lengths = [f"@{length.replace(' ', '')}" for length in entry.checkpoints] or [""]
    found = []
    for work in works:
        data, defaults = work.settings.data, list[str]()  # type: ignore[attr-defined]
        if kind == "evaluate":
            defaults.append(_override("data.dataset", data.dataset))
            defaults += [_override("data.split", data.eval_split)] if data.eval_split else []
        for run, at in itertools.product(work.runs, lengths):
            label = _label(axis, f"{os.path.relpath(run, above or '.')}{at}")
            own = (_override("pretrained", f"{run}{at}"),)
            found.append(Choice(label, own, tuple(defaults)))
    return found


def _axis(name: str, given: Any) -> list[Choice]:
    if isinstance(given, list) and given:
        return [Choice(_label(name, value), (_override(name, value),)) for value in given]
    if isinstance(given, dict) and given and all(isinstance(case, dict) for case in given.values()):
        return [
            Choice(case, tuple(_override(key, value) for key, value in changes.items()))
            for case, changes in given.items()
        ]
    fix = "give a list of values, or cases, for example {small: {model.width: 64}}"
    raise SettingsError(f"grid.{name}", f"{given!r} is not an axis", fix, code="bad-value")


def _label(name: str, value: Any) -> str:
    """Return the label of a plain value: 1e-05, 50-epochs, mlp_b6_wi256."""
    text = value if isinstance(value, str) else json.dumps(value)
    label = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if isinstance(value, list | dict) or not label:
        fix = f"give the value a name: {{some_name: {{{name}: {text}}}}}"
        raise SettingsError(f"grid.{name}", f"{text} has no short label", fix, code="bad-value")
    return label


def _override(key: str, value: Any) -> str:
    """Return a key=value override that is parsed to the same value."""
    tree: dict[str, Any] = {}
    if isinstance(value, str):
        with suppress(SettingsError):
            apply_override(tree, f"value={value}")
    return f"{key}={value}" if tree == {"value": value} else f"{key}={json.dumps(value)}"


def _fill(template: str, labels: Mapping[str, str]) -> str:
    for name in re.findall(r"\{([^{}]*)\}", template):
        if name not in labels:
            problem, fix = f"the entry has no axis {name!r}", nearest(name, list(labels))
            raise SettingsError("run_dir", problem, fix, code="unknown-name")
    return re.sub(r"\{([^{}]*)\}", lambda found: labels[found[1]], template)
