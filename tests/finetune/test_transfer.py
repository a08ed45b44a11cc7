"""Tune from a real pretraining checkpoint: exact on any number of ranks, resumed = uninterrupted."""

from pathlib import Path

import pytest
import torch

from data_prep.cli import main as data_prep
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.checkpoints.run import list_checkpoints
from tests.conftest import Command
from tests.training import final_state, finish, start, write_config

TUNE = """
augment: {crop_scale: [0.7, 1.0]}
optimizer: {name: sgd, lr: 1e-2, head_lr_scale: 5.0, weight_decay: 1e-4}
train: {duration: 24 steps, global_batch_size: 8, local_batch_size: 4, eval_every: 12 steps}
checkpoint: {every: 6 steps}
tracking: {enabled: false}
"""


@pytest.fixture(scope="module")
def pretrained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    finish(start(write_config(folder, dataset=shapes), folder / "run", "train.duration=40 steps", ranks=1))
    return folder / "run"


@pytest.fixture(scope="module")
def tune_config(pretrained: Path, other_shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune") / "tune.yaml"
    path.write_text(f"pretrained: {pretrained}\ndata: {{dataset: {other_shapes}}}\n{TUNE}")
    return path


def test_tuning_on_two_ranks_is_tuning_on_one(command: Command, tune_config: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        done = command("finetune", "tune", str(tune_config), f"run_dir={tmp_path}/{ranks}", "--ranks", str(ranks))
        assert done.returncode == 0, done.stderr
    one, two = final_state(tmp_path / "1"), final_state(tmp_path / "2")
    assert one.keys() == two.keys() and one["head.weight"].shape == (5, 32)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


def test_tuning_starts_from_the_checkpoint_and_scratch_does_not(
    command: Command, tune_config: Path, pretrained: Path, tmp_path: Path
) -> None:
    """One step at a vanishing learning rate leaves the body where it started."""
    body = load_weights(Checkpoint.open(pretrained))["stem.weight"]
    for init in ("pretrained", "scratch"):
        settings = [f"run_dir={tmp_path}/{init}", f"init={init}", "optimizer.lr=1e-12", "train.duration=1 steps"]
        done = command("finetune", "tune", str(tune_config), *settings)
        assert done.returncode == 0, done.stderr
    near, far = (final_state(tmp_path / init)["stem.weight"] for init in ("pretrained", "scratch"))
    torch.testing.assert_close(near, body, rtol=0, atol=1e-6)
    assert (far - body).abs().max() > 1e-2


@pytest.mark.parametrize("encoding", ["raw", "keep"])
def test_a_dataset_of_another_size_is_fed_at_the_checkpoints(
    command: Command, tune_config: Path, other_shapes: Path, tmp_path: Path, encoding: str
) -> None:
    source = f"source.path={other_shapes}-images"
    words = ["image_size=24", "num_workers=1"] if encoding == "raw" else ["num_workers=1"]
    out = tmp_path / "dataset"
    assert data_prep(["build", "--source", "folder", "--out", str(out), source, f"encoding={encoding}", *words]) == 0
    settings = [f"run_dir={tmp_path}/run", f"data.dataset={out}", "train.duration=2 steps"]
    done = command("finetune", "tune", str(tune_config), *settings)
    assert done.returncode == 0, done.stderr
    card = Checkpoint.open(tmp_path / "run").card
    assert (card.image_size, card.stored_crop, card.stored_interpolation) == (16, "center", "bicubic")


def test_an_interrupted_tuning_ends_at_the_same_bits(command: Command, tune_config: Path, tmp_path: Path) -> None:
    straight = command("finetune", "tune", str(tune_config), f"run_dir={tmp_path}/straight")
    assert straight.returncode == 0, straight.stderr
    again = command("finetune", "tune", str(tune_config), f"run_dir={tmp_path}/again")
    assert again.returncode == 0, again.stderr
    (tmp_path / "again" / "result.json").unlink()  # as if killed after the checkpoint before the last
    newest = list_checkpoints(tmp_path / "again")[-1]
    for file in newest.iterdir():
        file.unlink()
    resumed = command("finetune", "tune", str(tune_config), f"run_dir={tmp_path}/again")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from step-00000018" in resumed.stdout
    one, two = final_state(tmp_path / "straight"), final_state(tmp_path / "again")
    assert all(torch.equal(one[name], two[name]) for name in one)
