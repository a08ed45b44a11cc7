"""`finetune probe`: a grid of linear heads on features that are computed once, or streamed
(source.py).

1. Features of both splits, and views if there are any, are found or made (features.py), unless they
   are streamed.
2. All ranks train their share of the grid on the kept samples and judge it on the held-out ones.
3. The first rank trains the best candidate once more on all of the training split, judges it on the
   test split, once, and saves it with its backbone as a checkpoint; result.json comes last.
D features, E rows of a head (heads.py), K classes, B batch.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

from data_prep.errors import UserError
from data_prep.images.lettering import legible
from data_prep.manifest import load_manifest
from finetune.probe.config import ProbeSettings
from finetune.probe.features import FeatureMaker
from finetune.probe.heads import Candidate, Score, judge, train_heads
from finetune.probe.lbfgs import minimize
from finetune.probe.rows import Rows, Standard
from finetune.probe.source import Cached, Streamed, source_of
from finetune.session import PatientGroup, open_backbone, register, session
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.checkpoints.run import checkpoint_dir, save_result
from pretrain.cli import console
from pretrain.data.datasets import Part
from pretrain.data.order import hash64, permute
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import RunIdentity, Tracker

_HOLDOUT = 0x686F6C64
"""Part of the key of the held-out share."""


class Judged(NamedTuple):
    """A candidate and its score on the held-out samples."""

    candidate: Candidate
    score: Score

    @property
    def has_diverged(self) -> bool:
        return not math.isfinite(self.score.loss)

    def __str__(self) -> str:
        return "diverged" if self.has_diverged else f"{self.score.top1:.1%}"


class Outcome(NamedTuple):
    judged: list[Judged]
    best: Judged
    classifier: tuple[Tensor, Tensor]
    """(weight_KD, bias_K) of plain features: standardization is folded in."""
    result: dict[str, Any]


def probe(
    settings: ProbeSettings, world: World, checkpoint: Checkpoint | None
) -> dict[str, Any] | None:
    """The result, on the first rank. `checkpoint`: of `settings.pretrained`."""
    manifest, run_dir = load_manifest(settings.data.directory), Path(settings.run_dir)
    used = settings.used(manifest)
    with session(
        settings, world, run_dir=run_dir, used=used, checkpoint=checkpoint, task="probe"
    ) as (device, tracker):
        fed: dict[str, Any] = {
            "image_size": settings.data.image_size,
            "channel_stats": settings.channel_stats,
        }
        backbone = open_backbone(
            checkpoint, manifest, device=device, precision=settings.feature_precision, **fed
        )
        maker = FeatureMaker(settings, manifest, backbone, world, device)
        with source_of(settings, maker) as source:
            outcome = choose_and_test(
                source, settings=settings, num_classes=len(manifest.classes), world=world
            )
        if outcome is None:
            return None  # nothing is collective from here on, so nobody waits for the first rank
        report(outcome, settings, tracker)
        if checkpoint is not None:
            save_classifier(settings, outcome, maker)
            top1 = outcome.result["test_top1"]
            register(tracker, checkpoint, {"probe/top1": top1}, target=target_of(manifest))
        save_result(run_dir, outcome.result)  # last: what a kill leaves without it is begun anew
        return outcome.result


def choose_and_test(
    source: Cached | Streamed, *, settings: ProbeSettings, num_classes: int, world: World
) -> Outcome | None:
    """On the first rank; collective up to the choice, with shared rows to the end."""
    none = Standard.none(source.num_features)
    standard = source.standard() if settings.standardize else none
    kept, held = held_out(source.num_train, settings)
    holdout = source.rows("plain", standard=standard, chosen_n=held)
    kept_rows = source.rows("train", standard=standard, chosen_n=kept)
    how: dict[str, Any] = {"settings": settings, "num_classes": num_classes}
    judged, heads = judged_candidates(
        kept_rows, holdout, world=world, are_shared=source.are_shared, **how
    )
    best = best_of(judged, num_held=holdout.num_rows)
    if not world.is_first and not source.are_shared:
        return None
    PROGRESS.mark("training the best head once more")
    head, rows = heads.get(best.candidate), kept_rows
    if head is None or source.are_shared or (settings.refit and settings.holdout_split is None):
        if settings.refit:
            rows = source.rows("train", standard=standard)
        head = heads_of(rows, [best.candidate], **how)[0]
    classifier = folded(head.weights_EK, standard)
    result = scores_on_test(classifier, source.rows("test", standard=none))
    if not world.is_first:
        return None
    result |= {f"chosen_{name}": value for name, value in best.candidate._asdict().items()}
    result |= {"holdout_top1": best.score.top1, "steps": head.num_steps}
    cells = []
    for each in judged:
        loss = None if each.has_diverged else each.score.loss
        cells.append(
            each.candidate._asdict() | {"holdout_top1": each.score.top1, "holdout_loss": loss}
        )
    return Outcome(judged, best, classifier, result | {"grid": cells})


def folded(head_EK: Tensor, standard: Standard) -> tuple[Tensor, Tensor]:
    """(weight_KD, bias_K): gives plain features the answers that the head gives standardized
    ones."""
    num_features = len(standard.mean_D)
    weight_DK, bias_K = head_EK[:num_features].cpu().double(), head_EK[num_features].cpu().double()
    scaled_DK = weight_DK / standard.std_D.double().unsqueeze(1)
    bias_K = bias_K - standard.mean_D.double() @ scaled_DK
    return scaled_DK.T.float().contiguous(), bias_K.float()


def held_out(num_samples: int, settings: ProbeSettings) -> tuple[Tensor | None, Tensor | None]:
    """The numbers of the kept and of the held-out samples of the training split; with a holdout
    split, all of each."""
    if settings.holdout_split is not None:
        return None, None
    key = int(hash64(_HOLDOUT, settings.seed))
    shuffled = torch.from_numpy(permute(np.arange(num_samples), size=num_samples, key=key))
    cut = min(num_samples - 1, max(1, round(num_samples * settings.holdout_share)))
    return shuffled[cut:].sort().values, shuffled[:cut].sort().values


@torch.no_grad()
def scores_on_test(classifier: tuple[Tensor, Tensor], rows: Rows) -> dict[str, Any]:
    """`rows` are not standardized. The mean over classes is of those that have samples."""
    weight_DK, bias_K = classifier[0].T.to(rows.device), classifier[1].to(rows.device)
    num_features, num_classes = weight_DK.shape
    right_K, number_K = (
        torch.zeros(num_classes, dtype=torch.float64, device=rows.device) for _ in range(2)
    )
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


def report(outcome: Outcome, settings: ProbeSettings, tracker: Tracker) -> None:
    judged, best, result = outcome.judged, outcome.best, outcome.result
    print_grid(judged, best, console())
    for hint in edges(best, judged):
        print(hint)
    found = {
        name: value for name, value in result.items() if name != "grid"
    }  # that is a picture, and stands in result.json
    chosen_by = {name: value for name, value in found.items() if name.startswith("chosen_")}
    tracker.params(chosen_by)
    tracker.metrics(
        {f"probe/{name}": float(found[name]) for name in found.keys() - chosen_by.keys()}, step=0
    )
    chosen = f"at lr {best.candidate.lr:g}, decay {best.candidate.weight_decay:g}"
    length = f", {best.candidate.epochs} epochs" if len(settings.epochs) > 1 else ""
    title = f"{Path(settings.run_dir).name}: held-out top-1, best {best} {chosen}{length}"
    tracker.picture("grid", lambda: draw_grid(judged, best, title=title), step=0)


def save_classifier(settings: ProbeSettings, outcome: Outcome, maker: FeatureMaker) -> None:
    """RUN/checkpoints/step-NNNNNNNN: what evaluate, tune and export take."""
    run_dir, manifest, backbone = Path(settings.run_dir), maker.manifest, maker.backbone
    mean, std = backbone.normalisation
    assert backbone.checkpoint is not None and backbone.model is not None
    identity = RunIdentity.of(
        run_dir, experiment=settings.tracking.experiment, uri=settings.tracking.uri
    )
    backbone.model.reset_classifier(len(manifest.classes))
    tensors = {name: tensor.detach().cpu() for name, tensor in backbone.model.state_dict().items()}
    tensors |= dict(zip(("head.weight", "head.bias"), outcome.classifier, strict=True))
    card = backbone.checkpoint.card.model_copy(
        update={
            "classes": manifest.classes,
            "dataset": manifest.name,
            "stored_crop": manifest.crop,
            "stored_interpolation": manifest.interpolation,
            "stored_size": (
                Part(settings.data.directory, manifest, settings.data.train_split).stored_size(
                    backbone.image_size
                )
            ),
            "fed_interpolation": maker.cache.fed.plain_filter,
            "channel_mean": mean,
            "channel_std": std,
            "content_hash": manifest.content_hash,
            "pixels_hash": manifest.pixels_hash,
            "step": outcome.result["steps"],
            "run_key": identity.run_key,
        }
    )
    save_folder(checkpoint_dir(run_dir, card.step), card=card, weights=tensors)


def candidates_of(settings: ProbeSettings) -> list[Candidate]:
    return [
        Candidate(*values)
        for values in itertools.product(settings.lrs, settings.weight_decays, settings.epochs)
    ]


class Head(NamedTuple):
    weights_EK: Tensor
    num_steps: int
    """That it was trained for; passes over the features, of L-BFGS."""


def heads_of(
    rows: Rows,
    candidates: Sequence[Candidate],
    *,
    settings: ProbeSettings,
    num_classes: int,
    num_epochs: int | None = None,
) -> list[Head]:
    """By the optimizer of the settings."""
    if settings.optimizer != "lbfgs":
        heads_GEK = train_heads(
            rows, candidates, settings=settings, num_classes=num_classes, num_epochs=num_epochs
        )
        num_batches = -(-rows.num_rows // settings.batch_size)
        return [
            Head(head, each.epochs * num_batches)
            for head, each in zip(heads_GEK, candidates, strict=True)
        ]
    heads_GEK, ends = minimize(
        rows, candidates, tolerance=settings.tolerance, num_classes=num_classes
    )
    for each, end in zip(candidates, ends, strict=True):
        if not end.has_converged:
            fix = "increase epochs, tolerance or weight_decays"
            if end.is_stuck:
                fix = "single precision finds no lower loss; increase tolerance or weight_decays"
            print(
                f"lbfgs: weight decay {each.weight_decay:g} has a gradient of"
                f" {end.largest_gradient:.1e} after {end.num_passes} passes, above tolerance"
                f" {settings.tolerance:g}. To converge, {fix}."
            )
    return [Head(head, end.num_passes) for head, end in zip(heads_GEK, ends, strict=True)]


def judged_candidates(
    train: Rows,
    held: Rows,
    *,
    settings: ProbeSettings,
    num_classes: int,
    world: World,
    are_shared: bool = False,
) -> tuple[list[Judged], dict[Candidate, Head]]:
    """All candidates with their scores, known to every rank, and the heads of this rank's share.
    `are_shared`: see `Streamed`."""
    candidates, group = candidates_of(settings), PatientGroup()
    mine = shares(candidates, world.num_ranks)[world.rank]
    takes_part = not mine and are_shared
    num_epochs = max(each.epochs for each in candidates) if are_shared else None
    table = torch.zeros(len(candidates), 2, dtype=torch.float64)
    heads: dict[Candidate, Head] = {}
    PROGRESS.mark("training heads")
    if mine or takes_part:
        of_share = [candidates[number] for number in mine] or candidates[:1]
        own = heads_of(
            train, of_share, settings=settings, num_classes=num_classes, num_epochs=num_epochs
        )
        weights = torch.stack([head.weights_EK for head in own])
        for number, head, score in zip(mine, own, judge(held, weights), strict=bool(mine)):
            heads[candidates[number]] = head
            table[number] = torch.tensor([score.top1, score.loss], dtype=torch.float64)
    known = group.all_sum(
        table
    ).tolist()  # ranks without a candidate wait here for all of the training
    return [Judged(each, Score(*row)) for each, row in zip(candidates, known, strict=True)], heads


def shares(candidates: Sequence[Candidate], num_ranks: int) -> list[list[int]]:
    """The numbers of each rank's candidates: the longest first, each to the rank that has least to
    do."""
    work, dealt = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(candidates)), key=lambda number: -candidates[number].epochs):
        rank = work.index(min(work))
        dealt[rank].append(number)
        work[rank] += candidates[number].epochs
    return [sorted(numbers) for numbers in dealt]


def best_of(judged: list[Judged], *, num_held: int) -> Judged:
    """Return the candidate with the lowest held-out loss among those with the best held-out
    accuracy.

    Accuracies within one standard error of the highest are equal: 192 samples cannot tell 68 % from
    70 %, and the loss can. Losses are compared to three digits, which no number of ranks changes.
    Then the smallest learning rate, the shortest length and the largest decay win.
    """
    usable = [each for each in judged if not each.has_diverged]
    if not usable:
        lowest = judged[0].candidate.lr
        raise UserError(
            "lrs",
            f"all {len(judged)} candidates have diverged, down to {lowest:g}",
            "choose smaller values",
            code="not-finite",
        )

    highest = max(each.score.top1 for each in usable)
    error = math.sqrt(highest * (1 - highest) / num_held)
    equals = [each for each in usable if each.score.top1 >= highest - error]
    return min(
        equals,
        key=lambda each: (
            round(each.score.loss, 3),
            each.candidate.lr,
            each.candidate.epochs,
            -each.candidate.weight_decay,
        ),
    )


def edges(best: Judged, judged: list[Judged]) -> list[str]:
    """Where the best candidates lie on the edge of the grid alone: a better one may lie beyond."""
    hints = []
    tied = [each for each in judged if each.score.top1 == best.score.top1]
    for name, field in (("lrs", "lr"), ("weight_decays", "weight_decay"), ("epochs", "epochs")):
        values, found = (
            {getattr(each.candidate, field) for each in group} for group in (judged, tied)
        )
        if len(values) > 1 and found == {max(values)}:
            hints.append(f"{name}: the best, {max(values):g}, is the largest; try larger ones, too")
        elif len(values) > 1 and found == {min(values)} and min(values) > 0:
            hints.append(
                f"{name}: the best, {min(values):g}, is the smallest; try smaller ones, too"
            )
    return hints


def _layer(
    judged: list[Judged], epochs: int
) -> tuple[list[float], list[float], list[list[Judged]]]:
    """(weight decays, learning rates, a row of candidates for each decay), of those of one
    length."""
    found = {
        (e.candidate.weight_decay, e.candidate.lr): e
        for e in judged
        if e.candidate.epochs == epochs
    }
    decays, lrs = (sorted({place[axis] for place in found}) for axis in (0, 1))
    return decays, lrs, [[found[decay, lr] for lr in lrs] for decay in decays]


def print_grid(judged: list[Judged], best: Judged, console: Console) -> None:
    """A table for each number of epochs: a row for each weight decay, a column for each learning
    rate."""
    for epochs in sorted({each.candidate.epochs for each in judged}):
        decays, lrs, rows = _layer(judged, epochs)
        console.print(f"held-out top-1, {'' if len(lrs) > 1 else 'at most '}{epochs} epochs")
        table = Grid(box=None, pad_edge=False, header_style="bold")
        table.add_column("decay \\ lr", justify="right")
        for lr in lrs:
            table.add_column(f"{lr:g}", justify="right", no_wrap=True)
        for decay, row in zip(decays, rows, strict=True):
            words = [
                f"[bold green]{each}[/]" if each.candidate == best.candidate else str(each)
                for each in row
            ]
            table.add_row(f"{decay:g}", *words)
        console.print(table)


def draw_grid(judged: list[Judged], best: Judged, *, title: str) -> Image.Image:
    """Of the candidates that are as long as the best: darker is better, the best has a frame."""
    from matplotlib.figure import Figure  # a second, which ranks that draw nothing need not spend
    from matplotlib.patches import Rectangle

    from finetune.looks import file_of, looks

    decays, lrs, rows = _layer(judged, best.candidate.epochs)
    scores = np.array(
        [[math.nan if each.has_diverged else each.score.top1 for each in row] for row in rows]
    )
    first, third = np.nanpercentile(scores, [25, 75])
    lowest = max(
        np.nanmin(scores), first - 1.5 * (third - first)
    )  # what is below, as in a box plot, would take all colours
    with looks(title):
        figure = Figure(figsize=(2.5 + 0.9 * len(lrs), 1.5 + 0.5 * len(decays)))
        axes = figure.add_subplot(
            title=legible(title), xlabel="learning rate", ylabel="weight decay"
        )
        axes.imshow(scores, cmap="Blues", aspect="auto", vmin=lowest, vmax=np.nanmax(scores))
        axes.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axes.set_yticks(range(len(decays)), [f"{decay:g}" for decay in decays])
        for (row, column), score in np.ndenumerate(scores):
            colour = "white" if score > (lowest + np.nanmax(scores)) / 2 else "black"
            axes.text(column, row, str(rows[row][column]), ha="center", va="center", color=colour)
        corner = (
            lrs.index(best.candidate.lr) - 0.48,
            decays.index(best.candidate.weight_decay) - 0.48,
        )
        axes.add_patch(
            Rectangle(corner, 0.96, 0.96, fill=False, edgecolor="#cc5500", linewidth=2.5)
        )
        return Image.open(file_of(figure)).convert("RGB")
