"""Weighted votes of the nearest neighbours by cosine similarity, exact, in chunks of both tables. No setting changes the answer but
by rounding. Q test rows, T training rows, D features, M the largest number of neighbours, K classes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from finetune.probing.config import Weights

_CLOSEST = 1e-6
"""Cosine distance that counts as 0 where votes are weighed by its inverse."""


def neighbours_of(queries_QD: Tensor, training: Iterator[Tensor], *, count: int) -> tuple[Tensor, Tensor]:
    """(similarities, rows) of the `count` nearest, nearest first; `training` yields normalised rows in their order."""
    similarities_QM = queries_QD.new_empty(len(queries_QD), 0)
    places_QM = torch.empty(len(queries_QD), 0, dtype=torch.int64, device=queries_QD.device)
    start = 0
    for part_TD in training:
        here_QT = queries_QD @ part_TD.T
        best, places = here_QT.topk(min(count, len(part_TD)), dim=1)
        merged = torch.cat([similarities_QM, best], dim=1)
        similarities_QM, chosen = merged.topk(min(count, merged.shape[1]), dim=1)
        places_QM = torch.cat([places_QM, places + start], dim=1).gather(1, chosen)
        start += len(part_TD)
    return similarities_QM, places_QM


def answers(
    similarities_QM: Tensor,
    labels_QM: Tensor,
    *,
    counts: Sequence[int],
    num_classes: int,
    weights: Weights,
    temperature: float,
) -> dict[int, Tensor]:
    """The class with most votes of the k nearest, for each k; of equals the first class."""
    votes_QM = vote_weights(similarities_QM, weights=weights, temperature=temperature)
    sums_QK = votes_QM.new_zeros(len(votes_QM), num_classes)
    found, done = {}, 0
    for count in sorted(counts):  # the votes of k neighbours are those of fewer, and some more
        sums_QK.scatter_add_(1, labels_QM[:, done:count], votes_QM[:, done:count])
        found[count], done = sums_QK.argmax(dim=1), count
    return found


def vote_weights(similarities_QM: Tensor, *, weights: Weights, temperature: float) -> Tensor:
    match weights:
        case "softmax":  # up to a factor of the query's own, which keeps small temperatures from overflowing
            return ((similarities_QM - similarities_QM[:, :1]) / temperature).exp()
        case "uniform":
            return torch.ones_like(similarities_QM)
        case "distance":
            return 1 / (1 - similarities_QM).clamp(min=_CLOSEST)


def unit_rows(features_ND: Tensor, *, size: int, device: torch.device) -> Iterator[Tensor]:
    """Rows of length 1, in chunks, on the device."""
    for part in torch.split(features_ND, size):
        yield normalize(part.to(device).float(), dim=1)
