"""Weighted votes of the nearest neighbours by cosine similarity, exact, in blocks of both tables. Of rows that are equally near the
first ones count, so no setting changes an answer.

Products are in double precision and rounded to 2^-23: the same pair of rows has the same similarity in whatever block it stands. A
similarity and its row are one whole number, which is larger for what is nearer, so that the best of many are one `topk`.
Q test rows, T training rows, t and q of a block, D features, M the largest number of neighbours, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from finetune.probe.config import Weights
from pretrain.ranks.hangs import PROGRESS

_CLOSEST = 1e-6
"""Cosine distance that counts as 0 where votes are weighed by its inverse."""
_GRID, _MOST_ROWS = 2**23, 2**29
"""A key is similarity * _GRID * _MOST_ROWS - row: whole, and below 2^53, up to which doubles are exact."""
_MOST_TRAINING = 2048
"""Training rows of a block: more make no product faster, and take room from test rows, for each block of which all training rows
are read."""


@dataclass(frozen=True)
class Blocks:
    """How many rows of both tables are looked at together."""

    num_queries: int
    num_training: int

    @staticmethod
    def within(num_bytes: int, *, num_features: int, num_classes: int, count: int) -> "Blocks":
        """So that all that is made of them takes no more than that, or one row of each where that is too much."""
        per_training = 20 * num_features  # as they are, and twice in double precision
        num_training = min(_MOST_TRAINING, max(1, num_bytes // 4 // per_training))
        per_query = (
            20 * num_features + 24 * num_training + 56 * count + 8 * num_classes
        )  # products, keys, their merging; votes
        left = num_bytes - num_training * per_training
        return Blocks(max(1, left // per_query), num_training)


def neighbours_of(queries_qD: Tensor, training: Iterator[Tensor], *, count: int) -> tuple[Tensor, Tensor]:
    """(similarities, rows) of the `count` nearest, nearest first; both tables are normalised, `training` in order."""
    best_qM = torch.empty(len(queries_qD), 0, dtype=torch.float64, device=queries_qD.device)
    start = 0
    for part_tD in training:
        rows_t = torch.arange(start, start + len(part_tD), dtype=torch.float64, device=part_tD.device)
        keys_qt = (queries_qD @ part_tD.T).mul_(_GRID).round_().mul_(_MOST_ROWS).sub_(rows_t)
        both = torch.cat([best_qM, keys_qt], dim=1)
        best_qM = both.topk(min(count, both.shape[1]), dim=1).values
        start += len(part_tD)
    assert start <= _MOST_ROWS
    whole_qM = best_qM.div(_MOST_ROWS).ceil_()
    return whole_qM.div(_GRID).float(), (whole_qM * _MOST_ROWS - best_qM).long()


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
    """Rows of length 1, in blocks, on the device and in double precision."""
    for part in torch.split(features_ND, size):
        PROGRESS.touch()
        yield normalize(part.to(device).double(), dim=1)
