"""`finetune knn`: what the nearest training pictures say of each test picture, from the features that a probe uses, too.

Each rank judges a range of the test split; sums are reduced at the end.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.manifest import load_manifest
from data_prep.progress import progress
from finetune.accelerator import Joined, Patience, joined_ranks
from finetune.backbone import open_backbone
from finetune.probe.config import KnnSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.nearest import Blocks, answers, neighbours_of, unit_rows
from finetune.probe.rows import Residence
from finetune.recording import recorded
from pretrain.checkpoints.run import save_result
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of


def knn(settings: KnnSettings, world: World) -> dict[str, Any] | None:
    """The result, on the first rank."""
    with joined_ranks(world, settings.ranks) as joined:
        return _knn(settings, world, joined)


def _knn(settings: KnnSettings, world: World, joined: Joined) -> dict[str, Any] | None:
    manifest, device = load_manifest(settings.dataset), joined.device
    backbone = open_backbone(settings.pretrained, manifest, image_size=settings.image_size, device=device)
    run_dir = Path(settings.run_dir)
    with (
        recorded(
            settings,
            run_dir=run_dir,
            patience=settings.ranks,
            tracking=settings.tracking,
            world=world,
            used=settings.used(manifest),
            weights=backbone.weights,
            tags={"task": "knn"},
        ) as tracker,
        joined.attended(run_dir),
    ):
        maker = FeatureMaker(settings, manifest, backbone, world, device)
        train, test = (maker.tables(split, [None])[0] for split in (settings.train_split, settings.test_split))
        num_classes = len(manifest.classes)
        top1 = accuracies(train, test, settings=settings, num_classes=num_classes, world=world, device=device)
        if not world.is_first:
            return None
        result: dict[str, Any] = {f"top1_k{count}": value for count, value in sorted(top1.items())}
        told = {f"knn/{name}": value for name, value in result.items()}
        tracker.metrics(told, step=0)
        if backbone.weights is not None:
            backbone.weights.tell(tracker, told, target=target_of(manifest))
        # the best of them would be a choice on the test split
        save_result(run_dir, result | {"test_top1": top1[settings.neighbours[0]], "k": settings.neighbours[0]})
        return result


def accuracies(
    train: Table, test: Table, *, settings: KnnSettings, num_classes: int, world: World, device: torch.device
) -> dict[int, float]:
    """k -> top-1 on the whole test split."""
    counts, size, patience = sorted(settings.neighbours), len(test.labels_N), Patience()
    first, end = (size * rank // world.num_ranks for rank in (world.rank, world.rank + 1))
    num_features = train.features_ND.shape[1]
    blocks = Blocks.within(
        settings.chunk_mb * 1_000_000, num_features=num_features, num_classes=num_classes, count=counts[-1]
    )
    placed_ND = _placed(train.features_ND, device)
    train_labels_T = train.labels_N.to(device)
    right = torch.zeros(len(counts), dtype=torch.float64, device=device)
    PROGRESS.mark("looking for neighbours")
    with progress("neighbours", total=end - first, unit="images", enabled=world.is_first) as line:
        for start in range(first, end, blocks.num_queries):
            mine = slice(start, min(end, start + blocks.num_queries))
            (queries_QD,) = unit_rows(test.features_ND[mine], size=blocks.num_queries, device=device)
            parts = unit_rows(placed_ND, size=blocks.num_training, device=device)
            similarities, places = neighbours_of(queries_QD, parts, count=counts[-1])
            found = answers(
                similarities,
                train_labels_T[places],
                counts=counts,
                num_classes=num_classes,
                weights=settings.weights,
                temperature=settings.temperature,
            )
            labels_Q = test.labels_N[mine].to(device)
            right += torch.stack([(found[count] == labels_Q).sum() for count in counts])
            line.advance(len(labels_Q))
    shares = (patience.all_sum(right.cpu()) / size).tolist()
    return dict(zip(counts, shares, strict=True))


def _placed(features_ND: Tensor, device: torch.device) -> Tensor:
    """On the GPU where it takes less than half of what is free; else it stays in its file and is copied chunk by chunk."""
    if device.type != "cuda":
        return features_ND
    placed = Residence(device, room=torch.cuda.mem_get_info(device)[0] // 2).of(features_ND)
    return features_ND if placed is None else placed
