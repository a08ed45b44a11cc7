"""Which evaluation it is, and where its results go. No torch here.

Two evaluations that may differ in a single answer have different identities, hence different directories: nothing is overwritten.
What only changes the speed (batch size, ranks) or where things lie (paths) is not part of it.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.manifest import DatasetError, Manifest, load_manifest
from data_prep.publish import hash_of_json
from data_prep.settings import SettingsError, read_yaml
from finetune.judging.config import EvaluateSettings
from finetune.recording import Weights
from pretrain.card import ModelCard
from pretrain.config import TrackingSettings
from pretrain.run import CONFIG_FILE, check_settings, finished_result
from pretrain.tracker import RunIdentity


@dataclass(frozen=True)
class Evaluation:
    """What is judged on what: all that is known before anything heavy is imported."""

    settings: EvaluateSettings
    manifest: Manifest
    weights: Weights

    @classmethod
    def of(cls, settings: EvaluateSettings) -> "Evaluation":
        manifest = load_manifest(settings.dataset)
        if not manifest.labelled_split(settings.split, directory=settings.dataset).num_samples:
            raise DatasetError(f"{settings.dataset}: split {settings.split!r} is empty; choose another split")
        return cls(settings, manifest, Weights.at(settings.pretrained))

    @property
    def card(self) -> ModelCard:
        return self.weights.card

    @property
    def checkpoint(self) -> Path:
        """The directory of the weights themselves."""
        return self.weights.checkpoint

    @property
    def owner(self) -> Path | None:
        """The run that made the weights; None where they came in a folder."""
        above = self.checkpoint.absolute().parent
        return self.checkpoint.parent.parent if above.name == "checkpoints" else None

    @cached_property
    def identity(self) -> str:
        settings = self.settings
        facts: dict[str, Any] = {"split": settings.split, "precision": settings.precision, "views": settings.views}
        if settings.views:
            facts |= {"include_plain": settings.include_plain, "seed": settings.seed}
            facts["augment"] = settings.augment.model_dump(mode="json")
        return hash_of_json(facts | {"weights": self.weights.sha256, "manifest": self.manifest.hash})

    @property
    def run_dir(self) -> Path:
        settings = self.settings
        if settings.run_dir is not None:
            return Path(settings.run_dir)
        folder = self.checkpoint if self.checkpoint.name else self.checkpoint.absolute()
        place = self.owner / "evaluations" if self.owner is not None else folder.with_name(f"{folder.name}-evaluations")
        views = [f"{settings.views}views"] if settings.views else []
        return place / "-".join([self.manifest.name, settings.split, *views, self.identity[:8]])

    @property
    def tracking(self) -> TrackingSettings:
        """Where the settings leave it open, with the run that made the weights: a parent is known in its own store alone."""
        asked, base = self.settings.tracking, self.owner or self.checkpoint.absolute()
        identity = base / "tracking" / "identity.json"
        known = RunIdentity.model_validate_json(identity.read_text()) if identity.exists() else None
        beside = f"sqlite:///{(base.absolute().parent / 'mlflow.db').resolve()}"
        uri = asked.uri or os.environ.get("MLFLOW_TRACKING_URI") or (known.uri if known else beside)
        is_open = known is not None and "experiment" not in asked.model_fields_set
        experiment = known.experiment if known is not None and is_open else asked.experiment
        return asked.model_copy(update={"uri": uri, "experiment": experiment})

    def stored_result(self) -> dict[str, Any] | None:
        """Of this very evaluation, if it was finished before; a directory that holds anything else is refused."""
        result = finished_result(self.run_dir)
        if result is None:
            check_settings(self.run_dir, self.settings)
            return None
        if result.get("identity") != self.identity:
            what = f"of {result['dataset']}, {result['split']}" if "identity" in result else "of another run"
            raise SettingsError(
                f"run_dir: {self.run_dir} holds other results ({what}); name another run_dir, or leave it out"
            )
        return result

    def warning(self) -> str | None:
        """Where the model was trained on what it is judged on."""
        where = "the model was trained on these very pictures: this is no test accuracy"
        return f"{self.settings.dataset}, {self.settings.split}: {where}" if self._seen_in_training() else None

    def _seen_in_training(self) -> bool:
        is_same = self.card.manifest_hash == self.manifest.hash
        path = (self.owner / CONFIG_FILE) if self.owner is not None else None
        if path is None or not path.exists():
            return is_same and self.settings.split == "train"
        data = read_yaml(path).get("data", {})
        if is_same:
            return bool(data.get("train_split", "train") == self.settings.split)
        parts = [(data.get("dataset"), data.get("train_split", "train"))] if data.get("also") else []
        parts += [(other.get("dataset"), other.get("split", "train")) for other in data.get("also") or ()]
        return any(split == self.settings.split and _hash_of(dataset) == self.manifest.hash for dataset, split in parts)


def _hash_of(dataset: str) -> str | None:
    try:
        return load_manifest(dataset).hash
    except DatasetError:  # gone since
        return None
