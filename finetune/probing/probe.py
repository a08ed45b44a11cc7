"""`finetune probe`: a grid of linear heads on features that are computed once. D features, K classes, G learning rates.

The learning rate is chosen on a held-out share of the training split; then one head is trained on all of it and judged on the test
split, once.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_prep.manifest import Manifest, load_manifest
from data_prep.progress import progress
from finetune.accelerator import start_accelerator
from finetune.backbone import Backbone, open_backbone
from finetune.probing.config import ProbeSettings
from finetune.probing.features import split_features
from finetune.recording import recorded
from pretrain.page import target_of
from pretrain.run import save_result
from pretrain.shards import open_split
from pretrain.world import World


def probe(settings: ProbeSettings, world: World) -> dict[str, float] | None:
    """The result, on the first rank."""
    accelerator = start_accelerator(world)
    manifest = load_manifest(settings.dataset)
    backbone = open_backbone(settings.pretrained, manifest, image_size=settings.image_size, device=accelerator.device)
    run_dir = Path(settings.run_dir)
    with recorded(
        settings,
        run_dir=run_dir,
        tracking=settings.tracking,
        world=world,
        manifest=manifest,
        weights=backbone.weights,
        tags={"task": "probe"},
    ) as tracker:
        train, test = (
            _features(settings, manifest, backbone, split, world, accelerator.device)
            for split in (settings.train_split, settings.test_split)
        )
        if not world.is_first:
            return None  # nothing is collective from here on, so nobody waits for the heads
        result = choose_and_test(train, test, settings=settings, num_classes=len(manifest.classes))
        for number, lr in enumerate(settings.lrs):
            tracker.metrics({"probe/holdout_top1": result[f"holdout_top1_lr_{lr:g}"], "probe/lr": lr}, step=number)
        chosen = {"probe/test_top1": result["test_top1"], "probe/chosen_lr": result["chosen_lr"]}
        tracker.metrics(chosen, step=settings.epochs)
        save_result(run_dir, result)
        if backbone.weights is not None:
            backbone.weights.tell(tracker, {"probe/top1": result["test_top1"]}, target=target_of(manifest))
        return result


def _features(
    settings: ProbeSettings, manifest: Manifest, backbone: Backbone, split: str, world: World, device: torch.device
) -> tuple[Tensor, Tensor]:
    reader = open_split(settings.dataset, manifest, split, image_size=backbone.image_size)
    return split_features(
        backbone.extract,
        reader,
        backbone.augmentation(device=device),
        local_batch_size=settings.feature_batch_size,
        world=world,
    )


def choose_and_test(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, settings: ProbeSettings, num_classes: int
) -> dict[str, float]:
    mean, std = train[0].mean(dim=0), train[0].std(dim=0).clamp(min=1e-6)
    features, test_features = (train[0] - mean) / std, (test[0] - mean) / std
    shuffled = torch.from_numpy(np.random.Generator(np.random.Philox(settings.seed)).permutation(len(features)))
    cut = max(1, round(len(features) * settings.holdout_share))
    held, kept = shuffled[:cut], shuffled[cut:]
    heads = train_heads(features[kept], train[1][kept], lrs=settings.lrs, settings=settings, num_classes=num_classes)
    holdout = accuracies(heads, features[held], train[1][held])
    best = settings.lrs[int(np.argmax(holdout))]
    final = train_heads(features, train[1], lrs=(best,), settings=settings, num_classes=num_classes)
    cells = {f"holdout_top1_lr_{lr:g}": top1 for lr, top1 in zip(settings.lrs, holdout, strict=True)}
    return {"test_top1": accuracies(final, test_features, test[1])[0], "chosen_lr": best} | cells


def train_heads(
    features: Tensor, labels: Tensor, *, lrs: tuple[float, ...], settings: ProbeSettings, num_classes: int
) -> Tensor:
    """(G, D + 1, K) weights, bias last, one head per learning rate, all in one pass with AdamW and a cosine."""
    heads = [torch.zeros(features.shape[1] + 1, num_classes, requires_grad=True) for _ in lrs]
    groups = [{"params": [head], "lr": lr} for head, lr in zip(heads, lrs, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
    rows = with_bias(features)
    generator = torch.Generator().manual_seed(settings.seed)
    steps = settings.epochs * -(-len(rows) // settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with progress("linear heads", total=settings.epochs, unit="epochs") as line:
        for _ in range(settings.epochs):
            for chosen in torch.split(torch.randperm(len(rows), generator=generator), settings.batch_size):
                logits_GBK = torch.einsum("bd,gdk->gbk", rows[chosen], torch.stack(heads))
                target = labels[chosen].expand(len(heads), -1).flatten()
                loss = cross_entropy(logits_GBK.flatten(0, 1), target) * len(heads)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
            line.advance()
    return torch.stack(heads).detach()


def accuracies(heads_GDK: Tensor, features: Tensor, labels: Tensor) -> list[float]:
    logits_GBK = torch.einsum("bd,gdk->gbk", with_bias(features), heads_GDK)
    right: list[float] = (logits_GBK.argmax(dim=-1) == labels).double().mean(dim=1).tolist()
    return right


def with_bias(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones(len(features), 1)], dim=1)
