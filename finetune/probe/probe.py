"""`finetune probe`: a grid of linear heads on features that are computed once.

1. Features of both splits, and views if there are any, are found or made (features.py).
2. All ranks train their share of the grid on the kept samples and judge it on the held-out ones (grid.py).
3. The first rank trains the best cell once more on all of the training split, judges it on the test split, once, and saves it with
   its backbone as a checkpoint; result.json comes last.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.accelerator import Joined, joined_ranks
from finetune.backbone import open_backbone
from finetune.probe.classifier import Classifier, save_classifier, test_scores
from finetune.probe.config import ProbeSettings
from finetune.probe.features import FeatureMaker, Table, Views
from finetune.probe.grid import Judged, best_of, edges, heads_of, judged_cells
from finetune.probe.report import draw_grid, print_grid
from finetune.probe.rows import Residence, Rows, Standard
from finetune.recording import recorded
from pretrain.checkpoints.run import save_result
from pretrain.cli import console
from pretrain.data.order import hash64, permute
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import RunIdentity, Tracker

_HOLDOUT = 0x686F6C64
"""Part of the key of the held-out share."""


@dataclass(frozen=True)
class Splits:
    """The tables of a probe."""

    train: list[Table]
    """One for each view; the plain pictures where there are none."""
    plain: Table
    """Of the training split, or of `holdout_split`: where held-out samples are taken from."""
    test: Table


@dataclass(frozen=True)
class Verdict:
    judged: list[Judged]
    best: Judged
    classifier: Classifier
    result: dict[str, Any]


def probe(settings: ProbeSettings, world: World) -> dict[str, Any] | None:
    """The result, on the first rank."""
    with joined_ranks(world, settings.ranks) as joined:
        return _probe(settings, world, joined)


def _probe(settings: ProbeSettings, world: World, joined: Joined) -> dict[str, Any] | None:
    manifest, device = load_manifest(settings.dataset), joined.device
    backbone = open_backbone(settings.pretrained, manifest, image_size=settings.image_size, device=device)
    run_dir, tracking = Path(settings.run_dir), settings.tracking
    with (
        recorded(
            settings,
            run_dir=run_dir,
            patience=settings.ranks,
            tracking=tracking,
            world=world,
            used=settings.used(manifest),
            weights=backbone.weights,
            tags={"task": "probe"},
        ) as tracker,
        joined.attended(run_dir),
    ):
        views = Views(settings.augment, settings.seed) if settings.augment is not None else None
        maker = FeatureMaker(settings, manifest, backbone, world, device, views)
        splits = tables_of(settings, maker)
        num_classes = len(manifest.classes)
        verdict = choose_and_test(splits, settings=settings, num_classes=num_classes, device=device, world=world)
        if verdict is None:
            return None  # nothing is collective from here on, so nobody waits for the first rank
        report(verdict, settings, tracker)
        if backbone.weights is not None:
            identity = RunIdentity.of(run_dir, experiment=tracking.experiment, uri=tracking.uri)
            step = verdict.result["steps"]
            save_classifier(
                run_dir,
                verdict.classifier,
                backbone,
                manifest,
                fed_interpolation=maker.fed.plain_filter,
                step=step,
                run_key=identity.run_key,
            )
            backbone.weights.tell(tracker, {"probe/top1": verdict.result["test_top1"]}, target=target_of(manifest))
        save_result(run_dir, verdict.result)  # last: what a kill leaves without it is begun anew
        return verdict.result


def tables_of(settings: ProbeSettings, maker: FeatureMaker) -> Splits:
    (test,) = maker.tables(settings.test_split, [None])
    (plain,) = maker.tables(settings.holdout_split or settings.train_split, [None])
    if settings.views:
        return Splits(maker.tables(settings.train_split, list(range(settings.views))), plain, test)
    train = [plain] if settings.holdout_split is None else maker.tables(settings.train_split, [None])
    return Splits(train, plain, test)


def choose_and_test(
    splits: Splits, *, settings: ProbeSettings, num_classes: int, device: torch.device, world: World
) -> Verdict | None:
    """On the first rank; collective up to the choice."""
    train, num_features = splits.train, splits.test.features_ND.shape[1]
    standard = Standard.of(train[0].features_ND) if settings.standardise else Standard.none(num_features)
    kept, held = held_out(len(train[0].labels_N), settings)
    place: dict[str, Any] = {"device": device, "residence": Residence(device)}
    holdout = Rows([splits.plain], standard=standard, chosen_n=held, **place)
    kept_rows = Rows(train, standard=standard, chosen_n=kept, **place)
    judged, heads = judged_cells(kept_rows, holdout, settings=settings, num_classes=num_classes, world=world)
    best = best_of(judged)
    if not world.is_first:
        return None
    PROGRESS.mark("training the best head once more")
    head, rows = heads.get(best.cell), kept_rows
    if head is None or (settings.refit and settings.holdout_split is None):
        if settings.refit:
            rows = Rows(train, standard=standard, **place)
        head = heads_of(rows, [best.cell], settings=settings, num_classes=num_classes)[0]
    classifier = Classifier.of(head.weights_EK, standard)
    scores = test_scores(classifier, Rows([splits.test], standard=Standard.none(num_features), **place))
    result = {
        "test_top1": scores.top1,
        "test_top5": scores.top5,
        "test_class_mean": scores.class_mean,
        "chosen_lr": best.cell.lr,
        "chosen_weight_decay": best.cell.weight_decay,
        "chosen_epochs": best.cell.epochs,
        "holdout_top1": best.score.top1,
        "steps": head.num_steps,
        "cells": [shown_cell(each) for each in judged],
    }
    return Verdict(judged, best, classifier, result)


def held_out(num_samples: int, settings: ProbeSettings) -> tuple[Tensor | None, Tensor | None]:
    """The numbers of the kept and of the held-out samples of the training split; with a holdout split, all of each."""
    if settings.holdout_split is not None:
        return None, None
    key = int(hash64(_HOLDOUT, settings.seed))
    shuffled = torch.from_numpy(permute(np.arange(num_samples), size=num_samples, key=key))
    cut = min(num_samples - 1, max(1, round(num_samples * settings.holdout_share)))
    return shuffled[cut:].sort().values, shuffled[:cut].sort().values


def shown_cell(each: Judged) -> dict[str, float | int | None]:
    score = each.score
    return {
        "lr": each.cell.lr,
        "weight_decay": each.cell.weight_decay,
        "epochs": each.cell.epochs,
        "holdout_top1": score.top1,
        "holdout_loss": None if each.has_diverged else score.loss,
    }


def report(verdict: Verdict, settings: ProbeSettings, tracker: Tracker) -> None:
    best, result = verdict.best.cell, verdict.result
    print_grid(verdict.judged, best, console())
    for hint in edges(verdict.best, verdict.judged):
        print(hint)
    for number, each in enumerate(verdict.judged):
        values = shown_cell(each)
        tracker.metrics(
            {f"probe/{name}": float(value) for name, value in values.items() if value is not None}, step=number
        )
    scores = {name: value for name, value in result.items() if name != "cells"}
    tracker.metrics({f"probe/{name}": float(value) for name, value in scores.items()}, step=len(verdict.judged))
    facts = f"{Path(settings.run_dir).name}: best {verdict.best.score.top1:.1%} at lr {best.lr:g}, decay {best.weight_decay:g}"
    if len(settings.epochs) > 1:
        facts += f", {best.epochs} epochs"
    tracker.picture("probe/grid", lambda: draw_grid(verdict.judged, best, facts=facts), step=0)
