"""One pass over a split: every picture once, over all ranks, in the split's order."""

from collections.abc import Iterator

from data_prep.progress import progress
from pretrain.data.loader import Batch, evaluation_batches
from pretrain.data.reader import ShardReader
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World


def batches_of(
    reader: ShardReader, *, title: str | None, local_batch_size: int, world: World, pin: bool = False
) -> Iterator[Batch]:
    """This rank's batches. Their `mask_B` is False where one is padded, or where a picture does not decode (`num_bad`). `pin`: in
    memory that a GPU can copy from while others work. `title`: of the progress line; None where the caller has its own."""
    shown = title is not None and world.is_first
    with (
        progress(title or "", total=reader.num_samples, unit="images", enabled=shown) as line,
        evaluation_batches(
            reader, local_batch_size=local_batch_size, world=world, num_threads=world.num_cores, pin=pin
        ) as batches,
    ):
        for batch in batches:
            PROGRESS.touch()
            yield batch
            line.advance(min(local_batch_size * world.num_ranks, reader.num_samples - line.done))
