"""Shared by the tests of finetune: tiny weights, a run to export, synthetic features, and an
evaluation in this process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data_prep.manifest import load_manifest
from finetune.evaluate.config import EvaluateSettings, Evaluation
from finetune.evaluate.evaluate import evaluate_checkpoint
from finetune.export.config import ExportSettings
from finetune.export.export import export
from finetune.probe.config import FeatureSettings, ProbeSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.rows import Standard, TableRows
from finetune.session import open_backbone
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model, save_folder
from pretrain.config import AugmentSettings
from pretrain.data.reader import Places, ShardReader, Unreadable, open_split
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import AnySpec, MlpSpec
from pretrain.ranks.world import World
from tests.conftest import Patch

ALONE = World(rank=0, local_rank=0, num_ranks=1, num_cores=2)
CPU = torch.device("cpu")
CROPS = AugmentSettings(crop_scale=(0.5, 1.0))
MLP = MlpSpec(kind="mlp", depth=1, width=12)
MEAN, STD = (0.45, 0.5, 0.55), (0.2, 0.25, 0.3)
FEATURES, CLASSES = 6, 3
SILENT = {"enabled": False}
PROBE: dict[str, Any] = {
    "optimizer": "sgd",
    "lrs": (1e-3, 1e-1),
    "weight_decays": (0.0, 1e-2),
    "epochs": (6,),
    "batch_size": 16,
}
"""Settings of a probe that takes a few seconds."""
TUNE = """
augment: {crop_scale: [0.7, 1.0]}
optimizer: {name: sgd, lr: 1e-2, head_lr_scale: 5.0, weight_decay: 1e-4, layer_decay: 0.5}
train: {duration: 6 steps, global_batch_size: 8, eval_every: 6 steps}
checkpoint: {every: 6 steps}
"""


def write_folder(
    path: Path, dataset: Path | None = None, *, spec: AnySpec = MLP, **facts: Any
) -> Path:
    """Write random weights for the classes of `dataset`, or for three classes. `facts`: fields of
    the card."""
    classes = load_manifest(dataset).classes if dataset else ("ant", "bee", "cat")
    model = build_model(spec, num_classes=len(classes), image_size=16, seed=1)
    noise = torch.Generator().manual_seed(0)
    weights = model.state_dict()
    for tensor in weights.values():  # also at zeros of a mask, where weights must have no effect
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=noise))
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


def model_of(folder: Path) -> ImageModel:
    return load_model(Checkpoint.open(folder)).eval()


def normalized(checkpoint: Path, dataset: Path) -> tuple[Tensor, np.ndarray]:
    """Return (images, labels) of the validation split, normalized by hand."""
    card = Checkpoint.open(checkpoint).card
    reader = open_split(dataset, load_manifest(dataset), "val")
    images = reader.images(np.arange(reader.num_samples)).permute(0, 3, 1, 2).float() / 255
    mean, std = (
        torch.tensor(values).view(1, 3, 1, 1) for values in (card.channel_mean, card.channel_std)
    )
    return (images - mean) / std, reader.labels


@torch.no_grad()
def plain_logits(checkpoint: Path, dataset: Path) -> tuple[Tensor, np.ndarray]:
    images, labels = normalized(checkpoint, dataset)
    return model_of(checkpoint)(images), labels


def spoil(patch: Patch, sample: int) -> None:
    """Make the image fail to decode."""
    read = ShardReader.read

    def failing(self: ShardReader, places: Places, batch_BHWC: Tensor) -> list[Unreadable]:
        rows = np.flatnonzero(places.ids == sample).tolist()
        return read(self, places, batch_BHWC) + [
            Unreadable(row, sample, "shard", "key", "cut") for row in rows
        ]

    patch.setattr(ShardReader, "read", failing)


def with_data(dataset: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes with the settings of `data` in that section."""
    names = ("split", "train_split", "test_split", "image_size")
    data = {"dataset": str(dataset), **changes.get("data", {})} | {
        name: changes[name] for name in names if name in changes
    }
    return {name: value for name, value in changes.items() if name not in names} | {"data": data}


# evaluations


def evaluation_settings(
    pretrained: Path, dataset: Path, run_dir: Path | None, **changes: Any
) -> EvaluateSettings:
    base = {
        "pretrained": str(pretrained),
        "run_dir": str(run_dir) if run_dir else None,
        "tracking": SILENT,
    }
    return EvaluateSettings.model_validate(base | with_data(dataset, changes), strict=False)


def judge(pretrained: Path, dataset: Path, run_dir: Path | None, **changes: Any) -> dict[str, Any]:
    settings = evaluation_settings(pretrained, dataset, run_dir, **changes)
    result = evaluate_checkpoint(Evaluation.of(settings), ALONE)
    assert result is not None
    return result


def predictions(run_dir: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(run_dir / "predictions.parquet").to_pydict()
    return columns


# probes


def probe_settings(**changes: Any) -> ProbeSettings:
    tree = {
        "run_dir": "r",
        "data": {"dataset": "d"},
        "optimizer": "sgd",
        "batch_size": 32,
        "epochs": (3,),
    }
    return ProbeSettings.model_validate(tree | changes, strict=False)


def feature_settings(
    dataset: Path, place: Path, pretrained: Path | None, **changes: Any
) -> ProbeSettings:
    tree = {
        "run_dir": str(place / "run"),
        "pretrained": str(pretrained) if pretrained else None,
        "features_dir": str(place / "features"),
        "feature_batch_size": 8,
        "tracking": SILENT,
    }
    return ProbeSettings.model_validate(tree | with_data(dataset, changes), strict=False)


def opened(settings: FeatureSettings) -> Checkpoint | None:
    return Checkpoint.open(settings.pretrained) if settings.pretrained else None


def maker_of(settings: ProbeSettings, *, world: World = ALONE, **changes: Any) -> FeatureMaker:
    """Return a feature maker. `changes`: fields of the backbone."""
    manifest = load_manifest(settings.data.directory)
    opening: dict[str, Any] = {
        "channel_stats": settings.channel_stats,
        "precision": settings.feature_precision,
    }
    backbone = replace(open_backbone(opened(settings), manifest, device=CPU, **opening), **changes)
    return FeatureMaker(settings, manifest, backbone, world, CPU)


def blobs(count: int, *, seed: int, spread: float = 3.0) -> Table:
    """Return clusters on unequal scales, with the same centers for every seed."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * spread
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    values = (centers[labels] + torch.randn(count, FEATURES, generator=generator)) * torch.arange(
        1.0, 1 + FEATURES
    )
    return Table(values + 5, labels)


def standard_of(table: Table) -> Standard:
    return Standard.of(table.chunks(7), num_features=table.num_features)


def rows_of(*tables: Table) -> TableRows:
    return TableRows(list(tables), standard=standard_of(tables[0]), device=CPU)


def whole(table: Table) -> Tensor:
    return table.gather(torch.arange(len(table)))


class Largest(TorchDispatchMode):
    """Record the size of the largest new tensor."""

    num_bytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


# tuning


def write_tuning(folder: Path, pretrained: Path, dataset: Path) -> Path:
    path = folder / "tune.yaml"
    path.write_text(f"pretrained: {pretrained}\ndata: {{dataset: {dataset}}}\n{TUNE}")
    return path


# exports


def export_of(source: Path, out: Path, **settings: object) -> Path:
    wanted = ExportSettings.model_validate({"pretrained": str(source), "out": str(out)} | settings)
    export(wanted, Checkpoint.open(source))
    return out
