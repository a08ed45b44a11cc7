"""One run of a trainer, from its newest whole checkpoint to its true status.

The status is said last: a run is FINISHED when its last checkpoint is on disk and result.json says so.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from pretrain.checkpoints.card import CheckpointError, read_card
from pretrain.checkpoints.checkpoint import mark_of, newest_whole
from pretrain.checkpoints.files import TrainerState, load_state
from pretrain.checkpoints.run import checkpoints_dir, save_result, stacks_dir, step_of
from pretrain.data.loader import num_cpu_threads
from pretrain.loop.saving import LOOK_S
from pretrain.loop.trainer import Outcome, Trainer
from pretrain.ranks.collectives import all_sum, any_rank, highest, same_on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.heartbeat import Heartbeat
from pretrain.ranks.preemption import LAST_WRITE_S
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.world import World
from pretrain.tracking.node import node_report
from pretrain.tracking.tracker import Status

Result = TypeVar("Result")


@contextmanager
def watched(world: World, ranks: RanksSettings, *, device: torch.device) -> Iterator[Heartbeat]:
    """Entered by all ranks when they have joined: if one of them is gone, frozen or fails, the others end and name it."""
    heartbeat = Heartbeat(world, ranks)
    heartbeat.start(lambda numbers: all_sum(torch.tensor(numbers, device=device)).tolist())
    try:
        yield heartbeat
    except BaseException as error:
        heartbeat.blame(error)
        raise
    heartbeat.stop()


def supervise(
    trainer: Trainer, heartbeat: Heartbeat, *, on_result: Callable[[dict[str, float]], None] | None = None
) -> Outcome:
    """Restores, fits, and closes the tracker with the status that is true. `on_result`: the first rank's, once it is saved."""
    trainer.stop.is_alone = trainer.world.num_ranks == 1

    def at_end(stopped: bool) -> None:
        trainer.writer.wait(LAST_WRITE_S)
        if stopped:
            trainer.tracker.close("KILLED")

    heartbeat.watch(stacks_dir(trainer.run_dir))
    heartbeat.attend(
        at_end=at_end,
        stuck_wait_s=trainer.stop.stuck_wait_s,
        report=node_report(trainer.world, trainer.run_dir),
        received=lambda _rank, report: trainer.tracker.system(report["values"], node=report["node"]),
    )
    try:
        return _fitted(trainer, on_result or (lambda result: None))
    except BaseException as error:
        heartbeat.blame(error)  # before anything that takes its time
        trainer.writer.wait(LAST_WRITE_S)
        trainer.tracker.close("FAILED")
        raise


def _fitted(trainer: Trainer, on_result: Callable[[dict[str, float]], None]) -> Outcome:
    threads = num_cpu_threads(trainer.engine.device)
    if threads is not None:
        trainer.tracker.params({"num_cpu_threads": threads})
    PROGRESS.mark("reading the newest checkpoint")
    outcome = trainer.fit(restore(trainer))
    PROGRESS.mark("closing its journal")
    if trainer.world.is_first and outcome.finished:
        scores = outcome.scores
        result = {"step": outcome.step, "images_per_s": outcome.images_per_s, "ranks": trainer.world.num_ranks}
        if scores is not None:
            result |= scores.metrics("eval")
        save_result(trainer.run_dir, result)
        on_result(result)
    status: Status = "FINISHED" if outcome.finished else "KILLED"
    patiently(lambda: trainer.tracker.close(status), device=trainer.engine.device)  # who goes sooner hears of no death
    return outcome


def restore(trainer: Trainer) -> TrainerState:
    """Every rank reads the newest whole checkpoint itself."""
    path = agreed_checkpoint(trainer.run_dir, trainer.world, device=trainer.engine.device)
    if path is None:
        return TrainerState(step=0, samples_consumed=0)
    engine, state = patiently(lambda: load_state(path), device=trainer.engine.device)
    if read_card(path).pixels_hash != trainer.card_at(0).pixels_hash:
        raise CheckpointError(
            f"{path}: was trained on other pictures than the dataset has now; bring them back, or name another run_dir"
        )
    if state.samples_consumed != state.step * trainer.plan.global_batch_size:
        raise CheckpointError(f"{path}: was made with another global batch size; set it back, or name another run_dir")
    trainer.engine.import_state(engine)
    if trainer.world.is_first:
        print(f"{trainer.title}: going on from {path.name}")
        _tell_of_threads(state.num_cpu_threads, num_cpu_threads(trainer.engine.device))
    return state


def _tell_of_threads(before: int | None, now: int | None) -> None:
    if before is not None and now is not None and before != now:
        print(
            f"WARNING: OMP_NUM_THREADS: was {before} and is {now} now: sums are rounded otherwise from here on; set it to {before} "
            "for the same bits",
            file=sys.stderr,
        )


def patiently(work: Callable[[], Result], *, device: torch.device) -> Result:
    """What `work` finds on this rank, when all ranks are done with theirs: however slow a disk is, no collective waits long for it.
    Long work says by itself that it gets on."""
    threads = futures.ThreadPoolExecutor(1, thread_name_prefix="patient")
    found = threads.submit(work)
    threads.shutdown(wait=False)
    while True:
        futures.wait([found], timeout=LOOK_S)
        if not any_rank(not found.done(), device=device):
            return found.result()


def agreed_checkpoint(run_dir: Path, world: World, *, device: torch.device) -> Path | None:
    """The newest whole one, on which all ranks agree. One rank of each node reads it all to verify it; the others of a node see the
    same disks, and if they do not, their sha256.json differs."""
    found, fault = None, None
    try:
        found = patiently(lambda: newest_whole(run_dir) if world.local_rank == 0 else None, device=device)
    except CheckpointError as error:
        fault = error
    if any_rank(fault is not None, device=device):
        raise fault or CheckpointError(f"{run_dir}: another rank finds no whole checkpoint; see its message")
    step = highest(step_of(found) if found else -1, device=device)
    path = checkpoints_dir(run_dir) / f"step-{step:08d}" if step >= 0 else None
    agrees = world.local_rank != 0 or found == path
    if any_rank(not agrees, device=device) or not same_on_all_ranks(mark_of(path), device=device):
        raise CheckpointError(
            f"{run_dir}: the ranks do not see the same checkpoints; check that all nodes share it, and retry"
        )
    return path
