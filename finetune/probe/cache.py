"""The features that a probe or a k-NN keeps on disk: which, under which names, how large, and
whether there is room. No torch here.

A name has the hash of everything that the numbers depend on, so what is found under it is what
would be computed (features.py).
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_prep.errors import UserError
from data_prep.manifest import Manifest
from data_prep.publish import TEMPORARY_PREFIX, hash_of_json
from finetune.config import Fed
from finetune.probe.config import FeatureSettings
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import AugmentSettings, PixelOrder
from pretrain.models.cost import num_features_of

VERSION = 2
"""Of what becomes of a picture: raise it when the same key would give other numbers."""
_BYTES = {"float32": 4, "float16": 2}
Which = Literal["train", "plain", "test"]
"""train: what heads learn from, a table for each view; plain: where held-out samples are taken
from."""


class Wanted(NamedTuple):
    """A split in some views; None is the plain pictures."""

    split: str
    views: list[int | None]


def wanted_of(settings: FeatureSettings) -> Mapping[Which, Wanted]:
    """A k-NN has neither views nor a holdout."""
    data, views = settings.data, getattr(settings, "views", 0)
    return {
        "test": Wanted(data.test_split, [None]),
        "plain": Wanted(getattr(settings, "holdout_split", None) or data.train_split, [None]),
        "train": Wanted(data.train_split, list(range(views)) if views else [None]),
    }


@dataclass(frozen=True)
class Cache:
    settings: FeatureSettings
    manifest: Manifest
    source: Fed

    @property
    def seed(self) -> int:
        """Of the views."""
        return int(getattr(self.settings, "seed", 0))

    @property
    def fed(self) -> AugmentSettings:
        """Of views, and with which filter plain pictures are resized."""
        augment: AugmentSettings = getattr(self.settings, "augment", None) or AugmentSettings()
        return augment.fed_as(self.source.interpolation)

    def place_of(self, split: str, view: int | None) -> Path:
        """The directory of the split in this view."""
        name = "plain" if view is None else f"view{view:03d}"
        key = hash_of_json(self.key(split, view))[:16]
        return self.settings.features_place / f"{self.manifest.name}-{split}-{name}-{key}"

    def temporary_of(self, place: Path) -> Path:
        """Where it is written; another job may make the same now."""
        writer = hash_of_json(str(Path(self.settings.run_dir).absolute()))[:8]
        return place.with_name(f"{TEMPORARY_PREFIX}{place.name}-{writer}")

    def key(self, split: str, view: int | None) -> dict[str, Any]:
        source, is_augmented = self.source, view is not None
        mean, std = source.normalisation
        order = source.pixels.model_dump(include={*PixelOrder.model_fields}, exclude_defaults=True)
        return (
            order
            | {
                "version": VERSION,
                "weights_sha256": source.checkpoint.sha256 if source.checkpoint else "pixels",
                "pixels_hash": self.manifest.pixels_hash,
                "split": split,
                "image_size": source.image_size,
                "mean": list(mean),
                "std": list(std),
                "interpolation": self.fed.plain_filter,
                "augment": self.fed.model_dump(mode="json") if is_augmented else None,
                "seed": self.seed if is_augmented else None,
                "view": view,
                "dtype": self.settings.feature_dtype,
            }
            | ({"precision": source.precision} if source.precision != "fp32" else {})
        )

    @cached_property
    def missing_gb(self) -> float:
        """That is not on disk yet."""
        source, size = self.source, self.source.image_size
        num_features = (
            num_features_of(source.checkpoint.card.model, image_size=size)
            if source.checkpoint
            else 3 * size**2
        )
        tables = {
            (split, view) for split, views in wanted_of(self.settings).values() for view in views
        }
        splits = [split for split, view in tables if not self.place_of(split, view).exists()]
        rows = sum(
            self.manifest.split(split, directory=self.settings.data.dataset).num_samples
            for split in splits
        )
        return rows * num_features * _BYTES[self.settings.feature_dtype] / 1e9

    @cached_property
    def fault(self) -> tuple[str, str] | None:
        """Problem and fix if the features do not fit. The space of a killed start is free again."""
        settings, place = self.settings, self.settings.features_place.absolute()
        above = next(path for path in (place, *place.parents) if path.exists())
        left = sum(
            file.stat().st_blocks * 512
            for file in place.glob(f"{self.temporary_of(place / '*').name}/*")
        )
        free_gb = (shutil.disk_usage(above).free + left) / 1e9
        allowed_gb = getattr(settings, "cache_gb", math.inf)
        if self.missing_gb <= min(free_gb, allowed_gb):
            return None
        limit, fix = (
            f"{settings.features_place} has {free_gb:.3g} GB",
            "choose another features_dir",
        )
        if allowed_gb < free_gb:
            limit, fix = f"cache_gb allows {allowed_gb:g}", "raise cache_gb"
        if hasattr(settings, "features"):
            is_lbfgs = getattr(settings, "optimizer", "") == "lbfgs"
            fix = f"set features=stream{' optimizer=lion' if is_lbfgs else ''}, or {fix}"
        return f"need {self.missing_gb:.3g} GB more, but {limit}", fix


def check_room(
    settings: FeatureSettings, manifest: Manifest, checkpoint: Checkpoint | None
) -> None:
    """Refuses what must be kept and does not fit; what need not be kept is streamed then. Nobody
    knows yet what auto stands for."""
    image_size, channel_stats = settings.data.image_size, settings.channel_stats
    fed = Fed.of(checkpoint, manifest, image_size=image_size, channel_stats=channel_stats)
    chosen = (
        ("fp32", "bf16") if settings.feature_precision == "auto" else (settings.feature_precision,)
    )
    caches = [Cache(settings, manifest, replace(fed, precision=precision)) for precision in chosen]
    fault = caches[0].fault
    if settings.must_keep and fault and all(cache.fault for cache in caches):
        raise UserError("features", *fault, code="no-space")
