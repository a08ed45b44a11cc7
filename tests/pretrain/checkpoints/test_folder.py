"""Folders of weights: our loader and timm's load the saved weights, and only complete folders."""

import json
import re
from pathlib import Path

import pytest
import timm
import timm.data
import torch
from torch import Tensor, nn

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from pretrain.checkpoints.card import ModelCard, config_of, read_card
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import Snapshot, TrainerState, load_model, publish, save_folder
from pretrain.checkpoints.weights import load_strictly
from pretrain.engine.step import EngineState
from pretrain.models.build import build_model
from pretrain.models.presets import spec_of
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec
from tests.errors import fails
from tests.pretrain.checkpoints.tiny import card_of

SPECS: list[AnySpec] = [
    MlpSpec(kind="mlp", depth=2, width=12, norm="batch", dropout=0.1),
    MixerSpec(
        kind="mixer",
        patch_size=4,
        num_channels=6,
        depth=2,
        num_tokens=5,
        norm_eps=1e-6,
        permuted_blocks=(1,),
    ),
    SparseMlpSpec(kind="sw_mlp", num_channels=2, width=24, depth=2, density=0.3, storage="sparse"),
]


def random_weights(card: ModelCard) -> dict[str, Tensor]:
    model = build_model(
        card.model, num_classes=len(card.classes), image_size=card.image_size, seed=3
    )
    return {
        k: v + torch.rand_like(v) * 0.1 if v.is_floating_point() else v
        for k, v in model.state_dict().items()
    }


@pytest.mark.parametrize("spec", SPECS, ids=["mlp", "rp mixer", "sparse"])
def test_a_folder_is_the_same_model_here_and_in_timm(tmp_path: Path, spec: AnySpec) -> None:
    card, images = card_of(spec), torch.randn(4, 3, 16, 16)
    weights = random_weights(card)
    save_folder(tmp_path / "folder", card=card, weights=weights)
    checkpoint = Checkpoint.open(tmp_path / "folder")
    read, ours = checkpoint.card, load_model(checkpoint)
    assert read == card
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.state_dict().items())
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert torch.equal(theirs.eval()(images), ours.eval()(images))
    wanted = timm.data.resolve_model_data_config(theirs)
    assert (wanted["mean"], wanted["std"]) == (list(card.channel_mean), list(card.channel_std))
    assert tuple(wanted["input_size"]) == (3, 16, 16) and wanted["crop_pct"] == 1.0
    assert theirs.pretrained_cfg["label_names"] == ["n0", "n1", "n2"]


def test_a_checkpoint_of_a_run_is_such_a_folder_and_timm_gives_it_a_new_head(
    tmp_path: Path,
) -> None:
    card = card_of(SPECS[1])
    state = EngineState(random_weights(card), {"exp_avg.w": torch.zeros(1)}, 20)
    snapshot = Snapshot(state, TrainerState(20, 320), card)
    publish(tmp_path, snapshot)
    path = snapshot.place(tmp_path)
    assert (
        len({file.stat().st_mode for file in path.iterdir()}) == 1
    )  # all files have the same permissions
    ours = load_model(Checkpoint.open(tmp_path))
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True, num_classes=9)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(theirs.forward_features(images), ours.forward_features(images))
    assert theirs(images).shape == (2, 9)


def test_a_named_model_starts_from_our_file(tmp_path: Path) -> None:
    card = card_of(spec_of("smixer_c32"), image_size=32, num_classes=4)
    save_folder(tmp_path / "folder", card=card, weights=random_weights(card))
    overlay = {"file": str(tmp_path / "folder" / "model.safetensors")}
    theirs = timm.create_model(
        "smixer_c32", pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay
    )
    ours, images = load_model(Checkpoint.open(tmp_path / "folder")), torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs.forward_features(images), ours.forward_features(images))
    assert theirs(images).shape == (2, 5)


def test_cards_old_and_new_are_read_and_strange_keys_are_not(tmp_path: Path) -> None:
    card = card_of(SPECS[1])

    def read(tree: object) -> ModelCard:
        (tmp_path / "config.json").write_text(json.dumps(tree))
        return read_card(tmp_path)

    old = {
        "model": {"kind": "mixer", "patch_size": 4, "num_channels": 6, "depth": 2},
        "image_size": 16,
        "classes": ["a"],
        "channel_mean": [0.5, 0.5, 0.5],
        "channel_std": [0.2, 0.2, 0.2],
        "dataset": "shapes",
        "content_hash": "",
        "pixels_hash": "",
        "step": 1,
        "run_key": "",
    }
    assert read(old).model == MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=2)
    assert read(config_of(card)) == card
    assert read(config_of(card) | {"num_features": 6, "global_pool": "avg"}) == card
    path = str(tmp_path / "config.json")
    with fails("unknown-format", path) as caught:
        read(config_of(card) | {"license": "mit"})
    assert "license" in caught.value.problem
    with fails("missing-path", path):
        read({"architecture": "mixer_b16_224", "pretrained_cfg": {}})
    with fails("unknown-format", path):
        read([1])


def test_what_does_not_fit_is_counted_and_named_in_the_order_of_the_model() -> None:
    model = build_model(MlpSpec(kind="mlp", depth=2, width=4), num_classes=3, image_size=4)
    weights = model.state_dict()
    for name in ("head.weight", "blocks.1.norm.bias", "blocks.0.norm.bias", "stem.bias"):
        del weights[name]
    weights |= {
        "stem.weight": torch.zeros(4, 12),
        "a": torch.zeros(1),
        "head.bias": torch.zeros(()),
    }
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with fails("mismatch", "X") as caught:
        load_strictly(model, weights, source="X", label="B-2/Wi-4")
    counts = re.findall(r"(\d+) (?:missing|unknown|of another shape)", caught.value.problem)
    assert counts == ["4", "1", "2"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("stored", ["masked", "sparse"])
@pytest.mark.parametrize("wanted", ["masked", "sparse"])
def test_a_sparse_model_takes_either_storage_and_any_number_of_connections(
    stored: str, wanted: str
) -> None:
    def made(storage: str, seed: int) -> nn.Module:
        spec = SPECS[2].model_copy(update={"storage": storage})
        return build_model(spec, num_classes=3, image_size=16, seed=seed).eval()

    given, model, images = made(stored, 1), made(wanted, 2), torch.randn(2, 3, 16, 16)
    load_strictly(model, given.state_dict(), source="FILE", label="MODEL")
    torch.testing.assert_close(model(images), given(images))
    short = {
        name: tensor
        for name, tensor in given.state_dict().items()
        if not name.endswith(("1.linear.weight", "1.linear.values"))
    }
    with fails("mismatch", "FILE"):
        load_strictly(model, short, source="FILE", label="MODEL")
    other = given.state_dict() | {"blocks.0.linear.row_starts": torch.zeros(9, dtype=torch.int32)}
    with fails("mismatch", "FILE"):
        load_strictly(model, other, source="FILE", label="MODEL")


def test_weights_that_are_not_numbers_are_neither_loaded_nor_saved(tmp_path: Path) -> None:
    card = card_of(SPECS[0])
    weights = random_weights(card)
    weights["head.bias"][1] = torch.inf
    model = build_model(card.model, num_classes=3, image_size=16)
    with fails("not-finite", "X"):
        load_strictly(model, weights, source="X", label="")
    with fails("not-finite", str(tmp_path / "folder")):
        save_folder(tmp_path / "folder", card=card, weights=weights)
    with fails("mismatch", str(tmp_path / "folder")):
        save_folder(tmp_path / "folder", card=card, weights={})
    assert list(tmp_path.iterdir()) == []
