"""Settings of `finetune tune`, and its repetition over several seeds, or over the folds of a split.
No torch here.

    RUN/seed-0/ RUN/seed-1/ ...     runs of their own, each as `finetune tune` leaves it
    RUN/result.json                 their mean and spread, and what each has reached; written last

What is finished stays finished: the same command goes on with the one that was interrupted, and
with further seeds.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from data_prep.errors import SettingsError, UserError
from data_prep.manifest import load_manifest
from data_prep.remote import join
from data_prep.settings import read_yaml
from finetune.config import ChannelStats
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    check_resume,
    finished_result,
    is_worthless,
    list_checkpoints,
)
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
    """accelerate's data parallelism."""

    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Of the forward and backward pass; the weights are in fp32. tf32: GPUs round what they
    multiply to ten bits."""


class TuneSettings(TrainingSettings):
    of_verb = "finetune tune"
    example_with: ClassVar = {"train.ema_decay": None} | {
        f"data.{name}": None for name in StreamSettings.model_fields
    }
    pretrained: str = Field(examples=["runs/mine"])
    """A run directory of `pretrain train`, or one of its checkpoints."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """scratch: the same architecture from random weights, as the baseline that transfer has to
    beat."""
    new_head: Literal["zeros", "torch"] = "zeros"
    """How the classifier of the new classes begins: at zero, or as torch begins a linear layer, as
    in paper B's code."""
    channel_stats: ChannelStats = "checkpoint"
    seeds: tuple[int, ...] | None = Field(None, examples=[[0, 1, 2]])
    """Repeat with each of them as train.seed; result.json has the mean and the standard deviation.
    More can be added later."""
    folds: bool = False
    """Repeat on each fold of the training split alone, STL-10's protocol."""
    optimizer: OptimizerSettings = OptimizerSettings(
        name="sgd", lr=1e-3, head_lr_scale=10.0, weight_decay=1e-4
    )
    """The paper's: SGD with momentum, 0.01 for the head and 0.001 for the body."""
    engine: TuneEngineSettings = TuneEngineSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> "TuneSettings":
        seeds = self.seeds
        if seeds is not None and (not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0):
            raise UserError(
                "seeds",
                f"{list(seeds)} is not valid",
                "give different integers from 0 on, for example [0, 1, 2]",
                code="bad-value",
            )
        if self.data.stream:
            remedy = (
                "index its shards (data_prep index), or go on with pretrain train and start_from"
            )
            raise UserError(
                "data.stream", "true is not supported by tune", remedy, code="unsupported"
            )
        if self.folds and self.data.fold is not None:
            raise UserError(
                "folds",
                f"true repeats on every fold, but data.fold is {self.data.fold}",
                "remove one of them",
                code="conflict",
            )
        if self.train.ema_decay is not None:
            raise UserError(
                "train.ema_decay",
                "tune has no moving average",
                "remove train.ema_decay",
                code="unsupported",
            )
        return self

    def as_training(self, card: ModelCard) -> PretrainSettings:
        """The same task in the words of the one training loop."""
        size = self.data.image_size or card.image_size
        if size != card.image_size:
            raise UserError(
                "data.image_size",
                f"{size} is set, but {self.pretrained} was trained at {card.image_size}",
                "remove data.image_size",
                code="mismatch",
            )
        order = card.model_dump(include={*PixelOrder.model_fields})
        own = self.data.model_dump(include={*PixelOrder.model_fields} & self.data.model_fields_set)
        if own != {name: order[name] for name in own}:
            name = next(name for name in own if own[name] != order[name])
            raise UserError(
                f"data.{name}",
                f"{own[name]} is set, but {self.pretrained} was trained with {order[name]}",
                f"remove data.{name}",
                code="mismatch",
            )
        same = {name: getattr(self, name) for name in TrainingSettings.model_fields}
        same |= {
            "data": self.data.model_copy(update={"image_size": size, **order}),
            "augment": self.augment.fed_as(card.fed_interpolation),
        }
        return PretrainSettings(
            **same,
            model=card.model,
            engine=EngineSettings(zero_stage=0, **self.engine.model_dump()),
        )


def repeats_of(settings: TuneSettings) -> list[TuneSettings]:
    """The single runs; the settings themselves where nothing is repeated."""
    if settings.seeds is None and not settings.folds:
        return [settings]
    folds: Sequence[int | None] = [None]
    if settings.folds:
        directory, split = settings.data.dataset, settings.data.train_split
        manifest = load_manifest(settings.data.directory)
        manifest.split(split, directory=directory)
        folds = range(num_folds(Part(settings.data.directory, manifest, split)))
        if not folds:
            raise UserError(
                "folds",
                f"split {split!r} of {directory} has no folds",
                "remove folds",
                code="conflict",
            )
    return [
        _repeat(settings, seed=seed, fold=fold)
        for fold in folds
        for seed in settings.seeds or (None,)
    ]


def _repeat(settings: TuneSettings, *, seed: int | None, fold: int | None) -> TuneSettings:
    names = [
        f"{what}-{number}"
        for what, number in (("fold", fold), ("seed", seed))
        if number is not None
    ]
    train, data, checkpoint = settings.train, settings.data, settings.checkpoint
    if checkpoint.remote is not None:
        checkpoint = checkpoint.model_copy(
            update={"remote": join(checkpoint.remote, "-".join(names))}
        )
    return settings.model_copy(
        update={
            "run_dir": str(Path(settings.run_dir) / "-".join(names)),
            "checkpoint": checkpoint,
            "resume": (
                "auto" if settings.resume == "must" else settings.resume
            ),  # checked for all of them
            "seeds": None,
            "folds": False,
            "train": train if seed is None else train.model_copy(update={"seed": seed}),
            "data": data if fold is None else data.model_copy(update={"fold": fold}),
        }
    )


def check_kind(settings: TuneSettings) -> None:
    """A directory holds one run, or repetitions; `seeds` may grow, but not come and go."""
    path = Path(settings.run_dir) / CONFIG_FILE
    is_begun = path.exists() and not is_worthless(path.parent)
    begun = read_yaml(path).get("seeds") if is_begun else settings.seeds
    if (begun is None) != (settings.seeds is None):
        holds = (
            "one run without seeds"
            if begun is None
            else f"a run for each of the seeds {list(begun)}"
        )
        raise SettingsError(
            "seeds",
            f"{settings.run_dir} holds {holds}",
            "choose another run_dir, or set seeds as before",
            code="changed",
        )


def check_resume_of(settings: TuneSettings, repeats: list[TuneSettings]) -> None:
    """Of repetitions any checkpoint or result is something to go on from."""
    unfinished = unfinished_of(repeats)
    if settings.resume == "must" and (
        len(unfinished) < len(repeats) or any(map(list_checkpoints, unfinished))
    ):
        return
    for place in unfinished:
        check_resume(place, settings.resume)


def unfinished_of(repeats: list[TuneSettings]) -> list[Path]:
    return [
        Path(each.run_dir) for each in repeats if finished_result(Path(each.run_dir), each) is None
    ]


def is_finished(settings: TuneSettings) -> bool:
    """Whether nothing of what is asked for is left to do."""
    result = finished_result(Path(settings.run_dir), settings)
    return result is not None and (
        (repeats := repeats_of(settings)) == [settings]
        or set(_names(repeats)) <= set(result["runs"])
    )


def summary(repeats: list[TuneSettings]) -> dict[str, Any]:
    """The mean under the name of the figure itself, the sample standard deviation beside it; all
    runs are finished."""
    results = {
        name: finished_result(Path(each.run_dir)) or {}
        for name, each in zip(_names(repeats), repeats, strict=True)
    }
    found: dict[str, Any] = {"runs": results, "num_runs": len(results)}
    for name in SPREAD:
        values = [result[name] for result in results.values() if name in result]
        found |= {name: statistics.fmean(values)} if values else {}
        found |= {f"{name}_std": statistics.stdev(values)} if len(values) > 1 else {}
    return found


def in_words(result: dict[str, Any], *, baselines: str) -> str:
    """Of a summary: mean +- spread."""
    if "eval/top1" not in result:
        return f"{result['num_runs']} runs, not evaluated"
    spread = f" +- {100 * result['eval/top1_std']:.2f}" if "eval/top1_std" in result else ""
    class_mean = (
        f", class mean {100 * result['eval/class_top1']:.2f} %"
        if "eval/class_top1" in result
        else ""
    )
    return (
        f"top-1 {100 * result['eval/top1']:.2f}{spread} %{class_mean} over {result['num_runs']}"
        f" runs ({baselines})"
    )


def _names(repeats: list[TuneSettings]) -> list[str]:
    return [Path(each.run_dir).name for each in repeats]
