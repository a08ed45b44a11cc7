"""The folder of `finetune import` serves every later stage, and has the facts of the file and its
options."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor
from torch.nn.functional import cross_entropy

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from analysis.matrices.filters import first_layer
from data_prep.manifest import load_manifest
from finetune.cli import main
from finetune.evaluate.config import Evaluation
from finetune.evaluate.evaluate import evaluate_checkpoint
from finetune.probe.probe import probe
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.data.reader import open_split
from pretrain.models.spec import MlpSpec
from pretrain.ranks.world import World
from tests.errors import printed_errors
from tests.finetune.test_foreign import Theirs
from tests.finetune.tiny import evaluation_settings, feature_settings

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def public_model() -> Theirs:
    torch.manual_seed(0)
    return Theirs(side=16, depth=1, num_classes=8).eval().requires_grad_(False)


def public_weights() -> dict[str, Tensor]:
    return public_model().state_dict()


def test_an_imported_folder_is_evaluated_probed_and_drawn(
    shapes: Path, other_shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = public_weights()
    file = tmp_path / "B-1_Wi-12_res_16_imagenet21_epochs_1_weights"
    out = tmp_path / "folder"
    torch.save({"state_dict": weights}, file)
    words = [
        "import",
        str(file),
        "--out",
        str(out),
        "--classes",
        str(shapes),
        "--name",
        "imagenet21",
    ]
    for _ in range(2):  # the second time nothing is left to do
        assert main(words) == 0
        said = capsys.readouterr().out
        assert f"{out}: B-1/Wi-10 of scaling_mlps, 16 px, 8 classes, 8,333 parameters" in said
        assert "crop=longer_side interpolation=area" in said
        assert "mean 0.485 0.456 0.406, std 0.229 0.224 0.225" in said
    card = Checkpoint.open(out).card
    assert card.dataset == "imagenet21" and card.fed_interpolation == "area"
    assert (card.stored_crop, card.stored_interpolation) == ("longer_side", "area")

    world = World(rank=0, local_rank=0, num_ranks=1)
    scores = evaluate_checkpoint(Evaluation.of(evaluation_settings(out, shapes, None)), world)
    assert scores is not None
    reader = open_split(shapes, load_manifest(shapes), "val")
    images_BHWC = reader.images(
        np.arange(reader.num_samples)
    ).float()  # integers from 0 to 255, as the public code expects
    logits = public_model()(((images_BHWC - 255 * MEAN) / (255 * STD)).permute(0, 3, 1, 2))
    labels = torch.from_numpy(reader.labels).long()
    assert scores["eval/loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-4)
    assert scores["eval/top1"] == pytest.approx(
        float((logits.argmax(1) == labels).float().mean()), abs=1e-6
    )

    result = probe(
        feature_settings(other_shapes, tmp_path, out, run_dir=str(tmp_path / "probe"), epochs=(2,)),
        world,
        Checkpoint.open(out),
    )
    assert result is not None and 0 <= result["test_top1"] <= 1
    card = Checkpoint.open(tmp_path / "probe").card
    assert (card.stored_crop, card.stored_interpolation, card.fed_interpolation) == (
        "center",
        "bicubic",
        "area",
    )
    layer = first_layer(Checkpoint.open(out))
    weight_NF, side = layer.weight_NF, layer.side
    assert torch.equal(weight_NF, weights["linear_in.weight"]) and side == 16


@pytest.mark.parametrize(
    ("name", "config", "words", "expected"),
    [
        ("B-1_res_16_cifar10_epochs_20_weights", {}, [], (0.4914, 0.2470)),
        ("w", {"architecture": "B_1", "dataset": "stl10"}, [], (0.4914, 0.2471)),
        ("w", {}, ["--mean", "0.1", "0.2", "0.3", "--std", "0.4", "0.5", "0.6"], (0.1, 0.4)),
    ],
)
def test_the_normalization_is_of_the_command_line_the_name_or_the_config(
    tmp_path: Path,
    name: str,
    config: dict[str, str],
    words: list[str],
    expected: tuple[float, float],
) -> None:
    torch.save(public_weights(), tmp_path / name)
    (tmp_path / "config.txt").write_text(json.dumps(config | {"act": "relu"} if config else config))
    assert main(["import", str(tmp_path / name), "--out", str(tmp_path / "out"), *words]) == 0
    card = Checkpoint.open(tmp_path / "out").card
    assert (card.channel_mean[0], card.channel_std[0]) == pytest.approx(expected, abs=1e-4)
    assert card.classes[:2] == ("class_00000", "class_00001") and len(card.classes) == 8
    assert isinstance(card.model, MlpSpec) and card.model.activation == (
        "relu" if config else "gelu"
    )


def test_a_timm_mixer_brings_its_own_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = MlpMixer(num_classes=2, img_size=16, patch_size=8, num_blocks=1, embed_dim=8).eval()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    words = ["import", str(tmp_path / "pytorch_model.bin"), "--out"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    card = Checkpoint.open(tmp_path / "plain").card
    assert (card.channel_mean, card.stored_crop, card.fed_interpolation) == (
        (0.5, 0.5, 0.5),
        None,
        "bicubic",
    )
    said = capsys.readouterr().out
    assert "activation: gelu (default" in said
    assert "timm's transform: interpolation bicubic, crop_pct 0.875" in said
    cfg = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0], "label_names": ["ant", "bee"]}
    cfg |= {"interpolation": "bilinear", "crop_pct": 0.9, "crop_mode": "squash"}
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "mixer_b16_224", "pretrained_cfg": cfg})
    )
    assert main([*words, str(tmp_path / "hub")]) == 0
    assert "from the config next to the file" in capsys.readouterr().out
    checkpoint = Checkpoint.open(tmp_path / "hub")
    card, ours = checkpoint.card, load_model(checkpoint)
    assert (card.channel_mean, card.channel_std, card.classes) == (
        (0.0,) * 3,
        (1.0,) * 3,
        ("ant", "bee"),
    )
    assert card.fed_interpolation == "bilinear"
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours.eval()(images), theirs(images))
    for folder, transform in (
        ("plain", ("bicubic", 0.875, "center")),
        ("hub", ("bilinear", 0.9, "squash")),
    ):
        timms = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True)
        found = timm.data.resolve_model_data_config(timms)
        assert (found["interpolation"], found["crop_pct"], found["crop_mode"]) == transform


def test_the_average_of_a_training_file_is_taken_unless_the_weights_as_trained_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = public_weights()
    average = {name: tensor / 2 for name, tensor in raw.items()}
    torch.save({"state_dict": raw, "state_dict_ema": average}, tmp_path / "w")
    for words, taken, said in (
        ([], average, "--weights raw:"),
        (["--weights", "raw"], raw, "--weights ema:"),
    ):
        out = tmp_path / f"out{len(words)}"
        assert main(["import", str(tmp_path / "w"), "--out", str(out), *words]) == 0
        assert said in capsys.readouterr().out
        checkpoint = Checkpoint.open(out)
        card, model = checkpoint.card, load_model(checkpoint)
        assert torch.equal(model.state_dict()["head.weight"], taken["linear_out.weight"])
        assert ("running average" in card.origin) == (not words)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--classes 9", ("--classes", "mismatch")),
        ("--classes names.txt", ("--classes", "conflict")),
        ("--classes short.txt", ("--classes", "mismatch")),
        ("--out full", None),
        ("--out weights", None),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    error: tuple[str, str] | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(public_weights(), "weights")
    Path("names.txt").write_text("crane\n" * 8)
    Path("short.txt").write_text("crane\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["import", "weights", "--out", "out", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and error in (None, *printed_errors(said))
    assert sorted(tmp_path.rglob("*")) == before
