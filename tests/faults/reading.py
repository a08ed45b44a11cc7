"""A reader of several ranks that is killed again and again: started by test_killed_readers.py, in a process of its own.

    python -m tests.faults.reading DATASET OUT KILLS STEPS SHUFFLE SEED

Ranks are forked by one driver (which spares twenty imports of torch), read their slices of a global batch of 24, write what they
read to OUT/log, wait for each other, and let the first one publish the number of consumed samples: the trainer's checkpoint. The
driver kills all of them with -9 at a random moment, and starts again with another number of ranks where that checkpoint says.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from data_prep.manifest import load_manifest
from data_prep.publish import write_atomic
from pretrain.loader import as_stored, training_batches
from pretrain.order import BatchPlan, Order, Shuffle
from pretrain.shards import open_split

GLOBAL_BATCH = 24
WORLDS = (2, 1, 3, 4, 2, 6)


def consumed_of(out: Path) -> int:
    return int((out / "consumed").read_text()) if (out / "consumed").exists() else 0


def read(
    rank: int, num_ranks: int, barrier: Barrier, dataset: Path, out: Path, num_steps: int, shuffle: Shuffle
) -> None:
    reader = open_split(dataset, load_manifest(dataset), "train")
    order = Order(reader.num_samples, 9, shuffle, 16, 3)
    plan = BatchPlan(GLOBAL_BATCH, GLOBAL_BATCH // num_ranks // 2, num_ranks)
    consumed = consumed_of(out)
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
            micro_batches = [next(batches) for _ in range(plan.accumulation_steps)]
            line = {
                "consumed": consumed,
                "ranks": num_ranks,
                "rank": rank,
                "samples": [sample for batch in micro_batches for sample in batch.samples.tolist()],
                "labels": [label for batch in micro_batches for label in batch.labels_B.tolist()],
            }
            os.write(log, (json.dumps(line) + "\n").encode())
            barrier.wait()
            consumed += GLOBAL_BATCH
            if rank == 0:
                write_atomic(out / "consumed", str(consumed).encode())
            barrier.wait()


def main() -> None:
    dataset, out = Path(sys.argv[1]), Path(sys.argv[2])
    num_kills, num_steps, shuffle, seed = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
    generator, context = random.Random(seed), multiprocessing.get_context("fork")
    for life in range(num_kills + 1):
        num_ranks = WORLDS[life % len(WORLDS)]
        barrier = context.Barrier(num_ranks)
        facts = (num_ranks, barrier, dataset, out, num_steps, shuffle)
        ranks = [context.Process(target=read, args=(rank, *facts)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        if life < num_kills:
            began_with, deadline_s = consumed_of(out), time.monotonic() + 60
            while generator.random() < 0.98 or consumed_of(out) == began_with:
                assert time.monotonic() < deadline_s and all(process.is_alive() for process in ranks)
                time.sleep(0.001)
            for process in generator.sample(ranks, num_ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGKILL)
        for process in ranks:
            process.join()
            assert process.exitcode == (0 if life == num_kills else -signal.SIGKILL), process.exitcode
        assert life == num_kills or consumed_of(out) < num_steps * GLOBAL_BATCH, "the test needs more steps"


if __name__ == "__main__":
    main()
