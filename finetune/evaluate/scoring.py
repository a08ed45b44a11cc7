"""The table of what a model answers on a split, and how good the answers are: every figure is a
pure function of the table.

K classes of the dataset; the model may have others, whose answers are counted together in the
column K. N samples, A answers (the five most probable), M moments of test-time augmentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.order import Ids

Floats = NDArray[np.float64]
NUM_BINS = 15
"""Of the confidence, for the calibration error."""
OTHER = "(other)"
"""How an answer is called that is no class of the dataset."""


@dataclass(frozen=True)
class Answers:
    """Labels and answers are the model's numbers of the classes."""

    samples_N: Ids
    labels_N: Ids
    answers_NA: Ids
    """The most probable first."""
    probabilities_NA: Floats
    losses_N: Floats
    """-log of the probability of the label; of the mean probability, with test-time
    augmentation."""
    entropies_N: Floats
    """Of all probabilities, in nats."""
    squares_N: Floats
    """The sum of the squares of all probabilities."""
    answers_NM: Ids
    """The most probable answer after so many views."""
    losses_NM: Floats
    moments: tuple[int, ...] = ()
    """After how many views the running mean is noted; none without test-time augmentation."""

    @classmethod
    def of_ranks(cls, shares: Sequence["Answers"], *, num_samples: int, num_bad: int) -> "Answers":
        """Of all ranks, in any order. Every sample is there once, or was counted as one that does
        not decode."""
        order = np.argsort(
            samples := np.concatenate([share.samples_N for share in shares]), kind="stable"
        )
        whole = {
            name: np.concatenate([getattr(share, name) for share in shares])[order]
            for name in COLUMNS
        }
        found = samples[order]
        assert (np.diff(found) > 0).all(), "a sample was answered twice"
        assert len(found) + num_bad == num_samples, (len(found), num_bad, num_samples)
        assert not len(found) or (found[0] >= 0 and found[-1] < num_samples), (
            found[0],
            found[-1],
            num_samples,
        )
        return cls(**whole, moments=shares[0].moments)

    def __len__(self) -> int:
        return len(self.samples_N)

    def left_out(self, *, num_samples: int) -> Ids:
        """The samples that did not decode."""
        return np.setdiff1d(np.arange(num_samples), self.samples_N, assume_unique=True)


COLUMNS = tuple(field.name for field in fields(Answers) if field.name != "moments")


def scores_of(answers: Answers) -> dict[str, float]:
    """By their names in a result; `entropy` is in nats."""
    assert len(answers)
    right_NA = answers.answers_NA == answers.labels_N[:, None]
    bins = calibration(answers.probabilities_NA[:, 0], right_NA[:, 0])
    # the mean squared distance of the probabilities from the truth, summed over classes: 0 is
    # perfect, 2 the worst
    brier = answers.squares_N - 2 * np.exp(-answers.losses_N) + 1
    return {
        "top1": float(right_NA[:, 0].mean()),
        "top5": float(right_NA.any(axis=1).mean()),
        "loss": float(answers.losses_N.mean()),
        "ece": bins.expected_error,
        "mce": bins.max_error,
        "brier": float(brier.mean()),
        "entropy": float(answers.entropies_N.mean()),
    }


@dataclass(frozen=True)
class Calibration:
    """Pictures by the probability of their first answer, in bins of equal width, each without its
    lower edge."""

    counts: Ids
    confidences: Floats
    """The mean of each bin; nan where it is empty."""
    accuracies: Floats

    @property
    def _gaps(self) -> Floats:
        return np.where(self.counts > 0, np.abs(self.confidences - self.accuracies), 0.0)

    @property
    def expected_error(self) -> float:
        """The mean gap over the bins, weighted by their pictures."""
        return float((self._gaps * self.counts).sum() / self.counts.sum())

    @property
    def max_error(self) -> float:
        return float(self._gaps.max())


def calibration(confidences_N: Floats, right_N: NDArray[np.bool_]) -> Calibration:
    edges = np.linspace(0, 1, NUM_BINS + 1)
    places = np.clip(np.searchsorted(edges, confidences_N, side="left") - 1, 0, NUM_BINS - 1)
    counts = np.bincount(places, minlength=NUM_BINS)
    sums = [
        np.bincount(places, weights=values, minlength=NUM_BINS)
        for values in (confidences_N, right_N)
    ]
    with np.errstate(invalid="ignore"):
        confidence, accuracy = (total / counts for total in sums)
    return Calibration(counts, confidence, accuracy)


@dataclass(frozen=True)
class Confusion:
    """How often each class was answered for each, as the entries that are not 0, in the order of
    (label, answer)."""

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
        labels_N, tops_N = (
            dataset_numbers(values, numbers)
            for values in (answers.labels_N, answers.answers_NA[:, 0])
        )
        assert (labels_N < size).all()
        pairs, counts = np.unique(labels_N * (size + 1) + tops_N, return_counts=True)
        return cls(tuple(names), pairs // (size + 1), pairs % (size + 1), counts)

    @cached_property
    def has_others(self) -> bool:
        return bool((self.answers == len(self.names)).any())

    def name(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else OTHER

    def wrong(self) -> Ids:
        """The entries that are mistakes, the most frequent first."""
        wrong = np.flatnonzero(self.labels != self.answers)
        return wrong[np.argsort(-self.counts[wrong], kind="stable")]

    def most_confused(self, count: int) -> list[tuple[str, str, int]]:
        """(class, what it was taken for, how often), the most frequent first."""
        found = zip(
            *(
                each[self.wrong()[:count]].tolist()
                for each in (self.labels, self.answers, self.counts)
            ),
            strict=True,
        )
        return [(self.name(label), self.name(answer), number) for label, answer, number in found]

    def matrix(self, *, num_blocks: int | None = None) -> Floats:
        """Counts; a last column for other answers, if there are any. With `num_blocks`, of blocks
        of neighbouring classes."""
        size = len(self.names)
        rows = size if num_blocks is None else num_blocks
        labels, answers = (
            np.where(values < size, values * rows // size, rows)
            for values in (self.labels, self.answers)
        )
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
        size, labels_N = len(numbers), dataset_numbers(answers.labels_N, numbers)
        hits_NA = answers.answers_NA == answers.labels_N[:, None]
        counts = np.bincount(labels_N, minlength=size)
        summed = (hits_NA[:, 0], hits_NA.any(axis=1), answers.losses_N)
        sums = [np.bincount(labels_N, weights=values, minlength=size) for values in summed]
        answered = np.bincount(confusion.answers, weights=confusion.counts, minlength=size + 1)[
            :size
        ]
        with np.errstate(invalid="ignore"):
            top1, top5, loss = (total / counts for total in sums)
            precision = sums[0] / answered
        taken_for = np.full(size, -1, np.int64)
        rising = confusion.wrong()[::-1]
        taken_for[confusion.labels[rising]] = confusion.answers[
            rising
        ]  # the last, most frequent one stays
        return cls(counts, top1, top5, precision, loss, taken_for)

    def order(self) -> Ids:
        """The classes that have pictures, the worst first; of equal ones the larger loss."""
        present = np.flatnonzero(self.counts_K)
        return present[np.lexsort((-self.loss_K[present], self.top1_K[present]))]


class Moment(NamedTuple):
    """After so many views."""

    num_views: int
    top1: float
    loss: float


def moments(answers: Answers) -> list[Moment]:
    right_M = (answers.answers_NM == answers.labels_N[:, None]).mean(axis=0).tolist()
    return [
        Moment(*each)
        for each in zip(
            answers.moments, right_M, answers.losses_NM.mean(axis=0).tolist(), strict=True
        )
    ]
