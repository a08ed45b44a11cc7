"""A reader of several ranks that is killed repeatedly. test_killed_readers.py starts this program.

    python -m tests.faults.reading DATASET OUT KILLS STEPS SHUFFLE SEED     STEPS: at least
    LONGEST_LIFE for each kill

1. One driver forks the ranks, which saves imports of torch.
2. Ranks read their slices of a global batch of 24, write them to OUT/log, and wait for each other.
3. The first rank publishes the number of consumed samples, like the trainer's checkpoint.
4. One rank kills itself with -9 at a random point of one of its first steps. The driver kills the
   others, and starts another number of ranks from that checkpoint.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

from data_prep.manifest import load_manifest
from data_prep.publish import write_atomic
from pretrain.config import Shuffle
from pretrain.data.loader import as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split

GLOBAL_BATCH = 24
WORLDS = (2, 1, 3, 4, 2, 6)
LONGEST_LIFE = 12
"""Maximum steps of a reader that is killed."""


def consumed_of(out: Path) -> int:
    return int((out / "consumed").read_text()) if (out / "consumed").exists() else 0


def read(
    rank: int,
    num_ranks: int,
    barrier: Barrier,
    dataset: Path,
    out: Path,
    num_steps: int,
    shuffle: Shuffle,
    dies: tuple[int, str],
) -> None:
    """Read batches. `dies`: the step and the point at which this rank kills itself."""
    reader = open_split(dataset, load_manifest(dataset), "train")
    order = Order(reader.num_samples, 9, shuffle, 16, 3)
    plan = BatchPlan(GLOBAL_BATCH, GLOBAL_BATCH // num_ranks // 2, num_ranks)
    consumed = began_with = consumed_of(out)

    def pass_by(point: str) -> None:
        if ((consumed - began_with) // GLOBAL_BATCH, point) == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    log = os.open(out / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with training_batches(
        reader,
        order,
        plan,
        rank=rank,
        consumed=consumed,
        num_threads=2,
        prefetch=3,
        pin=False,
        finish=as_stored,
    ) as batches:
        while consumed < num_steps * GLOBAL_BATCH:
            pass_by("reading")
            micro_batches = [next(batches) for _ in range(plan.accumulation_steps)]
            line = {
                "consumed": consumed,
                "ranks": num_ranks,
                "rank": rank,
                "samples": [sample for batch in micro_batches for sample in batch.samples.tolist()],
                "labels": [label for batch in micro_batches for label in batch.labels_B.tolist()],
            }
            os.write(log, (json.dumps(line) + "\n").encode())
            pass_by("waiting")
            barrier.wait()
            consumed += GLOBAL_BATCH
            if rank == 0:
                write_atomic(out / "consumed", str(consumed).encode())
            barrier.wait()


def main() -> None:
    dataset, out = Path(sys.argv[1]), Path(sys.argv[2])
    num_kills, num_steps, shuffle, seed = (
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
        int(sys.argv[6]),
    )
    generator, context = random.Random(seed), multiprocessing.get_context("fork")
    assert num_steps > num_kills * LONGEST_LIFE
    for life in range(num_kills + 1):
        num_ranks = WORLDS[life % len(WORLDS)]
        barrier = context.Barrier(num_ranks)
        victim = generator.randrange(num_ranks) if life < num_kills else None
        dies = (generator.randrange(LONGEST_LIFE), generator.choice(["reading", "waiting"]))
        facts = (num_ranks, barrier, dataset, out, num_steps, shuffle)
        ranks = [
            context.Process(target=read, args=(rank, *facts, dies if rank == victim else (-1, "")))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        if victim is not None:
            ranks[victim].join()
            for process in ranks:
                process.kill()
        for process in ranks:
            process.join()
            assert process.exitcode == (0 if victim is None else -signal.SIGKILL), process.exitcode


if __name__ == "__main__":
    main()
