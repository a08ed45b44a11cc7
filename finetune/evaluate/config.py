"""Settings of `finetune evaluate`, and the evaluation that they describe.

The identity of an evaluation is a hash of all facts that its predictions depend on. Batch size,
ranks and paths are excluded. The name of the default run_dir contains the identity.
RUN_DIR/evaluation.json records the facts before the first prediction.
"""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from data_prep.errors import SettingsError, UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest
from data_prep.publish import hash_of_json
from data_prep.settings import read_yaml, validate
from finetune.config import Pretrained, ShortRunSettings
from finetune.split import check_split
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint, check_source
from pretrain.checkpoints.run import CONFIG_FILE, EVALUATION, check_settings, finished_result
from pretrain.config import Address, AugmentSettings, ReadingSettings, TrackingSettings
from pretrain.models.imported import code_of
from pretrain.tracking.tracker import RunIdentity

GEOMETRY = (
    "crop_scale",
    "crop_ratio",
    "crop_interpolation",
    "crop_padding",
    "padding_mode",
    "flip_probability",
)
"""Augmentation settings that test-time views inherit from the training."""
PUBLIC: dict[str, Any] = {
    "crop_scale": (0.4, 1.0),
    "crop_ratio": (1.0, 1.0),
    "flip_probability": 0.5,
}


class ViewSettings(AugmentSettings):
    """Augmentation of test-time views. Crops and flips that are not set come from the training."""

    @model_validator(mode="after")
    def _of_one_image(self) -> "ViewSettings":
        for name, field in self.mixing.items():
            problem = f"{getattr(self, field):g} is not valid: {name} mixes two images"
            fix = f"set augment.{field}=0"
            raise UserError(f"augment.{field}", problem, fix, code="conflict")
        return self


class JudgedDataSettings(ReadingSettings):
    dataset: Address = Field(examples=["data/mine"])
    """Dataset of `data_prep build` or `data_prep index`. All its classes must be classes of the
    checkpoint."""
    split: str = "val"
    """Split to evaluate on."""


class EvaluateSettings(ShortRunSettings):
    of_verb = "finetune evaluate"
    example_with: ClassVar = {"augment": "num_views=10", "include_plain": "num_views=10"}
    pretrained: Pretrained
    data: JudgedDataSettings
    run_dir: str | None = Field(None, examples=["runs/mine-views"])
    """Directory of the results. Default: a subdirectory of RUN/evaluations, where RUN is the run
    that trained the weights. For a folder of weights: a subdirectory of FOLDER-evaluations, next to
    the folder."""
    num_views: int = Field(0, ge=0, le=100_000)
    """Number of augmented views of each image at test time. The prediction is the mean softmax over
    the views. 0: use the plain image. Each image is decoded once."""
    include_plain: bool = False
    """Include the plain image in the mean, as the first view."""
    augment: ViewSettings = ViewSettings()
    """Augmentation of the views (needs num_views). Default: the crops and flips of the training. If
    the training is unknown or used neither: square crops of 0.4 to 1 of the area, and flips (the
    public code of Scaling MLPs). Settings that you omit keep these defaults."""
    seed: int = Field(0, ge=0)
    """Random seed of the views. A view depends only on the seed, the number of the view and the
    image."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass. Softmax and scores use at least fp32."""
    local_batch_size: int = Field(512, ge=1)
    """Number of images in a forward pass on each rank."""
    tracking: TrackingSettings = TrackingSettings()
    """Tracking of the evaluation. Default: a child run of the run that trained the weights, in the
    same tracking database and experiment."""

    @model_validator(mode="after")
    def _views_are_asked_for(self) -> "EvaluateSettings":
        for field in ("include_plain", "augment"):
            if (
                not self.num_views
                and getattr(self, field) != type(self).model_fields[field].default
            ):
                problem = "has no effect without num_views"
                fix = "set num_views, for example num_views=100"
                raise UserError(field, problem, fix, code="conflict")
        return self

    @property
    def view_numbers(self) -> tuple[int | None, ...]:
        """Numbers of the views. None means the plain image."""
        plain = (None,) if self.include_plain or self.num_views == 0 else ()
        return (*plain, *range(self.num_views))


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: completed settings (augmentation, run directory, tracking), dataset and
    weights."""

    settings: EvaluateSettings
    manifest: Manifest
    checkpoint: Checkpoint
    augment_from: str | None = None
    """Text that names the source of the augmentation; None without views."""

    @classmethod
    def of(
        cls,
        settings: EvaluateSettings,
        *,
        verify: bool = True,
        checkpoint: Checkpoint | None = None,
    ) -> "Evaluation":
        """Return the evaluation with completed settings. `verify`: check the hash of the weights,
        unless `checkpoint` is given."""
        manifest = load_manifest(settings.data.directory)
        check_split(manifest, settings.data.split, directory=settings.data.dataset)
        checkpoint = checkpoint or Checkpoint.open(settings.pretrained, verify=verify)
        card, source = checkpoint.card, None
        if settings.num_views:
            augment, source = choose_views(settings.augment, checkpoint.run_dir)
            augment = augment.fed_as(card.fed_interpolation, card.eval_crop)
            settings = settings.model_copy(update={"augment": augment})
        evaluation = cls(settings, manifest, checkpoint, source)
        places = {"run_dir": str(evaluation._run_dir()), "tracking": evaluation._tracking()}
        return replace(evaluation, settings=settings.model_copy(update=places))

    @property
    def card(self) -> ModelCard:
        return self.checkpoint.card

    @cached_property
    def _training_data(self) -> dict[str, Any]:
        """The `data` settings of the run that trained the weights."""
        run = self.checkpoint.run_dir
        return dict(read_yaml(run / CONFIG_FILE).get("data") or {}) if run else {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All facts that a prediction depends on."""
        settings = self.settings
        facts: dict[str, Any] = {
            "split": settings.data.split,
            "precision": settings.precision,
            "num_views": settings.num_views,
            "weights": self.checkpoint.sha256,
            "model_sha256": self.checkpoint.model_sha256,
            "code": code_of(self.card.model),
            "pixels": self.manifest.pixels_hash,
        }
        if settings.num_views:
            facts |= {"include_plain": settings.include_plain, "seed": settings.seed}
            facts["augment"] = settings.augment.model_dump(mode="json")
        return facts

    @cached_property
    def identity(self) -> str:
        return hash_of_json(self.facts)

    @property
    def run_dir(self) -> Path:
        return Path(str(self.settings.run_dir))

    def _run_dir(self) -> Path:
        settings, folder = self.settings, self.checkpoint.home
        if settings.run_dir is not None:
            return Path(settings.run_dir)
        place, run = folder.with_name(f"{folder.name}-evaluations"), self.checkpoint.run_dir
        if run is not None or folder.parent.name == "checkpoints":
            place = (run or folder.parent.parent) / "evaluations"
        views = [f"{settings.num_views}views"] if settings.num_views else []
        words = [self.manifest.name, settings.data.split, *views, self.identity[:8]]
        return place / "-".join(words)

    def _tracking(self) -> TrackingSettings:
        """Return tracking settings. Default: the database of the run that trained the weights."""
        wanted, base = self.settings.tracking, self.checkpoint.run_dir or self.checkpoint.home
        known, changes = RunIdentity.known(base), dict[str, str]()
        if known is None and not wanted.uri and "MLFLOW_TRACKING_URI" not in os.environ:
            changes["uri"] = f"sqlite:///{(base.parent / 'mlflow.db').resolve()}"
        if known is not None and "experiment" not in wanted.model_fields_set:
            changes["experiment"] = known.experiment
        return wanted.model_copy(update=changes)

    def stored_result(self) -> dict[str, Any] | None:
        """Return the result if this evaluation has finished, otherwise None. Fail if the directory
        holds something else."""
        is_ours = check_settings(self.run_dir, self.settings, self.facts)
        return finished_result(self.run_dir) if is_ours else None

    def plain_top1(self) -> float | None:
        """Return the training run's own accuracy on this split, without views, if it is known."""
        run, data = self.checkpoint.run_dir, self._training_data
        if run is None or self.card.pixels_hash != self.manifest.pixels_hash:
            return None
        result = finished_result(run) or {}
        top1 = result.get("eval/top1", result.get("test_top1"))
        is_same = self.settings.data.split == data.get("eval_split", data.get("test_split"))
        is_same = is_same and result.get("step", self.card.step) == self.card.step
        return float(top1) if is_same and top1 is not None else None

    def warning(self) -> str | None:
        """Return a warning if the model was trained on the images of this evaluation."""
        data, content = self._training_data, self.manifest.content_hash
        parts = [data, *(data.get("extra_datasets") or ())]
        splits = {each.get("train_split", each.get("split", "train")) for each in parts
                  if len(parts) > 1 and _content_of(each.get("dataset")) == content}  # fmt: skip
        if self.card.content_hash == content:
            splits = {data.get("train_split", "train")}
        if self.settings.data.split not in splits:
            return None
        place = f"{self.settings.data.dataset}, {self.settings.data.split}"
        return f"{place}: the model was trained on these images, so this is not a test accuracy"


def is_evaluated(settings: EvaluateSettings) -> bool:
    """True if `run_dir` has the finished result of this evaluation. Fail if the weights have
    changed.

    If weights or images no longer exist, true if evaluation.json exists.
    """
    assert settings.run_dir is not None
    run_dir = Path(settings.run_dir)
    if finished_result(run_dir) is None:
        return check_settings(run_dir, settings, {})
    check_source(run_dir, settings.pretrained)
    checkpoint = Checkpoint.found(settings.pretrained)
    if checkpoint is None or not (Path(settings.data.dataset) / MANIFEST_NAME).exists():
        return (run_dir / EVALUATION).exists()
    return Evaluation.of(settings, checkpoint=checkpoint).stored_result() is not None


def _content_of(dataset: str) -> str | None:
    try:
        return load_manifest(local_copy(dataset, storage=None)).content_hash
    except (UserError, OSError):
        return None


def choose_views(wanted: ViewSettings, run_dir: Path | None) -> tuple[ViewSettings, str]:
    """Return the augmentation of the views and a description of its source. `run_dir`: the run that
    trained the weights."""
    named = {name: getattr(wanted, name) for name in sorted(wanted.model_fields_set)}
    base, public = PUBLIC, "from the public command of Scaling MLPs"
    source = f"{public}, because the training is unknown"
    if run_dir is not None and (trained := _training_augmentation(run_dir)) is not None:
        base = trained.model_dump(include={*GEOMETRY})
        source = f"from the training of {run_dir.name}"
        if trained.crop_scale is None and not trained.crop_padding and not trained.flip_probability:
            source = f"{public}, because {run_dir.name} used no crops or flips"
            base = PUBLIC
    # crop_scale and crop_padding exclude each other
    replaced: dict[str, Any] = {"crop_scale": None} if named.get("crop_padding") else {}
    replaced |= {"crop_padding": 0} if named.get("crop_scale") else {}
    if named:
        source = f"{', '.join(named)} from augment, the rest {source}"
    tree = ViewSettings().model_dump() | base | replaced | named
    return validate(ViewSettings, tree), source


def _training_augmentation(run_dir: Path) -> AugmentSettings | None:
    try:
        section = read_yaml(run_dir / CONFIG_FILE)["augment"]
        known = {name: section[name] for name in GEOMETRY if name in section}
        return validate(AugmentSettings, known)
    except (SettingsError, KeyError, TypeError):  # older config, or no augmentation
        return None
