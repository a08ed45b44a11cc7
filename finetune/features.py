"""One vector per image of a split, each computed once on some rank and gathered on all."""

from collections.abc import Callable

import torch
from torch import Tensor

from data_prep.manifest import DatasetError
from data_prep.progress import progress
from pretrain.augment.augmentation import Augmentation
from pretrain.collectives import all_sum
from pretrain.loader import evaluation_batches
from pretrain.shards import ShardReader
from pretrain.world import World

Extract = Callable[[Tensor], Tensor]


def pixels(images_BCHW: Tensor) -> Tensor:
    """The features of a model that has none: the normalised picture itself."""
    return images_BCHW.flatten(1)


@torch.no_grad()
def split_features(
    extract: Extract, reader: ShardReader, augmentation: Augmentation, *, local_batch_size: int, world: World
) -> tuple[Tensor, Tensor]:
    """(features, labels) of the whole split in its order, on the CPU of every rank."""
    table: Tensor | None = None
    with (
        progress("features", total=reader.num_samples, unit="images", enabled=world.is_first) as line,
        evaluation_batches(
            reader, local_batch_size=local_batch_size, world=world, num_threads=world.num_cores
        ) as batches,
    ):
        for batch in batches:
            assert batch.mask_B is not None
            if batch.num_bad:
                raise DatasetError(
                    "features: some pictures do not decode (see above); leave them out with data_prep subset"
                )
            vectors = extract(augmentation.plain(batch).images_BCHW).float().cpu()
            if table is None:
                table = torch.zeros(reader.num_samples, vectors.shape[1])
            table[torch.from_numpy(batch.samples)[batch.mask_B]] = vectors[batch.mask_B]
            line.advance(min(local_batch_size * world.num_ranks, reader.num_samples - line.done))
    assert table is not None
    # every row is nonzero on exactly one rank, so the sum is the union
    gathered = all_sum(table.to(augmentation.device)).cpu()
    return gathered, torch.from_numpy(reader.labels)
