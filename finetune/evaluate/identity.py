"""Which evaluation it is: what is judged on what, with which views, and where its results go. No torch here.

Two evaluations that may differ in a single answer have different identities, hence different directories: nothing is overwritten.
What only changes the speed (batch size, ranks) or where things lie (paths) is not part of it, so an evaluation that was killed is
begun anew by whatever words mean the same: RUN/evaluation.json holds all that its answers depend on, from its beginning on.

Views that the model was never trained on can cost more than averaging brings (flips, where classes are left and right). Hence the
augmentation of views is, in this order: what the user names; the crops and flips of the training, where the run that made the
weights records them; those of the paper's public command.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.manifest import DatasetError, Manifest, load_manifest
from data_prep.publish import hash_of_json, write_json
from data_prep.settings import SettingsError, read_yaml, validate
from finetune.evaluate.config import EvaluateSettings, ViewSettings
from finetune.split import check_split
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import CONFIG_FILE, check_settings, finished_result, is_begun
from pretrain.config import AugmentSettings, TrackingSettings
from pretrain.tracking.tracker import RunIdentity

IDENTITY = "evaluation.json"
GEOMETRY = ("crop_scale", "crop_ratio", "crop_interpolation", "crop_padding", "padding_mode", "flip_probability")
"""All that is taken of a training: views are to be other pictures of the same thing, not harder ones."""
PUBLIC: dict[str, Any] = {"crop_scale": (0.4, 1.0), "crop_ratio": (1.0, 1.0), "flip_probability": 0.5}


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
    def of(cls, settings: EvaluateSettings, *, verify: bool = True) -> "Evaluation":
        """`verify`: the weights are held to their hash."""
        manifest = load_manifest(settings.dataset)
        check_split(manifest, settings.split, directory=settings.dataset)
        checkpoint = Checkpoint.open(settings.pretrained, verify=verify)
        if not settings.views:
            return cls(settings, manifest, checkpoint)
        augment, source = choose_views(settings.augment, checkpoint.run_dir)
        chosen = settings.model_copy(update={"augment": augment.fed_as(checkpoint.card.fed_interpolation)})
        return cls(chosen, manifest, checkpoint, source)

    @property
    def card(self) -> ModelCard:
        return self.checkpoint.card

    @cached_property
    def owner(self) -> Path | None:
        """The run that made the weights; None where they came in a folder."""
        return self.checkpoint.run_dir

    @cached_property
    def _owners_settings(self) -> dict[str, Any]:
        """Those of a probe stand by themselves where a training has its section `data`."""
        return read_yaml(self.owner / CONFIG_FILE) if self.owner is not None else {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All that an answer depends on."""
        settings = self.settings
        facts: dict[str, Any] = {"split": settings.split, "precision": settings.precision, "views": settings.views}
        facts["interpolation"] = self.card.fed_interpolation  # it is not in the weights
        if settings.views:
            facts |= {"include_plain": settings.include_plain, "seed": settings.seed}
            facts["augment"] = settings.augment.model_dump(mode="json")
        return facts | {"weights": self.checkpoint.sha256, "pixels": self.manifest.pixels_hash}

    @cached_property
    def identity(self) -> str:
        return hash_of_json(self.facts)

    @property
    def run_dir(self) -> Path:
        settings = self.settings
        if settings.run_dir is not None:
            return Path(settings.run_dir)
        views = [f"{settings.views}views"] if settings.views else []
        return self._place / "-".join([self.manifest.name, settings.split, *views, self.identity[:8]])

    @property
    def _place(self) -> Path:
        folder = self.checkpoint.directory.absolute()
        if self.owner is not None or folder.parent.name == "checkpoints":  # there it would look like a checkpoint
            return (self.owner or folder.parent.parent) / "evaluations"
        return folder.with_name(f"{folder.name}-evaluations")

    @property
    def tracking(self) -> TrackingSettings:
        """Where the settings leave it open, with the run that made the weights: a parent is known in its own store alone."""
        asked, base = self.settings.tracking, self.owner or self.checkpoint.directory.absolute()
        known, changes = RunIdentity.known(base), dict[str, str]()
        if known is None and not asked.uri and "MLFLOW_TRACKING_URI" not in os.environ:
            changes["uri"] = f"sqlite:///{(base.parent / 'mlflow.db').resolve()}"
        if known is not None and "experiment" not in asked.model_fields_set:
            changes["experiment"] = known.experiment
        return asked.model_copy(update=changes)

    @property
    def begun_settings(self) -> EvaluateSettings:
        """What the run is recorded with: the words that it was begun with, where it was."""
        if not self._is_begun():
            return self.settings
        begun = validate(EvaluateSettings, read_yaml(self.run_dir / CONFIG_FILE))
        return begun.model_copy(update={"local_batch_size": self.settings.local_batch_size, "ranks": self.settings.ranks})

    def mark(self) -> None:
        write_json(self.run_dir / IDENTITY, self.facts)

    def _is_begun(self) -> bool:
        return is_begun(self.run_dir, self.facts, record=IDENTITY, what="an evaluation")

    def stored_result(self) -> dict[str, Any] | None:
        """Of this very evaluation, if it was finished before; a directory that holds anything else is refused."""
        if self._is_begun():
            return finished_result(self.run_dir)
        check_settings(self.run_dir, self.settings)
        return None

    def plain_top1(self) -> float | None:
        """On the plain pictures of the same split, where the run that made the weights has recorded it."""
        if self.owner is None or self.card.pixels_hash != self.manifest.pixels_hash:
            return None
        result, settings = finished_result(self.owner) or {}, self._owners_settings
        data = settings | settings.get("data", {})
        top1 = result.get("eval/top1", result.get("test_top1"))
        is_same = self.settings.split == data.get("eval_split", data.get("test_split"))
        is_same = is_same and result.get("step", self.card.step) == self.card.step
        return float(top1) if is_same and top1 is not None else None

    def warning(self) -> str | None:
        """Where the model was trained on what it is judged on."""
        where = "the model was trained on these very pictures: this is no test accuracy"
        return f"{self.settings.dataset}, {self.settings.split}: {where}" if self._seen_in_training() else None

    def _seen_in_training(self) -> bool:
        is_same = self.card.content_hash == self.manifest.content_hash
        if self.owner is None:
            return is_same and self.settings.split == "train"
        settings = self._owners_settings
        data = settings | settings.get("data", {})
        if is_same:
            return bool(data.get("train_split", "train") == self.settings.split)
        parts = [(data.get("dataset"), data.get("train_split", "train"))] if data.get("also") else []
        parts += [(other.get("dataset"), other.get("split", "train")) for other in data.get("also") or ()]
        return any(split == self.settings.split and _content_of(dataset) == self.manifest.content_hash for dataset, split in parts)


def _content_of(dataset: str) -> str | None:
    try:
        return load_manifest(dataset).content_hash
    except DatasetError:  # gone since
        return None


def choose_views(asked: ViewSettings, run_dir: Path | None) -> tuple[ViewSettings, str]:
    """The augmentation, and why, in words. `run_dir`: of the run that made the weights."""
    named = {name: getattr(asked, name) for name in sorted(asked.model_fields_set)}
    base, source = PUBLIC, "the public command's, for the training's is not known"
    trained = _trained_with(run_dir) if run_dir is not None else None
    if run_dir is not None and trained is not None:
        base = {name: getattr(trained, name) for name in GEOMETRY}
        source = f"as {run_dir.name} was trained"
        if trained.crop_scale is None and not trained.crop_padding and not trained.flip_probability:
            base, source = PUBLIC, f"the public command's, for {run_dir.name} was trained without crops and flips"
    if named.get("crop_padding") and "crop_scale" not in named:
        base = base | {"crop_scale": None}  # the other way to crop
    if named.get("crop_scale") and "crop_padding" not in named:
        base = base | {"crop_padding": 0}
    if named:
        source = f"{', '.join(named)} as asked; the rest {source}"
    # every field is set: config.yaml and --show say what was chosen
    whole = ViewSettings().model_dump() | base | named
    return validate(ViewSettings, whole), source


def _trained_with(run_dir: Path) -> AugmentSettings | None:
    try:
        section = read_yaml(run_dir / CONFIG_FILE).get("augment")
        if not isinstance(section, dict):
            return None
        return validate(AugmentSettings, {name: section[name] for name in GEOMETRY if name in section})
    except SettingsError:  # of a stranger, or of another version
        return None
