"""`analysis cka`: similarity of the features of two trained networks, mixing by mixing.

Each pair of runs has a matrix and the mean of its diagonal: for networks of different depth, the
entries at the same fraction of their depths. It is compared with a ceiling, the CKA of other seeds
of the same architecture, and a floor: the second network gets the images in another order.
Pairs of the same two architectures are seeds: mean, standard deviation over pairs, and an interval
from resampled batches. F features of all runs together, T batches, W weightings of these, L and M
layers of a pair.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from analysis.device import device_of
from analysis.features.hsic import Grams, WholeCka, cka, gram, hsic
from analysis.features.mixings import Images, Subject, open_subjects
from analysis.output import Result
from data_prep.errors import UserError
from finetune.looks import looks
from pretrain.models.spec import ModelSpec, SparseMlpSpec

RESAMPLES, INTERVAL = 1000, (2.5, 97.5)
FEWEST_BATCHES = 4
"""Of fewer there is no interval: their resamples are too much alike."""
Pair = tuple[str, str]


@dataclass(frozen=True)
class Group:
    """Pairs of the same two architectures."""

    names: tuple[Sequence[str], Sequence[str]]
    """Of the two networks' mixings."""
    matrix_LM: np.ndarray
    """The mean over the pairs."""
    facts: dict[str, Any]
    """Density: of the second, where it is a SW-MLP. Ceilings: of the first and of the second
    architecture, where there are several seeds."""


@dataclass(frozen=True)
class Comparison:
    """All that a pass over the split has found."""

    subjects: dict[str, Subject]
    hsic_TFF: Tensor
    floor_TFF: Tensor
    """With the images of the second in another order."""
    num_images: int
    whole: dict[Pair, list[float]]

    def resampled(self, pair: Pair, weights_WT: Tensor, *, floor: bool = False) -> Tensor:
        """(W, L, M): CKA of HSIC1 averaged with each row of weights of the batches."""
        ends = list(
            itertools.accumulate(
                (len(subject.mixings) for subject in self.subjects.values()), initial=0
            )
        )
        one, other = (
            slice(*ends[place : place + 2]) for place in map(list(self.subjects).index, pair)
        )
        cross = torch.einsum(
            "wt,tlm->wlm", weights_WT, (self.floor_TFF if floor else self.hsic_TFF)[:, one, other]
        )
        selves = weights_WT @ self.hsic_TFF.diagonal(
            dim1=1, dim2=2
        )  # with itself a shuffled network has what it had
        return cka(cross, selves[:, one], selves[:, other])

    def matrix(self, pair: Pair, *, floor: bool = False) -> Tensor:
        """(L, M)"""
        num_batches = len(self.hsic_TFF)
        return self.resampled(
            pair, torch.full((1, num_batches), 1 / num_batches, dtype=torch.float64), floor=floor
        )[0]

    def mean_diagonal(self, pairs: Iterable[Pair], *, floor: bool = False) -> float | None:
        values = [float(diagonal_of(self.matrix(pair, floor=floor))) for pair in pairs]
        return statistics.fmean(values) if values else None


def diagonal(rows: int, columns: int) -> list[tuple[int, int]]:
    """The entries at the same share of both depths."""
    longest = max(rows, columns)
    return [(place * rows // longest, place * columns // longest) for place in range(longest)]


def diagonal_of(matrix: Tensor) -> Tensor:
    """(..., L, M) to (...): the mean over the diagonal."""
    rows, columns = zip(*diagonal(matrix.shape[-2], matrix.shape[-1]), strict=True)
    return matrix[..., list(rows), list(columns)].mean(-1)


def compare(
    images: Images, pairs: Sequence[Pair], *, whole: bool, device: torch.device
) -> Comparison:
    """One pass over the images, with all runs at once; with `whole`, one more for each entry of a
    diagonal."""
    subjects = open_subjects(itertools.chain(*pairs), images.manifest, device=device)
    if whole:
        _check_room(subjects, pairs, device=device)
    sums, floors, seen = list[Tensor](), list[Tensor](), 0
    for batch in images.batches(
        "features", size=max(each.card.image_size for each in subjects.values()), device=device
    ):
        grams = Grams.of(
            one
            for each in subjects.values()
            for one in each.run(each.plain.plain(batch).images_BCHW, gram)[1]
        )
        order_N = torch.randperm(
            len(batch.samples), generator=torch.Generator().manual_seed(seen)
        ).to(device, non_blocking=True)
        sums.append(hsic(grams, grams))  # nobody waits for it before the end
        floors.append(hsic(grams, grams.shuffled(order_N)))
        seen += len(batch.samples)
    wholes = (
        {pair: _whole(images, *(subjects[run] for run in pair), device=device) for pair in pairs}
        if whole
        else {}
    )
    return Comparison(subjects, torch.stack(sums).cpu(), torch.stack(floors).cpu(), seen, wholes)


def _check_room(
    subjects: dict[str, Subject], pairs: Sequence[Pair], *, device: torch.device
) -> None:
    """For the whole-sample form of the largest mixings, before an hour's work."""
    most = {}
    for run, subject in subjects.items():
        most[run] = max(
            subject.run(
                torch.zeros(1, 3, *[subject.card.image_size] * 2, device=device), torch.numel
            )[1]
        )
    need = 8 * max(
        most[one] ** 2 + most[other] ** 2 + most[one] * most[other] for one, other in pairs
    )
    room = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    if need > room:
        problem = f"needs {need / 1e9:,.1f} GB, and {room / 1e9:,.1f} GB are free"
        raise UserError("--whole", problem, "leave it out", code="no-space")


def _whole(images: Images, one: Subject, other: Subject, *, device: torch.device) -> list[float]:
    """The diagonal, a pass for each entry: the products of one pair of layers are held at a
    time."""
    found = list[float]()
    for row, column in diagonal(len(one.mixings), len(other.mixings)):
        whole, title = WholeCka(), f"whole sample, mixings {row + 1} and {column + 1}"
        for batch in images.batches(
            title, size=max(one.card.image_size, other.card.image_size), device=device
        ):
            chosen = (one.only(row), other.only(column))
            whole.add(
                *(
                    each.run(each.plain.plain(batch).images_BCHW, lambda output: output)[1][0]
                    for each in chosen
                )
            )
        found.append(whole.value())
    return found


# ---- what follows from it


def groups_of(found: Comparison, pairs: Sequence[Pair]) -> list[Group]:
    """In the order of their densities."""
    together: dict[tuple[ModelSpec, ...], list[Pair]] = {}
    for pair in pairs:
        together.setdefault(tuple(found.subjects[run].card.model for run in pair), []).append(pair)
    random, num_batches = np.random.default_rng(0), len(found.hsic_TFF)
    weights_WT = torch.from_numpy(
        random.multinomial(num_batches, np.full(num_batches, 1 / num_batches), RESAMPLES)
        / num_batches
    )
    groups = []
    for (first, second), members in together.items():
        matrices = [found.matrix(pair) for pair in members]
        diagonals = [float(diagonal_of(matrix)) for matrix in matrices]
        resampled = torch.stack(
            [diagonal_of(found.resampled(pair, weights_WT)) for pair in members]
        ).mean(0)
        ones, others = (list(dict.fromkeys(runs)) for runs in zip(*members, strict=True))
        facts = {
            "model_a": first.label,
            "model_b": second.label,
            "density": second.density if isinstance(second, SparseMlpSpec) else None,
            "pairs": members,
            "diagonal": statistics.fmean(diagonals),
            "diagonal_std_over_pairs": statistics.stdev(diagonals) if len(members) > 1 else None,
            "diagonal_interval_over_batches": (
                np.nanpercentile(resampled, INTERVAL).tolist()
                if num_batches >= FEWEST_BATCHES
                else None
            ),
            "ceiling_a": found.mean_diagonal(itertools.combinations(ones, 2)),
            "ceiling_b": found.mean_diagonal(itertools.combinations(others, 2)),
            "floor": found.mean_diagonal(members, floor=True),
        }
        names = tuple(list(found.subjects[run].mixings) for run in members[0])
        groups.append(Group((names[0], names[1]), torch.stack(matrices).mean(0).numpy(), facts))
    return sorted(
        groups, key=lambda each: (each.facts["model_a"], each.facts["density"] or -math.inf)
    )


def rows_of(found: Comparison, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """One for each entry of each pair's matrix."""
    rows = []
    for pair in pairs:
        one, other = (found.subjects[run] for run in pair)
        matrix, floor = found.matrix(pair), found.matrix(pair, floor=True)
        entries = diagonal(*matrix.shape)
        wholes = dict(zip(entries, found.whole.get(pair, []), strict=False))
        place = {
            "run_a": pair[0],
            "run_b": pair[1],
            "model_a": one.card.model.label,
            "model_b": other.card.model.label,
        }
        for (row, first), (column, second) in itertools.product(
            enumerate(one.mixings), enumerate(other.mixings)
        ):
            values = {"cka": float(matrix[row, column]), "floor": float(floor[row, column])}
            about = {
                "on_diagonal": (row, column) in entries,
                "cka_whole": wholes.get((row, column)),
            }
            rows.append({**place, "mixing_a": first, "mixing_b": second, **values, **about})
    return rows


def compare_features(
    images: Images,
    pairs: Sequence[Pair],
    *,
    whole: bool = False,
    device: torch.device | None = None,
) -> Result:
    from analysis.features.drawing import cka_figures, table_of_groups

    found = compare(images, pairs, whole=whole, device=device or device_of(None))
    groups = groups_of(found, pairs)
    facts = {
        "split": images.split,
        "num_images": found.num_images,
        "batch": images.batch,
        "num_batches": len(found.hsic_TFF),
        "gram_bytes": found.hsic_TFF.shape[1] * images.batch**2 * 8,
        "groups": [group.facts for group in groups],
    }
    names = (group.facts[model] for group in groups for model in ("model_a", "model_b"))
    with looks(*names):
        figures = cka_figures(groups)
    inputs = [images.dataset, *found.subjects]
    return Result(rows_of(found, pairs), facts, figures, inputs, [table_of_groups(groups)])
