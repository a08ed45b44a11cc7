"""A run that loses all machines and disks ends like an uninterrupted run: the bucket has all that
it needs."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.checkpoints.files import TrainerState
from pretrain.checkpoints.writer import Saver
from tests import training as trainings
from tests.data_prep.stock import forget_credentials, s3_server
from tests.faults.test_interrupted_training import assert_same_bits, logged_losses
from tests.moments import Strike
from tests.training import Run, finish, kill, write_config

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

WORDS = (
    "train.duration=20 steps",
    "train.eval_every=8 steps",
    "checkpoint.every=3 steps",
    "tracking.enabled=true",
    "tracking.peak_teraflops=1",
    "train.log_every_steps=2",
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    forget_credentials(monkeypatch)
    (tmp_path / "empty").mkdir()
    with s3_server(tmp_path / "empty") as options:
        yield options


def on_its_own_disk(program: str, words: list[str], strike: Strike | None) -> int:
    """Run each rank as a node with its own directory. Every checkpoint waits for its upload, so a
    strike's moment determines the bucket's content."""
    rank, really = os.environ["RANK"], Saver.save
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words = [f"{word}/disk-{rank}/run" if word.startswith("run_dir=") else word for word in words]

    def save(saver: Saver, state: TrainerState, *, is_last: bool = False) -> None:
        really(saver, state, is_last=is_last)
        if saver.writer.uploader is not None and not is_last:
            assert saver.writer.make_room(timeout_s=20) and saver.writer.uploader.wait(20)

    Saver.save = save  # type: ignore[method-assign]
    return trainings.main(program, words, strike)


def test_every_disk_is_lost_twice_and_the_bits_are_those_of_an_undisturbed_run(
    shapes: Path, tmp_path: Path, store: str
) -> None:
    """First killed with all disks lost, then stopped with one outdated disk left, then finished on
    another machine."""
    config, undisturbed = write_config(tmp_path, dataset=shapes), tmp_path / "undisturbed"
    words = [str(config), *WORDS]
    finish(Run(["train", *words, f"run_dir={undisturbed}"], ranks=2, journal_only=True))
    with_remote = [
        *words,
        "checkpoint.remote=s3://pictures/runs/mine",
        f"checkpoint.remote_storage={store}",
    ]

    def life(place: str, strike: Strike | None = None) -> Run:
        target, strikes = (
            "tests.faults.test_lost_disks:on_its_own_disk",
            {0: strike} if strike else {},
        )
        given = ["train", *with_remote, f"run_dir={tmp_path / place}"]
        return Run(given, ranks=2, journal_only=True, target=target, strikes=strikes)

    killed = life("first", Strike(tmp_path / "first", 1, step=9))
    killed.ranks[0].join(120)
    kill(killed)
    identity = (tmp_path / "first/disk-0/run/tracking/identity.json").read_text()
    shutil.rmtree(tmp_path / "first")
    said = finish(life("second", Strike(tmp_path / "second", 1, step=14, signal=signal.SIGTERM)))
    assert "run: resuming from step-00000008" in said and "stopped with a checkpoint" in said
    shutil.rmtree(tmp_path / "second" / "disk-0")
    said = finish(life("second"))
    assert "run: resuming from step-00000014" in said or "run: resuming from step-00000015" in said
    run_dir = tmp_path / "second" / "disk-0" / "run"
    assert_same_bits(run_dir, undisturbed)
    assert (
        logged_losses(run_dir) == logged_losses(undisturbed) and len(logged_losses(run_dir)) == 10
    )
    assert (run_dir / "tracking/identity.json").read_text() == identity.replace(
        "/first/", "/second/"
    )
    whole = fetched(store, tmp_path / "copy")
    assert_same_bits(whole, undisturbed)
    assert json.loads((whole / "result.json").read_text())["step"] == 20
    written = [
        path.read_bytes()
        for place in (tmp_path / "second", whole)
        for path in place.rglob("*")
        if path.is_file()
    ]
    assert len(written) > 20 and not [content for content in written if b"secret-word" in content]
    assert "secret-word" not in said


def fetched(store: str, place: Path) -> Path:
    """Copy the remote with the bucket's own client. Return the copy's path."""
    import boto3

    options = json.loads(store)
    keys = {
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        "region_name": "us-east-1",
    }
    bucket = boto3.resource("s3", endpoint_url=options["endpoint_url"], **keys).Bucket("pictures")
    for found in bucket.objects.filter(Prefix="runs/mine/"):
        path = place / found.key.removeprefix("runs/mine/")
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.download_file(found.key, str(path))
    return place
