"""One pass over a split: every picture once, over all ranks, in the split's order."""

from collections.abc import Iterator

from data_prep.progress import progress
from pretrain.loader import Batch, evaluation_batches
from pretrain.shards import ShardReader
from pretrain.world import World


def batches_of(
    reader: ShardReader, *, title: str, local_batch_size: int, world: World, pin: bool = False
) -> Iterator[Batch]:
    """This rank's batches. Their `mask_B` is False where one is padded, or where a picture does not decode (`num_bad`)."""
    with (
        progress(title, total=reader.num_samples, unit="images", enabled=world.is_first) as line,
        evaluation_batches(
            reader, local_batch_size=local_batch_size, world=world, num_threads=world.num_cores, pin=pin
        ) as batches,
    ):
        for batch in batches:
            yield batch
            line.advance(min(local_batch_size * world.num_ranks, reader.num_samples - line.done))
