"""A study file: datasets, pretraining and what is done with the checkpoints, as one graph. No torch here.

    prepare: [configs/data_prep/demo_pretrain.yaml, configs/data_prep/demo_transfer.yaml]
    pretrain: {config: configs/pretrain/demo_mlp.yaml, nodes: 4, overrides: ["train.duration=2 epochs"]}
    probe: configs/probe/demo.yaml
    finetune: [...]

Each entry is the path of a config, or {config: ..., overrides: [key=value], nodes: N, sbatch: [options]}; a section is one entry or
a list. What waits for what is not written down, it follows from the resolved configs: an entry waits for those that write the
datasets and the checkpoint that it reads. What no entry writes must be there already.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cluster.studies.work import Kind, Work, in_file
from data_prep.build.config import BuildSettings
from data_prep.manifest import MANIFEST_NAME
from data_prep.settings import Settings, SettingsError, load_settings, validate


class Entry(Settings):
    config: str
    overrides: tuple[str, ...] = ()
    """key.path=value, as on the command line."""
    nodes: int | None = Field(None, ge=1)
    """Of the SLURM job; the template's own number otherwise."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch for this job, such as --time=24:00:00 or, to prepare, --array=0-31."""


def _entries(given: Any) -> Any:
    if given == ():
        return ()  # the default
    entries = given if isinstance(given, list) else [given]
    return tuple(validate(Entry, {"config": entry} if isinstance(entry, str) else _mapping(entry)) for entry in entries)


def _mapping(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(
            f"{entry!r} will not do; give the path of a config, or {{config: PATH, overrides: [key=value]}}"
        )
    return entry


Entries = Annotated[tuple[Entry, ...], BeforeValidator(_entries)]


class StudySettings(Settings):
    prepare: Entries = ()
    """`data_prep build`"""
    pretrain: Entries = ()
    """`pretrain train`"""
    probe: Entries = ()
    """`finetune probe`"""
    finetune: Entries = ()
    """`finetune tune`"""


SECTIONS: Mapping[str, Kind] = {"prepare": "build", "pretrain": "pretrain", "probe": "probe", "finetune": "tune"}


@dataclass(frozen=True)
class Stage:
    name: str
    entry: Entry
    work: Work
    after: tuple[str, ...]
    """The names of the stages that write what it reads."""
    is_finished: bool


@dataclass(frozen=True)
class Study:
    path: str
    stages: tuple[Stage, ...]
    """Each after those that it waits for."""
    missing: tuple[str, ...]
    """What it reads that neither is there nor is written by a stage: a line each."""

    @property
    def name(self) -> str:
        return Path(self.path).stem


def load_study(path: str) -> Study:
    """All that can be known without starting anything; every mistake in one message."""
    try:
        settings = load_settings(StudySettings, path=path, overrides=[])
    except SettingsError as error:
        raise in_file(path, error) from None
    found: list[tuple[str, Entry, Work, bool]] = []
    problems: list[str] = []
    for section, kind in SECTIONS.items():
        entries: tuple[Entry, ...] = getattr(settings, section)
        for entry in entries:
            work = Work(kind, entry.config, entry.overrides)
            try:
                work.check()
                is_finished = work.is_finished()
            except ValueError as error:
                problems += [f"{section}: {line}" for line in str(error).splitlines()]
                continue
            found.append((section, entry, work, is_finished))
    named = _named(found)
    problems += _clashes([(name, work) for name, _, work, _ in named])
    if not named and not problems:
        problems = [f"nothing to do; give it {', '.join(SECTIONS)}"]
    if problems:
        raise SettingsError("\n".join(f"{path}: {problem}" for problem in problems))
    works = [(name, work) for name, _, work, _ in named]
    stages = tuple(Stage(name, entry, work, _after(work, works), done) for name, entry, work, done in named)
    return Study(path, stages, tuple(line for stage in stages for line in _missing(stage, works)))


def _named(found: list[tuple[str, Entry, Work, bool]]) -> list[tuple[str, Entry, Work, bool]]:
    """A section's only entry is called like it, others by what they write as well."""
    lasts = [(section, Path(work.writes).name) for section, _, work, _ in found]
    names = []
    for section, last in lasts:
        is_only = [each for each, _ in lasts].count(section) == 1
        names.append(section if is_only else f"{section} {last}")
    clear = [
        name if names.count(name) == 1 else f"{found[at][0]} {found[at][2].writes}" for at, name in enumerate(names)
    ]
    return [(name, *rest) for name, (_, *rest) in zip(clear, found, strict=True)]  # type: ignore[misc]


def _clashes(works: list[tuple[str, Work]]) -> list[str]:
    found = []
    for number, (name, work) in enumerate(works):
        for other_name, other in works[:number]:
            if _place(work.writes) == _place(other.writes):
                found.append(
                    f"{name}: writes {work.writes}, as {other_name} does; give one of them another out or run_dir"
                )
    return found


def _after(work: Work, works: list[tuple[str, Work]]) -> tuple[str, ...]:
    return tuple(name for name, other in works if any(_is_of(read, other) for read in _reads(work)))


def _reads(work: Work) -> list[str]:
    return [*work.datasets, *([work.pretrained] if work.pretrained else [])]


def _is_of(read: str, work: Work) -> bool:
    """Whether it is what the work writes, or something in it: RUN/checkpoints/step-..., RUN/seed-0."""
    return _place(read).is_relative_to(_place(work.writes))


def _place(path: str) -> Path:
    return Path(os.path.normpath(Path(path).absolute()))


def _missing(stage: Stage, works: list[tuple[str, Work]]) -> list[str]:
    if stage.is_finished:
        return []
    work = stage.work
    if isinstance(work.settings, BuildSettings):
        source = getattr(work.settings.source, "path", None)
        there = source is None or Path(source).exists()
        said = f"{stage.name}: source.path {source} is not there; add source.path=... to its overrides, or put it there"
        return [] if there else [said]
    found = []
    for dataset in work.datasets:
        if not (Path(dataset) / MANIFEST_NAME).exists() and not any(_is_of(dataset, other) for _, other in works):
            found.append(f"{stage.name}: {dataset} is no finished dataset, and nothing under `prepare` writes it")
    if work.pretrained and not Path(work.pretrained).exists() and not any(_is_of(work.pretrained, w) for _, w in works):
        found.append(f"{stage.name}: {work.pretrained} is not there, and nothing under `pretrain` writes it")
    return found
