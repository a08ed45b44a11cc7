"""One training from validated settings to its end. `pretrain train` and `finetune tune` implement
`Task`.

1. The first rank claims the run directory (run.py). The others wait for the first rank when they
   join.
2. From then on a rank that dies, freezes or fails ends the others (watchdog.py).
3. `assemble` makes the parts of the training in order.
4. `restore` reads the newest complete checkpoint.
5. The loop runs (trainer.py).
6. result.json comes last: a run is finished when its last checkpoint is on disk and its tracker is
   closed.

The file is long because it makes every part of a training and passes each part its settings.
"""

import logging
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.checkpoints.card import CheckpointError, ModelCard, WeightsError
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
from pretrain.checkpoints.writer import Saver
from pretrain.config import PretrainSettings, TrainingSettings
from pretrain.data.datasets import TrainingData
from pretrain.data.first_read import FirstRead
from pretrain.data.loader import num_cpu_threads
from pretrain.data.order import BatchPlan
from pretrain.data.reader import ShardReader, open_store
from pretrain.data.staging import stage_data
from pretrain.data.stream import open_reader
from pretrain.engine.micro_batch import REMEDY, micro_batch_size
from pretrain.engine.step import Engine
from pretrain.loop.peak import Meter, find_peak
from pretrain.loop.trainer import Outcome, Trainer
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters, training_flops
from pretrain.models.image_model import ImageModel
from pretrain.models.imported import code_of
from pretrain.optim import build_optimizer
from pretrain.ranks.collectives import any_rank, barrier, highest, on_all_ranks, same_on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import LAST_WRITE_S, StopFlag, entered
from pretrain.ranks.watchdog import watched
from pretrain.ranks.world import World
from pretrain.record import RecordedTask, write_record
from pretrain.tracking.node import NodeSampler, node_name, node_report
from pretrain.tracking.run_tags import datasets_of, training_tags
from pretrain.tracking.tracker import RunIdentity, Tracker


class Task(ABC):
    """Differences between pretraining and fine-tuning."""

    name: RecordedTask = "pretrain"
    """Name of the task in the run's record."""
    parent_key: str | None = None
    """Key of the parent run in tracking databases, if `parent_dir` has none."""
    parent_dir: Path | None = None
    start: Checkpoint | None = None
    """Checkpoint with the initial weights, or None."""
    is_branch = False
    """True if the run also continues the optimizer and data position of `start`."""
    remedy = REMEDY
    """Advice if no micro-batch fits into memory."""

    def __init__(
        self,
        settings: PretrainSettings,
        data: TrainingData,
        *,
        config: TrainingSettings,
        normalization: Normalization,
        tags: dict[str, str],
    ):
        """`config`: settings of the command, written to RUN/config.yaml."""
        self.settings, self.data, self.config = settings, data, config
        self.normalization, self.tags = normalization, tags

    @abstractmethod
    def join_ranks(self, world: World) -> torch.device: ...

    @abstractmethod
    def model(self) -> ImageModel:
        """Return the model with its initial weights."""

    @abstractmethod
    def engine(
        self, model: ImageModel, plan: BatchPlan, *, device: torch.device, world: World
    ) -> Engine: ...

    def record_result(self, result: Mapping[str, Any], tracker: Tracker) -> None:  # noqa: B027 (nothing, by default)
        """Record the result outside the run. The first rank calls this method after it has saved
        the result."""


class Pretraining(Task):
    def __init__(
        self, settings: PretrainSettings, data: TrainingData, start: Checkpoint | None = None
    ):
        """`start`: checkpoint of settings.start_from; None if it is not set or the run has its own
        checkpoint."""
        # importing takes seconds, and fine-tuning does not need it
        from pretrain.engine import deepspeed

        self._deepspeed = deepspeed
        tags = {"task": "pretrain"}
        if start is not None:
            tags["start_from"] = str(start.directory.absolute())
        normalization = Normalization(*data.channel_statistics)
        super().__init__(settings, data, config=settings, normalization=normalization, tags=tags)
        self.start = start
        self.is_branch = start is not None and run_and_length(settings.start_from or "")[1] != ""

    def join_ranks(self, world: World) -> torch.device:
        device = self._deepspeed.start_distributed(world, timeout_s=self.settings.engine.timeout_s)
        weights = int(self.start.sha256[:14], 16) if self.start else 0
        if not same_on_all_ranks(weights, device=device):
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
        classes, size, seed = self.data.classes, self.data.image_size, self.settings.train.seed
        model = build_model(
            self.settings.model, num_classes=len(classes), image_size=size, seed=seed
        )
        if self.start is not None:
            take_weights(model, self.start, classes=classes)
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


def summary(outcome: Outcome, run_dir: Path, data: TrainingData) -> list[str]:
    """Return the last lines of a finished run: scores, weights and next commands."""
    scores, best, run = outcome.scores, outcome.best, shlex.quote(str(run_dir))
    weights = checkpoint_dir(run_dir, outcome.step)
    rows = [("weights", str(weights))]
    if scores is not None:
        top1 = f"{accuracy(scores.top1, scores.class_top1)} ({data.baselines})"
        rows = [("last", f"{top1}, validation loss {scores.loss:.3f}: {weights}")]
    if best is not None:
        rows += [("best", f"top-1 {100 * best.score:.1f} %: {checkpoint_dir(run_dir, best.step)}")]
    if outcome.images_per_s:
        rows += [("speed", f"{outcome.images_per_s:,.0f} images/s")]
    rows += [("next", f"finetune predict {run} IMAGES --out predictions.csv")]
    if scores is not None:
        dataset = shlex.quote(data.settings.eval_dataset or data.settings.dataset)
        rows += [("", f"finetune evaluate pretrained={run} dataset={dataset}")]
    return [f"  {name:8} {words}" for name, words in rows]


def train(task: Task, world: World) -> Outcome:
    """Run the training of `settings.run_dir` until it is finished or asked to stop."""
    run_dir, engine = Path(task.settings.run_dir), task.settings.engine
    stop = StopFlag().install()
    with entered(_claimed(task, stop) if world.is_first else nullcontext()):
        log_to(run_dir / "logs" / f"rank-{world.rank}.log")
        device = task.join_ranks(world)
        if engine.compile and device.type == "cpu" and world.is_first:
            print(
                f"{run_dir.name}: engine.compile takes a minute and saves little on CPUs. Set it to"
                " false",
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
                received=lambda report: tracker.system(report["values"], node=report["node"]),
            )
            try:
                return _run(trainer, task)
            except BaseException as error:
                heartbeat.blame(error)  # first, because the next lines may take long
                writer.wait(LAST_WRITE_S)
                tracker.close("FAILED")
                raise


@contextmanager
def _claimed(task: Task, stop: StopFlag) -> Iterator[None]:
    """Lock the run directory, and write the run's record. If the wait for the lock is interrupted,
    write nothing."""
    run_dir, config, start = Path(task.settings.run_dir), task.config, task.start
    with claim(run_dir, config, ranks=task.settings.engine, stop=stop):
        code, seed = code_of(task.settings.model), config.train.seed
        write_record(run_dir, task.name, config.record, seed=seed, weights=start, code=code)
        yield


def log_to(path: Path) -> None:
    """Write warnings of Python, DeepSpeed and torch's extensions to this file instead of the
    console."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("DeepSpeed", "py.warnings", "torch.utils.cpp_extension"):
        logger = logging.getLogger(name)
        for earlier in logger.handlers:  # of an earlier run in this process
            earlier.close()
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)


def assemble(task: Task, world: World, *, device: torch.device, stop: StopFlag) -> Trainer:
    """Create all parts of the training, in order. All ranks must call this function together."""
    settings, train, run_dir = task.settings, task.settings.train, Path(task.settings.run_dir)
    model = task.model()
    num_weights = num_parameters(model)  # before ZeRO shards them
    local_batch_size = micro_batch_size(
        model,
        settings=settings,
        image_size=task.data.image_size,
        device=device,
        world=world,
        remedy=task.remedy,
    )
    plan = BatchPlan(
        train.global_batch_size,
        local_batch_size,
        world.num_ranks,
        is_connected=settings.data.canonical_streams > 1,
    )
    engine = task.engine(model, plan, device=device, world=world)
    facts = {"train.local_batch_size": local_batch_size, "num_weights": num_weights}
    run_key, tracker = open_tracker(task, facts, world)
    card = card_of(task, run_key=run_key)

    data = stage_data(task.data, world=world, device=engine.device, stop=stop)
    barrier()  # all ranks measure at once
    peak = find_peak(
        engine.device, precision=settings.engine.precision, given=settings.tracking.peak_teraflops
    )
    threads = num_cpu_threads(device)
    known = {} if threads is None else {"num_cpu_threads": threads}
    tracker.params({"peak_teraflops": str(peak), **known})
    meter = Meter(
        global_batch_size=train.global_batch_size,
        flops_per_image=training_flops(
            settings.model, num_classes=len(data.classes), image_size=data.image_size
        ),
        peak_teraflops=peak.teraflops * world.num_ranks,
        device=engine.device,
    )
    unchecked = data.read_parts if data.settings.verify_hashes == "on_first_read" else ()
    first_read = FirstRead(unchecked, run_dir=run_dir, world=world, device=engine.device)
    store, eval_part = open_store(data.settings, data.read_parts), data.eval_part()
    augmentation = Augmentation(
        settings.augment,
        seed=train.seed,
        image_size=data.image_size,
        normalization=task.normalization,
        device=engine.device,
        dtype=engine.input_dtype,
        pixels=card,
    )
    return Trainer(
        settings=settings,
        data=data,
        plan=plan,
        world=world,
        stop=stop,
        tracker=tracker,
        engine=engine,
        reader=open_reader(data, seed=train.seed, world=world, store=store),
        eval_reader=(
            ShardReader([eval_part], image_size=data.image_size, store=store) if eval_part else None
        ),
        augmentation=augmentation,
        saver=Saver(settings, data, engine=engine, world=world, card=card, log=tracker),
        first_read=first_read,
        meter=meter,
    )


def _run(trainer: Trainer, task: Task) -> Outcome:
    device, tracker = trainer.engine.device, trainer.tracker
    PROGRESS.mark("reading the newest checkpoint")
    outcome = trainer.fit(restore(trainer, task))
    PROGRESS.mark("closing its event log")
    if trainer.world.is_first and outcome.finished:
        result: dict[str, Any] = {"step": outcome.step, "ranks": trainer.world.num_ranks}
        if trainer.data.settings.stream:
            result["stream"] = True
        if outcome.images_per_s is not None:
            result["images_per_s"] = outcome.images_per_s
        if len(trainer.lengths) > 1:
            result["lengths"] = trainer.lengths
        if outcome.scores is not None:
            result |= outcome.scores.metrics()
        save_result(trainer.run_dir, result)
        task.record_result(result, tracker)
    # together: a rank that left would not notice the death of a rank that is still closing
    on_all_ranks(
        lambda: tracker.close("FINISHED" if outcome.finished else "KILLED"),
        device=device,
        field=str(trainer.run_dir),
    )
    trainer.saver.close(finished=outcome.finished)
    return outcome


def restore(trainer: Trainer, task: Task) -> TrainerState:
    """Give the trainer its initial state:

    1. It resumes from the newest checkpoint of the run, in RUN or in the remote.
    2. Or it branches from another run's checkpoint (start_from=RUN@LENGTH), with that run's
       optimizer and position, but with new records.
    3. Or it begins with the weights of `task.start`, which `task.model` has loaded.
    4. Or it begins with new weights.
    """
    device, run = trainer.engine.device, trainer.run_dir.name
    own = agreed_checkpoint(
        trainer.run_dir, trainer.world, device=device, remote=trainer.saver.remote
    )
    if own is not None:
        source = own
    elif task.is_branch and task.start is not None:
        source = task.start
    else:
        return TrainerState(step=0, samples_consumed=0)
    place, resume = source.directory, task.settings.resume
    if resume != "changed_code" and source.card.code_sha256 != code_of(task.settings.model):
        fix = "restore the code, or set resume=changed_code"
        raise WeightsError(
            "model.import", f"the code has changed since {place} was written", fix, code="changed"
        )
    state, trainer_state = on_all_ranks(lambda: load_state(place), device=device, field=str(place))
    problem = ""
    if source.card.pixels_hash != trainer.data.pixels_hash:
        problem = "the checkpoint was trained on other images than the dataset has now"
    elif trainer_state.samples_consumed != trainer_state.step * trainer.plan.global_batch_size:
        problem = "the checkpoint was made with another train.global_batch_size"
    if problem:
        fix = "restore the former setting or images, or choose another run_dir"
        raise CheckpointError(str(place), problem, fix, code="changed")
    trainer.engine.import_state(state)
    filters = source.card.fed_interpolation, task.settings.augment.plain_filter
    if trainer.world.is_first and filters[0] != filters[1]:
        change = "evaluations used {} before and use {} now".format(*filters)
        print(f"WARNING: augment.crop_interpolation: {change}", file=sys.stderr)
    before, now = trainer_state.num_cpu_threads, num_cpu_threads(device)
    if trainer.world.is_first:
        notes = ""
        if trainer.data.settings.stream:
            notes += "; the stream begins again, in another order"
        if is_command(trainer.data.settings.dataset):
            notes += "; the command in data.dataset has the recorded hash"
        print(f"{run}: resuming from {place.name if own else place}{notes}")
        if before is not None and now is not None and before != now:
            print(
                f"WARNING: OMP_NUM_THREADS: it was {before} and is now {now}, so sums are rounded"
                f" differently. Set it to {before} for the same bits",
                file=sys.stderr,
            )
    return trainer_state if own else replace(trainer_state, best=None, lengths=())


def agreed_checkpoint(
    run_dir: Path, world: World, *, device: torch.device, remote: Remote | None = None
) -> Checkpoint | None:
    """Return the newest complete checkpoint. All ranks agree on it, and one rank of each node
    verifies it. Without a remote, the nodes must share RUN. If there is a remote, the first rank
    chooses and the other nodes fetch."""

    def newest_here() -> Checkpoint | None:
        if remote is not None:
            return remote.newest() if world.is_first else None
        return Checkpoint.newest(run_dir) if world.local_rank == 0 else None

    newest = on_all_ranks(newest_here, device=device, field=str(run_dir))
    step = highest(step_of(newest.directory) if newest else -1, device=device)
    if step < 0:
        return None
    if remote is not None:
        fetches = world.local_rank == 0 and not world.is_first
        newest = on_all_ranks(
            lambda: remote.receive(step) if fetches else newest, device=device, field=str(run_dir)
        )
    checkpoint = on_all_ranks(
        lambda: newest or Checkpoint.read(checkpoint_dir(run_dir, step)),
        device=device,
        field=str(run_dir),
    )
    mark = int(hash_of_json([checkpoint.directory.name, checkpoint.hashes])[:14], 16)
    if not same_on_all_ranks(mark, device=device):
        raise CheckpointError(
            str(run_dir),
            "the ranks do not see the same checkpoints",
            "check that all nodes share the run directory, and run the same command again",
            code="mismatch",
        )
    return checkpoint


def open_tracker(task: Task, facts: dict[str, Any], world: World) -> tuple[str, Tracker]:
    """Return the run key and the tracker. On other ranks the tracker does nothing."""
    if not world.is_first:
        return "", Tracker(None, params={}, tags={})
    settings, tracking, data = task.settings, task.settings.tracking, task.data
    run_dir = Path(settings.run_dir)
    identity = RunIdentity.of(
        run_dir,
        experiment=tracking.experiment,
        uri=tracking.uri,
        parent_key=task.parent_key,
        parent_dir=task.parent_dir,
    )
    facts = facts | {"num_ranks": world.num_ranks, "content_hash": data.content_hash}
    tracker = Tracker(
        run_dir,
        params=flatten(settings.model_dump(mode="json")) | facts,
        tags=training_tags(settings, data, num_weights=facts["num_weights"]) | task.tags,
        datasets=datasets_of(data),
        settings=tracking,
    )
    tracker.artifact(run_dir / CONFIG_FILE)
    if tracking.enabled:
        tracker.sample_system(NodeSampler(run_dir).sample, node=node_name(world))
    return identity.run_key, tracker


def card_of(task: Task, *, run_key: str) -> ModelCard:
    data, settings, (crop, interpolation) = task.data, task.settings, task.data.squares
    return ModelCard(
        model=settings.model,
        code_sha256=code_of(settings.model),
        image_size=data.image_size,
        classes=data.classes,
        channel_mean=task.normalization.mean,
        channel_std=task.normalization.std,
        dataset=data.name,
        stream=data.settings.stream,
        stored_crop=crop,
        stored_interpolation=interpolation,
        stored_size=data.parts[0].stored_size(data.image_size),  # all parts have the same size
        fed_interpolation=settings.augment.plain_filter,
        eval_crop=settings.augment.plain_crop,
        content_hash=data.content_hash,
        pixels_hash=data.pixels_hash,
        pixel_permutation=settings.data.pixel_permutation,
        permute=settings.data.permute,
        run_key=run_key,
    )
