"""How good the answers are: every figure is a pure function of the table.

K classes of the dataset; the model may have others, whose answers are counted together in the column K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from finetune.evaluate.answers import Answers, Floats
from pretrain.data.order import Ids

NUM_BINS = 15
"""Of the confidence, for the calibration error."""
OTHER = "(other)"
"""How an answer is called that is no class of the dataset."""


@dataclass(frozen=True)
class Overall:
    top1: float
    top5: float
    loss: float
    ece: float
    """Expected calibration error: the mean distance of confidence and accuracy over the bins, weighted by their pictures."""
    max_calibration_error: float
    brier: float
    """The mean squared distance of the probabilities from the truth, summed over the classes: 0 is perfect, 2 the worst."""
    entropy: float
    """The mean, in nats."""


def overall(answers: Answers) -> Overall:
    assert len(answers)
    right_NA = answers.answers_NA == answers.labels_N[:, None]
    bins = calibration(answers.probabilities_NA[:, 0], right_NA[:, 0])
    label_N = np.exp(-answers.losses_N)
    return Overall(
        top1=float(right_NA[:, 0].mean()),
        top5=float(right_NA.any(axis=1).mean()),
        loss=float(answers.losses_N.mean()),
        ece=bins.expected_error,
        max_calibration_error=bins.max_error,
        brier=float((answers.squares_N - 2 * label_N + 1).mean()),
        entropy=float(answers.entropies_N.mean()),
    )


@dataclass(frozen=True)
class Calibration:
    """Pictures by the probability of their first answer, in bins of equal width, each without its lower edge."""

    counts: Ids
    confidences: Floats
    """The mean of each bin; nan where it is empty."""
    accuracies: Floats

    @property
    def _gaps(self) -> Floats:
        return np.where(self.counts > 0, np.abs(self.confidences - self.accuracies), 0.0)

    @property
    def expected_error(self) -> float:
        return float((self._gaps * self.counts).sum() / self.counts.sum())

    @property
    def max_error(self) -> float:
        return float(self._gaps.max())


def calibration(confidences_N: Floats, right_N: NDArray[np.bool_], *, num_bins: int = NUM_BINS) -> Calibration:
    edges = np.linspace(0, 1, num_bins + 1)
    places = np.clip(np.searchsorted(edges, confidences_N, side="left") - 1, 0, num_bins - 1)
    counts = np.bincount(places, minlength=num_bins)
    sums = [np.bincount(places, weights=values, minlength=num_bins) for values in (confidences_N, right_N)]
    with np.errstate(invalid="ignore"):
        confidence, accuracy = (total / counts for total in sums)
    return Calibration(counts, confidence, accuracy)


@dataclass(frozen=True)
class Confusion:
    """How often each class was answered for each, as the entries that are not 0, in the order of (label, answer)."""

    names: tuple[str, ...]
    """Of the dataset's classes."""
    labels: Ids
    answers: Ids
    """The dataset's numbers; K where it is none of its classes."""
    counts: Ids

    @classmethod
    def of(cls, answers: Answers, *, names: Sequence[str], numbers: Sequence[int]) -> "Confusion":
        """`numbers`: what the model calls each class of the dataset."""
        size = len(names)
        labels_N, tops_N = (dataset_numbers(values, numbers) for values in (answers.labels_N, answers.answers_NA[:, 0]))
        assert (labels_N < size).all()
        pairs, counts = np.unique(labels_N * (size + 1) + tops_N, return_counts=True)
        return cls(tuple(names), pairs // (size + 1), pairs % (size + 1), counts)

    @cached_property
    def has_others(self) -> bool:
        return bool((self.answers == len(self.names)).any())

    def name(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else OTHER

    def most_confused(self, count: int) -> list[tuple[str, str, int]]:
        """(class, what it was taken for, how often), the most frequent first."""
        wrong = np.flatnonzero(self.labels != self.answers)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:count]
        return [(self.name(int(self.labels[i])), self.name(int(self.answers[i])), int(self.counts[i])) for i in order]

    def matrix(self, *, num_blocks: int | None = None) -> Floats:
        """Counts; a last column for other answers, if there are any. With `num_blocks`, of blocks of neighbouring classes."""
        size = len(self.names)
        rows = size if num_blocks is None else num_blocks
        labels, answers = (np.where(values < size, values * rows // size, rows) for values in (self.labels, self.answers))
        matrix = np.zeros((rows, rows + int(self.has_others)))
        np.add.at(matrix, (labels, answers), self.counts)
        return matrix


def dataset_numbers(model_numbers: Ids, numbers: Sequence[int]) -> Ids:
    """What the dataset calls the classes that the model calls so; K where it has no such class."""
    size = max(int(model_numbers.max(initial=0)), *numbers) + 1
    column_of = np.full(size, len(numbers), np.int64)
    column_of[list(numbers)] = np.arange(len(numbers))
    return column_of[model_numbers]


@dataclass(frozen=True)
class PerClass:
    """A row per class of the dataset; nan where it has no picture (or was never answered)."""

    counts_K: Ids
    top1_K: Floats
    """The accuracy on the pictures of the class: its recall."""
    top5_K: Floats
    precision_K: Floats
    """How many of the pictures that were answered so are of the class."""
    loss_K: Floats
    taken_for_K: Ids
    """The most frequent wrong answer; -1 where there is none."""

    @classmethod
    def of(cls, answers: Answers, confusion: Confusion, *, numbers: Sequence[int]) -> "PerClass":
        size = len(numbers)
        labels_N = dataset_numbers(answers.labels_N, numbers)
        hits_NA = answers.answers_NA == answers.labels_N[:, None]
        counts = np.bincount(labels_N, minlength=size)
        sums = [
            np.bincount(labels_N, weights=values, minlength=size)
            for values in (hits_NA[:, 0], hits_NA.any(axis=1), answers.losses_N)
        ]
        answered = np.bincount(confusion.answers, weights=confusion.counts, minlength=size + 1)[:size]
        with np.errstate(invalid="ignore"):
            top1, top5, loss = (total / counts for total in sums)
            precision = sums[0] / answered
        taken_for = np.full(size, -1, np.int64)
        wrong = np.flatnonzero(confusion.labels != confusion.answers)
        rising = wrong[np.argsort(-confusion.counts[wrong], kind="stable")][::-1]
        taken_for[confusion.labels[rising]] = confusion.answers[rising]  # the last, most frequent one stays
        return cls(counts, top1, top5, precision, loss, taken_for)

    @property
    def mean_top1(self) -> float:
        return float(np.nanmean(self.top1_K))

    def order(self) -> Ids:
        """The classes that have pictures, the worst first; of equal ones the larger loss."""
        present = np.flatnonzero(self.counts_K)
        return present[np.lexsort((-self.loss_K[present], self.top1_K[present]))]


@dataclass(frozen=True)
class Moment:
    """After so many views."""

    num_views: int
    top1: float
    loss: float


def moments(answers: Answers) -> list[Moment]:
    right_NM = answers.answers_NM == answers.labels_N[:, None]
    return [
        Moment(count, float(right_NM[:, column].mean()), float(answers.losses_NM[:, column].mean()))
        for column, count in enumerate(answers.moments)
    ]
