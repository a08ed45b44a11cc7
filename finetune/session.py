"""Setup of a short run (probe, knn, evaluate): process group, frozen model, and MLflow record.

A short run has no checkpoints, so it starts from the beginning after an interruption. If a signal
ends the run, its status is KILLED.
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
from data_prep.publish import hash_of_json
from data_prep.settings import flatten
from finetune.config import ChannelStats, InputFormat, ShortRunSettings
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import CONFIG_FILE, claim
from pretrain.config import AugmentSettings, TrainingSettings
from pretrain.data.datasets import Part
from pretrain.engine.step import keep_freed_memory, working_in
from pretrain.models.build import pooled_features
from pretrain.models.image_model import ImageModel
from pretrain.ranks.collectives import is_distributed, same_on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import Interrupted, StopFlag
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
    used: Sequence[tuple[Part, str]],
    checkpoint: Checkpoint | None,
    task: str,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[tuple[torch.device, Tracker]]:
    """Enter a run on all ranks, and yield the device and the tracker. If a rank exits, hangs or
    fails, the other ranks end. Fail if `facts` (default: weights) differ between ranks."""
    device = start_accelerator(world, timeout_s=settings.ranks.timeout_s).device
    identity = hash_of_json(facts) if facts else checkpoint.model_sha256 if checkpoint else "0"
    run_dir = Path(cast(Any, settings).run_dir)
    with watched(world, settings.ranks, device=device) as heartbeat:
        if not same_on_all_ranks(int(identity[:15], 16), device=device):
            place = str(checkpoint.directory if checkpoint else run_dir)
            problem = (
                "the ranks read different weights, data or settings; its run may be training now"
            )
            fix = "choose one checkpoint, RUN/checkpoints/step-N"
            raise UserError(place, problem, fix, code="mismatch")
        with recorded(
            settings, world, used=used, checkpoint=checkpoint, tags={"task": task}, facts=facts
        ) as tracker:
            heartbeat.watch(run_dir / "stacks")
            try:
                yield device, tracker
            except BaseException as error:
                heartbeat.blame(error)  # first, because closing the tracker takes time
                raise


def start_accelerator(
    world: World, *, precision: str = "fp32", timeout_s: float = 600.0
) -> Accelerator:
    """Join all ranks in a process group. Without a GPU, accelerate needs `cpu=True` for this."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout_s)),
            # buffers are constant (permutations, masks) or averaged by `average_over_ranks`
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    seen = accelerator.num_processes
    if seen != world.num_ranks:
        raise RuntimeError(
            f"accelerate found {seen} processes instead of {world.num_ranks};"
            " unset the variables ACCELERATE_*"
        )
    return accelerator


class PatientGroup:
    """Process group without a timeout, for long waits on other ranks.

    The heartbeat (watchdog.py) finds lost ranks. All ranks must create the group together, before
    the work.
    """

    def __init__(self) -> None:
        self._group = None
        if is_distributed():
            self._group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)

    def all_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        assert not values.is_cuda
        if self._group is not None:
            with PROGRESS.waiting("waiting for the other ranks"):
                dist.all_reduce(values, group=self._group)
        return values

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_sum(torch.tensor(float(flag))) > 0)

    def gather(self, own: Any) -> list[Any] | None:
        """Return the objects of all ranks in rank order on the first rank, None on other ranks."""
        if self._group is None:
            return [own]
        found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with PROGRESS.waiting("waiting for the other ranks"):
            dist.gather_object(own, found, dst=0, group=self._group)
        return found


@dataclass(frozen=True, kw_only=True)
class Backbone(InputFormat):
    """A frozen model that computes features."""

    extract: Callable[[Tensor], Tensor]
    """Function from normalized images (B, 3, H, W) to features (B, features)."""
    model: ImageModel | None = None

    def augmentation(
        self, settings: AugmentSettings | None = None, *, seed: int = 0, device: torch.device
    ) -> Augmentation:
        return Augmentation(
            (settings or AugmentSettings()).fed_as(self.interpolation, self.eval_crop),
            seed=seed,
            image_size=self.image_size,
            normalization=Normalization(*self.normalization),
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
    """Load a frozen model. Without a checkpoint, features are the normalized pixels."""
    inputs = InputFormat.of(
        checkpoint, manifest, image_size=image_size, channel_stats=channel_stats
    )
    if checkpoint is None:
        return Backbone(**vars(inputs), extract=lambda images: images.flatten(1))
    model = load_model(checkpoint).to(device).eval()
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"

    def extract(images_BCHW: Tensor) -> Tensor:
        with (
            working_in(precision),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            return pooled_features(model, images_BCHW).float()

    return Backbone(**vars(replace(inputs, precision=precision)), extract=extract, model=model)


@contextmanager
def recorded(
    settings: ShortRunSettings | TrainingSettings,
    world: World,
    *,
    used: Sequence[tuple[Part, str]],
    checkpoint: Checkpoint | None,
    tags: dict[str, str],
    stop: StopFlag | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[Tracker]:
    """Lock the run directory, and record the run in MLflow as a child of the run that trained the
    weights.

    All ranks enter this context; only the first rank records. `used`: splits of one dataset, each
    with its use, such as "training". `tags` must contain "task".
    """
    if not world.is_first:
        yield Tracker(None, params={}, tags={})
        return
    run_dir, tracking = Path(cast(Any, settings).run_dir), settings.tracking
    ranks = getattr(settings, "ranks", None) or cast(Any, settings).engine
    card, manifest = checkpoint.card if checkpoint else None, used[0][0].manifest
    source = checkpoint if tags.get("init") != "scratch" else None
    with claim(run_dir, settings, ranks=ranks, stop=stop, facts=facts):
        task = cast(RecordedTask, tags["task"].removesuffix("_seeds"))
        seed = getattr(settings, "seed", None)
        write_record(run_dir, task, settings.record, seed=seed, weights=source)
        RunIdentity.of(
            run_dir,
            experiment=tracking.experiment,
            uri=tracking.uri,
            parent_key=card.run_key or None if card else None,
            parent_dir=checkpoint.run_dir if checkpoint else None,
        )
        model, name = "pixels", "without a model"
        if checkpoint and card:
            model, name = card.model.label, f"of `{checkpoint.name}`"
        splits = " and ".join(f"{part.split} ({part.num_samples:,} images)" for part, _ in used)
        title = f"**{tags['task']}** on **{manifest.name}**, {splits}: {model}, {name}"
        tags = {"origin": card.origin if card else ""} | tags
        tags |= run_tags(dataset=manifest.name, target=target_of(manifest), model=model)
        params = flatten(settings.model_dump(mode="json"))
        tracker = Tracker(
            run_dir,
            params=params | {"content_hash": manifest.content_hash},
            tags=with_note(tags, title=title, run_dir=run_dir),
            datasets=tuple(dataset_of(part, context) for part, context in used),
            settings=tracking,
        )
        tracker.artifact(run_dir / CONFIG_FILE)
        try:
            yield tracker
        except BaseException as error:
            is_killed = isinstance(error, KeyboardInterrupt | Interrupted)
            tracker.close("KILLED" if is_killed else "FAILED")
            raise
        tracker.close("FINISHED")


def register(
    tracker: Tracker, checkpoint: Checkpoint, results: Mapping[str, float], *, target: str
) -> None:
    """Write `results` as tags of the checkpoint's version in MLflow's model registry."""
    place, card = (checkpoint.run_dir or checkpoint.home).absolute(), checkpoint.card
    is_repeat = (place.parent / CONFIG_FILE).is_file()
    name = f"{place.parent.name}-{place.name}" if is_repeat else place.name
    model, target = (re.sub(r"[^\w. -]", "-", each) for each in (name, target))
    tags = {f"{name}/{target}": f"{value:.4f}" for name, value in results.items()}
    tracker.version(
        model,
        checkpoint=checkpoint.directory,
        weights_sha256=checkpoint.sha256,
        parent_key=card.run_key,
        tags={"model": card.model.label, "trained_on": card.dataset} | tags,
    )
