"""`Work`: one command with its inputs, output and progress. Imports no torch.

The settings class of the command checks a `Work`, so mistakes are reported before the start. A
`Work` is finished if its last file (a manifest or a result) exists and has the present settings.
Other settings for the same directory are a mistake.
"""

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from data_prep.build.config import BuildSettings
from data_prep.build.workplan import refuse_other_config
from data_prep.commands import building
from data_prep.errors import SettingsError, UserError
from data_prep.explain import program
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.settings import Settings, apply_override, read_yaml, refuse_of_another_verb, validate
from finetune.evaluate.config import EvaluateSettings, is_evaluated
from finetune.export.config import RECORD, ExportSettings, is_exported
from finetune.probe.cache import check_room
from finetune.probe.config import KnnSettings, ProbeSettings
from finetune.tune.config import TuneSettings, is_finished, repeats_of
from pretrain.checkpoints.checkpoint import Checkpoint, check_source
from pretrain.checkpoints.hub import is_on_hub
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    RESULT,
    check_settings,
    checkpoint_at,
    finished_result,
    list_checkpoints,
    run_and_length,
    step_of,
)
from pretrain.config import DataSettings, PretrainSettings
from pretrain.data.datasets import TrainingData, check_against_data, load_training_data
from pretrain.engine.zero_cost import Cluster, plan_of, slower_than_fewer

Kind = Literal["build", "pretrain", "probe", "tune", "knn", "evaluate", "export"]


@dataclass(frozen=True)
class Command:
    section: str
    """Section for this command in a plan file."""
    words: tuple[str, str]
    schema: type[Settings]
    script: str
    seed: str = ""
    """Setting that `seeds` of a plan file sets."""
    place: str = "run_dir"
    """Setting with the output directory."""
    result: str = RESULT
    """Name of the last file that the command writes into the output directory."""

    @property
    def reads_checkpoint(self) -> bool:
        return "pretrained" in self.schema.model_fields


COMMANDS: Mapping[Kind, Command] = {
    "build": Command(
        "prepare",
        ("data_prep", "build"),
        BuildSettings,
        "cluster/data_prep.slurm",
        place="out",
        result=MANIFEST_NAME,
    ),
    "pretrain": Command(
        "pretrain", ("pretrain", "train"), PretrainSettings, "cluster/pretrain.slurm", "train.seed"
    ),
    "probe": Command("probe", ("finetune", "probe"), ProbeSettings, "cluster/probe.slurm", "seed"),
    "tune": Command(
        "finetune", ("finetune", "tune"), TuneSettings, "cluster/finetune.slurm", "train.seed"
    ),
    "knn": Command("knn", ("finetune", "knn"), KnnSettings, "cluster/knn.slurm"),
    "evaluate": Command(
        "evaluate", ("finetune", "evaluate"), EvaluateSettings, "cluster/evaluate.slurm", "seed"
    ),
    "export": Command(
        "export",
        ("finetune", "export"),
        ExportSettings,
        "cluster/export.slurm",
        place="out",
        result=RECORD,
    ),
}


@dataclass(frozen=True)
class Work:
    kind: Kind
    config: str
    overrides: tuple[str, ...] = ()

    @cached_property
    def settings(self) -> Settings:
        schema = COMMANDS[self.kind].schema
        try:
            if self.kind == "build":  # arguments may also be options
                parser = program("data_prep", description="", add_verbs=building.add_verbs)
                words = ["build", self.config, *self.overrides]
                return building.settings_to_build(parser.parse_args(words))
            path = Path(self.config).absolute()
            is_file = path.is_file()
            tree = _read(path, path.stat().st_mtime_ns) if is_file else read_yaml(Path(self.config))
            tree, keys = copy.deepcopy(tree), frozenset(tree)
            try:
                for override in self.overrides:
                    if override.startswith("-"):
                        fix = "put options of sbatch before the script; use --nodes, not --ranks"
                        problem = "only key=value may follow CONFIG"
                        raise SettingsError(override, problem, fix, code="bad-syntax")
                    apply_override(tree, override, schema=schema)
                settings = validate(schema, tree)
            except SettingsError:
                refuse_of_another_verb(schema, keys, self.config)
                raise
            if getattr(settings, COMMANDS[self.kind].place) is None:
                problem, fix = "it is required for cluster jobs", "set it, for example to runs/mine"
                raise SettingsError("run_dir", problem, fix, code="missing-value")
            return settings
        except SettingsError as error:
            raise in_file(self.config, error) from None

    @property
    def words(self) -> list[str]:
        return [*COMMANDS[self.kind].words, self.config, *self.overrides]

    @property
    def writes(self) -> str:
        """Path of the dataset, run directory or export that the command writes."""
        return str(getattr(self.settings, COMMANDS[self.kind].place))

    @property
    def runs(self) -> list[str]:
        """Runs with checkpoints that the command writes: one for each seed of a fine-tuning. Empty
        for folds, because only the dataset knows their number."""
        if not isinstance(self.settings, TuneSettings):
            return [self.writes]
        return [] if self.settings.folds else [each.run_dir for each in repeats_of(self.settings)]

    @property
    def datasets(self) -> tuple[str, ...]:
        data = getattr(self.settings, "data", None)
        if isinstance(data, DataSettings):
            return data.datasets
        return () if data is None else (data.dataset,)

    @property
    def pretrained(self) -> str | None:
        """Run (or checkpoint of a run) that provides the initial weights."""
        settings = self.settings
        if isinstance(settings, PretrainSettings):
            return None if list_checkpoints(Path(settings.run_dir)) else settings.start_from
        return getattr(settings, "pretrained", None)

    def is_finished(self) -> bool:
        """Return True if the result exists. Raise `UserError` if the directory has results of other
        settings."""
        settings = self.settings
        match settings:
            case BuildSettings():
                is_built = (settings.directory / MANIFEST_NAME).exists()
                if is_built:
                    refuse_other_config(settings, load_manifest(settings.directory))
                return is_built
            case EvaluateSettings():
                return is_evaluated(settings)
            case ExportSettings():
                return is_exported(settings)
        place = Path(self.writes)
        check_settings(place, settings)
        if isinstance(settings, TuneSettings):
            is_done = is_finished(settings)  # seeds may have been added
        else:
            is_done = finished_result(place, settings) is not None
        if is_done and not isinstance(settings, PretrainSettings):
            check_source(place, self.pretrained)
        return is_done

    def check(self) -> None:
        """Raise `UserError` for mistakes that are visible before the start. Missing data is no
        mistake."""
        settings, source = self.settings, self.pretrained or ""
        if self.is_finished():
            return
        if source and finished_result(Path(run_and_length(source)[0])) is not None:
            checkpoint_at(source)  # raises if the run has not kept it
        if not self._has_data:
            return
        if isinstance(settings, KnnSettings):
            settings.check_against(load_manifest(settings.data.dataset))
        if isinstance(settings, ProbeSettings | KnnSettings) and settings.must_keep:
            checkpoint = Checkpoint.found(source) if source else None
            if checkpoint or not source:
                check_room(settings, load_manifest(settings.data.dataset), checkpoint)
        if isinstance(settings, PretrainSettings):
            data = _data_of(settings.data.model_dump_json(), settings.data.dataset)
            check_against_data(data, settings)

    @property
    def _has_data(self) -> bool:
        """True if all datasets exist on this file system."""
        return all((Path(dataset) / MANIFEST_NAME).exists() for dataset in self.datasets)

    def slower_nodes(self, nodes: int, cluster: Cluster) -> str | None:
        """Return a warning if pretraining on fewer nodes would take less time. Return None
        otherwise, or if the data is missing."""
        settings = self.settings
        if not isinstance(settings, PretrainSettings) or not self._has_data:
            return None
        data = _data_of(settings.data.model_dump_json(), settings.data.dataset)
        classes, size = len(data.classes), data.image_size
        plan = plan_of(settings, cluster, num_classes=classes, image_size=size)
        return slower_than_fewer(plan, nodes)

    @property
    def reads(self) -> list[str]:
        """Local paths that must exist before the start. The path of a dataset is its manifest."""
        paths = [f"{dataset}/{MANIFEST_NAME}" for dataset in self.datasets]
        paths.append(run_and_length(self.pretrained or "")[0])
        return [path for path in paths if path and "://" not in path and not is_on_hub(path)]

    @property
    def reads_from(self) -> tuple[str, ...]:
        """Datasets and the run that the command reads."""
        return (*self.datasets, *([self.pretrained] if self.pretrained else []))

    def missing(self, written: Sequence[Path] = ()) -> list[UserError]:
        """Return an error for each input that neither exists nor is in a path of `written`. Remote
        inputs count as existing."""
        settings = self.settings
        if isinstance(settings, BuildSettings):
            source = getattr(settings.source, "path", None)
            if source is None or "://" in str(source) or Path(source).exists():
                return []
            problem, fix = f"{source}: no such file", "download the file, or set source.path"
            return [UserError("source.path", problem, fix, code="missing-path")]
        found = []
        for path in self.reads:
            if Path(path).exists() or any(place_of(path).is_relative_to(each) for each in written):
                continue
            if path.endswith(f"/{MANIFEST_NAME}"):
                problem = f"this is not a complete dataset (no {MANIFEST_NAME})"
                fix = "run data_prep build, or cluster/submit cluster/data_prep.slurm CONFIG"
                dataset = path.removesuffix(f"/{MANIFEST_NAME}")
                found.append(UserError(dataset, problem, fix, code="unfinished"))
            else:
                field = "start_from" if isinstance(settings, PretrainSettings) else "pretrained"
                problem = f"{self.pretrained}: no such run or checkpoint"
                found.append(
                    UserError(field, problem, "finish this run first", code="missing-path")
                )
        return found

    def state(self) -> str:
        try:
            if self.is_finished():
                return "finished"
        except UserError:
            return "other settings"
        run_dir, events = Path(self.writes), list[bytes]()
        with suppress(OSError):
            lines = (run_dir / "tracking" / "journal.jsonl").read_bytes().splitlines()
            events = [line for line in lines if re.search(rb'"event": ?"(start|end)"', line)]
        begun = "begun" if (run_dir / CONFIG_FILE).exists() else "not begun"
        word = "failed" if events and b'"FAILED"' in events[-1] else begun
        checkpoints = list_checkpoints(run_dir)
        return f"{word}, at step {step_of(checkpoints[-1]):,}" if checkpoints else word


def kept(file: str, snapshot: Path | None) -> str:
    """Return the copy of a file in the snapshot of the submission, or the file itself without a
    snapshot. Raise SettingsError if the snapshot lacks the file."""
    if snapshot is None:
        return file
    path, here = place_of(file), Path.cwd()
    copies = [snapshot / path.relative_to(here)] if path.is_relative_to(here) else []
    for copied in (*copies, Path(f"{snapshot}/given{path}")):
        if copied.is_file():
            return str(copied)
    if path.is_file():
        problem, fix = "the job's snapshot lacks this file", "put the file into configs/"
        raise SettingsError(file, problem, fix, code="missing-path")
    return file


def place_of(path: str) -> Path:
    return Path(os.path.normpath(Path(path).absolute()))


def in_file(path: str, *errors: UserError) -> SettingsError:
    """Return one error that contains all errors. The file (or stage) is in front of each field."""
    found = []
    for error in (each for given in errors for each in (given, *given.others)):
        is_located = error.field == path or error.field.startswith(f"{path}:")
        field = error.field if is_located else f"{path}: {error.field}".removesuffix(": ")
        found.append(SettingsError(field, error.problem, error.fix, code=error.code))
    first, *others = found
    return SettingsError(first.field, first.problem, first.fix, code=first.code, others=others)


@lru_cache
def _read(path: Path, _mtime_ns: int) -> dict[str, Any]:
    """Return the parsed file. It is cached, because members of a grid share files and parsing is
    slow."""
    return read_yaml(path)


@lru_cache(maxsize=16)
def _data_of(data: str, dataset: str) -> TrainingData:
    """Return the dataset of a data section. It is cached, because members of a grid share it."""
    tree = json.loads(data) | {"dataset": dataset}
    return load_training_data(DataSettings.model_validate_json(json.dumps(tree)))
