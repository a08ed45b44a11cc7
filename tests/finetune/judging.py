"""What the tests of `finetune evaluate` share: weights, one evaluation in this process, and the plain computation beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.evaluate.config import EvaluateSettings
from finetune.evaluate.evaluate import evaluate_checkpoint
from finetune.evaluate.identity import Evaluation
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights, save_folder
from pretrain.config import TrackingSettings
from pretrain.data.reader import open_split
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.ranks.world import World

ALONE = World(rank=0, local_rank=0, num_ranks=1, num_cores=2)
MEAN, STD = (0.45, 0.5, 0.55), (0.2, 0.25, 0.3)


def write_folder(path: Path, shapes: Path, **facts: Any) -> Path:
    """Weights that know nothing, yet are of very different opinions. `facts`: of their card."""
    spec, classes = MlpSpec(kind="mlp", depth=1, width=12), load_manifest(shapes).classes
    torch.manual_seed(0)
    model = build_model(spec, num_classes=len(classes), image_size=16)
    weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    card = ModelCard(
        model=spec,
        image_size=16,
        classes=classes,
        channel_mean=MEAN,
        channel_std=STD,
        dataset="none",
        content_hash="0",
    )
    save_folder(path, card=card.model_copy(update=facts), weights=weights)
    return path


def settings_of(pretrained: Path, dataset: Path, run_dir: Path | None, **changes: Any) -> EvaluateSettings:
    base = {"pretrained": str(pretrained), "dataset": str(dataset), "run_dir": str(run_dir) if run_dir else None}
    return EvaluateSettings.model_validate(base | {"tracking": TrackingSettings(enabled=False)} | changes, strict=False)


def judge(pretrained: Path, dataset: Path, run_dir: Path | None, **changes: Any) -> dict[str, Any]:
    result = evaluate_checkpoint(Evaluation.of(settings_of(pretrained, dataset, run_dir, **changes)), ALONE)
    assert result is not None
    return result


def plain_logits(checkpoint: Path, dataset: Path) -> tuple[Tensor, np.ndarray]:
    """(logits, labels) of the whole validation split at once, normalised by hand."""
    opened = Checkpoint.open(checkpoint)
    card, weights = opened.card, load_weights(opened)
    model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    model.load_state_dict(weights)
    reader = open_split(dataset, load_manifest(dataset), "val")
    images = reader.images(np.arange(reader.num_samples)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (card.channel_mean, card.channel_std))
    with torch.no_grad():
        return model((images - mean) / std), reader.labels


def predictions(run_dir: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(run_dir / "predictions.parquet").to_pydict()
    return columns
