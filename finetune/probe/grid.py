"""The grid of a probe: its candidates, shared among ranks; what each is worth on held-out samples; which is best, and how that is
shown, as a table on the console and as a picture."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from data_prep.settings import UserError
from finetune.probe.config import ProbeSettings
from finetune.probe.heads import Candidate, Score, judge, train_heads
from finetune.probe.lbfgs import minimise
from finetune.probe.rows import Rows
from finetune.session import PatientGroup
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World


@dataclass(frozen=True)
class Judged:
    """A candidate and its score on the held-out samples."""

    candidate: Candidate
    score: Score

    @property
    def has_diverged(self) -> bool:
        return not math.isfinite(self.score.loss)

    def __str__(self) -> str:
        return "diverged" if self.has_diverged else f"{self.score.top1:.1%}"


def candidates_of(settings: ProbeSettings) -> list[Candidate]:
    return [Candidate(*values) for values in itertools.product(settings.lrs, settings.weight_decays, settings.epochs)]


class Head(NamedTuple):
    weights_EK: Tensor
    num_steps: int
    """That it was trained for; passes over the features, of L-BFGS."""


def heads_of(rows: Rows, candidates: Sequence[Candidate], *, settings: ProbeSettings, num_classes: int) -> list[Head]:
    """By the optimizer of the settings."""
    if settings.optimizer != "lbfgs":
        heads_GEK = train_heads(rows, candidates, settings=settings, num_classes=num_classes)
        num_batches = -(-rows.num_rows // settings.batch_size)
        return [Head(head, each.epochs * num_batches) for head, each in zip(heads_GEK, candidates, strict=True)]
    heads_GEK, ways = minimise(rows, candidates, tolerance=settings.tolerance, num_classes=num_classes)
    for each, way in zip(candidates, ways, strict=True):
        advice = "; more epochs, or a larger tolerance, or a larger decay would end it sooner"
        if way.is_stuck:
            advice = (
                ", and single precision sees no way down any more; such a head is mostly as good, and a larger tolerance or decay"
            )
            advice += " would end it sooner"
        if not way.has_converged:
            where = f"the gradient is {way.steepest:.1e} after {way.num_passes} passes, not yet {settings.tolerance:g}"
            print(f"lbfgs, weight decay {each.weight_decay:g}: {where}{advice}")
    return [Head(head, way.num_passes) for head, way in zip(heads_GEK, ways, strict=True)]


def judged_candidates(
    train: Rows, held: Rows, *, settings: ProbeSettings, num_classes: int, world: World
) -> tuple[list[Judged], dict[Candidate, Head]]:
    """All candidates with their scores, known to every rank, and the heads of this rank's share."""
    candidates, group = candidates_of(settings), PatientGroup()
    mine = shares(candidates, world.num_ranks)[world.rank]
    table = torch.zeros(len(candidates), 2, dtype=torch.float64)
    heads: dict[Candidate, Head] = {}
    PROGRESS.mark("training heads")
    if mine:
        own = heads_of(train, [candidates[number] for number in mine], settings=settings, num_classes=num_classes)
        weights = torch.stack([head.weights_EK for head in own])
        for number, head, score in zip(mine, own, judge(held, weights), strict=True):
            heads[candidates[number]] = head
            table[number] = torch.tensor([score.top1, score.loss], dtype=torch.float64)
    known = group.all_sum(table).tolist()  # ranks without a candidate wait here for all of the training
    return [Judged(each, Score(*row)) for each, row in zip(candidates, known, strict=True)], heads


def shares(candidates: Sequence[Candidate], num_ranks: int) -> list[list[int]]:
    """The numbers of each rank's candidates: the longest first, each to the rank that has least to do."""
    work, dealt = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(candidates)), key=lambda number: -candidates[number].epochs):
        rank = work.index(min(work))
        dealt[rank].append(number)
        work[rank] += candidates[number].epochs
    return [sorted(numbers) for numbers in dealt]


def best_of(judged: list[Judged]) -> Judged:
    """The highest held-out accuracy; of equals the lowest held-out loss (to three digits, which no number of ranks changes), then
    the smallest learning rate, the shortest, the largest decay."""
    usable = [each for each in judged if not each.has_diverged]
    if not usable:
        lowest = judged[0].candidate.lr
        raise UserError(f"lrs: all {len(judged)} candidates have diverged, down to {lowest:g}; choose smaller ones")

    def rank(each: Judged) -> tuple[float, ...]:
        candidate, score = each.candidate, each.score
        return -score.top1, round(score.loss, 3), candidate.lr, candidate.epochs, -candidate.weight_decay

    return min(usable, key=rank)


def edges(best: Judged, judged: list[Judged]) -> list[str]:
    """Where the best candidates lie on the edge of the grid alone: a better one may lie beyond."""
    hints = []
    tied = [each for each in judged if each.score.top1 == best.score.top1]
    for name, field in (("lrs", "lr"), ("weight_decays", "weight_decay"), ("epochs", "epochs")):
        values, found = ({getattr(each.candidate, field) for each in group} for group in (judged, tied))
        if len(values) > 1 and found == {max(values)}:
            hints.append(f"{name}: the best, {max(values):g}, is the largest; try larger ones, too")
        elif len(values) > 1 and found == {min(values)} and min(values) > 0:
            hints.append(f"{name}: the best, {min(values):g}, is the smallest; try smaller ones, too")
    return hints


def _layer(judged: list[Judged], epochs: int) -> tuple[list[float], list[float], list[list[Judged]]]:
    """(weight decays, learning rates, a row of candidates for each decay), of those of one length."""
    found = {(e.candidate.weight_decay, e.candidate.lr): e for e in judged if e.candidate.epochs == epochs}
    decays, lrs = (sorted({place[axis] for place in found}) for axis in (0, 1))
    return decays, lrs, [[found[decay, lr] for lr in lrs] for decay in decays]


def print_grid(judged: list[Judged], best: Judged, console: Console) -> None:
    """A table for each number of epochs: a row for each weight decay, a column for each learning rate."""
    for epochs in sorted({each.candidate.epochs for each in judged}):
        decays, lrs, rows = _layer(judged, epochs)
        console.print(f"held-out top-1, {'' if len(lrs) > 1 else 'at most '}{epochs} epochs")
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("decay \\ lr", justify="right")
        for lr in lrs:
            table.add_column(f"{lr:g}", justify="right", no_wrap=True)
        for decay, row in zip(decays, rows, strict=True):
            words = [f"[bold green]{each}[/]" if each.candidate == best.candidate else str(each) for each in row]
            table.add_row(f"{decay:g}", *words)
        console.print(table)


def draw_grid(judged: list[Judged], best: Judged, *, title: str) -> Image.Image:
    """Of the candidates that are as long as the best: darker is better, the best has a frame."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second, which ranks that draw nothing need not spend
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    decays, lrs, rows = _layer(judged, best.candidate.epochs)
    scores = np.array([[math.nan if each.has_diverged else each.score.top1 for each in row] for row in rows])
    figure = Figure(figsize=(2.5 + 0.9 * len(lrs), 1.5 + 0.5 * len(decays)), dpi=120, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    axes.imshow(scores, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
    axes.set_yticks(range(len(decays)), [f"{decay:g}" for decay in decays])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("weight decay")
    middle = (np.nanmin(scores) + np.nanmax(scores)) / 2
    for (row, column), score in np.ndenumerate(scores):
        colour = "white" if score > middle else "black"
        axes.text(column, row, str(rows[row][column]), ha="center", va="center", color=colour, fontsize=9)
    corner = (lrs.index(best.candidate.lr) - 0.48, decays.index(best.candidate.weight_decay) - 0.48)
    axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor="#cc5500", linewidth=2.5))
    axes.set_title(title, fontsize=9, loc="left")
    canvas.draw()  # type: ignore[no-untyped-call]
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())  # type: ignore[no-untyped-call]
