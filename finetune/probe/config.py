"""Settings of `finetune probe` and `finetune knn`."""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest
from finetune.config import ChannelStats, ShortRunSettings
from pretrain.config import (
    AugmentSettings,
    ReadingSettings,
    ScheduleSettings,
    check_schedule,
    parse_length,
)
from pretrain.data.datasets import Part, check_cooldown, fit_warmup

FeatureType = Literal["float32", "float16"]
HeadOptimizer = Literal["lion", "sgd", "adamw", "lbfgs"]

_GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "lion": {
        "lrs": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        "weight_decays": (0.0, 0.1, 1.0, 10.0, 100.0),
        "epochs": (50,),
    },
    "sgd": {
        "lrs": (1e-3, 1e-2, 3e-2, 1e-1, 3e-1),
        "weight_decays": (0.0, 1e-5, 1e-4, 1e-3, 1e-2),
        "epochs": (50,),
    },
    "adamw": {"lrs": (1e-4, 3e-4, 1e-3, 3e-3), "weight_decays": (1e-2,), "epochs": (50,)},
    "lbfgs": {
        "lrs": (1.0,),
        "weight_decays": tuple(
            float(f"{base}e{power}") for power in range(-6, 0) for base in (1, 3)
        )
        + (1.0,),
        "epochs": (1000,),
    },
}
"""Default learning rates, weight decays and epochs of each optimizer."""
_DEFAULT: HeadOptimizer = "lbfgs"


def _as_tuple(value: Any) -> Any:
    """Convert a number or a list to a tuple, because pydantic rejects both."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


_ONE_OR_MORE = BeforeValidator(_as_tuple, json_schema_input_type=float | list[float] | None)


class FeatureDataSettings(ReadingSettings):
    train_split: str = "train"
    """Training split."""
    test_split: str = "val"
    """Test split. It is never used to choose a learning rate or another setting."""
    image_size: int | None = Field(None, ge=8, le=1024, examples=[64])
    """Image size in pixels. Default: the image size of the checkpoint, or of the dataset if there
    is no checkpoint."""

    @model_validator(mode="after")
    def _test_is_kept_apart(self) -> "FeatureDataSettings":
        if self.train_split == self.test_split:
            problem, fix = f"{self.test_split!r} is also the training split", "choose another split"
            raise UserError("data.test_split", problem, fix, code="conflict")
        return self


class FeatureSettings(ShortRunSettings):
    run_dir: str = Field(examples=["runs/mine-probe"])
    """Directory of the run: event log, resolved config, result."""
    data: FeatureDataSettings
    pretrained: str | None = Field(None, examples=["runs/mine"])
    """Run, checkpoint, folder of weights, hf-hub:USER/NAME or timm:NAME that computes the features.
    null: use the pixels as features, as a baseline."""
    channel_stats: ChannelStats = "checkpoint"
    feature_batch_size: int | None = Field(None, ge=1, examples=[512])
    """Number of images in a forward pass on each rank. Default: 512, or up to 8192 for small models
    on GPUs."""
    feature_precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Precision of the frozen model. auto: bf16 on GPUs, fp32 on CPUs. If you change it, the
    features are computed again."""
    feature_dtype: FeatureType = "float32"
    """Number format of the features on disk. float16 has three significant digits and needs half
    the space."""
    features_dir: str | None = Field(None, examples=["/scratch/features"])
    """Directory of the features. Several runs can share the directory. Default: `features` next to
    the run directory."""

    @property
    def must_keep(self) -> bool:
        """True if features must be on disk, regardless of their size."""
        return True

    @property
    def features_place(self) -> Path:
        default = Path(self.run_dir).parent / "features"
        return Path(self.features_dir) if self.features_dir else default

    def used(self, manifest: Manifest) -> list[tuple[Part, str]]:
        """Return the training and the test split with their uses, "training" and "evaluation"."""
        uses = {self.data.train_split: "training", self.data.test_split: "evaluation"}
        return [(Part(self.data.directory, manifest, split), use) for split, use in uses.items()]


_NOT_FOR_LBFGS = ("lrs", "schedule", "label_smoothing", "gradient_clip_norm")


class ProbeSettings(FeatureSettings):
    of_verb = "finetune probe"
    removed: ClassVar = {"refit": True}
    example_with: ClassVar = {"augment": "num_views=10 optimizer=lion"} | dict.fromkeys(
        _NOT_FOR_LBFGS, "optimizer=lion"
    )
    features: Literal["auto", "cache", "stream"] = "auto"
    """cache: compute features once and keep them on disk. stream: compute features again for each
    batch, with the images divided over all ranks. auto: cache, or stream if the features exceed
    `cache_gb` or the free space. The choice does not change the trained heads."""
    cache_gb: float = Field(100.0, ge=0)
    """Disk space for newly cached features, in GB. If they need more, features=auto streams them;
    features=cache and optimizer=lbfgs fail."""
    optimizer: HeadOptimizer = _DEFAULT
    """Optimizer of the linear heads. lbfgs: logistic regression that minimizes cross-entropy +
    weight_decay / 2 |W|^2 until convergence. lion and adamw decouple weight decay from the
    gradient; sgd adds weight decay to the gradient. Biases never decay. num_views > 0 needs lion,
    adamw or sgd."""
    lrs: Annotated[tuple[float, ...], _ONE_OR_MORE] = _GRIDS[_DEFAULT]["lrs"]
    """Learning rates to try. Each combination of learning rate, weight decay and epochs is a
    candidate. All candidates train together, and the best candidate on held-out samples is kept.
    The defaults of `lrs`, `weight_decays` and `epochs` depend on the optimizer."""
    weight_decays: Annotated[tuple[float, ...], _ONE_OR_MORE] = _GRIDS[_DEFAULT]["weight_decays"]
    """Weight decays to try (see `lrs`)."""
    epochs: Annotated[tuple[int, ...], _ONE_OR_MORE] = (1000,)
    """Numbers of epochs to try (see `lrs`), each with its own schedule. For lbfgs: largest number
    of passes over the features."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Learning rate schedule (not for lbfgs)."""
    batch_size: int = Field(256, ge=1)
    """Batch size (not for lbfgs). All candidates train on the same batches."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Fraction of the target probability that is spread over all classes (not for lbfgs)."""
    gradient_clip_norm: float = Field(0.0, ge=0)
    """Largest gradient norm of each candidate (not for lbfgs). 0: no clipping."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum (SGD only)."""
    nesterov: bool = True
    """Use Nesterov momentum (SGD only)."""
    tolerance: float = Field(1e-5, gt=0)
    """Stop lbfgs when no absolute gradient entry exceeds this value."""
    standardize: bool = True
    """Scale features to mean 0 and standard deviation 1 over the training split. The saved
    classifier includes this scaling."""
    num_views: int = Field(0, ge=0, le=10_000)
    """Number of augmented views of each training image. 0: train on plain images. Epoch e trains on
    view e mod num_views."""
    augment: AugmentSettings | None = Field(None, examples=[{"crop_scale": [0.4, 1.0]}])
    """Augmentation of the views (needs num_views). View v is the image that training would use
    in epoch v. mixup and cutmix are not supported."""
    holdout_fraction: float = Field(0.2, gt=0, lt=1)
    """Fraction of the training split that is held out to choose the best candidate."""
    holdout_split: str | None = Field(None, examples=["holdout"])
    """Split for choosing the best candidate, instead of a fraction of the training split. The best
    head is then not trained again."""
    seed: int = Field(0, ge=0)
    """Random seed of the sample order, the held-out samples and the views."""

    @property
    def must_keep(self) -> bool:
        return self.features == "cache" or self.optimizer == "lbfgs"

    @model_validator(mode="before")
    @classmethod
    def _grid_fits_the_optimizer(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        name = tree.get("optimizer", _DEFAULT)
        grid = _GRIDS.get(name, {}) if isinstance(name, str) else {}
        unset = {key for key in grid if tree.get(key) is None}
        return _with_tuples(tree) | {key: grid[key] for key in unset}

    @model_validator(mode="after")
    def _grid_makes_sense(self) -> "ProbeSettings":
        rules = (("lrs", "above 0", lambda value: value > 0),
                 ("weight_decays", "0 or above", lambda value: value >= 0),
                 ("epochs", "1 or above", lambda value: value >= 1))  # fmt: skip
        for name, words, is_good in rules:
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or not all(map(is_good, values)):
                problem = f"{list(values)} is not valid"
                fix = f"give different values, each {words}"
                raise UserError(name, problem, fix, code="bad-value")
        for lr in self.lrs:
            check_schedule(self.schedule, lr, field="lrs")
        return self

    @model_validator(mode="after")
    def _settings_fit(self) -> "ProbeSettings":
        is_lbfgs = self.optimizer == "lbfgs"
        holdout = self.holdout_split
        fields = type(self).model_fields
        conflicts = [
            ("num_views", self.num_views and self.augment is None, "needs augment",
             "set augment, for example augment.crop_scale=[0.4,1.0]"),
            ("augment", self.augment and not self.num_views, "has no effect without num_views",
             "set num_views, for example num_views=10"),
            *((f"augment.{field}", True, f"{way} is not valid: each image has one label",
               f"set augment.{field}=0")
              for way, field in (self.augment.mixing if self.augment else {}).items()),
            ("epochs", is_lbfgs and len(self.epochs) > 1, "lbfgs takes only one value",
             f"set epochs=[{max(self.epochs)}]"),
            *((name, is_lbfgs and getattr(self, name) != fields[name].default,
               "has no effect with lbfgs", f"set optimizer=lion, or remove {name}")
              for name in _NOT_FOR_LBFGS),
            ("features", is_lbfgs and self.features == "stream",
             "stream is not valid with lbfgs, which needs many passes", "set optimizer=lion"),
            ("num_views", is_lbfgs and self.num_views, "lbfgs does not support views",
             "set optimizer=lion"),
            ("holdout_split", holdout in (self.data.train_split, self.data.test_split),
             f"{holdout!r} is also a training or test split", "choose another split"),
        ]  # fmt: skip
        for field, is_wrong, problem, fix in conflicts:
            if is_wrong:
                raise UserError(field, problem, fix, code="conflict")
        return self

    def num_held(self, num_samples: int) -> int:
        """Return the number of held-out training samples, if holdout_split is not set."""
        return min(num_samples - 1, max(1, round(num_samples * self.holdout_fraction)))

    def steps_of(self, epochs: int, num_rows: int) -> tuple[int, int, int]:
        """Return the steps of a candidate's training, warm-up and cooldown. Fail if the training is
        too short. The last batch of an epoch counts as a full batch."""
        batch, schedule = self.batch_size, self.schedule
        num_samples = -(-num_rows // batch) * batch
        steps, warmup, cooldown = (
            parse_length(each).steps(global_batch_size=batch, num_samples=num_samples)
            for each in (f"{epochs} epochs", schedule.warmup, schedule.cooldown)
        )
        warmup = fit_warmup(warmup, num_steps=steps)
        check_cooldown(warmup, cooldown, num_steps=steps, length=f"{epochs} epochs")
        return steps, warmup, cooldown

    def check_against(self, manifest: Manifest) -> None:
        split = self.data.train_split
        num_samples = manifest.split(split, directory=self.data.dataset).num_samples
        num_kept = num_samples
        if self.holdout_split is None:
            num_kept -= self.num_held(num_samples)
            if num_kept == num_samples:
                problem = f"{split!r} has one sample, but one sample must be held out"
                fix = "choose another split"
                raise DatasetError("data.train_split", problem, fix, code="empty")
        for epochs in self.epochs:
            for num_rows in (num_kept, num_samples):  # the best head trains again on all samples
                self.steps_of(epochs, num_rows)


def _with_tuples(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _with_tuples(value) for name, value in tree.items()}
    return tuple(map(_with_tuples, tree)) if isinstance(tree, list) else tree


class KnnSettings(FeatureSettings):
    of_verb = "finetune knn"
    removed: ClassVar = {"chunk_mb": 256}
    num_views: ClassVar[int] = 0
    augment: ClassVar[AugmentSettings | None] = None
    holdout_split: ClassVar[str | None] = None
    seed: ClassVar[int] = 0
    cache_gb: ClassVar[float] = math.inf
    neighbors: Annotated[tuple[int, ...], _ONE_OR_MORE] = Field((20, 10, 100, 200), min_length=1)
    """Numbers k of nearest training images that vote. One run evaluates all numbers. `test_top1` is
    the accuracy with the first number, because the best number would be a choice on the test split.
    """
    weights: Literal["softmax", "uniform", "distance"] = "softmax"
    """Weight of a vote. softmax: exp(cosine similarity / temperature). uniform: 1. distance: 1 /
    cosine distance."""
    temperature: float = Field(0.07, gt=0)
    """Temperature of the softmax weights."""

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> "KnnSettings":
        counts = self.neighbors
        if min(counts, default=0) < 1 or len(set(counts)) < len(counts):
            problem, fix = f"{list(counts)} is not valid", "give different numbers, each at least 1"
            raise UserError("neighbors", problem, fix, code="bad-value")
        return self

    def check_against(self, manifest: Manifest) -> None:
        most, split = max(self.neighbors), self.data.train_split
        num_training = manifest.split(split, directory=self.data.dataset).num_samples
        if most > num_training:
            problem = f"{most} is more than the {num_training:,} samples of {split!r}"
            raise DatasetError("neighbors", problem, "set smaller numbers", code="bad-value")
