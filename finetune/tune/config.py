"""Settings of `finetune tune`, and repetitions over seeds or folds.

    RUN/seed-0/ RUN/seed-1/ ...     one run for each repetition
    RUN/result.json                 mean, standard deviation and result of each run; written last

The same command resumes an interrupted repetition.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from data_prep.errors import UserError
from data_prep.manifest import load_manifest
from data_prep.remote import join
from finetune.config import AllowedImport, ChannelStats, Pretrained
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.run import check_resume, finished_result, list_checkpoints
from pretrain.config import (
    EngineSettings,
    OptimizerSettings,
    PassSettings,
    PixelOrder,
    PretrainSettings,
    StreamSettings,
    TrainingSettings,
)
from pretrain.data.datasets import Part, num_folds

SPREAD = ("eval/top1", "eval/top5", "eval/loss", "eval/real", "eval/class_top1")


class TuneEngineSettings(PassSettings):
    """Settings of accelerate's data parallelism."""

    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of forward and backward pass. Weights are in fp32. tf32: fp32 storage, but GPUs
    multiply matrices with a 10-bit mantissa."""


class TuneSettings(TrainingSettings):
    of_verb = "finetune tune"
    example_with: ClassVar = {"train.ema_decay": None} | {
        f"data.{name}": None for name in StreamSettings.model_fields
    }
    pretrained: Pretrained
    init: Literal["pretrained", "scratch"] = "pretrained"
    """pretrained: start from the checkpoint. scratch: train the same architecture from random
    weights, as a baseline."""
    head_init: Literal["zeros", "torch"] = "zeros"
    """Initial weights of the new classifier. torch: the default of torch.nn.Linear, as in the code
    of Scaling MLPs."""
    channel_stats: ChannelStats = "checkpoint"
    allow_import: AllowedImport = None
    seeds: tuple[int, ...] | None = Field(None, examples=[[0, 1, 2]])
    """Seeds for repeated runs. Each run uses one seed as train.seed. result.json has the mean and
    standard deviation over the runs. You can add seeds later."""
    folds: bool = False
    """Run once on each fold of the training split, as in the protocol of STL-10."""
    optimizer: OptimizerSettings = OptimizerSettings(
        name="sgd", lr=1e-3, head_lr_scale=10.0, weight_decay=1e-4
    )
    """Optimizer settings. Default: SGD with momentum and the learning rates of Scaling MLPs, 0.01
    for the head and 0.001 for the body."""
    engine: TuneEngineSettings = TuneEngineSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> "TuneSettings":
        seeds = self.seeds
        if seeds is not None and (not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0):
            problem = f"{list(seeds)} is not valid"
            fix = "give different integers from 0 on, for example [0, 1, 2]"
            raise UserError("seeds", problem, fix, code="bad-value")
        if self.folds and self.data.fold is not None:
            problem = f"true trains on every fold, but data.fold={self.data.fold} is one fold"
            raise UserError("folds", problem, "remove one of the two", code="conflict")
        if self.data.stream:
            fix = "index the shards (data_prep index), or use pretrain train with start_from"
            raise UserError("data.stream", "is not supported by tune", fix, code="unsupported")
        if self.train.ema_decay is not None:
            fix = "remove train.ema_decay"
            raise UserError("train.ema_decay", "is not supported by tune", fix, code="unsupported")
        return self

    def as_training(self, card: ModelCard) -> PretrainSettings:
        order = card.model_dump(include={*PixelOrder.model_fields})
        trained = {"image_size": card.image_size, **order}
        for name, value in trained.items():
            own = getattr(self.data, name)
            if name in self.data.model_fields_set and own not in (
                value,
                *([None] * (name == "image_size")),
            ):
                problem = f"{own} is set, but {self.pretrained} was trained with {value}"
                raise UserError(f"data.{name}", problem, f"remove data.{name}", code="mismatch")
        same = {name: getattr(self, name) for name in TrainingSettings.model_fields}
        same["data"] = self.data.model_copy(update=trained)
        same["augment"] = self.augment.fed_as(card.fed_interpolation, card.eval_crop)
        engine = EngineSettings(zero_stage=0, **self.engine.model_dump())
        return PretrainSettings(**same, model=card.model, engine=engine)


def repeats_of(settings: TuneSettings) -> list[TuneSettings]:
    """Return the settings of each repetition. Without seeds and folds, return only `settings`."""
    if settings.seeds is None and not settings.folds:
        return [settings]
    folds: Sequence[int | None] = [None]
    if settings.folds:
        directory, split = settings.data.directory, settings.data.train_split
        manifest = load_manifest(directory)
        manifest.split(split, directory=settings.data.dataset)
        folds = range(num_folds(Part(directory, manifest, split)))
        if not folds:
            problem = f"split {split!r} of {settings.data.dataset} has no folds"
            raise UserError("folds", problem, "remove folds", code="conflict")
    seeds: Sequence[int | None] = settings.seeds or [None]
    return [_repeat(settings, seed=seed, fold=fold) for fold in folds for seed in seeds]


def _repeat(settings: TuneSettings, *, seed: int | None, fold: int | None) -> TuneSettings:
    numbers = {"fold": fold, "seed": seed}
    name = "-".join(f"{what}-{number}" for what, number in numbers.items() if number is not None)
    changes: dict[str, Any] = {
        "run_dir": str(Path(settings.run_dir) / name),
        "seeds": None,
        "folds": False,
    }
    if settings.checkpoint.remote is not None:
        remote = join(settings.checkpoint.remote, name)
        changes["checkpoint"] = settings.checkpoint.model_copy(update={"remote": remote})
    if settings.resume == "must":  # checked for all repetitions together
        changes["resume"] = "auto"
    if seed is not None:
        changes["train"] = settings.train.model_copy(update={"seed": seed})
    if fold is not None:
        changes["data"] = settings.data.model_copy(update={"fold": fold})
    return settings.model_copy(update=changes)


def check_resume_of(settings: TuneSettings, repeats: list[TuneSettings]) -> None:
    """Check the setting `resume`. `resume=must` needs a checkpoint or result of any repetition."""
    unfinished = unfinished_of(repeats)
    has_any = len(unfinished) < len(repeats) or any(map(list_checkpoints, unfinished))
    for place in () if settings.resume == "must" and has_any else unfinished:
        check_resume(place, settings.resume)


def unfinished_of(repeats: list[TuneSettings]) -> list[Path]:
    places = [(Path(each.run_dir), each) for each in repeats]
    return [place for place, each in places if finished_result(place, each) is None]


def is_finished(settings: TuneSettings) -> bool:
    result, repeats = finished_result(Path(settings.run_dir), settings), repeats_of(settings)
    if result is None or repeats == [settings]:
        return result is not None
    return {Path(each.run_dir).name for each in repeats} <= set(result["runs"])


def summary(repeats: list[TuneSettings]) -> dict[str, Any]:
    """Return all results, and the mean and sample standard deviation (NAME_std) of each score in
    SPREAD."""
    places = [Path(each.run_dir) for each in repeats]
    results = {place.name: finished_result(place) or {} for place in places}
    found: dict[str, Any] = {"runs": results, "num_runs": len(results)}
    for name in SPREAD:
        values = [result[name] for result in results.values() if name in result]
        found |= {name: statistics.fmean(values)} if values else {}
        found |= {f"{name}_std": statistics.stdev(values)} if len(values) > 1 else {}
    return found


def in_words(result: dict[str, Any], *, baselines: str) -> str:
    if "eval/top1" not in result:
        return f"{result['num_runs']} runs, not evaluated"
    words = f"top-1 {100 * result['eval/top1']:.2f}"
    if "eval/top1_std" in result:
        words += f" +- {100 * result['eval/top1_std']:.2f}"
    words += " %"
    if "eval/class_top1" in result:
        words += f", class mean {100 * result['eval/class_top1']:.2f} %"
    return f"{words} over {result['num_runs']} runs ({baselines})"
