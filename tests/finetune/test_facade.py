"""`import wide_mlps` has the packages' names and types, and imports torch only if needed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import wide_mlps
from finetune.predict.predict import Predictor
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.data.torch_dataset import Shards
from pretrain.models.build import build
from pretrain.models.listing import list_models
from tests.data_prep.samples import picture
from tests.ranks import REPOSITORY

USER = """
from typing import assert_type

import torch
from PIL import Image

import wide_mlps

assert_type(wide_mlps.list_models("mixer_*"), list[str])
image, label = wide_mlps.Dataset("data/mine", "train")[0]
assert_type(label, int)
loader = wide_mlps.ShardLoader(wide_mlps.ShardBatches("data/mine", "train", batch_size=64))
assert_type(loader.dataset.epoch, int)
model = wide_mlps.create_model("mixer_ss_w", num_classes=10, depth=4)
torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = wide_mlps.load_checkpoint("runs/mine")
assert_type(checkpoint.card.classes, tuple[str, ...])
assert_type(wide_mlps.load_model(checkpoint).training, bool)
predictor = wide_mlps.Predictor.open(checkpoint)
with Image.open("photo.jpg") as opened:
    assert_type(wide_mlps.predict(predictor, [opened]), torch.Tensor)
    assert_type(wide_mlps.extract_features("runs/mine", [opened]), torch.Tensor)
wide_mlps.create_model(7)  # type: ignore[arg-type]
wide_mlps.load_model(7)  # type: ignore[arg-type]
"""


def images() -> list[Image.Image]:
    return [picture(seed=seed, width=30) for seed in range(3)]


def test_predictions_features_and_models_are_those_of_the_packages(folder: Path) -> None:
    predictor = Predictor.open(folder)
    logits, features = predictor.answer(predictor.batch(images()))
    for weights in (folder, str(folder), Checkpoint.open(folder), predictor):
        assert torch.equal(wide_mlps.predict(weights, images()), logits.softmax(dim=1))
        assert torch.equal(wide_mlps.extract_features(weights, images()), features)
    checkpoint = wide_mlps.load_checkpoint(folder)
    assert checkpoint.sha256 == Checkpoint.open(folder).sha256
    expected = load_model(checkpoint).state_dict()
    for source in (folder, checkpoint):
        model = wide_mlps.load_model(source)
        assert not model.training and model.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_models_and_datasets_are_those_of_the_packages(shapes: Path) -> None:
    names = wide_mlps.list_models("mixer_s*")
    assert names == [row.name for row in list_models(match="mixer_s*")[0]]
    made: list[Any] = [
        function("mixer_ss_w", num_classes=3, image_size=16, seed=1, depth=2).state_dict()
        for function in (wide_mlps.create_model, build)
    ]
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
    ours, theirs = wide_mlps.Dataset(shapes, "val"), Shards(shapes, "val")
    assert torch.equal(ours[5][0], theirs[5][0]) and ours[5][1] == theirs[5][1]


def test_every_name_exists_and_no_other() -> None:
    assert set(wide_mlps.__all__) <= {*dir(wide_mlps)}
    for name in wide_mlps.__all__:
        assert getattr(wide_mlps, name) is not None
    with pytest.raises(AttributeError):
        wide_mlps.create_dataset  # noqa: B018
    text = (REPOSITORY / "wide_mlps/__init__.py").read_text()
    assert len(text) <= 8000


@pytest.mark.processes
def test_the_import_and_the_list_of_models_do_not_import_torch() -> None:
    code = (
        "import sys, wide_mlps; wide_mlps.list_models(); print({*sys.modules} & {'torch', 'timm'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.nightly
def test_types_reach_a_users_program(tmp_path: Path) -> None:
    """Unused `type: ignore` comments are errors, so names without types fail."""
    (tmp_path / "program.py").write_text(USER)
    words = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "program.py")]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
