"""What probing is tested on, a frozen network with fixed random weights over the tiny datasets; and what exporting is tested on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.manifest import load_manifest
from finetune.probe.config import FeatureSettings, ProbeSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.session import open_backbone
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.config import AugmentSettings
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.ranks.world import World
from tests.finetune.exporting import export_of, write_run

ALONE = World(rank=0, local_rank=0, num_ranks=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def backbone_folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of a B-1/Wi-24 with random weights, of the 8 classes of `shapes`."""
    manifest, spec = load_manifest(shapes), MlpSpec(kind="mlp", depth=1, width=24, expansion=2)
    card = ModelCard(
        model=spec,
        image_size=16,
        classes=manifest.classes,
        channel_mean=manifest.channel_mean,
        channel_std=manifest.channel_std,
        dataset=manifest.name,
        run_key="0" * 32,
    )
    folder = tmp_path_factory.mktemp("backbone") / "folder"
    model = build_model(spec, num_classes=len(manifest.classes), image_size=16, seed=1)
    save_folder(folder, card=card, weights=model.state_dict())
    return folder


@pytest.fixture(scope="session")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is exported."""
    return write_run(tmp_path_factory.mktemp("exporting"), shapes)


@pytest.fixture(scope="session")
def exported(run: Path) -> Path:
    return export_of(run, run.parent / "out")


def opened(settings: FeatureSettings) -> Checkpoint | None:
    return Checkpoint.open(settings.pretrained) if settings.pretrained else None


def maker_of(settings: ProbeSettings, *, world: World = ALONE, **changes: Any) -> FeatureMaker:
    """`changes`: other fields of the backbone."""
    manifest = load_manifest(settings.dataset)
    backbone = open_backbone(opened(settings), manifest, device=CPU)
    return FeatureMaker(settings, manifest, replace(backbone, **changes), world, CPU, settings.augment, settings.seed)


def rows_of_table(table: Table) -> torch.Tensor:
    """All of them."""
    return table.gather(torch.arange(len(table)))


def feature_settings(dataset: Path, place: Path, pretrained: Path | None, **changes: Any) -> ProbeSettings:
    tree = {
        "run_dir": str(place / "run"),
        "dataset": str(dataset),
        "pretrained": str(pretrained) if pretrained else None,
        "features_dir": str(place / "features"),
        "feature_batch_size": 8,
        "tracking": {"enabled": False},
    }
    return ProbeSettings.model_validate(tree | changes, strict=False)


CROPS = AugmentSettings(crop_scale=(0.5, 1.0))
