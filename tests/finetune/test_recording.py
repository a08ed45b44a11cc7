"""A short run records its true status and its parent."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from data_prep.manifest import load_manifest
from finetune.probe.config import FeatureDataSettings, ProbeSettings
from finetune.session import recorded, register
from finetune.verbs import end_on_signals
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import TrackingSettings
from pretrain.data.datasets import Part
from pretrain.ranks.world import World
from tests.conftest import Patch
from tests.finetune.tiny import write_folder


@pytest.mark.parametrize(
    ("ending", "status"),
    [(None, "FINISHED"), (OSError("disk"), "FAILED"), (signal.SIGTERM, "KILLED")],
)
def test_the_status_is_how_it_ended(
    shapes: Path,
    tmp_path: Path,
    ending: OSError | signal.Signals | None,
    status: str,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(
        "pretrain.tracking.tracker.sys.executable", "/bin/true"
    )  # nothing is delivered
    weights = Checkpoint.open(
        write_folder(tmp_path / "a:folder", dataset=None, run_key="the maker's")
    )
    run_dir = tmp_path / "run"
    settings = ProbeSettings(
        run_dir=str(run_dir),
        data=FeatureDataSettings(dataset=str(shapes)),
        tracking=TrackingSettings(uri="sqlite:///x.db"),
    )
    end_on_signals("nothing is saved")
    with (
        pytest.raises((OSError, KeyboardInterrupt)) if ending is not None else nullcontext(),
        recorded(
            settings,
            World(0, 0, 1),
            used=[(Part(shapes, load_manifest(shapes), "val"), "evaluation")],
            checkpoint=weights,
            tags={"task": "probe"},
        ) as tracker,
    ):
        register(tracker, weights, {"probe/top1": 0.5}, target="my: data/set")
        if isinstance(ending, OSError):
            raise ending
        if ending is not None:
            os.kill(os.getpid(), ending)
    events = [
        json.loads(line)
        for line in (run_dir / "tracking" / "journal.jsonl").read_text().splitlines()
    ]
    assert (events[0]["event"], events[-1]["event"], events[-1]["status"]) == (
        "start",
        "end",
        status,
    )
    (told,) = (event for event in events if event["event"] == "version")
    assert (
        told["model"] == "a-folder"
        and told["parent_key"] == "the maker's"
        and told["weights_sha256"]
    )
    assert told["tags"] == {
        "model": "B-1/Wi-12",
        "trained_on": "none",
        "probe/top1/my- data-set": "0.5000",
    }
    identity = json.loads((run_dir / "tracking" / "identity.json").read_text())
    assert identity["parent_key"] == "the maker's" and identity["uri"] == "sqlite:///x.db"
