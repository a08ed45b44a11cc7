"""What a short run (probe, knn, evaluate) works in: ranks that have joined, the frozen model, and
the run's record in MLflow.

Such a run has no checkpoints: it ends or it is begun anew. What ends it as Ctrl-C does
(`verbs.end_on_signals`) makes its status KILLED. This file alone (and the engine of `finetune
tune`) imports accelerate.
"""

import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import Manifest
from data_prep.settings import flatten
from finetune.config import ChannelStats, Fed, ShortRunSettings
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import CONFIG_FILE, claim
from pretrain.config import AugmentSettings, TrackingSettings, TrainingSettings
from pretrain.data.datasets import Part
from pretrain.engine.step import keep_freed_memory, working_in
from pretrain.models.build import pooled_features
from pretrain.models.image_model import ImageModel
from pretrain.ranks.collectives import is_distributed, same_on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.watchdog import watched
from pretrain.ranks.world import World
from pretrain.record import RecordedTask, write_record
from pretrain.tracking.run_tags import dataset_of, run_tags, target_of, with_note
from pretrain.tracking.tracker import RunIdentity, Tracker

_AS_LONG_AS_IT_TAKES = datetime.timedelta(days=365)


@contextmanager
def session(
    settings: ShortRunSettings,
    world: World,
    *,
    run_dir: Path,
    used: Sequence[tuple[Part, str]],
    checkpoint: Checkpoint | None,
    task: str,
    tracking: TrackingSettings | None = None,
    identity: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[tuple[torch.device, Tracker]]:
    """Entered by all ranks of a run: one that is gone, frozen, stuck or fails meanwhile ends the
    others, and is named. `identity`: a hash of all that the ranks must have found alike, if that is
    more than the weights; `facts`: see `claim`.
    """
    device = start_accelerator(world, timeout_s=settings.ranks.timeout_s).device
    identity = identity or (checkpoint.sha256 if checkpoint else "0")
    with watched(world, settings.ranks, device=device) as heartbeat:
        if not same_on_all_ranks(int(identity[:15], 16), device=device):
            raise UserError(
                str(checkpoint.directory if checkpoint else run_dir),
                "the ranks found different weights, data or settings; it may still be training",
                "choose one of its checkpoints/step-*",
                code="mismatch",
            )
        record = recorded(
            settings,
            run_dir=run_dir,
            ranks=settings.ranks,
            tracking=tracking or settings.tracking,
            world=world,
            used=used,
            checkpoint=checkpoint,
            tags={"task": task},
            facts=facts,
        )
        with record as tracker:
            heartbeat.watch(run_dir / "stacks")
            try:
                yield device, tracker
            except BaseException as error:
                heartbeat.blame(
                    error
                )  # at once, not after the end of the record, which takes its time
                raise


def start_accelerator(
    world: World, *, precision: str = "fp32", timeout_s: float = 600.0
) -> Accelerator:
    """Without a GPU accelerate must be told so, or each rank would silently work alone."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout_s)),
            # or every forward pass would send all permutations and masks; `average_over_ranks` does
            # what is needed
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    seen = accelerator.num_processes
    if seen != world.num_ranks:
        raise RuntimeError(
            f"accelerate sees {seen} processes of {world.num_ranks}; unset ACCELERATE_* variables"
        )
    return accelerator


class PatientGroup:
    """All ranks, for waits that are as long as another rank's work, which no timeout of collectives
    may end; the heartbeat notices ranks that are gone. All ranks make one together, before that
    work. Nothing of it goes through a GPU.
    """

    def __init__(self) -> None:
        self._group = (
            dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
            if is_distributed()
            else None
        )

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place, of numbers in the host's memory."""
        assert not values.is_cuda
        if self._group is not None:
            with PROGRESS.waiting("waiting for the other ranks"):
                dist.all_reduce(values, group=self._group)
        return values

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_sum(torch.tensor(float(flag))) > 0)

    def gather(self, own: Any) -> list[Any] | None:
        """What each rank has, in their order, on the first rank."""
        if self._group is None:
            return [own]
        found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with PROGRESS.waiting("waiting for the other ranks"):
            dist.gather_object(own, found, dst=0, group=self._group)
        return found


@dataclass(frozen=True, kw_only=True)
class Backbone(Fed):
    """A frozen model as what makes a vector of a picture."""

    extract: Callable[[Tensor], Tensor]
    """Normalised (B, 3, H, W) to (B, features)."""
    model: ImageModel | None = None

    def augmentation(
        self, settings: AugmentSettings | None = None, *, seed: int = 0, device: torch.device
    ) -> Augmentation:
        return Augmentation(
            (settings or AugmentSettings()).fed_as(self.interpolation),
            seed=seed,
            image_size=self.image_size,
            normalisation=Normalisation(*self.normalisation),
            device=device,
            dtype=torch.float32,
            pixels=self.pixels,
        )


def open_backbone(
    checkpoint: Checkpoint | None,
    manifest: Manifest,
    *,
    image_size: int | None = None,
    device: torch.device,
    channel_stats: ChannelStats = "checkpoint",
    precision: str = "fp32",
) -> Backbone:
    """None: the features are the pixels themselves, normalised as the dataset's manifest says.
    `precision` is of `extract`."""
    fed = Fed.of(checkpoint, manifest, image_size=image_size, channel_stats=channel_stats)
    if checkpoint is None:
        return Backbone(**vars(fed), extract=lambda images: images.flatten(1))
    model = load_model(checkpoint).to(device).eval()
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"

    def extract(images_BCHW: Tensor) -> Tensor:
        with (
            working_in(precision),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            return pooled_features(model, images_BCHW).float()

    return Backbone(**vars(replace(fed, precision=precision)), extract=extract, model=model)


@contextmanager
def recorded(
    settings: ShortRunSettings | TrainingSettings,
    *,
    run_dir: Path,
    ranks: RanksSettings,
    tracking: TrackingSettings,
    world: World,
    used: Sequence[tuple[Part, str]],
    checkpoint: Checkpoint | None,
    tags: dict[str, str],
    stop: StopFlag | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[Tracker]:
    """Entered by all ranks; the first one's tracker is real. The run is a child of the one that
    made the weights; None: there are none. `used`: splits of one dataset, and for what (training,
    evaluation). `tags` name the `task`.
    """
    if not world.is_first:
        yield Tracker(None, params={}, tags={})
        return
    weights = checkpoint.mark if checkpoint and tags.get("init") != "scratch" else None
    with claim(run_dir, settings, ranks=ranks, stop=stop, weights=weights, facts=facts):
        task = cast(RecordedTask, tags["task"].removesuffix("_seeds"))
        seed = getattr(settings, "seed", None)
        started_from = checkpoint if tags.get("init") != "scratch" else None
        write_record(run_dir, task, settings.record, seed=seed, weights=started_from)
        card, manifest = checkpoint.card if checkpoint else None, used[0][0].manifest
        RunIdentity.of(
            run_dir,
            experiment=tracking.experiment,
            uri=tracking.uri,
            parent_key=card.run_key or None if card else None,
            parent_dir=checkpoint.run_dir if checkpoint else None,
        )
        model, origin = (card.model.label, card.origin) if card else ("pixels", "")
        splits = " and ".join(f"{part.split} ({part.num_samples:,} pictures)" for part, _ in used)
        of = f"of `{checkpoint.name}`" if checkpoint else "without a model"
        title = f"**{tags['task']}** on **{manifest.name}**, {splits}: {model}, {of}"
        tags = (
            run_tags(dataset=manifest.name, target=target_of(manifest), model=model)
            | {"origin": origin}
            | tags
        )
        tracker = Tracker(
            run_dir,
            params=flatten(settings.model_dump(mode="json"))
            | {"content_hash": manifest.content_hash},
            tags=with_note(tags, title=title, run_dir=run_dir),
            datasets=tuple(dataset_of(part, context) for part, context in used),
            settings=tracking,
        )
        tracker.artifact(run_dir / CONFIG_FILE)
        try:
            yield tracker
        except BaseException as error:
            tracker.close(
                "KILLED" if isinstance(error, KeyboardInterrupt | Interrupted) else "FAILED"
            )
            raise
        tracker.close("FINISHED")


def register(
    tracker: Tracker, checkpoint: Checkpoint, results: Mapping[str, float], *, target: str
) -> None:
    """Results of a task on a dataset stand as tags of the weights' version in the model registry,
    under the name of the run that made them (of one of several seeds with that of their group)."""
    place, card = (checkpoint.run_dir or checkpoint.home).absolute(), checkpoint.card
    is_repeat = (place.parent / CONFIG_FILE).is_file()
    model = f"{place.parent.name}-{place.name}" if is_repeat else place.name
    model, target = (
        re.sub(r"[^\w. -]", "-", name) for name in (model, target)
    )  # as a store takes names of models and tags
    tags = {f"{name}/{target}": f"{value:.4f}" for name, value in results.items()}
    tracker.version(
        model,
        checkpoint=checkpoint.directory,
        weights_sha256=checkpoint.sha256,
        parent_key=card.run_key,
        tags={"model": card.model.label, "trained_on": card.dataset} | tags,
    )
