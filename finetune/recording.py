"""A probe, an evaluation or another short run in the books: its directory, its journal, its true end.

Such a run has no checkpoints: it ends or it is begun anew. What ends it as Ctrl-C does
(`verbs.end_on_signals`) makes its status KILLED.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_prep.manifest import Manifest
from data_prep.settings import Settings
from pretrain.card import ModelCard, hash_of_weights, parse_card, resolve
from pretrain.config import TrackingSettings
from pretrain.page import git_commit, shown_command, target_of
from pretrain.preemption import Interrupted
from pretrain.run import CONFIG_FILE, claim, flatten, owner_of
from pretrain.tracker import RunIdentity, Tracker
from pretrain.world import World


@dataclass(frozen=True)
class Weights:
    """What is measured, and where it lies."""

    checkpoint: Path
    sha256: str
    card: ModelCard

    @classmethod
    def at(cls, pretrained: str) -> "Weights":
        checkpoint = resolve(Path(pretrained))
        return cls(checkpoint, hash_of_weights(checkpoint), parse_card(checkpoint))

    @property
    def run_dir(self) -> Path | None:
        """The run that they belong to; None for a bare folder."""
        return owner_of(self.checkpoint)

    @property
    def name(self) -> str:
        """Of the registered model."""
        return re.sub(r"[/:]", "-", (self.run_dir or self.checkpoint).name)

    def tell(self, tracker: Tracker, results: Mapping[str, float], *, target: str) -> None:
        """Results of a task on a dataset stand as tags of the weights' version in the model registry."""
        tags = {f"{name}/{target}": f"{value:.4f}" for name, value in results.items()}
        tracker.version(
            self.name,
            checkpoint=self.checkpoint,
            weights_sha256=self.sha256,
            parent_key=self.card.run_key,
            tags={"model": self.card.model.label, "trained_on": self.card.dataset} | tags,
        )


@contextmanager
def recorded(
    settings: Settings,
    *,
    run_dir: Path,
    tracking: TrackingSettings,
    world: World,
    manifest: Manifest,
    weights: Weights | None,
    tags: dict[str, str],
) -> Iterator[Tracker]:
    """Entered by all ranks; the first one's tracker is real. The run is a child of the one that made the weights; None: there are
    none. `tags` name the `task`."""
    if not world.is_first:
        yield Tracker(None, params={}, tags={})
        return
    with claim(run_dir, settings, is_first=True):
        tracker = _open(settings, run_dir, tracking, manifest, weights, tags)
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
    manifest: Manifest,
    weights: Weights | None,
    tags: dict[str, str],
) -> Tracker:
    RunIdentity.of(
        run_dir,
        experiment=tracking.experiment,
        uri=tracking.uri,
        parent_key=weights.card.run_key or None if weights else None,
        parent_dir=weights.run_dir if weights else None,
    )
    params = flatten(settings.model_dump(mode="json")) | {"manifest_hash": manifest.hash}
    source = {
        "mlflow.source.name": shown_command(sys.argv),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git_commit(),
        "dataset": manifest.name,
        "target": target_of(manifest),
        "model": weights.card.model.label if weights else "pixels",
        "origin": weights.card.origin if weights else "",
    }
    tracker = Tracker(run_dir if tracking.enabled else None, params=params, tags=source | tags)
    tracker.artifact(run_dir / CONFIG_FILE)
    return tracker
