"""A split of a dataset: whether it can be learned from and judged on, and one pass over it. Torch
is imported by the pass alone.

Two splits share a sample when shards of both are the same tar (by hash) and their indices name the
same offset in it. That finds subsets of one dataset that were cut to overlap, and a split that
holds another; copies of pictures in other tars are `data_prep dedup`'s business.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest, Shard, load_index
from data_prep.progress import progress
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
    """It is there, it has labels, and it is not empty."""
    if not manifest.labelled_split(split, directory=directory).num_samples:
        raise DatasetError(
            f"{directory}", f"split {split!r} is empty", "choose another split", code="empty"
        )


def check_apart(
    directory: Path | str,
    manifest: Manifest,
    *,
    train: str,
    test: str,
    holdout: str | None = None,
    test_field: str = "data.test_split",
) -> None:
    """What one learns from, chooses with and is judged on share no sample."""
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
    """How many samples of split `one` are in `other` as well, and the tar of the first of them."""
    num_shared, first = 0, ""
    others: dict[str, list[Shard]] = {}
    for shard in manifest.splits[other].shards:
        others.setdefault(shard.sha256, []).append(shard)
    for shard in manifest.splits[one].shards:
        same = others.get(shard.sha256, [])
        if not same:
            continue
        there = np.concatenate([load_index(directory, each)[:, 0] for each in same])
        found = int(np.isin(load_index(directory, shard)[:, 0], there).sum())
        num_shared, first = num_shared + found, first or (shard.file if found else "")
    return num_shared, first


def class_numbers(card: ModelCard, manifest: Manifest, *, dataset: str | Path) -> tuple[int, ...]:
    """The number that the checkpoint gives each class of the dataset: a classifier can only be
    judged on its own classes. It may have more, having been trained on a mixture; they stay among
    its answers."""
    number_of = {name: number for number, name in enumerate(card.classes)}
    if all(name in number_of for name in manifest.classes):
        return tuple(number_of[name] for name in manifest.classes)
    detail = f"{len(card.classes)} classes against {len(manifest.classes)}"
    if len(card.classes) == len(manifest.classes):
        pairs = enumerate(zip(card.classes, manifest.classes, strict=True))
        detail = next(
            f"class {number} is {own!r} against {other!r}"
            for number, (own, other) in pairs
            if own != other
        )
    raise UserError(
        "dataset",
        f"{dataset} has other classes than the checkpoint ({detail})",
        "probe or tune on it first",
        code="mismatch",
    )


def batches_of(
    reader: "ShardReader",
    *,
    title: str | None,
    local_batch_size: int,
    world: World,
    device: "torch.device",
) -> Iterator["Batch"]:
    """This rank's batches of one pass: every picture once over all ranks, in the split's order.
    `mask_B` is False where a batch is padded, or where a picture does not decode (`num_bad`).
    Pictures and labels are on the device. `title`: of the progress line; None where the caller has
    its own."""
    from pretrain.augment.feed import on_device
    from pretrain.data.loader import evaluation_batches

    shown = title is not None and world.is_first
    with (
        progress(title or "", total=reader.num_samples, unit="images", enabled=shown) as line,
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
    """What the model sees of a stored batch: as evaluation does for None, or as training would in
    epoch `view`. A function of (settings and seed of the augmentation, view, sample), whatever rank
    or batch it is made in: probes learn from views, test-time augmentation averages over them."""
    if view is None:
        return augmentation.plain(batch).images_BCHW
    return augmentation.prepare(
        replace(batch, epochs=np.full(len(batch.samples), view, np.int64))
    ).images_BCHW
