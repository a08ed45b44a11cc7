"""One vector per image of a split, each computed once on some rank and gathered on all."""

from collections.abc import Callable

import torch
from torch import Tensor

from data_prep.manifest import DatasetError
from finetune.whole_split import batches_of
from pretrain.augment.augmentation import Augmentation
from pretrain.collectives import all_sum
from pretrain.shards import ShardReader
from pretrain.world import World

Extract = Callable[[Tensor], Tensor]


@torch.no_grad()
def split_features(
    extract: Extract, reader: ShardReader, augmentation: Augmentation, *, local_batch_size: int, world: World
) -> tuple[Tensor, Tensor]:
    """(features, labels) of the whole split in its order, on the CPU of every rank."""
    table: Tensor | None = None
    for batch in batches_of(reader, title="features", local_batch_size=local_batch_size, world=world):
        assert batch.mask_B is not None
        if batch.num_bad:
            raise DatasetError(
                "features: some pictures do not decode (see above); leave them out with data_prep subset"
            )
        vectors = extract(augmentation.plain(batch).images_BCHW).float().cpu()
        if table is None:
            table = torch.zeros(reader.num_samples, vectors.shape[1])
        table[torch.from_numpy(batch.samples)[batch.mask_B]] = vectors[batch.mask_B]
    assert table is not None
    # every row is nonzero on exactly one rank, so the sum is the union
    gathered = all_sum(table.to(augmentation.device)).cpu()
    return gathered, torch.from_numpy(reader.labels)
