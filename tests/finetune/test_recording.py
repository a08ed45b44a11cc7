"""A short run says truthfully how it ended, and whose child it is."""

import json
import os
import signal
from pathlib import Path

import pytest

from data_prep.manifest import load_manifest
from finetune.probe.config import ProbeSettings
from finetune.session import recorded, register
from finetune.verbs import end_on_signals
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import TrackingSettings
from pretrain.data.datasets import Part
from pretrain.ranks.world import World
from tests.finetune.tiny import write_folder


@pytest.fixture(autouse=True)
def no_deliverer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.tracking.tracker.sys.executable", "/bin/true")


@pytest.fixture
def weights(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(write_folder(tmp_path / "a:folder", dataset=None, run_key="the maker's"))


def journal(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "tracking" / "journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("ending", "status"), [(None, "FINISHED"), (OSError("disk"), "FAILED"), (signal.SIGTERM, "KILLED")])
def test_the_status_is_how_it_ended(
    shapes: Path, weights: Checkpoint, tmp_path: Path, ending: OSError | signal.Signals | None, status: str
) -> None:
    run_dir, before = (tmp_path / "run", {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)})
    settings = ProbeSettings(run_dir=str(run_dir), dataset=str(shapes), tracking=TrackingSettings(uri="sqlite:///x.db"))

    def run() -> None:
        with recorded(
            settings,
            run_dir=run_dir,
            ranks=settings.ranks,
            tracking=settings.tracking,
            world=World(0, 0, 1),
            used=[(Part(shapes, load_manifest(shapes), "val"), "evaluation")],
            checkpoint=weights,
            tags={"task": "probe"},
        ) as tracker:
            register(tracker, weights, {"probe/top1": 0.5}, target="my: data/set")
            if isinstance(ending, OSError):
                raise ending
            if ending is not None:
                os.kill(os.getpid(), ending)

    end_on_signals()
    try:
        if ending is None:
            run()
        else:
            with pytest.raises(OSError if isinstance(ending, OSError) else KeyboardInterrupt):
                run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    events = journal(run_dir)
    assert (events[0]["event"], events[-1]["event"], events[-1]["status"]) == ("start", "end", status)
    (told,) = (event for event in events if event["event"] == "version")
    assert told["model"] == "a-folder" and told["parent_key"] == "the maker's" and told["weights_sha256"]
    assert told["tags"] == {"model": "B-1/Wi-12", "trained_on": "none", "probe/top1/my- data-set": "0.5000"}
    identity = json.loads((run_dir / "tracking" / "identity.json").read_text())
    assert identity["parent_key"] == "the maker's" and identity["uri"] == "sqlite:///x.db"
