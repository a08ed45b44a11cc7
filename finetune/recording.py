"""A probe, an evaluation or another short run in the books: its directory, its journal, its true end.

Such a run has no checkpoints: it ends or it is begun anew. What ends it as Ctrl-C does
(`verbs.end_on_signals`) makes its status KILLED.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.manifest import Manifest
from data_prep.settings import Settings
from pretrain.config import TrackingSettings
from pretrain.page import git_commit, shown_command
from pretrain.run import CONFIG_FILE, claim, flatten
from pretrain.tracker import RunIdentity, Tracker
from pretrain.world import World


@contextmanager
def recorded(
    settings: Settings,
    *,
    run_dir: Path,
    tracking: TrackingSettings,
    world: World,
    manifest: Manifest,
    parent_key: str | None,
    tags: dict[str, str],
) -> Iterator[Tracker]:
    """Entered by all ranks; the first one's tracker is real. `parent_key`: of the run that the weights come from. `tags` name the
    `task` and the `model`."""
    if not world.is_first:
        yield Tracker(None, params={}, tags={})
        return
    with claim(run_dir, settings, is_first=True):
        tracker = _open(settings, run_dir, tracking, manifest, parent_key, tags)
        try:
            yield tracker
        except BaseException as error:
            tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        tracker.close("FINISHED")


def _open(
    settings: Settings,
    run_dir: Path,
    tracking: TrackingSettings,
    manifest: Manifest,
    parent_key: str | None,
    tags: dict[str, str],
) -> Tracker:
    RunIdentity.of(run_dir, experiment=tracking.experiment, uri=tracking.uri, parent_key=parent_key or None)
    params = flatten(settings.model_dump(mode="json")) | {"manifest_hash": manifest.hash}
    source = {
        "mlflow.source.name": shown_command(sys.argv),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git_commit(),
        "dataset": manifest.name,
    }
    tracker = Tracker(run_dir if tracking.enabled else None, params=params, tags=source | tags)
    tracker.artifact(run_dir / CONFIG_FILE)
    return tracker
