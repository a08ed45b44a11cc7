"""Directories, sizes and free space of the features that probe and k-NN keep on disk.

A directory name contains a hash of all facts that the features depend on. A directory with the
expected name can therefore be reused.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_prep.errors import UserError
from data_prep.manifest import Manifest
from data_prep.publish import TEMPORARY_PREFIX, hash_of_json
from finetune.config import InputFormat
from finetune.probe.config import KnnSettings, ProbeSettings
from pretrain.checkpoints.card import MODEL, shapes_in
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import AugmentSettings
from pretrain.models.cost import num_features_of
from pretrain.models.imported import code_of

VERSION = 2
"""Version of the feature computation. Increase it if a code change changes the features."""
Which = Literal["train", "plain", "test"]
"""Use of features. train: to train heads (augmented if num_views > 0). plain: held-out samples, not
augmented. test: test split."""


class Wanted(NamedTuple):
    """A split and its needed views. None means the plain images."""

    split: str
    views: list[int | None]


def wanted_of(settings: ProbeSettings | KnnSettings) -> Mapping[Which, Wanted]:
    data = settings.data
    views: list[int | None] = [*range(settings.num_views)] if settings.num_views else [None]
    return {
        "test": Wanted(data.test_split, [None]),
        "plain": Wanted(settings.holdout_split or data.train_split, [None]),
        "train": Wanted(data.train_split, views),
    }


@dataclass(frozen=True)
class Cache:
    settings: ProbeSettings | KnnSettings
    manifest: Manifest
    source: InputFormat

    @property
    def augment(self) -> AugmentSettings:
        """Augmentation settings of the views, with the checkpoint's filter and crop as defaults."""
        augment, source = self.settings.augment or AugmentSettings(), self.source
        return augment.fed_as(source.interpolation, source.eval_crop)

    def place_of(self, split: str, view: int | None) -> Path:
        name = "plain" if view is None else f"view{view:03d}"
        key = hash_of_json(self.key(split, view))[:16]
        return self.settings.features_place / f"{self.manifest.name}-{split}-{name}-{key}"

    def temporary_of(self, place: Path) -> Path:
        """Return a temporary directory for `place` that only this run uses."""
        writer = hash_of_json(str(Path(self.settings.run_dir).absolute()))[:8]
        return place.with_name(f"{TEMPORARY_PREFIX}{place.name}-{writer}")

    def key(self, split: str, view: int | None) -> dict[str, Any]:
        source, is_augmented = self.source, view is not None
        checkpoint, (mean, std) = source.checkpoint, source.normalization
        return {
            "version": VERSION,
            "model_sha256": checkpoint.model_sha256 if checkpoint else "pixels",
            "code": code_of(checkpoint.card.model) if checkpoint else "",
            "precision": source.precision,
            "pixels_hash": self.manifest.pixels_hash,
            "split": split,
            "image_size": source.image_size,
            "mean": list(mean),
            "std": list(std),
            "interpolation": self.augment.plain_filter,
            "eval_crop": self.augment.plain_crop,
            "augment": self.augment.model_dump(mode="json") if is_augmented else None,
            "seed": self.settings.seed if is_augmented else None,
            "view": view,
            "dtype": self.settings.feature_dtype,
        }

    @cached_property
    def missing_gb(self) -> float:
        """Size in GB of the needed features that are not on disk."""
        source, size = self.source, self.source.image_size
        num_features = 3 * size**2
        if source.checkpoint:
            checkpoint = source.checkpoint
            num_features = (
                num_features_of(checkpoint.card.model, image_size=size)
                or shapes_in(checkpoint.directory / MODEL)["head.weight"][1]
            )
        wanted = wanted_of(self.settings).values()
        num_rows = sum(
            self.manifest.split(split, directory=self.settings.data.dataset).num_samples
            for split, view in {(split, view) for split, views in wanted for view in views}
            if not self.place_of(split, view).exists()
        )
        return (
            num_rows * num_features * (4 if self.settings.feature_dtype == "float32" else 2) / 1e9
        )

    @cached_property
    def fault(self) -> tuple[str, str] | None:
        """Problem and fix if the missing features exceed cache_gb or the free space, otherwise
        None."""
        settings, place = self.settings, self.settings.features_place.absolute()
        above = next(path for path in (place, *place.parents) if path.exists())
        left_by_kill = place.glob(f"{self.temporary_of(place / '*').name}/*")
        left = sum(file.stat().st_blocks * 512 for file in left_by_kill)
        free_gb = (shutil.disk_usage(above).free + left) / 1e9
        if self.missing_gb <= min(free_gb, settings.cache_gb):
            return None
        limit, fix = f"{place} has {free_gb:.3g} GB free", "choose another features_dir"
        if settings.cache_gb < free_gb:
            limit, fix = f"cache_gb allows {settings.cache_gb:g} GB", "raise cache_gb"
        if isinstance(settings, ProbeSettings):
            lion = " optimizer=lion" if settings.optimizer == "lbfgs" else ""
            fix = f"set features=stream{lion}, or {fix}"
        return f"the features need {self.missing_gb:.3g} GB more, but {limit}", fix


def check_room(
    settings: ProbeSettings | KnnSettings, manifest: Manifest, checkpoint: Checkpoint | None
) -> None:
    """Fail if the features must be kept on disk but do not fit. For feature_precision=auto, fail
    only if the missing features of neither precision (fp32, bf16) fit."""
    image_size, channel_stats = settings.data.image_size, settings.channel_stats
    inputs = InputFormat.of(
        checkpoint, manifest, image_size=image_size, channel_stats=channel_stats
    )
    precision = settings.feature_precision
    chosen = ("fp32", "bf16") if precision == "auto" else (precision,)
    faults = [Cache(settings, manifest, replace(inputs, precision=each)).fault for each in chosen]
    if settings.must_keep and faults[0] and all(faults):
        raise UserError("features", *faults[0], code="no-space")
