"""The grid of a probe: its cells, shared among ranks; what each is worth on held-out samples; which is best. G cells."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_prep.settings import UserError
from finetune.accelerator import Patience
from finetune.probe.config import ProbeSettings
from finetune.probe.heads import Cell, Score, judge, train_heads
from finetune.probe.lbfgs import End, minimise
from finetune.probe.rows import Rows
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World


@dataclass(frozen=True)
class Judged:
    """A cell and its score on the held-out samples."""

    cell: Cell
    score: Score

    @property
    def has_diverged(self) -> bool:
        return not math.isfinite(self.score.loss)


def cells_of(settings: ProbeSettings) -> list[Cell]:
    return [Cell(*values) for values in itertools.product(settings.lrs, settings.weight_decays, settings.epochs)]


@dataclass(frozen=True)
class Head:
    weights_EK: Tensor
    num_steps: int
    """That it was trained for; passes over the features, of L-BFGS."""


def heads_of(rows: Rows, cells: list[Cell], *, settings: ProbeSettings, num_classes: int) -> list[Head]:
    """By the optimizer of the settings."""
    if settings.optimizer != "lbfgs":
        heads_GEK = train_heads(rows, cells, settings=settings, num_classes=num_classes)
        num_batches = -(-rows.num_rows // settings.batch_size)
        return [Head(head, cell.epochs * num_batches) for head, cell in zip(heads_GEK, cells, strict=True)]
    heads_GEK, ends = minimise(rows, cells, tolerance=settings.tolerance, num_classes=num_classes)
    for cell, end in zip(cells, ends, strict=True):
        if not end.has_converged:
            print(f"lbfgs, weight decay {cell.weight_decay:g}: {_how_it_ended(end, settings)}")
    return [Head(head, end.num_passes) for head, end in zip(heads_GEK, ends, strict=True)]


def _how_it_ended(end: End, settings: ProbeSettings) -> str:
    where = f"the gradient is {end.steepest:.1e} after {end.num_passes} passes, not yet {settings.tolerance:g}"
    if end.is_stuck:
        return (
            f"{where}, and single precision sees no way down any more; such a head is mostly as good, and a larger "
            "tolerance or decay would end it sooner"
        )
    return f"{where}; more epochs, or a larger tolerance, or a larger decay would end it"


def judged_cells(
    train: Rows, held: Rows, *, settings: ProbeSettings, num_classes: int, world: World
) -> tuple[list[Judged], dict[Cell, Head]]:
    """All cells with their scores, known to every rank, and the heads of this rank's share."""
    cells, patience = cells_of(settings), Patience()
    mine = shares(cells, world.num_ranks)[world.rank]
    table = torch.zeros(len(cells), 2, dtype=torch.float64)
    heads: dict[Cell, Head] = {}
    PROGRESS.mark("training heads")
    if mine:
        own = heads_of(train, [cells[number] for number in mine], settings=settings, num_classes=num_classes)
        weights = torch.stack([head.weights_EK for head in own])
        for number, head, score in zip(mine, own, judge(held, weights), strict=True):
            heads[cells[number]] = head
            table[number] = torch.tensor([score.top1, score.loss], dtype=torch.float64)
    known = patience.all_sum(table).tolist()  # ranks without a cell wait here for all of the training
    return [Judged(cell, Score(*row)) for cell, row in zip(cells, known, strict=True)], heads


def shares(cells: Sequence[Cell], num_ranks: int) -> list[list[int]]:
    """The numbers of each rank's cells: the longest first, each to the rank that has least to do."""
    work, dealt = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(cells)), key=lambda number: -cells[number].epochs):
        rank = work.index(min(work))
        dealt[rank].append(number)
        work[rank] += cells[number].epochs
    return [sorted(numbers) for numbers in dealt]


def best_of(judged: list[Judged]) -> Judged:
    """The highest held-out accuracy; of equals the lowest held-out loss (to three digits, which no number of ranks changes), then
    the smallest learning rate, the shortest, the largest decay."""
    usable = [each for each in judged if not each.has_diverged]
    if not usable:
        raise UserError(
            f"lrs: all {len(judged)} cells have diverged, down to {judged[0].cell.lr:g}; choose smaller ones"
        )

    def rank(each: Judged) -> tuple[float, ...]:
        cell, score = each.cell, each.score
        return -score.top1, round(score.loss, 3), cell.lr, cell.epochs, -cell.weight_decay

    return min(usable, key=rank)


def edges(best: Judged, judged: list[Judged]) -> list[str]:
    """Where the best cells lie on the edge of the grid alone: a better one may lie beyond."""
    hints = []
    tied = [each.cell for each in judged if each.score.top1 == best.score.top1]
    for name, field in (("lrs", "lr"), ("weight_decays", "weight_decay"), ("epochs", "epochs")):
        values, found = ({getattr(cell, field) for cell in cells} for cells in ([j.cell for j in judged], tied))
        if len(values) > 1 and found == {max(values)}:
            hints.append(f"{name}: the best, {max(values):g}, is the largest; try larger ones, too")
        elif len(values) > 1 and found == {min(values)} and min(values) > 0:
            hints.append(f"{name}: the best, {min(values):g}, is the smallest; try smaller ones, too")
    return hints
