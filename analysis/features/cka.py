"""`analysis cka`: similarity of the features of two trained networks, mixing by mixing.

Each pair of runs has a CKA matrix (hsic.py) and the mean of its diagonal. If the depths differ, the
diagonal has the entries at the same fraction of both depths. The ceiling is this mean for two seeds
of one architecture. The floor is this mean if the second network gets the images in another order.
Pairs of the same two architectures are averaged, with a standard deviation, or an interval from
resampled batches. Shapes: F layers of all runs together, T batches, W weightings of batches, L and
M layers of one run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.command import device_of
from analysis.features.hsic import WholeCka, cka, gram, hsic
from analysis.features.mixings import Images, Subject, open_subjects
from analysis.output import Result
from analysis.run_rows import model_words
from finetune.looks import looks
from pretrain.models.spec import SparseMlpSpec

RESAMPLES, INTERVAL = 1000, (2.5, 97.5)
FEWEST_BATCHES = 4
"""Smallest number of batches for an interval. Resamples of fewer batches are too similar."""
Pair = tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """HSIC1 between all layers of all runs, for each batch."""

    subjects: dict[str, Subject]
    hsic_TFF: Tensor
    floor_TFF: Tensor
    """HSIC1 if the second layer gets the images in another order."""
    num_images: int

    def cka(self, pair: Pair, weights_WT: Tensor | None = None, *, floor: bool = False) -> Tensor:
        """Return CKA (W, L, M) for each row of weights, from the weighted mean of HSIC1 over
        batches."""
        if weights_WT is None:
            num_batches = len(self.hsic_TFF)
            weights_WT = torch.full((1, num_batches), 1 / num_batches, dtype=torch.float64)
        lengths = (len(subject.mixings) for subject in self.subjects.values())
        ends = list(itertools.accumulate(lengths, initial=0))
        places = [list(self.subjects).index(run) for run in pair]
        one, other = (slice(*ends[place : place + 2]) for place in places)
        hsic_TFF = self.floor_TFF if floor else self.hsic_TFF
        cross = torch.einsum("wt,tlm->wlm", weights_WT, hsic_TFF[:, one, other])
        # shuffled images do not change the HSIC1 of a network with itself
        selves = weights_WT @ self.hsic_TFF.diagonal(dim1=1, dim2=2)
        return cka(cross, selves[:, one], selves[:, other])


def diagonal(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the entries (row, column) of layers at the same fraction of both depths."""
    longest = max(rows, columns)
    return [(place * rows // longest, place * columns // longest) for place in range(longest)]


def diagonal_of(matrices: Tensor) -> Tensor:
    rows, columns = zip(*diagonal(*matrices.shape[-2:]), strict=True)
    return matrices[..., list(rows), list(columns)].mean(-1)


def compare(images: Images, pairs: Sequence[Pair], *, device: torch.device) -> Comparison:
    subjects = open_subjects(itertools.chain(*pairs), images.manifest, device=device)
    sums, floors, num_images = list[Tensor](), list[Tensor](), 0
    size = max(each.card.image_size for each in subjects.values())
    for batch in images.batches("features", size=size, device=device):
        grams = [
            one
            for each in subjects.values()
            for one in each.run(each.plain.plain(batch).images_BCHW, gram)[1]
        ]
        grams_FNN = torch.stack(grams)
        del grams
        generator = torch.Generator().manual_seed(num_images)
        order_N = torch.randperm(len(batch.samples), generator=generator).to(device)
        sums.append(hsic(grams_FNN, grams_FNN))
        floors.append(hsic(grams_FNN, grams_FNN[:, order_N[:, None], order_N]))
        num_images += len(batch.samples)
    return Comparison(subjects, torch.stack(sums).cpu(), torch.stack(floors).cpu(), num_images)


def whole_diagonal(images: Images, pair: Sequence[Subject], *, device: torch.device) -> list[float]:
    """Return the CKA of each diagonal entry over all images at once. Each entry takes one pass over
    the images, so memory holds the products of only one pair of layers."""
    found, size = list[float](), max(each.card.image_size for each in pair)
    for entry in diagonal(*(len(each.mixings) for each in pair)):
        whole, title = WholeCka(), f"full sample, mixings {entry[0] + 1} and {entry[1] + 1}"
        chosen = [each.only(number) for each, number in zip(pair, entry, strict=True)]
        for batch in images.batches(title, size=size, device=device):
            inputs = [each.plain.plain(batch).images_BCHW for each in chosen]
            outputs = [
                each.run(x, torch.clone)[1][0] for each, x in zip(chosen, inputs, strict=True)
            ]
            whole.add(*outputs)
        found.append(whole.value())
    return found


def entries_of(found: Comparison, pairs: Sequence[Pair]) -> pd.DataFrame:
    """Return a row for each entry of each pair's CKA matrix."""
    rows = list[dict[str, Any]]()
    for pair in pairs:
        one, other = (found.subjects[run] for run in pair)
        models = dict(zip(("model_a", "model_b"), _models(found, pair), strict=True))
        matrix, floor = found.cka(pair)[0], found.cka(pair, floor=True)[0]
        entries = diagonal(*matrix.shape)
        for place in np.ndindex(*matrix.shape):
            names = (list(each.mixings)[n] for each, n in zip((one, other), place, strict=True))
            row = dict(
                zip(("run_a", "run_b", "mixing_a", "mixing_b"), (*pair, *names), strict=True)
            )
            row |= {**models, "on_diagonal": place in entries}
            rows.append(row | {"cka": float(matrix[place]), "floor": float(floor[place])})
    return pd.DataFrame(rows)


def _models(found: Comparison, pair: Pair) -> list[str]:
    return [model_words(found.subjects[run].card.model) for run in pair]


def groups_of(found: Comparison, pairs: Sequence[Pair]) -> pd.DataFrame:
    """Return a row for each pair of architectures, sorted by the first, then by the density of the
    second (if it is a SW-MLP). Architectures with several seeds have a ceiling."""
    seeds_of: dict[Any, list[Pair]] = {}
    for pair in pairs:
        specs = tuple(found.subjects[run].card.model for run in pair)
        seeds_of.setdefault(specs, []).append(pair)
    count = len(found.hsic_TFF)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    weights_WT, rows = torch.from_numpy(drawn / count), []
    for (_, second), seeds in seeds_of.items():
        first_model, second_model = _models(found, seeds[0])
        row: dict[str, Any] = {"model_a": first_model, "model_b": second_model}
        row["density"] = second.density if isinstance(second, SparseMlpSpec) else np.nan
        diagonals = pd.Series([float(diagonal_of(found.cka(pair))) for pair in seeds])
        row |= {"pairs": len(seeds), "diagonal": diagonals.mean(), "sd": diagonals.std()}
        resampled = torch.stack([diagonal_of(found.cka(pair, weights_WT)) for pair in seeds]).mean(
            0
        )
        has_interval = count >= FEWEST_BATCHES
        row["low"], row["high"] = (
            np.nanpercentile(resampled, INTERVAL) if has_interval else (np.nan, np.nan)
        )
        for name, runs in zip(("ceiling_a", "ceiling_b"), zip(*seeds, strict=True), strict=True):
            others = itertools.combinations(dict.fromkeys(runs), 2)
            row[name] = pd.Series([float(diagonal_of(found.cka(pair))) for pair in others]).mean()
        floors = [float(diagonal_of(found.cka(pair, floor=True))) for pair in seeds]
        rows.append(row | {"floor": np.mean(floors)})
    return pd.DataFrame(rows).sort_values(["model_a", "density"], na_position="first")


def compare_features(
    images: Images,
    pairs: Sequence[Pair],
    *,
    whole: bool = False,
    device: torch.device | None = None,
) -> Result:
    from analysis.features.drawing import draw_cka

    device = device or device_of(None)
    found = compare(images, pairs, device=device)
    entries, groups = entries_of(found, pairs), groups_of(found, pairs)
    if whole:
        subjects = [[found.subjects[run] for run in pair] for pair in pairs]
        wholes = [each for pair in subjects for each in whole_diagonal(images, pair, device=device)]
        entries.loc[entries.on_diagonal, "cka_whole"] = wholes
    facts = {
        "split": images.split,
        "num_images": found.num_images,
        "batch": images.batch,
        "num_batches": len(found.hsic_TFF),
        "gram_bytes": found.hsic_TFF.shape[1] * images.batch**2 * 8,
        "groups": groups.to_dict("records"),
    }
    with looks(*groups.model_a, *groups.model_b):
        figures = draw_cka(entries, groups)
    return Result(entries, facts, figures, [images.dataset, *found.subjects], [groups])
