"""One command of ours as a value: what it reads, what it writes, and how far it has come. No torch
here.

Plans are graphs of these. A `Work` is resolved by the settings class of its own command, so what is
wrong with it is reported before anything starts. It is finished when its last file stands (the
manifest of a dataset, the result of a run) and was made from the settings that it has now: the same
directory with other settings is a mistake, not a finished piece of work.

    python -m cluster.work [--starting] [--kept SNAPSHOT] PROGRAM VERB CONFIG [key=value ...]        or: ... grid PLAN STAGE INDEX

is what a job asks (cluster/job.py). The answer is JSON: `words` after python -m; `state`: finished,
unfinished, with --starting also taken (`about`: by which job) or blind (`about`: which path of
another file system is not there: a job is sent to many nodes, and some may lack a mount); what it
`writes`, the paths that it `reads`, and whether it `can_stage` its data and `needs_one_rank`, and
its `result`, the file that is written last. Every file, those that a plan names included, is the
one that SNAPSHOT keeps. A mistake in the config: exit code 2, and the command's own words.
"""  # noqa: E501 (a table)

import argparse
import contextlib
import copy
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from cluster.slurm import taken_by
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
    """Of a plan file."""
    words: tuple[str, str]
    schema: type[Settings]
    script: str
    """The template that runs it on SLURM."""
    seed: str = ""
    """The setting that `seeds` of a plan file are."""
    place: str = "run_dir"
    """The setting that names where it writes."""
    result: str = RESULT
    """What it writes there last."""

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
            if self.kind == "build":  # whose words may be options, too
                parser = program("data_prep", description="", add_verbs=building.add_verbs)
                options = parser.parse_args(["build", self.config, *self.overrides])
                if options.task is not None or options.show:
                    option = "--show" if options.show else "--task"
                    raise SettingsError(
                        option,
                        "a job builds the complete dataset",
                        f"omit {option}; --array of sbatch splits the work",
                        code="conflict",
                    )
                return building.settings_to_build(options)
            path = Path(self.config).absolute()
            tree = copy.deepcopy(
                _read(path, path.stat().st_mtime_ns)
                if path.is_file()
                else read_yaml(Path(self.config))
            )
            keys = frozenset(tree)
            try:
                for override in self.overrides:
                    if override.startswith("-"):
                        raise SettingsError(
                            override,
                            "only key=value may follow CONFIG",
                            (
                                "put options of sbatch before the script; --nodes and "
                                "RANKS_PER_NODE give the ranks"
                            ),
                            code="bad-syntax",
                        )
                    apply_override(tree, override, schema=schema)
                settings = validate(schema, tree)
                if getattr(settings, COMMANDS[self.kind].place) is None:
                    raise SettingsError(
                        "run_dir",
                        "it is required for cluster jobs",
                        "set it, for example run_dir=runs/mine-views",
                        code="missing-value",
                    )
                return settings
            except SettingsError:
                refuse_of_another_verb(schema, keys, self.config)
                raise
        except SettingsError as error:
            raise in_file(self.config, error) from None

    @property
    def words(self) -> list[str]:
        """What follows `python -m`."""
        return [*COMMANDS[self.kind].words, self.config, *self.overrides]

    @property
    def writes(self) -> str:
        """The dataset, the run directory or the export."""
        return str(getattr(self.settings, COMMANDS[self.kind].place))

    @property
    def runs(self) -> list[str]:
        """Those that it leaves with checkpoints: of a tuning one for each seed; none where only the
        dataset knows the folds."""
        if isinstance(self.settings, TuneSettings):
            return (
                [] if self.settings.folds else [each.run_dir for each in repeats_of(self.settings)]
            )
        return [self.writes]

    @property
    def datasets(self) -> tuple[str, ...]:
        """Those that it reads."""
        data = getattr(self.settings, "data", None)
        return (
            ()
            if data is None
            else data.datasets
            if isinstance(data, DataSettings)
            else (data.dataset,)
        )

    @property
    def pretrained(self) -> str | None:
        """The run, or the checkpoint of one, that it starts from."""
        settings = self.settings
        if isinstance(settings, PretrainSettings):
            return None if list_checkpoints(Path(settings.run_dir)) else settings.start_from
        return getattr(settings, "pretrained", None)

    def is_finished(self) -> bool:
        """Raise `UserError` if its place holds another's results."""
        settings = self.settings
        match settings:
            case BuildSettings():
                return _is_built(settings)
            case EvaluateSettings():
                return is_evaluated(settings)
            case ExportSettings():
                return is_exported(settings)
        check_settings(Path(self.writes), settings)
        if isinstance(settings, TuneSettings):
            is_done = is_finished(settings)  # seeds may have been added
        else:
            is_done = finished_result(Path(self.writes), settings) is not None
        if is_done and not isinstance(settings, PretrainSettings):
            check_source(Path(self.writes), self.pretrained)
        return is_done

    def check(self) -> None:
        """Raises `ValueError` for what is wrong and shows before it starts. Data that is not there
        yet is not looked at."""
        settings, source = self.settings, self.pretrained or ""
        if self.is_finished():
            return
        if source and finished_result(Path(run_and_length(source)[0])) is not None:
            checkpoint_at(source)  # which names what that run has kept
        if not self._has_data:
            return
        if isinstance(settings, KnnSettings):
            settings.check_against(load_manifest(settings.data.dataset))
        if isinstance(settings, (ProbeSettings, KnnSettings)) and settings.must_keep:
            checkpoint = Checkpoint.found(source) if source else None
            if checkpoint or not source:
                check_room(settings, load_manifest(settings.data.dataset), checkpoint)
        if isinstance(settings, PretrainSettings):
            data = _data_of(
                json.dumps(
                    settings.data.model_dump(mode="json") | {"dataset": settings.data.dataset}
                )
            )
            check_against_data(
                data, model=settings.model, train=settings.train, schedule=settings.schedule
            )

    @property
    def _has_data(self) -> bool:
        """On this file system."""
        return all((Path(dataset) / MANIFEST_NAME).exists() for dataset in self.datasets)

    def slower_nodes(self, nodes: int, *, gpus_per_node: int, **speeds: float) -> str | None:
        """Of a pretraining whose data are there: a line where fewer nodes would take less time."""
        settings = self.settings
        if not isinstance(settings, PretrainSettings) or not self._has_data:
            return None
        data = _data_of(
            json.dumps(settings.data.model_dump(mode="json") | {"dataset": settings.data.dataset})
        )
        plan = plan_of(
            settings,
            Cluster(gpus_per_node, **speeds),
            num_classes=len(data.classes),
            image_size=data.image_size,
        )
        return slower_than_fewer(plan, nodes)

    @property
    def reads(self) -> list[str]:
        """The paths of what must be there before it starts: a dataset by its manifest."""
        found = [f"{dataset}/{MANIFEST_NAME}" for dataset in self.datasets] + [
            run_and_length(self.pretrained or "")[0]
        ]
        return [path for path in found if path and "://" not in path and not is_on_hub(path)]

    @property
    def reads_from(self) -> tuple[str, ...]:
        """The datasets and the run."""
        return (*self.datasets, *([self.pretrained] if self.pretrained else []))

    def missing(self, written: Sequence[Path] = ()) -> list[UserError]:
        """Return an error for each input that is neither present nor in one of the `written`
        places. An input on a remote machine counts as present."""
        settings = self.settings
        if isinstance(settings, BuildSettings):
            source = getattr(settings.source, "path", None)
            is_there = source is None or "://" in str(source) or Path(source).exists()
            fix = "download it, or set its path"
            absent_source = UserError(
                "source.path", f"{source}: no such file", fix, code="missing-path"
            )
            return [] if is_there else [absent_source]
        there = [
            path
            for path in self.reads
            if Path(path).exists() or any(place_of(path).is_relative_to(each) for each in written)
        ]
        absent = [path for path in self.reads if path not in there]
        found = [
            UserError(
                dataset,
                f"it is not a complete dataset (no {MANIFEST_NAME})",
                "build it: cluster/submit cluster/data_prep.slurm CONFIG",
                code="unfinished",
            )
            for dataset in self.datasets
            if f"{dataset}/{MANIFEST_NAME}" in absent
        ]
        if run_and_length(self.pretrained or "")[0] in absent:
            field = "start_from" if isinstance(settings, PretrainSettings) else "pretrained"
            problem = f"{self.pretrained}: no such run or checkpoint"
            found.append(UserError(field, problem, "pretrain it first", code="missing-path"))
        return found

    def state(self) -> str:
        """In words, for a table."""
        try:
            if self.is_finished():
                return "finished"
        except UserError:
            return "other settings"
        run_dir = Path(self.writes)
        checkpoints = list_checkpoints(run_dir)
        where = f" at step {step_of(checkpoints[-1]):,}" if checkpoints else ""
        if _last_end(run_dir) == "FAILED":
            return f"failed{where}"
        return (
            f"begun,{where}"
            if where
            else "begun"
            if (run_dir / CONFIG_FILE).exists()
            else "not begun"
        )


def place_of(path: str) -> Path:
    return Path(os.path.normpath(Path(path).absolute()))


def in_file(path: str, *errors: UserError) -> SettingsError:
    """Return the errors as one, with the file (or the stage) in front of each field."""
    found = []
    for error in (each for given in errors for each in (given, *given.others)):
        is_located = error.field == path or error.field.startswith(f"{path}:")
        field = error.field if is_located else f"{path}: {error.field}".removesuffix(": ")
        found.append(SettingsError(field, error.problem, error.fix, code=error.code))
    first, *others = found
    return SettingsError(first.field, first.problem, first.fix, code=first.code, others=others)


@lru_cache
def _read(path: Path, _mtime_ns: int) -> dict[str, Any]:
    """The members of a grid share few files, and reading YAML is what takes longest."""
    return read_yaml(path)


@lru_cache(maxsize=16)
def _data_of(data: str) -> TrainingData:
    """Members of a grid mostly share it."""
    return load_training_data(DataSettings.model_validate_json(data))


def _is_built(settings: BuildSettings) -> bool:
    if not (settings.directory / MANIFEST_NAME).exists():
        return False
    refuse_other_config(settings, load_manifest(settings.directory))
    return True


def _last_end(run_dir: Path) -> str | None:
    """How its last start ended, by its journal: FAILED and the like; None while that goes on, or
    where it was killed."""
    try:
        lines = (run_dir / "tracking" / "journal.jsonl").read_bytes().splitlines()
    except OSError:
        return None
    for line in [line for line in reversed(lines) if b'"start"' in line or b'"end"' in line]:
        with contextlib.suppress(ValueError):  # a kill has cut the line
            event = json.loads(line)
            if event["event"] in ("start", "end"):
                return str(event.get("status"))
    return None


# ---- what a job asks
# --------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.work")
    parser.add_argument("--starting", action="store_true")
    parser.add_argument("--kept", metavar="SNAPSHOT", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    words, snapshot = options.words, options.kept
    try:
        answer = _of_work(_asked(words, snapshot), is_starting=options.starting)
    except UserError as error:
        own = (
            str(error).replace(f"{snapshot}/given/", "/").replace(f"{snapshot}/", "")
        )  # the user's path, not the copy's
        print(f"{words[0]}: {own}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


def kept(file: str, snapshot: Path | None) -> str:
    """The copy of a file that cluster/snapshot made when the job was submitted; without a snapshot
    the file itself."""
    if snapshot is None:
        return file
    whole, here = place_of(file), Path.cwd()
    copies = [snapshot / whole.relative_to(here)] if whole.is_relative_to(here) else []
    for copied in (*copies, Path(f"{snapshot}/given{whole}")):
        if copied.is_file():
            return str(copied)
    if whole.is_file():
        raise SettingsError(
            file, "the job's snapshot does not have it", "put it into configs/", code="missing-path"
        )
    return file


def _asked(words: list[str], snapshot: Path | None) -> Work:
    if words[0] != "grid":
        kind = next(kind for kind, command in COMMANDS.items() if list(command.words) == words[:2])
        return Work(kind, kept(words[2], snapshot), tuple(words[3:]))
    from cluster.plan_file import load_plan  # it is made of works

    members = load_plan(words[1], snapshot=snapshot).stage(words[2]).members
    if int(words[3]) >= len(members):
        raise SettingsError(
            words[1],
            f"{words[2]} has no member {words[3]}",
            f"choose one of 0 to {len(members) - 1}",
            code="unknown-name",
        )
    return members[int(words[3])].work


def _of_work(work: Work, *, is_starting: bool) -> dict[str, object]:
    state, about = "finished" if work.is_finished() else "unfinished", ""
    if (
        is_starting and state == "unfinished" and work.kind != "build"
    ):  # which many tasks write together
        absent = [path for path in work.reads if not Path(path).exists()]
        unseen = [path for path in absent if _file_system(Path(path)) != _file_system(Path())]
        writer = None if unseen else taken_by(work.writes, os.environ)
        if unseen or writer:
            state, about = ("blind", unseen[0]) if unseen else ("taken", str(writer))
    settings = work.settings
    can_stage = (
        isinstance(settings, PretrainSettings | TuneSettings) and settings.data.stage_dir is None
    )
    found = {
        "state": state,
        "about": about,
        "writes": work.writes,
        "work": getattr(settings, "work", None),
        "reads": work.reads,
    }
    more = {"result": COMMANDS[work.kind].result, "needs_one_rank": work.kind == "export"}
    return {**found, **more, "words": work.words, "can_stage": can_stage}


def _file_system(path: Path) -> int:
    """Of the path, or of what is there of it."""
    whole = path.absolute()
    return next(parent.stat().st_dev for parent in (whole, *whole.parents) if parent.exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
