"""A sweep file: the same command for every combination of configs, settings and seeds. No torch here.

    command: pretrain
    config: configs/pretrain/demo_mlp.yaml              # or a list: an axis called `config`
    overrides: ["train.duration=2 epochs"]              # for all members
    grid:                                               # further axes, in this order
      optimizer.lr: [1e-4, 1e-3]                        # a setting and its values
      shape:                                            # or cases: settings that go together, under a name
        narrow: {model.width: 64, model.depth: 8}
        wide: {model.width: 256, model.depth: 2}
    seeds: [0, 1, 2]                                    # the last axis
    run_dir: runs/sweeps/{name}/{shape}-lr-{optimizer.lr}-seed-{seed}
    max_concurrent: 4

Member i is a function of this file alone: the first axis turns slowest, the seeds fastest, and what is finished keeps its number.
"""

import itertools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.studies.work import Work, in_file
from data_prep.settings import Settings, SettingsError, apply_override, load_settings, nearest

MAX_MEMBERS = 1000
"""SLURM's MaxArraySize is 1001 unless a site raises it; the largest index is one less."""
_SEED_SETTING = {"pretrain": "train.seed", "probe": "seed", "tune": "train.seed"}


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class SweepSettings(Settings):
    command: Literal["pretrain", "probe", "tune"]
    """What each member is: `pretrain train`, `finetune probe` or `finetune tune`."""
    config: Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)]
    """The file that members are changes of; several are the first axis, `config`, called by the names of the files."""
    overrides: tuple[str, ...] = ()
    """key.path=value, for all members."""
    pretrained_by: str | None = None
    """For probe and tune: a sweep file beside this one; each of its members in turn is probed or tuned (the axis `pretrained`)."""
    grid: dict[str, Any] = Field(default_factory=dict)
    """Axes: a setting with a list of values, or any name with cases, {case: {setting: value, ...}, ...}."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1)
    """Of the training (pretrain, tune) or the heads (probe)."""
    run_dir: str
    """Where each member's run is: {name} is the file's own name, {AXIS} the member's value there, {seed} its seed."""
    max_concurrent: int | None = Field(None, ge=1)
    """At most so many members at a time, as a SLURM array's %; null: as many as SLURM has room for."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "SweepSettings":
        if self.pretrained_by is not None and self.command == "pretrain":
            raise ValueError(f"pretrained_by: {self.pretrained_by!r} is for probe and tune; leave it out")
        for name in {"config", "pretrained", "seed", "name"} & self.grid.keys():
            raise ValueError(f"grid.{name}: the name is taken; set {name if name == 'config' else 'another one'}")
        return self


@dataclass(frozen=True)
class Choice:
    """One value of an axis: how run directories call it, and what it sets."""

    label: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Axis:
    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Member:
    index: int
    work: Work
    own: tuple[str, ...]
    """The overrides that tell it from the others."""
    run_dir: str


@dataclass(frozen=True)
class Sweep:
    path: str
    settings: SweepSettings
    members: tuple[Member, ...]

    @property
    def files(self) -> list[str]:
        """That its members come from, besides itself."""
        other = self.settings.pretrained_by
        return sorted(
            {member.work.config for member in self.members}
            | ({str(Path(self.path).parent / other)} if other else set())
        )

    def array(self, indices: Iterable[int]) -> str:
        """What sbatch's --array takes for some of its members."""
        limit = self.settings.max_concurrent
        return compressed(indices) + (f"%{limit}" if limit else "")


def load_sweep(path: str) -> Sweep:
    try:
        settings = load_settings(SweepSettings, path=path, overrides=[])
        return Sweep(path, settings, tuple(_members(settings, Path(path))))
    except SettingsError as error:
        raise in_file(path, error) from None


def problems_of(sweep: Sweep) -> list[str]:
    """Everything that is wrong with its members, each by its number."""
    if len(sweep.members) > MAX_MEMBERS:
        many = f"{len(sweep.members):,} members are more than an array of SLURM takes ({MAX_MEMBERS:,}); make two files of it"
        return [many]
    found, seen = [], dict[str, int]()
    for member in sweep.members:
        place = os.path.normpath(member.run_dir)
        if place in seen:
            found.append(
                f"member {member.index}: writes {place}, as member {seen[place]} does; name each axis that differs in run_dir"
            )
        seen.setdefault(place, member.index)
        try:
            member.work.check()
        except ValueError as error:
            found += [f"member {member.index}: {line}" for line in str(error).splitlines()]
    return found


def compressed(indices: Iterable[int]) -> str:
    """As sbatch's --array takes them: 0-3,7,9-10"""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][-1] == index - 1:
            spans[-1] = [spans[-1][0], index]
        else:
            spans.append([index])
    return ",".join("-".join(map(str, span)) for span in spans)


def _members(settings: SweepSettings, path: Path) -> Iterable[Member]:
    axes = _axes(settings, path.parent)
    template = settings.run_dir
    for index, choices in enumerate(itertools.product(*(axis.choices for axis in axes))):
        labels = {"name": path.stem} | {axis.name: each.label for axis, each in zip(axes, choices, strict=True)}
        own = tuple(override for each in choices for override in each.overrides)
        run_dir = _filled(template, labels)
        config = settings.config[[choice.label for choice in axes[0].choices].index(choices[0].label)]
        work = Work(settings.command, config, (*settings.overrides, *own, _override("run_dir", run_dir)))
        yield Member(index, work, own, run_dir)


def _axes(settings: SweepSettings, beside: Path) -> list[Axis]:
    configs = _checked(Axis("config", tuple(Choice(Path(config).stem) for config in settings.config)))
    axes = [configs]
    if settings.pretrained_by is not None:
        axes.append(_pretrained(str(beside / settings.pretrained_by)))
    axes += [_checked(_axis(name, given)) for name, given in settings.grid.items()]
    if settings.seeds is not None:
        key = _SEED_SETTING[settings.command]
        axes.append(_checked(Axis("seed", tuple(Choice(str(seed), (f"{key}={seed}",)) for seed in settings.seeds))))
    return axes


def _axis(name: str, given: Any) -> Axis:
    if isinstance(given, list) and given:
        return Axis(name, tuple(Choice(_label(name, value), (_override(name, value),)) for value in given))
    if isinstance(given, dict) and given and all(isinstance(case, dict) for case in given.values()):
        return Axis(
            name,
            tuple(
                Choice(case, tuple(_override(key, value) for key, value in changes.items()))
                for case, changes in given.items()
            ),
        )
    raise SettingsError(
        f"grid.{name}: {given!r} will not do; give a list of values, or cases such as {{small: {{model.width: 64}}}}"
    )


def _pretrained(path: str) -> Axis:
    runs = [member.run_dir for member in load_sweep(path).members]
    above = os.path.commonpath([Path(run).parent for run in runs])
    return Axis(
        "pretrained",
        tuple(
            Choice(os.path.relpath(run, above or ".").replace("/", "-"), (_override("pretrained", run),))
            for run in runs
        ),
    )


def _checked(axis: Axis) -> Axis:
    labels = [choice.label for choice in axis.choices]
    doubled = next((label for label in labels if labels.count(label) > 1), None)
    if doubled is not None:
        raise SettingsError(f"{axis.name}: two of its values are called {doubled!r}; write cases with names for them")
    return axis


def _label(name: str, value: Any) -> str:
    """Of a plain value: 1e-05, 50-epochs, mlp_b6_wi256."""
    text = value if isinstance(value, str) else json.dumps(value)
    label = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if isinstance(value, list | dict) or not label:
        raise SettingsError(f"grid.{name}: {text} has no short name; write cases, {{some_name: {{{name}: {text}}}}}")
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
            raise SettingsError(f"run_dir: there is no axis {name!r}; {nearest(name, list(labels))}")
    return re.sub(r"\{([^{}]*)\}", lambda found: labels[found[1]], template)
