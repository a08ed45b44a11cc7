"""A probe, an evaluation or another short run in the books: its directory, its journal, its true end.

Such a run has no checkpoints: it ends or it is begun anew. What ends it as Ctrl-C does
(`verbs.end_on_signals`) makes its status KILLED.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_prep.settings import Settings
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import CONFIG_FILE, Patience, claim, flatten
from pretrain.config import TrackingSettings
from pretrain.data.datasets import Part
from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import dataset_of, run_tags, target_of, with_note
from pretrain.tracking.tracker import RunIdentity, Tracker


@dataclass(frozen=True)
class Weights:
    """What is measured, and where it lies."""

    opened: Checkpoint

    @classmethod
    def at(cls, pretrained: str) -> "Weights":
        return cls(Checkpoint.open(pretrained))

    @property
    def checkpoint(self) -> Path:
        return self.opened.directory

    @property
    def sha256(self) -> str:
        return self.opened.sha256

    @property
    def card(self) -> ModelCard:
        return self.opened.card

    @property
    def run_dir(self) -> Path | None:
        """The run that they belong to; None for a bare folder."""
        return self.opened.run_dir

    @property
    def name(self) -> str:
        """Of the registered model; of one of several seeds with the name of their group."""
        place = (self.run_dir or self.checkpoint).absolute()
        is_repeat = (place.parent / CONFIG_FILE).is_file()
        return _storable(f"{place.parent.name}-{place.name}" if is_repeat else place.name)

    def tell(self, tracker: Tracker, results: Mapping[str, float], *, target: str) -> None:
        """Results of a task on a dataset stand as tags of the weights' version in the model registry."""
        tags = {f"{name}/{_storable(target)}": f"{value:.4f}" for name, value in results.items()}
        tracker.version(
            self.name,
            checkpoint=self.checkpoint,
            weights_sha256=self.sha256,
            parent_key=self.card.run_key,
            tags={"model": self.card.model.label, "trained_on": self.card.dataset} | tags,
        )


def _storable(name: str) -> str:
    """As a store takes names of models and tags."""
    return re.sub(r"[^\w. -]", "-", name)


@contextmanager
def recorded(
    settings: Settings,
    *,
    run_dir: Path,
    patience: Patience,
    tracking: TrackingSettings,
    world: World,
    used: Sequence[tuple[Part, str]],
    weights: Weights | None,
    tags: dict[str, str],
    stop: StopFlag | None = None,
) -> Iterator[Tracker]:
    """Entered by all ranks; the first one's tracker is real. The run is a child of the one that made the weights; None: there are
    none. `used`: splits of one dataset, and for what (training, evaluation). `tags` name the `task`."""
    if not world.is_first:
        yield Tracker(None, params={}, tags={})
        return
    with claim(run_dir, settings, is_first=True, patience=patience, stop=stop):
        tracker = _open(settings, run_dir, tracking, used, weights, tags)
        try:
            yield tracker
        except BaseException as error:
            tracker.close("KILLED" if isinstance(error, KeyboardInterrupt | Interrupted) else "FAILED")
            raise
        tracker.close("FINISHED")


def _open(
    settings: Settings,
    run_dir: Path,
    tracking: TrackingSettings,
    used: Sequence[tuple[Part, str]],
    weights: Weights | None,
    tags: dict[str, str],
) -> Tracker:
    manifest = used[0][0].manifest
    RunIdentity.of(
        run_dir,
        experiment=tracking.experiment,
        uri=tracking.uri,
        parent_key=weights.card.run_key or None if weights else None,
        parent_dir=weights.run_dir if weights else None,
    )
    params = flatten(settings.model_dump(mode="json")) | {"content_hash": manifest.content_hash}
    model, origin = (weights.card.model.label, weights.card.origin) if weights else ("pixels", "")
    tags = run_tags(dataset=manifest.name, target=target_of(manifest), model=model) | {"origin": origin} | tags
    splits = " and ".join(f"{part.split} ({part.num_samples:,} pictures)" for part, _ in used)
    of = f"of `{weights.checkpoint.absolute()}`" if weights else "without a model"
    title = f"**{tags['task']}** on **{manifest.name}**, {splits}: {model}, {of}"
    tags = with_note(tags, title=title, run_dir=run_dir)
    datasets = tuple(dataset_of(part, context) for part, context in used)
    tracker = Tracker(run_dir if tracking.enabled else None, params=params, tags=tags, datasets=datasets)
    tracker.artifact(run_dir / CONFIG_FILE)
    return tracker
