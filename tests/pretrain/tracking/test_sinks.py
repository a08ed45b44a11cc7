"""TensorBoard and Weights & Biases get the event log's contents, according to their own checksums
and message formats."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pretrain.tracking.delivery import deliver_while_training, write_sinks
from pretrain.tracking.sinks import Sinks
from pretrain.tracking.tracker import Journal, RunIdentity
from tests.moments import wait_until

pytestmark = pytest.mark.processes


def read_events(path: Path) -> list[Any]:
    """Return TensorBoard's events, without the version of the file."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    events = loader.LegacyEventFileLoader(str(path)).Load()
    return [event for event in events if event.HasField("summary")]


pytest.importorskip("tensorboardX")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    RunIdentity.of(run_dir, experiment="tests", uri="file-of-nobody")
    journal = Journal(run_dir / "tracking" / "journal.jsonl")
    Image.new("RGB", (4, 3), "red").save(tmp_path / "first.png")
    journal.append({"event": "start", "params": {"optimizer.lr": 0.1}, "tags": {}})
    for step in (1, 300):
        journal.append(
            {"event": "metrics", "step": step, "values": {"train/loss": 1 / step, "train/lr": 0.5}}
        )
    journal.append(
        {"event": "image", "path": str(tmp_path / "first.png"), "key": "first", "step": 7}
    )
    journal.append(
        {"event": "metrics", "step": 2, "values": {"system/gpu": 5.0}}
    )  # with its own numbering
    journal.append({"event": "end", "status": "FINISHED"})
    assert journal.close(timeout_s=30)
    return run_dir


def test_tensorboard_finds_every_figure_and_picture_however_often_it_is_written(
    run_dir: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert write_sinks(run_dir, "tensorboard") == 6
    (path,) = (run_dir / "tracking/tensorboard").iterdir()
    events = read_events(path)
    found = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
        if not value.image.ByteSize()
    ]
    assert found == [
        (1, "train/loss", 1.0),
        (1, "train/lr", 0.5),
        (300, "train/loss", pytest.approx(1 / 300)),
        (300, "train/lr", 0.5),
        (2, "system/gpu", 5.0),
    ]
    (picture,) = (
        value.image for event in events for value in event.summary.value if value.image.ByteSize()
    )
    assert (picture.width, picture.height) == (4, 3)
    with Image.open(io.BytesIO(picture.encoded_image_string)) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


def test_what_comes_later_is_added(run_dir: Path) -> None:
    journal_path = run_dir / "tracking/journal.jsonl"
    lines = journal_path.read_bytes().splitlines(keepends=True)
    journal_path.write_bytes(b"".join(lines[:2]) + lines[2][:9])  # an incomplete last line
    sinks = Sinks(run_dir, ["tensorboard"])
    assert sinks.write() == 2
    journal_path.write_bytes(b"".join(lines))
    assert [sinks.write(), sinks.write()] == [4, 0]
    sinks.close()
    (path,) = (run_dir / "tracking/tensorboard").iterdir()
    assert [event.step for event in read_events(path)] == [1, 1, 300, 300, 7, 2]


def test_a_dead_store_holds_up_no_sink(run_dir: Path, tmp_path: Path) -> None:
    with open(tmp_path / "ended", "wb"):
        pass
    with open(tmp_path / "ended", "rb") as trainer:
        assert (
            deliver_while_training(run_dir, trainer, close_timeout_s=0, sinks=["tensorboard"]) == 1
        )
    (path,) = (run_dir / "tracking/tensorboard").iterdir()
    assert len(read_events(path)) == 6


def test_wandb_holds_every_figure_in_an_offline_run(run_dir: Path) -> None:
    for _ in range(2):
        assert write_sinks(run_dir, "wandb") == 6
    (path,) = (run_dir / "tracking/wandb").rglob("*.wandb")
    # wandb's service writes in its own process; the package cannot read its files in Python
    wait_until(lambda: b"system" in path.read_bytes())
    content = path.read_bytes()
    assert all(name in content for name in (b"tests", b"run", b"loss", b"lr", b"gpu"))
