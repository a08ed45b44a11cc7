"""Checks of splits, and one pass over a split.

Two splits share a sample if both contain the same offset in the same tar (compared by hash). This
check finds overlapping subsets of one dataset. `data_prep dedup` finds copies of images in other
tars.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest, Shard, load_index
from data_prep.progress import ProgressLine
from pretrain.checkpoints.card import ModelCard
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.augment.augmentation import Augmentation
    from pretrain.data.loader import Batch
    from pretrain.data.reader import ShardReader


def check_split(manifest: Manifest, split: str, *, directory: Path | str) -> None:
    """Fail if the split does not exist, has no labels, or is empty."""
    if not manifest.labeled_split(split, directory=directory).num_samples:
        problem = f"split {split!r} is empty"
        raise DatasetError(f"{directory}", problem, "choose another split", code="empty")


def check_apart(
    directory: Path | str,
    manifest: Manifest,
    *,
    train: str,
    test: str,
    holdout: str | None = None,
    test_field: str = "data.test_split",
) -> None:
    """Fail if two of the training, holdout and test splits share samples."""
    pairs = [(test_field, test, train)]
    if holdout is not None:
        pairs += [("holdout_split", holdout, test), ("holdout_split", holdout, train)]
    for field, one, other in pairs:
        num_shared, tar = _shared_samples(directory, manifest, one, other)
        if num_shared:
            shared = f"{num_shared:,} of the {manifest.splits[one].num_samples:,} samples"
            problem = f"{shared} of {one!r} are also in {other!r}, for example in {tar}"
            fix = "choose splits without shared samples, or make them with data_prep subset"
            raise DatasetError(field, problem, fix, code="conflict")


def _shared_samples(
    directory: Path | str, manifest: Manifest, one: str, other: str
) -> tuple[int, str]:
    """Return the number of samples in both splits, and the first tar with a shared sample."""
    num_shared, first = 0, ""
    others: dict[str, list[Shard]] = {}
    for shard in manifest.splits[other].shards:
        others.setdefault(shard.sha256, []).append(shard)
    for shard in manifest.splits[one].shards:
        if same := others.get(shard.sha256):
            offsets = np.concatenate([load_index(directory, each)[:, 0] for each in same])
            found = int(np.isin(load_index(directory, shard)[:, 0], offsets).sum())
            num_shared, first = num_shared + found, first or (shard.file if found else "")
    return num_shared, first


def class_numbers(card: ModelCard, manifest: Manifest, *, dataset: str | Path) -> tuple[int, ...]:
    """Return the checkpoint's class number for each class of the dataset. Fail if the checkpoint
    lacks a class."""
    number_of = {name: number for number, name in enumerate(card.classes)}
    missing = [name for name in manifest.classes if name not in number_of]
    if missing:
        problem = (
            f"{len(missing)} of {len(manifest.classes)} classes of {dataset} are not classes of the"
            f" checkpoint, for example {missing[0]!r}"
        )
        raise UserError(
            "dataset", problem, "run finetune tune on this dataset first", code="mismatch"
        )
    return tuple(number_of[name] for name in manifest.classes)


def batches_of(
    reader: "ShardReader",
    *,
    title: str | None,
    local_batch_size: int,
    world: World,
    device: "torch.device",
) -> Iterator["Batch"]:
    """Yield this rank's batches of one pass in order. Together, the ranks read every image once.

    `mask_B` is False for padding and for images that do not decode (`num_bad`). Images and labels
    are on the device. `title`: title of the progress line; None shows no line.
    """
    from pretrain.augment.feed import on_device
    from pretrain.data.loader import evaluation_batches

    shown = title is not None and world.is_first
    with (
        ProgressLine(title or "", total=reader.num_samples, unit="images", enabled=shown) as line,
        evaluation_batches(
            reader,
            local_batch_size=local_batch_size,
            world=world,
            num_threads=world.num_cores,
            pin=device.type == "cuda",
        ) as stored,
        on_device(stored, device) as batches,
    ):
        for batch in batches:
            PROGRESS.touch()
            yield batch
            line.advance(min(local_batch_size * world.num_ranks, reader.num_samples - line.done))


def view_of(batch: "Batch", view: int | None, augmentation: "Augmentation") -> "Tensor":
    """Return plain images if `view` is None, otherwise the augmented images of training epoch
    `view`.

    The result depends only on the settings and seed of the augmentation, on `view`, and on the
    sample.
    """
    if view is None:
        return augmentation.plain(batch).images_BCHW
    return augmentation.prepare(
        replace(batch, epochs=np.full(len(batch.samples), view, np.int64))
    ).images_BCHW
