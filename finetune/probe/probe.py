"""`finetune probe`: a grid of linear heads on frozen features.

1. Features of the training and test split are read from disk, or computed (features.py, source.py).
2. Each rank trains its fraction of the candidates and evaluates them on held-out samples.
3. The first rank trains the best candidate again on the complete training split (unless
   holdout_split is set), and evaluates it once on the test split. It saves the model as a
   checkpoint, then result.json.

Shapes: D features, E rows of a head (heads.py), K classes, B batch.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import load_manifest
from finetune.probe.config import ProbeSettings
from finetune.probe.features import FeatureMaker
from finetune.probe.heads import Candidate, Score, judge, train_heads
from finetune.probe.lbfgs import minimize
from finetune.probe.rows import Rows, Standard
from finetune.probe.source import Cached, Streamed, source_of
from finetune.session import PatientGroup, register, session
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
"""Constant in the random key that selects the held-out samples."""


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
    """(weight_KD, bias_K) for unscaled features."""
    result: dict[str, Any]


def probe(
    settings: ProbeSettings, world: World, checkpoint: Checkpoint | None
) -> dict[str, Any] | None:
    """Return the result on the first rank, None on other ranks."""
    manifest, run_dir = load_manifest(settings.data.directory), Path(settings.run_dir)
    used = settings.used(manifest)
    with session(settings, world, used=used, checkpoint=checkpoint, task="probe") as (
        device,
        tracker,
    ):
        maker = FeatureMaker.open(settings, manifest, checkpoint, world, device)
        with source_of(settings, maker) as source:
            outcome = choose_and_test(
                source, settings=settings, num_classes=len(manifest.classes), world=world
            )
        if outcome is None:
            return None  # the other ranks do not wait
        report(outcome, tracker)
        if checkpoint is not None:
            save_classifier(settings, outcome, maker)
            top1 = outcome.result["test_top1"]
            register(tracker, checkpoint, {"probe/top1": top1}, target=target_of(manifest))
        return save_result(run_dir, outcome.result)


def choose_and_test(
    source: Cached | Streamed, *, settings: ProbeSettings, num_classes: int, world: World
) -> Outcome | None:
    """Return the outcome on the first rank, None on other ranks. If all ranks compute rows together
    (`are_shared`), all ranks stay until the end."""
    unscaled = Standard.none(source.num_features)
    standard = source.standard() if settings.standardize else unscaled
    kept, held = held_out(source.num_train, settings)
    holdout = source.rows("plain", standard=standard, chosen_n=held)
    rows = source.rows("train", standard=standard, chosen_n=kept)
    judged, heads = judged_candidates(
        rows,
        holdout,
        settings=settings,
        num_classes=num_classes,
        world=world,
        are_shared=source.are_shared,
    )
    best = best_of(judged, num_held=holdout.num_rows)
    if not world.is_first and not source.are_shared:
        return None
    PROGRESS.mark("training the best head again")
    head = heads.get(best.candidate)
    if head is None or source.are_shared or settings.holdout_split is None:
        rows = source.rows("train", standard=standard)
        (head,) = heads_of(rows, [best.candidate], settings=settings, num_classes=num_classes)
    classifier = folded(head.weights_EK, standard)
    result = scores_on_test(classifier, source.rows("test", standard=unscaled))
    if not world.is_first:
        return None
    result |= {f"chosen_{name}": value for name, value in best.candidate._asdict().items()}
    result |= {"holdout_top1": best.score.top1, "steps": head.num_steps}
    result["grid"] = [
        each.candidate._asdict()
        | {"holdout_top1": each.score.top1}
        | {"holdout_loss": None if each.has_diverged else each.score.loss}
        for each in judged
    ]
    return Outcome(judged, best, classifier, result)


def folded(head_EK: Tensor, standard: Standard) -> tuple[Tensor, Tensor]:
    """Return (weight_KD, bias_K) that predict the same from unscaled features as the head from
    scaled features."""
    num_features = len(standard.mean_D)
    weight_DK, bias_K = head_EK[:num_features].cpu().double(), head_EK[num_features].cpu().double()
    scaled_DK = weight_DK / standard.std_D.double().unsqueeze(1)
    bias_K = bias_K - standard.mean_D.double() @ scaled_DK
    return scaled_DK.T.float().contiguous(), bias_K.float()


def held_out(num_samples: int, settings: ProbeSettings) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of the kept and the held-out training samples. Both are None if
    holdout_split is set: all samples of both splits are used."""
    if settings.holdout_split is not None:
        return None, None
    key = int(hash64(_HOLDOUT, settings.seed))
    shuffled = torch.from_numpy(permute(np.arange(num_samples), size=num_samples, key=key))
    cut = settings.num_held(num_samples)
    return shuffled[cut:].sort().values, shuffled[:cut].sort().values


@torch.no_grad()
def scores_on_test(classifier: tuple[Tensor, Tensor], rows: Rows) -> dict[str, Any]:
    """Return top-1, top-5, and the mean accuracy over the classes that have samples."""
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


def report(outcome: Outcome, tracker: Tracker) -> None:
    judged, best = outcome.judged, outcome.best
    print_grid(judged, best, console())
    for hint in edges(best, judged):
        print(hint)
    scores = {name: value for name, value in outcome.result.items() if name != "grid"}
    chosen = {name: scores.pop(name) for name in list(scores) if name.startswith("chosen_")}
    tracker.params(chosen)
    tracker.metrics({f"probe/{name}": float(value) for name, value in scores.items()}, step=0)


def save_classifier(settings: ProbeSettings, outcome: Outcome, maker: FeatureMaker) -> None:
    run_dir, manifest, backbone = Path(settings.run_dir), maker.manifest, maker.backbone
    mean, std = backbone.normalization
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
            "fed_interpolation": maker.cache.augment.plain_filter,
            "eval_crop": maker.cache.augment.plain_crop,
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
    """Number of training steps. For L-BFGS: number of passes over the features."""


def heads_of(
    rows: Rows,
    candidates: Sequence[Candidate],
    *,
    settings: ProbeSettings,
    num_classes: int,
    num_epochs: int | None = None,
) -> list[Head]:
    """Return the heads of the candidates, trained together. `num_epochs`: see `train_heads`."""
    if settings.optimizer != "lbfgs":
        heads_GEK = train_heads(
            rows, candidates, settings=settings, num_classes=num_classes, num_epochs=num_epochs
        )
        steps = [settings.steps_of(each.epochs, rows.num_rows)[0] for each in candidates]
        return [Head(*each) for each in zip(heads_GEK, steps, strict=True)]
    heads_GEK, ends = minimize(
        rows, candidates, tolerance=settings.tolerance, num_classes=num_classes
    )
    if late := [pair for pair in zip(candidates, ends, strict=True) if not pair[1].has_converged]:
        decays = ", ".join(f"{each.weight_decay:g}" for each, _ in late)
        more = "" if all(end.is_stuck for _, end in late) else "epochs, "
        print(
            f"lbfgs: no convergence with weight decay {decays}. After"
            f" {max(end.num_passes for _, end in late)} passes, the largest gradient entry is"
            f" {max(end.largest_gradient for _, end in late):.1e}, above tolerance"
            f" {settings.tolerance:g}. Increase {more}tolerance or weight_decays."
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
    """Return all candidates with their scores, and the heads of this rank.

    If `are_shared`, all ranks must request the same rows at the same time. A rank without
    candidates then trains the first candidate.
    """
    candidates, group = candidates_of(settings), PatientGroup()
    own = shares(candidates, world.num_ranks)[world.rank]
    table = torch.zeros(len(candidates), 2, dtype=torch.float64)
    heads: dict[Candidate, Head] = {}
    PROGRESS.mark("training heads")
    if own or are_shared:
        trained = heads_of(
            train,
            [candidates[number] for number in own or [0]],
            settings=settings,
            num_classes=num_classes,
            num_epochs=max(each.epochs for each in candidates) if are_shared else None,
        )
        scores = judge(held, torch.stack([head.weights_EK for head in trained]))
        for number, head, score in zip(own, trained, scores, strict=bool(own)):
            heads[candidates[number]] = head
            table[number] = torch.tensor(score, dtype=torch.float64)
    rows = group.all_sum(table).tolist()  # ranks without a candidate wait here
    return [Judged(each, Score(*row)) for each, row in zip(candidates, rows, strict=True)], heads


def shares(candidates: Sequence[Candidate], num_ranks: int) -> list[list[int]]:
    """Return the candidate numbers of each rank. Each candidate, longest first, goes to the rank
    with the least work."""
    work, dealt = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(candidates)), key=lambda number: -candidates[number].epochs):
        rank = work.index(min(work))
        dealt[rank].append(number)
        work[rank] += candidates[number].epochs
    return [sorted(numbers) for numbers in dealt]


def best_of(judged: list[Judged], *, num_held: int) -> Judged:
    """Return the candidate with the lowest held-out loss among the candidates with the best
    accuracy.

    Accuracies within one standard error of the highest count as best. Losses are rounded to three
    decimals. Ties go to the smallest learning rate, then to the fewest epochs, then to the largest
    decay.
    """
    usable = [each for each in judged if not each.has_diverged]
    if not usable:
        problem = f"all {len(judged)} classifiers have diverged"
        raise UserError("lrs", problem, "choose smaller values", code="not-finite")
    highest = max(each.score.top1 for each in usable)
    error = math.sqrt(highest * (1 - highest) / num_held)
    equals = [each for each in usable if each.score.top1 >= highest - error]

    def rank(each: Judged) -> tuple[float, ...]:
        lr, decay, epochs = each.candidate
        return round(each.score.loss, 3), lr, epochs, -decay

    return min(equals, key=rank)


def edges(best: Judged, judged: list[Judged]) -> list[str]:
    """Return a hint for each grid setting whose best value is at an end of its list."""
    hints = []
    tied = [each.candidate for each in judged if each.score.top1 == best.score.top1]
    for name, field in (("lrs", "lr"), ("weight_decays", "weight_decay"), ("epochs", "epochs")):
        values = sorted({getattr(each.candidate, field) for each in judged})
        found = {getattr(each, field) for each in tied}
        for end, words in (
            (values[0], "smallest; also try smaller"),
            (values[-1], "largest; also try larger"),
        ):
            if len(values) > 1 and found == {end} and end > 0:
                hints.append(f"{name}: the best value {end:g} is the {words} values")
    return hints


def print_grid(judged: list[Judged], best: Judged, console: Console) -> None:
    """Print held-out accuracies for each number of epochs, as a table (weight decay x learning
    rate)."""
    for epochs in sorted({each.candidate.epochs for each in judged}):
        layer = {each.candidate[:2]: each for each in judged if each.candidate.epochs == epochs}
        lrs, decays = (sorted({place[axis] for place in layer}) for axis in (0, 1))
        console.print(f"held-out top-1, {'' if len(lrs) > 1 else 'at most '}{epochs} epochs")
        table = Grid(box=None, pad_edge=False, header_style="bold")
        table.add_column("decay \\ lr", justify="right")
        for lr in lrs:
            table.add_column(f"{lr:g}", justify="right", no_wrap=True)
        for decay in decays:
            row = [layer[lr, decay] for lr in lrs]
            cells = [f"[bold green]{each}[/]" if each is best else str(each) for each in row]
            table.add_row(f"{decay:g}", *cells)
        console.print(table)
