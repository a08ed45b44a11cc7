"""What the tests of `finetune export` share: a folder of random weights, one export in this process, and a run to export."""

import json
from pathlib import Path

import yaml

from finetune.export.config import ExportSettings
from finetune.export.export import export
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model, save_folder
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import AnySpec, MlpSpec
from tests.training import finish, start, write_config

MLP = MlpSpec(kind="mlp", depth=1, width=12)


def folder_of(spec: AnySpec, path: Path) -> ImageModel:
    """A folder of random weights, written as imports are."""
    card = ModelCard(
        model=spec,
        image_size=16,
        classes=("ant", "bee", "cat"),
        channel_mean=(0.4, 0.5, 0.6),
        channel_std=(0.1, 0.2, 0.3),
        dataset="imagenet21",
        origin="scaling_mlps: B_weights, sha256 0, read as chw",
    )
    model = build_model(spec, num_classes=3, image_size=16, seed=1).eval()
    moved = {"bias": 0.1, "weight": 0.01}  # of a masked matrix also where the mask is 0: nothing may come of it
    weights = {name: tensor + moved.get(name.rsplit(".", 1)[-1], 0) for name, tensor in model.state_dict().items()}
    weights |= {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    save_folder(path, card=card, weights=weights)
    return load_model(Checkpoint.open(path)).eval()


def export_of(source: Path, out: Path, **settings: object) -> Path:
    wanted = ExportSettings.model_validate({"pretrained": str(source), "out": str(out)} | settings)
    export(wanted, Checkpoint.open(source))
    return out


def write_run(folder: Path, shapes: Path) -> Path:
    """Of two ranks at ZeRO 3, with runs beside it as an evaluation and a probe leave them."""
    config = write_config(folder, dataset=shapes)
    short = ["train.duration=6 steps", "train.eval_every=6 steps", "checkpoint.every=3 steps"]
    finish(start(config, folder / "run", "engine.zero_stage=3", *short, ranks=2))
    for name, settings, result in (
        ("judged", {"pretrained": str(folder / "run"), "split": "val"}, {"eval/top1": 0.25, "eval/loss": 2.0}),
        (
            "probed",
            {"pretrained": str(folder / "run"), "lrs": [0.1], "train_split": "train", "test_split": "test"},
            {"test_top1": 0.5},
        ),
        ("strange", {"pretrained": str(folder / "other"), "split": "val"}, {"eval/top1": 0.99}),
        ("unfinished", {"pretrained": str(folder / "run"), "split": "val"}, None),
    ):
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(yaml.safe_dump(settings | {"dataset": str(shapes)}))
        if result is not None:
            (folder / name / "result.json").write_text(json.dumps(result))
    return folder / "run"
