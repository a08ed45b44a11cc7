"""One training from validated settings to its true end. `pretrain train` and `finetune tune` are
two `Task`s for it.

1. The first rank claims the run directory (run.py); the others wait for it while they join. 2. From
   here on a rank that dies,
freezes or fails ends the others (heartbeat.py). 3. Model, micro-batch, engine, tracker, data,
trainer, in this order. 4. Every rank reads the newest whole checkpoint itself. 5. The loop
(trainer.py). 6. The status comes last: a run is FINISHED when its last checkpoint is on disk and
result.json says so.
"""

import logging
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_prep.clients import is_command
from data_prep.errors import UserError
from data_prep.manifest import accuracy
from data_prep.progress import doing
from data_prep.publish import hash_of_json
from data_prep.settings import flatten
from pretrain.augment.augmentation import Normalisation
from pretrain.checkpoints.card import CheckpointError, ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import TrainerState, load_state, take_weights
from pretrain.checkpoints.remote import Remote
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    checkpoint_dir,
    claim,
    run_and_length,
    save_result,
    step_of,
)
from pretrain.config import PretrainSettings, TrainingSettings
from pretrain.data.datasets import TrainingData
from pretrain.data.loader import num_cpu_threads
from pretrain.data.order import BatchPlan
from pretrain.data.staging import stage_data
from pretrain.engine.micro_batch import REMEDY, micro_batch_size
from pretrain.engine.step import Engine
from pretrain.loop.peak import find_peak
from pretrain.loop.trainer import Outcome, Trainer
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters
from pretrain.models.image_model import ImageModel
from pretrain.optim import build_optimizer
from pretrain.ranks.collectives import any_rank, barrier, highest, on_all_ranks, same_on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.heartbeat import watched
from pretrain.ranks.preemption import LAST_WRITE_S, StopFlag, entered
from pretrain.ranks.world import World
from pretrain.record import RecordedTask, write_record
from pretrain.tracking.node import NodeSampler, node_name, node_report
from pretrain.tracking.run_tags import datasets_of, training_tags
from pretrain.tracking.tracker import RunIdentity, Tracker


class Task(ABC):
    """What differs between pretraining and fine-tuning; `settings` and `data` have been checked. No
    attribute needs other ranks."""

    name: RecordedTask = "pretrain"
    """Task that the run's record states."""
    parent_key: str | None = None
    """Of the run that this one is a child of, where none is in `parent_dir`."""
    parent_dir: Path | None = None
    start: Checkpoint | None = None
    """Whose weights it begins with."""
    is_branch = False
    """It goes on from `start`, with its optimizer and its place in the data."""
    remedy = REMEDY
    """Where no micro-batch fits."""

    def __init__(
        self,
        settings: PretrainSettings,
        data: TrainingData,
        *,
        config: TrainingSettings,
        normalisation: Normalisation,
        tags: dict[str, str],
    ):
        """`config`: as the user wrote it, for RUN/config.yaml."""
        self.settings, self.data, self.config = settings, data, config
        self.normalisation, self.tags = normalisation, tags

    @abstractmethod
    def join_ranks(self, world: World) -> torch.device: ...

    @abstractmethod
    def model(self) -> ImageModel: ...

    @abstractmethod
    def engine(
        self, model: ImageModel, plan: BatchPlan, *, device: torch.device, world: World
    ) -> Engine: ...

    def record_result(self, result: Mapping[str, Any], tracker: Tracker) -> None:  # noqa: B027 (nothing, by default)
        """On the first rank, once the result is saved."""


class Pretraining(Task):
    def __init__(
        self, settings: PretrainSettings, data: TrainingData, start: Checkpoint | None = None
    ):
        """`start`: of settings.start_from, in a run that has no checkpoint yet."""
        # here, since it takes eight seconds, and fine-tuning does without it
        from pretrain.engine import deepspeed

        self._deepspeed = deepspeed
        normalisation = Normalisation(*data.channel_statistics)
        super().__init__(
            settings, data, config=settings, normalisation=normalisation, tags={"task": "pretrain"}
        )
        self.tags |= {"start_from": str(start.directory.absolute())} if start else {}
        self.start, self.is_branch = (
            start,
            start is not None and run_and_length(settings.start_from or "")[1] != "",
        )

    def join_ranks(self, world: World) -> torch.device:
        device = self._deepspeed.start_distributed(world, timeout_s=self.settings.engine.timeout_s)
        if not same_on_all_ranks(
            int(self.start.sha256[:14], 16) if self.start else 0, device=device
        ):
            raise UserError(
                "start_from",
                f"the ranks find different weights in {self.settings.start_from}",
                "choose one of its checkpoints",
                code="mismatch",
            )
        if not same_on_all_ranks(int(self.data.content_hash[:14], 16), device=device):
            raise UserError(
                "data.dataset",
                "the ranks read different datasets",
                "fix the node whose files or WDS_* variables differ",
                code="mismatch",
            )
        return device

    def model(self) -> ImageModel:
        classes, size, seed = len(self.data.classes), self.data.image_size, self.settings.train.seed
        model = build_model(self.settings.model, num_classes=classes, image_size=size, seed=seed)
        if self.start is not None:
            take_weights(model, self.start, classes=self.data.classes)
        return model

    def engine(
        self, model: ImageModel, plan: BatchPlan, *, device: torch.device, world: World
    ) -> Engine:
        return self._deepspeed.DeepSpeedEngine(
            model,
            make_optimizer=lambda module: build_optimizer(module, self.settings.optimizer),
            settings=self.settings.engine,
            plan=plan,
            label_smoothing=self.settings.train.label_smoothing,
            device=device,
            world=world,
            ema_decay=self.settings.train.ema_decay,
        )


def summary(outcome: Outcome, run_dir: Path, *, dataset: str, data: TrainingData) -> list[str]:
    """What is worth knowing at the end of a run, and what may come next."""
    scores, best, run, weights = (
        outcome.scores,
        outcome.best,
        shlex.quote(str(run_dir)),
        checkpoint_dir(run_dir, outcome.step),
    )
    rows = [("weights", str(weights))]
    if scores is not None:
        top1 = f"{accuracy(scores.top1, scores.class_top1)} ({data.baselines})"
        rows = [("last", f"{top1}, validation loss {scores.loss:.3f}: {weights}")]
    if best is not None:
        rows += [("best", f"top-1 {100 * best.score:.1f} %: {checkpoint_dir(run_dir, best.step)}")]
    rows += [("speed", f"{outcome.images_per_s:,.0f} images/s")] if outcome.images_per_s else []
    rows += [("next", f"finetune predict {run} PICTURES --out predictions.csv")]
    rows += (
        [("", f"finetune evaluate pretrained={run} dataset={shlex.quote(dataset)}")]
        if scores is not None
        else []
    )
    return [f"  {name:8} {words}" for name, words in rows]


def train(task: Task, world: World) -> Outcome:
    """Runs, or goes on with, the run of `settings.run_dir` until it is finished or asked to
    stop."""
    run_dir, engine = Path(task.settings.run_dir), task.settings.engine
    stop = StopFlag().install()
    weights = task.start.mark if task.start else None
    with entered(
        claim(
            run_dir, task.config, is_first=world.is_first, ranks=engine, stop=stop, weights=weights
        )
    ):
        if world.is_first:
            config = task.config
            seed = config.train.seed
            write_record(run_dir, task.name, config.record, seed=seed, weights=task.start)
        log_to(run_dir / "logs" / f"rank-{world.rank}.log")
        device = task.join_ranks(world)
        if engine.compile and device.type == "cpu" and world.is_first:
            print(
                f"{run_dir.name}: engine.compile takes a minute and gains next to nothing on CPUs;"
                " leave it out here",
                flush=True,
            )
        with watched(world, engine, device=device) as heartbeat:
            heartbeat.watch(run_dir / "stacks")
            if any_rank(stop.raised_by is not None, device=device):
                return Outcome(step=0, finished=False)
            with doing(
                f"{run_dir.name}: making the model, measuring the machine", enabled=world.is_first
            ):
                trainer = assemble(task, world, device=device, stop=stop)
            tracker, writer = trainer.tracker, trainer.saver.writer
            stop.is_alone = world.num_ranks == 1

            def at_end(stopped: bool) -> None:
                writer.wait(LAST_WRITE_S)
                if stopped:
                    tracker.close("KILLED")

            heartbeat.attend(
                at_end=at_end,
                stuck_wait_s=stop.stuck_wait_s,
                report=node_report(world, run_dir),
                received=lambda _rank, report: tracker.system(
                    report["values"], node=report["node"]
                ),
            )
            try:
                return _run(trainer, task)
            except BaseException as error:
                heartbeat.blame(error)  # before anything that takes its time
                writer.wait(LAST_WRITE_S)
                tracker.close("FAILED")
                raise


def log_to(path: Path) -> None:
    """From now on what these libraries and Python warn of is kept in this file: the console shows
    the run alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in (
        "DeepSpeed",
        "py.warnings",
        "torch.utils.cpp_extension",
    ):  # the last warns when something is compiled
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)


def assemble(task: Task, world: World, *, device: torch.device, stop: StopFlag) -> Trainer:
    """Called by all ranks together."""
    model = task.model()
    num_weights = num_parameters(model)  # before ZeRO cuts the weights up
    local_batch_size = micro_batch_size(
        model,
        settings=task.settings,
        image_size=task.data.image_size,
        device=device,
        world=world,
        remedy=task.remedy,
    )
    settings = task.settings
    if settings.train.local_batch_size == "auto":  # logged is what it came to
        settings = settings.model_copy(
            update={
                "train": settings.train.model_copy(update={"local_batch_size": local_batch_size})
            }
        )
    plan = BatchPlan(settings.train.global_batch_size, local_batch_size, world.num_ranks)
    engine = task.engine(model, plan, device=device, world=world)
    run_key, tracker = open_tracker(task, settings, world, num_weights=num_weights)

    data = stage_data(task.data, world=world, device=engine.device, stop=stop)
    barrier()  # all ranks measure at once
    peak = find_peak(
        engine.device, precision=settings.engine.precision, given=settings.tracking.peak_teraflops
    )
    tracker.params({"peak_teraflops": str(peak)})
    return Trainer(
        settings=settings,
        data=data,
        plan=plan,
        world=world,
        stop=stop,
        tracker=tracker,
        engine=engine,
        card=card_of(task, run_key=run_key),
        peak_teraflops=peak.teraflops * world.num_ranks,
    )


def _run(trainer: Trainer, task: Task) -> Outcome:
    device, tracker = trainer.engine.device, trainer.tracker
    threads = num_cpu_threads(device)
    if threads is not None:
        tracker.params({"num_cpu_threads": threads})
    PROGRESS.mark("reading the newest checkpoint")
    outcome = trainer.fit(restore(trainer, branch_of=task.start if task.is_branch else None))
    PROGRESS.mark("closing its journal")
    if trainer.world.is_first and outcome.finished:
        result: dict[str, Any] = {"step": outcome.step, "ranks": trainer.world.num_ranks}
        if trainer.data.settings.stream:
            result["stream"] = True
        if outcome.images_per_s is not None:
            result["images_per_s"] = outcome.images_per_s
        if len(trainer.lengths) > 1:
            result["lengths"] = trainer.lengths
        if outcome.scores is not None:
            result |= outcome.scores.metrics("eval")
        save_result(trainer.run_dir, result)
        task.record_result(result, tracker)
    # together: a rank that leaves sooner would not learn of the death of one that has not closed
    # yet
    on_all_ranks(
        lambda: tracker.close("FINISHED" if outcome.finished else "KILLED"),
        device=device,
        failed="the run could not be closed; see the message of the first rank",
    )
    trainer.saver.close(finished=outcome.finished)
    return outcome


def restore(trainer: Trainer, *, branch_of: Checkpoint | None = None) -> TrainerState:
    """Every rank reads the newest whole checkpoint itself; where there is none yet, that which the
    run branches from."""
    device = trainer.engine.device
    own = agreed_checkpoint(
        trainer.run_dir, trainer.world, device=device, remote=trainer.saver.remote
    )
    newest = own or branch_of
    if newest is None:
        return TrainerState(step=0, samples_consumed=0)
    place = newest.directory
    engine, state = on_all_ranks(
        lambda: load_state(place),
        device=device,
        failed=f"{place}: another rank could not read it; see its message",
    )
    if newest.card.pixels_hash != trainer.data.pixels_hash:
        raise CheckpointError(
            str(place),
            "the checkpoint was trained on other images than the dataset has now",
            "restore the dataset, or choose another run_dir",
            code="changed",
        )
    if state.samples_consumed != state.step * trainer.plan.global_batch_size:
        raise CheckpointError(
            str(place),
            "the checkpoint was made with another train.global_batch_size",
            "restore that size, or choose another run_dir",
            code="changed",
        )
    trainer.engine.import_state(engine)
    before, now = state.num_cpu_threads, num_cpu_threads(device)
    if trainer.world.is_first:
        anew = "; the stream begins anew, in another order" if trainer.data.settings.stream else ""
        anew += (
            "; data.dataset: its command has the recorded hash"
            if is_command(trainer.data.settings.dataset)
            else ""
        )
        print(f"{trainer.run_dir.name}: going on from {place.name if own else place}{anew}")
        if before is not None and now is not None and before != now:
            print(
                f"WARNING: OMP_NUM_THREADS: was {before} and is {now} now: sums are rounded"
                f" otherwise from here on; set it to {before} for the same bits",
                file=sys.stderr,
            )
    return state if own else replace(state, best=None, lengths=())  # which are the other run's


def agreed_checkpoint(
    run_dir: Path, world: World, *, device: torch.device, remote: Remote | None = None
) -> Checkpoint | None:
    """Return the newest whole checkpoint, on which all ranks agree. One rank of each node verifies
    it; the other ranks of a node see the same disks, and if they do not, its hashes differ. With a
    remote each node has disks of its own: the first rank chooses, and the other nodes fetch.
    """

    def newest_here() -> Checkpoint | None:
        if remote is not None:
            return remote.newest() if world.is_first else None
        return Checkpoint.newest(run_dir) if world.local_rank == 0 else None

    found = on_all_ranks(
        newest_here,
        device=device,
        failed=f"{run_dir}: another rank finds no whole checkpoint; see its message",
    )
    step = highest(step_of(found.directory) if found else -1, device=device)
    if step < 0:
        return None
    differ = (
        f"{run_dir}: the ranks do not see the same checkpoints; check that all nodes share it, and"
        " retry"
    )
    place = checkpoint_dir(run_dir, step)
    if remote is not None:
        fetches = world.local_rank == 0 and not world.is_first
        found = on_all_ranks(
            lambda: remote.receive(step) if fetches else found, device=device, failed=differ
        )
    newest = on_all_ranks(lambda: found or Checkpoint.read(place), device=device, failed=differ)
    if not same_on_all_ranks(_mark_of(newest), device=device):
        raise CheckpointError(
            str(run_dir),
            "the ranks do not see the same checkpoints",
            "check that all nodes share the run directory, and run the same command again",
            code="mismatch",
        )
    return newest


def _mark_of(checkpoint: Checkpoint) -> int:
    return int(hash_of_json([checkpoint.directory.name, checkpoint.hashes])[:14], 16)


def open_tracker(
    task: Task, settings: PretrainSettings, world: World, *, num_weights: int
) -> tuple[str, Tracker]:
    """(run key, tracker): the first rank's tracker is real, the others' do nothing."""
    if not world.is_first:
        return "", Tracker(None, params={}, tags={})
    run_dir, tracking, data = Path(settings.run_dir), settings.tracking, task.data
    identity = RunIdentity.of(
        run_dir,
        experiment=tracking.experiment,
        uri=tracking.uri,
        parent_key=task.parent_key,
        parent_dir=task.parent_dir,
    )
    facts = {
        "num_ranks": world.num_ranks,
        "num_weights": num_weights,
        "content_hash": data.content_hash,
    }
    tracker = Tracker(
        run_dir,
        params=flatten(settings.model_dump(mode="json")) | facts,
        tags=training_tags(settings, data, num_weights=num_weights) | task.tags,
        datasets=datasets_of(data),
        settings=tracking,
    )
    tracker.artifact(run_dir / CONFIG_FILE)
    if tracking.enabled:
        tracker.sample_system(NodeSampler(run_dir).sample, node=node_name(world))
    return identity.run_key, tracker


def card_of(task: Task, *, run_key: str) -> ModelCard:
    """For the checkpoints; each adds its step."""
    data, (crop, interpolation) = task.data, task.data.squares
    return ModelCard(
        model=task.settings.model,
        image_size=data.image_size,
        classes=data.classes,
        channel_mean=task.normalisation.mean,
        channel_std=task.normalisation.std,
        dataset=data.name,
        stream=data.settings.stream,
        stored_crop=crop,
        stored_interpolation=interpolation,
        stored_size=data.parts[0].stored_size(data.image_size),  # all have the same
        fed_interpolation=task.settings.augment.plain_filter,
        content_hash=data.content_hash,
        pixels_hash=data.pixels_hash,
        pixel_permutation=task.settings.data.pixel_permutation,
        permute=task.settings.data.permute,
        run_key=run_key,
    )
