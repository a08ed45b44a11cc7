"""`finetune probe`: a grid of linear heads on features that are computed once.

1. Features of both splits, and views if there are any, are found or made (features.py).
2. All ranks train their share of the grid on the kept samples and judge it on the held-out ones (grid.py).
3. The first rank trains the best candidate once more on all of the training split, judges it on the test split, once, and saves it
   with its backbone as a checkpoint; result.json comes last.
D features, E rows of a head (heads.py), K classes, B batch.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.probe.config import ProbeSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.grid import Judged, best_of, draw_grid, edges, heads_of, judged_candidates, print_grid
from finetune.probe.rows import OnDevice, Rows, Standard
from finetune.session import open_backbone, register, session
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.checkpoints.run import checkpoints_dir, save_result
from pretrain.cli import console
from pretrain.data.order import hash64, permute
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import RunIdentity, Tracker

_HOLDOUT = 0x686F6C64
"""Part of the key of the held-out share."""


class Splits(NamedTuple):
    """The tables of a probe."""

    train: list[Table]
    """One for each view; the plain pictures where there are none."""
    plain: Table
    """Of the training split, or of `holdout_split`: where held-out samples are taken from."""
    test: Table


class Outcome(NamedTuple):
    judged: list[Judged]
    best: Judged
    classifier: tuple[Tensor, Tensor]
    """(weight_KD, bias_K) of plain features: standardisation is folded in."""
    result: dict[str, Any]


def probe(settings: ProbeSettings, world: World, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """The result, on the first rank. `checkpoint`: of `settings.pretrained`."""
    manifest, run_dir = load_manifest(settings.dataset), Path(settings.run_dir)
    used = settings.used(manifest)
    with session(settings, world, run_dir=run_dir, used=used, checkpoint=checkpoint, task="probe") as joined:
        device = joined.device
        backbone = open_backbone(checkpoint, manifest, image_size=settings.image_size, device=device)
        maker = FeatureMaker(settings, manifest, backbone, world, device, settings.augment, settings.seed)
        splits, num_classes = tables_of(settings, maker), len(manifest.classes)
        outcome = choose_and_test(splits, settings=settings, num_classes=num_classes, device=device, world=world)
        if outcome is None:
            return None  # nothing is collective from here on, so nobody waits for the first rank
        report(outcome, settings, joined.tracker)
        if checkpoint is not None:
            save_classifier(settings, outcome, maker)
            top1 = outcome.result["test_top1"]
            register(joined.tracker, checkpoint, {"probe/top1": top1}, target=target_of(manifest))
        save_result(run_dir, outcome.result)  # last: what a kill leaves without it is begun anew
        return outcome.result


def tables_of(settings: ProbeSettings, maker: FeatureMaker) -> Splits:
    (test,) = maker.tables(settings.test_split, [None])
    (plain,) = maker.tables(settings.holdout_split or settings.train_split, [None])
    if settings.views:
        return Splits(maker.tables(settings.train_split, list(range(settings.views))), plain, test)
    train = [plain] if settings.holdout_split is None else maker.tables(settings.train_split, [None])
    return Splits(train, plain, test)


def choose_and_test(
    splits: Splits, *, settings: ProbeSettings, num_classes: int, device: torch.device, world: World
) -> Outcome | None:
    """On the first rank; collective up to the choice."""
    train, none = splits.train, Standard.none(splits.test.num_features)
    standard = Standard.of(train[0]) if settings.standardise else none
    kept, held = held_out(len(train[0]), settings)
    place: dict[str, Any] = {"device": device, "on_device": OnDevice(device)}
    holdout = Rows([splits.plain], standard=standard, chosen_n=held, **place)
    kept_rows = Rows(train, standard=standard, chosen_n=kept, **place)
    judged, heads = judged_candidates(kept_rows, holdout, settings=settings, num_classes=num_classes, world=world)
    best = best_of(judged)
    if not world.is_first:
        return None
    PROGRESS.mark("training the best head once more")
    head, rows = heads.get(best.candidate), kept_rows
    if head is None or (settings.refit and settings.holdout_split is None):
        if settings.refit:
            rows = Rows(train, standard=standard, **place)
        head = heads_of(rows, [best.candidate], settings=settings, num_classes=num_classes)[0]
    classifier = folded(head.weights_EK, standard)
    result = test_scores(classifier, Rows([splits.test], standard=none, **place))
    result |= {f"chosen_{name}": value for name, value in asdict(best.candidate).items()}
    result |= {"holdout_top1": best.score.top1, "steps": head.num_steps}
    return Outcome(judged, best, classifier, result | {"grid": [_as_json(each) for each in judged]})


def folded(head_EK: Tensor, standard: Standard) -> tuple[Tensor, Tensor]:
    """(weight_KD, bias_K): gives plain features the answers that the head gives standardised ones."""
    num_features = len(standard.mean_D)
    weight_DK, bias_K = head_EK[:num_features].cpu().double(), head_EK[num_features].cpu().double()
    scaled_DK = weight_DK / standard.std_D.double().unsqueeze(1)
    bias_K = bias_K - standard.mean_D.double() @ scaled_DK
    return scaled_DK.T.float().contiguous(), bias_K.float()


def held_out(num_samples: int, settings: ProbeSettings) -> tuple[Tensor | None, Tensor | None]:
    """The numbers of the kept and of the held-out samples of the training split; with a holdout split, all of each."""
    if settings.holdout_split is not None:
        return None, None
    key = int(hash64(_HOLDOUT, settings.seed))
    shuffled = torch.from_numpy(permute(np.arange(num_samples), size=num_samples, key=key))
    cut = min(num_samples - 1, max(1, round(num_samples * settings.holdout_share)))
    return shuffled[cut:].sort().values, shuffled[:cut].sort().values


@torch.no_grad()
def test_scores(classifier: tuple[Tensor, Tensor], rows: Rows) -> dict[str, Any]:
    """`rows` are not standardised. The mean over classes is of those that have samples."""
    weight_DK, bias_K = classifier[0].T.to(rows.device), classifier[1].to(rows.device)
    num_features, num_classes = weight_DK.shape
    right_K, number_K = (torch.zeros(num_classes, dtype=torch.float64, device=rows.device) for _ in range(2))
    right5 = torch.zeros((), dtype=torch.float64, device=rows.device)
    for x_BE, labels_B in rows.chunks():
        top = (x_BE[:, :num_features] @ weight_DK + bias_K).topk(min(5, num_classes), dim=1).indices
        hits = top == labels_B.unsqueeze(1)
        right_K += torch.bincount(labels_B[hits[:, 0]], minlength=num_classes)
        number_K += torch.bincount(labels_B, minlength=num_classes)
        right5 += hits.any(dim=1).sum()
    total, present = number_K.sum(), number_K > 0
    return {
        "test_top1": float(right_K.sum() / total),
        "test_top5": float(right5 / total),
        "test_class_mean": float((right_K[present] / number_K[present]).mean()),
    }


test_scores.__test__ = False  # type: ignore[attr-defined]  # pytest takes what is called test for its own


def _as_json(each: Judged) -> dict[str, float | None]:
    loss = None if each.has_diverged else each.score.loss
    return {**asdict(each.candidate), "holdout_top1": each.score.top1, "holdout_loss": loss}


def report(outcome: Outcome, settings: ProbeSettings, tracker: Tracker) -> None:
    judged, best, result = outcome.judged, outcome.best, outcome.result
    print_grid(judged, best, console())
    for hint in edges(best, judged):
        print(hint)
    for number, values in enumerate([*result["grid"], {k: v for k, v in result.items() if k != "grid"}]):
        known = {f"probe/{name}": float(value) for name, value in values.items() if value is not None}
        tracker.metrics(known, step=number)
    chosen = f"at lr {best.candidate.lr:g}, decay {best.candidate.weight_decay:g}"
    length = f", {best.candidate.epochs} epochs" if len(settings.epochs) > 1 else ""
    title = f"{Path(settings.run_dir).name}: held-out top-1, best {best} {chosen}{length}"
    tracker.picture("probe/grid", lambda: draw_grid(judged, best, title=title), step=0)


def save_classifier(settings: ProbeSettings, outcome: Outcome, maker: FeatureMaker) -> None:
    """RUN/checkpoints/step-NNNNNNNN: what evaluate, tune and export take."""
    run_dir, manifest, backbone = Path(settings.run_dir), maker.manifest, maker.backbone
    assert backbone.checkpoint is not None and backbone.model is not None
    identity = RunIdentity.of(run_dir, experiment=settings.tracking.experiment, uri=settings.tracking.uri)
    backbone.model.reset_classifier(len(manifest.classes))
    tensors = {name: tensor.detach().cpu() for name, tensor in backbone.model.state_dict().items()}
    tensors |= dict(zip(("head.weight", "head.bias"), outcome.classifier, strict=True))
    card = backbone.checkpoint.card.model_copy(
        update={
            "classes": manifest.classes,
            "dataset": manifest.name,
            "stored_crop": manifest.crop,
            "stored_interpolation": manifest.interpolation,
            "fed_interpolation": maker.fed.plain_filter,
            "content_hash": manifest.content_hash,
            "pixels_hash": manifest.pixels_hash,
            "step": outcome.result["steps"],
            "run_key": identity.run_key,
        }
    )
    save_folder(checkpoints_dir(run_dir) / f"step-{card.step:08d}", card=card, weights=tensors)
