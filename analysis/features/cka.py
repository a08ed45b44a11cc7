"""`analysis cka`: how alike the features of two trained networks are, mixing by mixing.

Of every pair of runs a matrix, and its diagonal's mean: of networks of different depth, the entries at the same share of their
depth. Beside it stand what to hold it against: the ceiling, which other seeds of the same architecture reach with each other, and
the floor, where the second network sees the pictures in another order. Pairs of the same two architectures are seeds of one point:
mean, standard deviation over pairs, and an interval from resampled batches.
R runs, F features of all runs together, T batches, L and M layers of a pair.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from analysis.features.hsic import Grams, WholeCka, cka, gram, hsic
from analysis.features.mixings import Subject, open_subjects, stored_batches, too_few
from data_prep.manifest import Manifest
from data_prep.progress import progress
from data_prep.settings import UserError
from pretrain.config import ReadingSettings
from pretrain.data.datasets import Part
from pretrain.data.reader import ShardReader, reading
from pretrain.models.spec import ModelSpec, SparseMlpSpec

RESAMPLES, INTERVAL = 1000, (2.5, 97.5)
FEWEST_BATCHES = 4
"""Of fewer there is no interval: their resamples are too much alike."""
Pair = tuple[str, str]


@dataclass(frozen=True)
class Request:
    """What is compared on what."""

    pairs: Sequence[Pair]
    dataset: str
    manifest: Manifest
    split: str
    batch: int = 256
    count: int | None = None
    """Pictures; None: all of the split."""
    whole: bool = False
    """The diagonals by the whole-sample form, too."""


@dataclass(frozen=True)
class Group:
    """Pairs of the same two architectures."""

    models: Pair
    density: float | None
    """Of the second, where it is a SW-MLP."""
    pairs: Sequence[Pair]
    names: tuple[Sequence[str], Sequence[str]]
    """Of the two networks' mixings."""
    matrix_LM: np.ndarray
    """The mean over the pairs."""
    diagonals: Sequence[float]
    """The mean of each pair's."""
    interval: tuple[float, float] | None
    """Over batches."""
    floor: float
    ceilings: tuple[float | None, float | None]
    """Of the first and of the second architecture, where there are several seeds."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.diagonals)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.diagonals) if len(self.diagonals) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """All that a pass over the split has found."""

    subjects: dict[str, Subject]
    hsic_TFF: Tensor
    floor_TFF: Tensor
    """With the pictures of the second in another order."""
    num_pictures: int
    whole: dict[Pair, list[float]]

    def part(self, run: str) -> slice:
        """Of the features."""
        places = list(self.subjects)
        first = sum(len(self.subjects[place].mixings) for place in places[: places.index(run)])
        return slice(first, first + len(self.subjects[run].mixings))

    def matrix(self, pair: Pair, *, floor: bool = False) -> Tensor:
        """(L, M): CKA of averaged HSIC1."""
        (one, other), mean_FF = map(self.part, pair), self.hsic_TFF.mean(0)
        selves = mean_FF.diagonal()  # with itself a shuffled network has what it had
        return cka((self.floor_TFF.mean(0) if floor else mean_FF)[one, other], selves[one], selves[other])

    def resampled(self, pair: Pair, weights_WT: Tensor) -> Tensor:
        """(W, L, M): with each row of weights of the batches."""
        one, other = map(self.part, pair)
        cross = torch.einsum("wt,tlm->wlm", weights_WT, self.hsic_TFF[:, one, other])
        selves = weights_WT @ self.hsic_TFF.diagonal(dim1=1, dim2=2)
        return cka(cross, selves[:, one], selves[:, other])


def diagonal(rows: int, columns: int) -> list[tuple[int, int]]:
    """The entries at the same share of both depths."""
    longest = max(rows, columns)
    return [(place * rows // longest, place * columns // longest) for place in range(longest)]


def diagonal_of(matrix: Tensor) -> Tensor:
    """(..., L, M) to (...): the mean over the diagonal."""
    rows, columns = zip(*diagonal(matrix.shape[-2], matrix.shape[-1]), strict=True)
    return matrix[..., list(rows), list(columns)].mean(-1)


def compare(request: Request, *, device: torch.device) -> Comparison:
    """One pass over the pictures, with all runs at once; with `whole`, one more for each entry of a diagonal."""
    part = Part(Path(request.dataset), request.manifest, request.split)
    subjects = open_subjects([run for pair in request.pairs for run in pair], request.manifest, device=device)
    size = max(subject.backbone.image_size for subject in subjects.values())
    with reading([part], ReadingSettings(dataset=request.dataset), image_size=size) as reader:
        count = min(request.count or reader.num_samples, reader.num_samples)
        sums, floors, seen = list[Tensor](), list[Tensor](), 0
        if request.whole:
            _check_room(subjects, request.pairs, size=size, device=device)
        with progress("features", total=count, unit="images") as line:
            for batch in stored_batches(reader, size=request.batch, count=count):
                number = len(batch.samples)
                grams = Grams.of(
                    one for each in subjects.values() for one in each.run(each.plain.plain(batch).images_BCHW, gram)[1]
                )
                others = grams.shuffled(torch.randperm(number, generator=torch.Generator().manual_seed(seen)).to(device))
                sums.append(hsic(grams, grams).cpu())
                floors.append(hsic(grams, others).cpu())
                seen += number
                line.advance(number)
        if not sums:
            raise UserError(too_few(request.dataset, request.split))
        whole = {}
        if request.whole:
            whole = {pair: _whole(request, [subjects[run] for run in pair], reader, count=count) for pair in request.pairs}
    return Comparison(subjects, torch.stack(sums), torch.stack(floors), seen, whole)


def _check_room(subjects: dict[str, Subject], pairs: Sequence[Pair], *, size: int, device: torch.device) -> None:
    """For the whole-sample form, before an hour's work."""
    nothing = torch.zeros(1, 3, size, size, device=device)
    entries = {run: subject.run(nothing, torch.numel)[1] for run, subject in subjects.items()}
    most = max(
        entries[one][row] ** 2 + entries[other][column] ** 2 + entries[one][row] * entries[other][column]
        for one, other in pairs
        for row, column in diagonal(len(entries[one]), len(entries[other]))
    )
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if most * 8 > room:
        raise UserError(
            f"--whole: needs {most * 8 / 1e9:,.1f} GB for mixings of so many entries, {room / 1e9:,.1f} are free; leave it out"
        )


def _whole(request: Request, subjects: Sequence[Subject], reader: ShardReader, *, count: int) -> list[float]:
    """The diagonal, a pass for each entry: the products of one pair of layers are held at a time."""
    names, found = [list(subject.mixings) for subject in subjects], list[float]()
    for places in diagonal(*map(len, names)):
        whole = WholeCka()
        with progress(f"whole sample, mixings {places[0] + 1} and {places[1] + 1}", total=count, unit="images") as line:
            for batch in stored_batches(reader, size=request.batch, count=count):
                outputs = [
                    subject.only(number).run(subject.plain.plain(batch).images_BCHW, lambda output: output)[1][0]
                    for subject, number in zip(subjects, places, strict=True)
                ]
                whole.add(*outputs)
                line.advance(len(batch.samples))
        found.append(whole.value())
    return found


# ---- what follows from it ----------------------------------------------------------------------------------------------


def groups_of(found: Comparison, pairs: Sequence[Pair]) -> list[Group]:
    """In the order of their densities."""
    together: dict[tuple[ModelSpec, ...], list[Pair]] = {}
    for pair in pairs:
        together.setdefault(tuple(found.subjects[run].card.model for run in pair), []).append(pair)
    random, num_batches = np.random.default_rng(0), len(found.hsic_TFF)
    weights_WT = torch.from_numpy(random.multinomial(num_batches, np.full(num_batches, 1 / num_batches), RESAMPLES) / num_batches)
    groups = []
    for specs, members in together.items():
        matrices = [found.matrix(pair) for pair in members]
        resampled = torch.stack([diagonal_of(found.resampled(pair, weights_WT)) for pair in members]).mean(0)
        low, high = map(float, np.nanpercentile(resampled.numpy(), INTERVAL))
        first, second = (list(found.subjects[run].mixings) for run in members[0])
        groups.append(
            Group(
                (specs[0].label, specs[1].label),
                specs[1].density if isinstance(specs[1], SparseMlpSpec) else None,
                members,
                (first, second),
                torch.stack(matrices).mean(0).numpy(),
                [float(diagonal_of(matrix)) for matrix in matrices],
                (low, high) if num_batches >= FEWEST_BATCHES else None,
                float(torch.stack([diagonal_of(found.matrix(pair, floor=True)) for pair in members]).mean()),
                (_ceiling(found, [one for one, _ in members]), _ceiling(found, [other for _, other in members])),
            )
        )
    return sorted(groups, key=lambda group: (group.models[0], -math.inf if group.density is None else group.density))


def _ceiling(found: Comparison, runs: Sequence[str]) -> float | None:
    different = list(dict.fromkeys(runs))
    values = [
        float(diagonal_of(found.matrix((one, other)))) for number, one in enumerate(different) for other in different[:number]
    ]
    return statistics.fmean(values) if values else None


def rows_of(found: Comparison, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """One for each entry of each pair's matrix."""
    rows = []
    for pair in pairs:
        one, other = (found.subjects[run] for run in pair)
        matrix, floor = found.matrix(pair), found.matrix(pair, floor=True)
        entries = diagonal(*matrix.shape)
        wholes = dict(zip(entries, found.whole.get(pair, []), strict=False))
        for row, first in enumerate(one.mixings):
            for column, second in enumerate(other.mixings):
                rows.append(
                    {
                        "run_a": pair[0],
                        "run_b": pair[1],
                        "model_a": one.label,
                        "model_b": other.label,
                        "mixing_a": first,
                        "mixing_b": second,
                        "cka": float(matrix[row, column]),
                        "floor": float(floor[row, column]),
                        "on_diagonal": (row, column) in entries,
                        "cka_whole": wholes.get((row, column)),
                    }
                )
    return rows


def facts_of(found: Comparison, groups: Sequence[Group], request: Request) -> dict[str, Any]:
    num_features = sum(len(subject.mixings) for subject in found.subjects.values())
    return {
        "split": request.split,
        "num_pictures": found.num_pictures,
        "batch": request.batch,
        "num_batches": len(found.hsic_TFF),
        "gram_bytes": num_features * request.batch**2 * 8,
        "groups": [
            {
                "model_a": group.models[0],
                "model_b": group.models[1],
                "density": group.density,
                "pairs": [list(pair) for pair in group.pairs],
                "diagonal": group.mean,
                "diagonal_std_over_pairs": group.std,
                "diagonal_interval_over_batches": group.interval,
                "ceiling_a": group.ceilings[0],
                "ceiling_b": group.ceilings[1],
                "floor": group.floor,
            }
            for group in groups
        ],
    }
