"""Settings of `finetune evaluate`, and which evaluation they mean: what is judged on what, with
which views, and where its results go. No torch here.

Two evaluations that may differ in a single answer have different identities, hence different
directories: nothing is overwritten. What only changes the speed (batch size, ranks) or where things
lie (paths) is not part of it, so an evaluation that was killed is begun anew by whatever words mean
the same: RUN/evaluation.json holds all that its answers depend on, from its beginning on.

Views that the model was never trained on can cost more than averaging brings (flips, where classes
are left and right). Hence the augmentation of views is, in this order: what the user names; the
crops and flips of the training, where the run that made the weights records them; those of the
paper's public command.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from data_prep.errors import SettingsError, UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest
from data_prep.publish import hash_of_json
from data_prep.settings import read_yaml, validate
from finetune.config import ShortRunSettings
from finetune.split import check_split
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint, check_source
from pretrain.checkpoints.run import CONFIG_FILE, EVALUATION, check_settings, finished_result
from pretrain.config import Address, AugmentSettings, ReadingSettings, TrackingSettings
from pretrain.tracking.tracker import RunIdentity

GEOMETRY = (
    "crop_scale",
    "crop_ratio",
    "crop_interpolation",
    "crop_padding",
    "padding_mode",
    "flip_probability",
)
"""All that is taken of a training: views are to be other pictures of the same thing, not harder
ones."""
PUBLIC: dict[str, Any] = {
    "crop_scale": (0.4, 1.0),
    "crop_ratio": (1.0, 1.0),
    "flip_probability": 0.5,
}


class ViewSettings(AugmentSettings):
    """What a view of a picture is. What is left out is as the model was trained."""

    @model_validator(mode="after")
    def _of_one_picture(self) -> "ViewSettings":
        for name, field in self.mixing.items():
            value = getattr(self, field)
            raise UserError(
                f"augment.{field}",
                f"{value:g} is not valid: {name} mixes two images, and a prediction is for one",
                f"set augment.{field}=0",
                code="conflict",
            )
        return self


class JudgedDataSettings(ReadingSettings):
    dataset: Address = Field(examples=["data/mine"])
    """A directory that `data_prep build` or `index` has finished; all its classes must be among the
    checkpoint's."""
    split: str = "val"
    """The split that is judged."""


class EvaluateSettings(ShortRunSettings):
    of_verb = "finetune evaluate"
    example_with: ClassVar = {"augment": "views=10", "include_plain": "views=10"}
    pretrained: str = Field(examples=["runs/mine"])
    """A run directory, one of its checkpoints, or an imported folder."""
    data: JudgedDataSettings
    run_dir: str | None = Field(None, examples=["runs/mine-views"])
    """Where the results go; by default a directory of this evaluation alone, in `evaluations/` of
    the run that made the weights (of a folder that belongs to no run: in FOLDER-evaluations/ beside
    it)."""
    views: int = Field(0, ge=0, le=100_000)
    """Test-time augmentation: the answer is the mean softmax over so many augmented views of each
    picture; 0 takes the plain picture. Each picture is read and decoded once, whatever the
    number."""
    include_plain: bool = False
    """The plain picture counts as one more view, the first."""
    augment: ViewSettings = ViewSettings()
    """What the views are; only with `views`. Left out, the crops and flips that the model was
    trained with; where these are not known, or there were none, the paper's public command: a
    square crop of 0.4 to 1 of the area, flipped or not. Naming one of them leaves the others as
    they would be."""
    seed: int = Field(0, ge=0)
    """Of the views, each of which is a function of (seed, number of the view, picture)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the forward pass; softmax and everything after it are in fp32 or above."""
    local_batch_size: int = Field(512, ge=1)
    """Pictures of one forward pass on one rank."""
    tracking: TrackingSettings = TrackingSettings()
    """By default the store and the experiment of the run that made the weights, as its child."""

    @model_validator(mode="after")
    def _views_are_asked_for(self) -> "EvaluateSettings":
        if self.include_plain and not self.views:
            raise UserError(
                "include_plain",
                "is true, but views is 0, so only the plain image is evaluated",
                "set views, for example views=100",
                code="conflict",
            )
        if self.augment != ViewSettings() and not self.views:
            raise UserError(
                "augment",
                "is set, but views is 0, so nothing is augmented",
                "set views, for example views=100",
                code="conflict",
            )
        return self

    @property
    def view_numbers(self) -> tuple[int | None, ...]:
        """A forward pass each; None is the plain picture."""
        plain = (None,) if self.include_plain or self.views == 0 else ()
        return (*plain, *range(self.views))


@dataclass(frozen=True)
class Evaluation:
    """What is judged on what: all that is known before anything heavy is imported."""

    settings: EvaluateSettings
    """With the augmentation that was chosen."""
    manifest: Manifest
    checkpoint: Checkpoint
    augment_from: str | None = None
    """Why this augmentation; None without."""

    @classmethod
    def of(
        cls,
        settings: EvaluateSettings,
        *,
        verify: bool = True,
        checkpoint: Checkpoint | None = None,
    ) -> "Evaluation":
        """`verify`: the weights are held to their hash, unless a checkpoint is given."""
        manifest = load_manifest(settings.data.directory)
        check_split(manifest, settings.data.split, directory=settings.data.dataset)
        checkpoint = checkpoint or Checkpoint.open(settings.pretrained, verify=verify)
        if not settings.views:
            return cls(settings, manifest, checkpoint)
        augment, source = choose_views(settings.augment, checkpoint.run_dir)
        chosen = settings.model_copy(
            update={"augment": augment.fed_as(checkpoint.card.fed_interpolation)}
        )
        return cls(chosen, manifest, checkpoint, source)

    @property
    def card(self) -> ModelCard:
        return self.checkpoint.card

    @cached_property
    def owner(self) -> Path | None:
        """The run that made the weights; None where they came in a folder."""
        return self.checkpoint.run_dir

    @cached_property
    def _owners_data(self) -> dict[str, Any]:
        """Its section `data`."""
        settings = read_yaml(self.owner / CONFIG_FILE) if self.owner is not None else {}
        return dict(settings.get("data") or {})

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All that an answer depends on."""
        settings = self.settings
        facts: dict[str, Any] = {
            "split": settings.data.split,
            "precision": settings.precision,
            "views": settings.views,
        }
        facts["interpolation"] = self.card.fed_interpolation  # it is not in the weights
        if self.card.pixel_permutation is not None:  # neither is this
            facts["pixel_permutation"], facts["permute"] = (
                self.card.pixel_permutation,
                self.card.permute,
            )
        if settings.views:
            facts |= {"include_plain": settings.include_plain, "seed": settings.seed}
            facts["augment"] = settings.augment.model_dump(mode="json")
        return facts | {"weights": self.checkpoint.sha256, "pixels": self.manifest.pixels_hash}

    @cached_property
    def identity(self) -> str:
        return hash_of_json(self.facts)

    @property
    def run_dir(self) -> Path:
        settings, folder = self.settings, self.checkpoint.home
        if settings.run_dir is not None:
            return Path(settings.run_dir)
        place = folder.with_name(f"{folder.name}-evaluations")
        if (
            self.owner is not None or folder.parent.name == "checkpoints"
        ):  # there it would look like a checkpoint
            place = (self.owner or folder.parent.parent) / "evaluations"
        views = [f"{settings.views}views"] if settings.views else []
        return place / "-".join(
            [self.manifest.name, settings.data.split, *views, self.identity[:8]]
        )

    @property
    def tracking(self) -> TrackingSettings:
        """Where the settings leave it open, with the run that made the weights: a parent is known
        in its own store alone."""
        asked, base = self.settings.tracking, self.owner or self.checkpoint.home
        known, changes = RunIdentity.known(base), dict[str, str]()
        if known is None and not asked.uri and "MLFLOW_TRACKING_URI" not in os.environ:
            changes["uri"] = f"sqlite:///{(base.parent / 'mlflow.db').resolve()}"
        if known is not None and "experiment" not in asked.model_fields_set:
            changes["experiment"] = known.experiment
        return asked.model_copy(update=changes)

    def stored_result(self) -> dict[str, Any] | None:
        """Of this very evaluation, if it was finished before; a directory that holds anything else
        is refused."""
        is_ours = check_settings(self.run_dir, self.settings, self.facts)
        return finished_result(self.run_dir) if is_ours else None

    def plain_top1(self) -> float | None:
        """On the plain pictures of the same split, where the run that made the weights has recorded
        it."""
        if self.owner is None or self.card.pixels_hash != self.manifest.pixels_hash:
            return None
        result, data = finished_result(self.owner) or {}, self._owners_data
        top1 = result.get("eval/top1", result.get("test_top1"))
        is_same = self.settings.data.split == data.get("eval_split", data.get("test_split"))
        is_same = is_same and result.get("step", self.card.step) == self.card.step
        return float(top1) if is_same and top1 is not None else None

    def warning(self) -> str | None:
        """Where the model was trained on what it is judged on."""
        data, content = self._owners_data, self.manifest.content_hash
        trained_on = [
            (each.get("dataset"), each.get("split", "train")) for each in data.get("also") or ()
        ]
        trained_on += (
            [(data.get("dataset"), data.get("train_split", "train"))] if trained_on else []
        )
        splits = [split for dataset, split in trained_on if _content_of(dataset) == content]
        if self.card.content_hash == content:
            splits = [data.get("train_split", "train")]
        where = f"{self.settings.data.dataset}, {self.settings.data.split}"
        fault = "the model was trained on these very pictures: this is no test accuracy"
        return f"{where}: {fault}" if self.settings.data.split in splits else None


def is_evaluated(settings: EvaluateSettings) -> bool:
    """Whether it is finished in its `run_dir`, of the weights that are there now; where these or
    the pictures are gone since, by its record. Nothing large is read."""
    assert settings.run_dir is not None
    run_dir = Path(settings.run_dir)
    if finished_result(run_dir) is None:
        return check_settings(run_dir, settings, {})  # no, or an error: another's
    check_source(run_dir, settings.pretrained)
    checkpoint = Checkpoint.found(settings.pretrained)
    if (
        checkpoint is None or not (Path(settings.data.dataset) / MANIFEST_NAME).exists()
    ):  # so of one behind a URL
        return (run_dir / EVALUATION).exists()
    return Evaluation.of(settings, checkpoint=checkpoint).stored_result() is not None


def _content_of(dataset: str) -> str | None:
    try:
        return load_manifest(local_copy(dataset, storage=None)).content_hash
    except (UserError, OSError):  # gone since
        return None


def choose_views(asked: ViewSettings, run_dir: Path | None) -> tuple[ViewSettings, str]:
    """The augmentation, and why, in words. `run_dir`: of the run that made the weights."""
    named = {name: getattr(asked, name) for name in sorted(asked.model_fields_set)}
    base, source = PUBLIC, "the public command's, for the training's is not known"
    trained = _trained_with(run_dir) if run_dir is not None else None
    if run_dir is not None and trained is not None:
        base, source = (
            {name: getattr(trained, name) for name in GEOMETRY},
            f"as {run_dir.name} was trained",
        )
        if trained.crop_scale is None and not trained.crop_padding and not trained.flip_probability:
            base, source = (
                PUBLIC,
                f"the public command's, for {run_dir.name} was trained without crops and flips",
            )
    # a way to crop that is named takes the place of the other one
    base = (
        base
        | ({"crop_scale": None} if named.get("crop_padding") else {})
        | ({"crop_padding": 0} if named.get("crop_scale") else {})
    )
    if named:
        source = f"{', '.join(named)} as asked; the rest {source}"
    # every field is set: config.yaml and --show say what was chosen
    return validate(ViewSettings, ViewSettings().model_dump() | base | named), source


def _trained_with(run_dir: Path) -> AugmentSettings | None:
    try:
        section = read_yaml(run_dir / CONFIG_FILE)["augment"]
        return validate(
            AugmentSettings, {name: section[name] for name in GEOMETRY if name in section}
        )
    except (
        SettingsError,
        KeyError,
        TypeError,
    ):  # of a stranger, of another version, or of what augments nothing
        return None
