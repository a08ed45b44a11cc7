"""Settings of `finetune probe` and `finetune knn`. No torch here."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest
from finetune.config import ChannelStats, ShortRunSettings
from pretrain.config import AugmentSettings, ReadingSettings, ScheduleSettings, check_schedule
from pretrain.data.datasets import Part

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
        "weight_decays": (
            1e-6,
            3e-6,
            1e-5,
            3e-5,
            1e-4,
            3e-4,
            1e-3,
            3e-3,
            1e-2,
            3e-2,
            1e-1,
            3e-1,
            1.0,
        ),
        "epochs": (1000,),
    },
}
"""Defaults of the three lists for each optimizer."""
_DEFAULT: HeadOptimizer = "lbfgs"


def _as_tuple(value: Any) -> Any:
    """A lone number is a list of one. Behind a validator of ours pydantic takes no list for a
    tuple."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


_ONE_OR_MORE = BeforeValidator(_as_tuple, json_schema_input_type=float | list[float] | None)


def _with_tuples(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _with_tuples(value) for name, value in tree.items()}
    return tuple(_with_tuples(value) for value in tree) if isinstance(tree, list) else tree


class FeatureDataSettings(ReadingSettings):
    train_split: str = "train"
    """The split that is learned from."""
    test_split: str = "val"
    """The split that is judged; nothing is chosen on it."""
    image_size: int | None = Field(None, ge=8, le=1024, examples=[64])
    """Pixels; null: the checkpoint's, or without one the dataset's."""

    @model_validator(mode="after")
    def _test_is_kept_apart(self) -> "FeatureDataSettings":
        if self.train_split == self.test_split:
            raise UserError(
                "data.test_split",
                f"{self.test_split!r} is also the training split",
                "choose another split",
                code="conflict",
            )
        return self


class FeatureSettings(ShortRunSettings):
    """The features that both verbs work on."""

    run_dir: str = Field(examples=["runs/mine-probe"])
    """Features aside, all of the run is here: journal, resolved config, result."""
    data: FeatureDataSettings
    pretrained: str | None = Field(None, examples=["runs/mine"])
    """The checkpoint whose features are used; null uses the pixels themselves, as the baseline."""
    channel_stats: ChannelStats = "checkpoint"
    feature_batch_size: int | None = Field(None, ge=1, examples=[512])
    """Pictures of one forward pass, on each rank; null: 512, on GPUs more of a model that is done
    with these before the next are launched."""
    feature_precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Of the frozen model's products. auto: bf16 on GPUs, fp32 on CPUs; which it was is part of
    what kept features are found by."""
    feature_dtype: FeatureType = "float32"
    """Of the features on disk; float16 takes half the room, with three digits."""
    features_dir: str | None = Field(None, examples=["/scratch/features"])
    """Where features are kept, for any run that asks for the same; null: `features` beside the run
    directory."""

    @property
    def must_keep(self) -> bool:
        """Whether features are kept, however large they are; a k-NN always does."""
        return (
            getattr(self, "features", "cache") == "cache"
            or getattr(self, "optimizer", "") == "lbfgs"
        )

    @property
    def features_place(self) -> Path:
        return (
            Path(self.features_dir) if self.features_dir else Path(self.run_dir).parent / "features"
        )

    def used(self, manifest: Manifest) -> list[tuple[Part, str]]:
        """What is learned from, and what is judged."""
        uses = {self.data.train_split: "training", self.data.test_split: "evaluation"}
        return [(Part(self.data.directory, manifest, split), use) for split, use in uses.items()]


_NOT_FOR_LBFGS = ("lrs", "schedule", "label_smoothing", "gradient_clip_norm")


class ProbeSettings(FeatureSettings):
    of_verb = "finetune probe"
    example_with: ClassVar = {"augment": "views=10 optimizer=lion"} | dict.fromkeys(
        _NOT_FOR_LBFGS, "optimizer=lion"
    )
    features: Literal["auto", "cache", "stream"] = "auto"
    """cache: made once and kept on disk; stream: made anew for each batch, by all ranks together,
    and nothing is kept; auto: stream where they would take more than `cache_gb`, or than the disk
    has. Both train the same heads."""
    cache_gb: float = Field(100.0, ge=0)
    """Largest size of new features on disk. Above it, lion, adamw and sgd stream features with
    `auto`; `cache` and lbfgs fail."""
    optimizer: HeadOptimizer = _DEFAULT
    """lbfgs is logistic regression: it minimizes cross-entropy + weight_decay / 2 |W|^2 until it
    converges. lion and adamw decay weights apart from the gradient, sgd through the gradient, as
    torch does. Biases never decay. Views need lion, adamw or sgd."""
    lrs: Annotated[tuple[float, ...], _ONE_OR_MORE] = _GRIDS[_DEFAULT]["lrs"]
    """Every combination of learning rate, decay and length is a cell; one pass over the features
    trains all of them, and the best on held-out samples is kept. Left out, or null, the three lists
    fit the optimizer."""
    weight_decays: Annotated[tuple[float, ...], _ONE_OR_MORE] = _GRIDS[_DEFAULT]["weight_decays"]
    """See `lrs`."""
    epochs: Annotated[tuple[int, ...], _ONE_OR_MORE] = (1000,)
    """Lengths, each with a schedule of its own; for lbfgs the most passes over the features."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Of each cell's learning rate; not for lbfgs, as the next three are not."""
    batch_size: int = Field(256, ge=1)
    """Of the heads, over all cells."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread over all classes, in training; 0 is off."""
    gradient_clip_norm: float = Field(0.0, ge=0)
    """Of each cell's gradient; 0 is off."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of sgd."""
    nesterov: bool = True
    """Of sgd."""
    tolerance: float = Field(1e-5, gt=0)
    """lbfgs has converged where no entry of the gradient is larger."""
    standardize: bool = True
    """Features to mean 0 and deviation 1 over the training split (the saved head undoes it); false
    takes them as they are."""
    views: int = Field(0, ge=0, le=10_000)
    """Augmented views of each training picture: epoch e learns from view e mod views; 0 learns from
    the plain pictures alone."""
    augment: AugmentSettings | None = Field(None, examples=[{"crop_scale": [0.4, 1.0]}])
    """How views are made: view v is what training would see in its epoch v. Pictures are never
    mixed."""
    holdout_share: float = Field(0.2, gt=0, lt=1)
    """Of the training split, to choose the cell with; the test split is never chosen on."""
    holdout_split: str | None = Field(None, examples=["holdout"])
    """Chooses with this split instead of a share of the training split."""
    refit: bool = True
    """Trains the chosen cell once more, on all of the training split; with a holdout_split it has
    seen all of it already."""
    seed: int = Field(0, ge=0)
    """Of the order, of the held-out share and of the views."""

    @model_validator(mode="before")
    @classmethod
    def _grid_fits_the_optimizer(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        name = tree.get("optimizer", _DEFAULT)
        grid = _GRIDS.get(name, {}) if isinstance(name, str) else {}
        given = {key: value for key, value in tree.items() if not (key in grid and value is None)}
        return {**grid, **_with_tuples(given)}

    @model_validator(mode="after")
    def _grid_makes_sense(self) -> "ProbeSettings":
        rules = (
            ("lrs", self.lrs, "learning rate must be above 0", all(lr > 0 for lr in self.lrs)),
            (
                "weight_decays",
                self.weight_decays,
                "decay must be 0 or above",
                all(d >= 0 for d in self.weight_decays),
            ),
            (
                "epochs",
                self.epochs,
                "length must be 1 or above",
                all(count >= 1 for count in self.epochs),
            ),
        )
        for name, values, words, is_good in rules:
            if not values:
                raise UserError(
                    name, "the list is empty", "give at least one value", code="bad-value"
                )
            if not is_good:
                raise UserError(
                    name,
                    f"{list(values)} is not valid: every {words}",
                    "change these values",
                    code="bad-value",
                )
            if len(set(values)) < len(values):
                raise UserError(
                    name,
                    f"{list(values)} repeats a value",
                    "give each value once",
                    code="bad-value",
                )
        if self.optimizer == "lbfgs" and len(self.epochs) > 1:
            raise UserError(
                "epochs",
                "lbfgs takes one limit of passes",
                "set one number, or several weight_decays",
                code="conflict",
            )
        for name in _NOT_FOR_LBFGS:
            if (
                self.optimizer == "lbfgs"
                and getattr(self, name) != type(self).model_fields[name].default
            ):
                raise UserError(
                    name,
                    "lbfgs does not use it",
                    f"set optimizer=lion, or remove {name}",
                    code="conflict",
                )
        for lr in self.lrs:
            check_schedule(self.schedule, lr, field="lrs")
        return self

    @model_validator(mode="after")
    def _views_are_augmented(self) -> "ProbeSettings":
        if self.views and self.augment is None:
            raise UserError(
                "views",
                f"{self.views} needs augment",
                "set augment, for example augment.crop_scale=[0.4,1.0], or set views=0",
                code="conflict",
            )
        if self.augment is not None and not self.views:
            raise UserError(
                "augment",
                "has no effect without views",
                "set views=10, for example, or remove augment",
                code="conflict",
            )
        for way, field in (self.augment.mixing if self.augment else {}).items():
            raise UserError(
                f"augment.{field}",
                f"{way} is not valid: features have one label each",
                f"set augment.{field}=0",
                code="conflict",
            )
        if self.features == "stream" and self.optimizer == "lbfgs":
            raise UserError(
                "features",
                "stream is not valid with lbfgs, which needs many passes",
                "set optimizer=lion",
                code="conflict",
            )
        if self.views and self.optimizer == "lbfgs":
            raise UserError(
                "views",
                f"{self.views} is not valid with lbfgs, which needs fixed features",
                "set optimizer=lion",
                code="conflict",
            )
        return self

    @model_validator(mode="after")
    def _holdout_is_kept_apart(self) -> "ProbeSettings":
        for name in ("train_split", "test_split"):
            if self.holdout_split is not None and self.holdout_split == getattr(self.data, name):
                raise UserError(
                    "holdout_split",
                    f"{self.holdout_split!r} is also data.{name}",
                    "choose another split",
                    code="conflict",
                )
        return self


class KnnSettings(FeatureSettings):
    of_verb = "finetune knn"
    neighbours: Annotated[tuple[int, ...], _ONE_OR_MORE] = Field((20, 10, 100, 200), min_length=1)
    """The numbers k of nearest training pictures that vote; each is judged, at the price of one.
    The first one's accuracy is the run's `test_top1`: the best would be a choice on the test
    split."""
    weights: Literal["softmax", "uniform", "distance"] = "softmax"
    """Of a vote: exp(cosine similarity / temperature); 1; or 1 / cosine distance."""
    temperature: float = Field(0.07, gt=0)
    """Of softmax."""
    chunk_mb: int = Field(256, ge=1)
    """Memory for blocks of both tables and their similarities, in megabytes; it changes nothing but
    the speed."""

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> "KnnSettings":
        if min(self.neighbours, default=0) < 1 or len(set(self.neighbours)) < len(self.neighbours):
            raise UserError(
                "neighbours",
                f"{list(self.neighbours)} is not valid",
                "give different numbers, each at least 1",
                code="bad-value",
            )
        return self

    def check_against(self, manifest: Manifest) -> None:
        most, split = max(self.neighbours), self.data.train_split
        num_training = manifest.split(split, directory=self.data.dataset).num_samples
        if most > num_training:
            raise DatasetError(
                "neighbours",
                f"{most} is more than the {num_training:,} samples of {split!r}",
                "set smaller numbers",
                code="bad-value",
            )
