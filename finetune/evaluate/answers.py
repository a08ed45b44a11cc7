"""The table that everything is judged by: one row per picture that decodes, sorted by sample. numpy alone.

Every rank makes rows of one width (`Layout`), integers among them as doubles, which hold them exactly to 2^53; rows of padding and
of pictures that do not decode have the sample -1. N samples, A answers (the five most probable), M moments of test-time
augmentation.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.data.order import Ids

Floats = NDArray[np.float64]
NUM_ANSWERS = 5
NO_SAMPLE = -1.0


@dataclass(frozen=True)
class Layout:
    """The columns of a row: sample, label, A answers, A probabilities, loss, entropy, sum of squares, M answers, M losses."""

    num_answers: int
    moments: tuple[int, ...] = ()
    """After how many views the running mean is noted; none without test-time augmentation."""

    @classmethod
    def of(cls, *, num_classes: int, num_views: int) -> "Layout":
        return cls(min(NUM_ANSWERS, num_classes), moments_up_to(num_views) if num_views else ())

    @property
    def width(self) -> int:
        return 5 + 2 * self.num_answers + 2 * len(self.moments)


@dataclass(frozen=True)
class Answers:
    """Labels and answers are the model's numbers of the classes."""

    samples_N: Ids
    labels_N: Ids
    answers_NA: Ids
    """The most probable first."""
    probabilities_NA: Floats
    losses_N: Floats
    """-log of the probability of the label; of the mean probability, with test-time augmentation."""
    entropies_N: Floats
    """Of all probabilities, in nats."""
    squares_N: Floats
    """The sum of the squares of all probabilities."""
    moments: tuple[int, ...]
    answers_NM: Ids
    """The most probable answer after so many views."""
    losses_NM: Floats

    @classmethod
    def of_rows(cls, rows: Floats, layout: Layout, *, num_samples: int, num_bad: int) -> "Answers":
        """From the rows of all ranks, in any order. Every sample is there once, or was counted as one that does not decode."""
        assert rows.shape[1] == layout.width, (rows.shape, layout)
        rows = rows[rows[:, 0] != NO_SAMPLE]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        answers, moments = layout.num_answers, len(layout.moments)
        cuts = np.cumsum([1, 1, answers, answers, 1, 1, 1, moments])
        columns = np.split(rows, cuts, axis=1)
        samples, labels, tops, probabilities, losses, entropies, squares, tops_NM, losses_NM = columns
        found = samples[:, 0].astype(np.int64)
        assert (np.diff(found) > 0).all(), "a sample was answered twice"
        assert len(found) + num_bad == num_samples, (len(found), num_bad, num_samples)
        assert not len(found) or (found[0] >= 0 and found[-1] < num_samples), (found[0], found[-1], num_samples)
        return cls(
            samples_N=found,
            labels_N=labels[:, 0].astype(np.int64),
            answers_NA=tops.astype(np.int64),
            probabilities_NA=probabilities,
            losses_N=losses[:, 0],
            entropies_N=entropies[:, 0],
            squares_N=squares[:, 0],
            moments=layout.moments,
            answers_NM=tops_NM.astype(np.int64),
            losses_NM=losses_NM,
        )

    def __len__(self) -> int:
        return len(self.samples_N)

    def left_out(self, *, num_samples: int) -> Ids:
        """The samples that did not decode."""
        return np.setdiff1d(np.arange(num_samples), self.samples_N, assume_unique=True)


def moments_up_to(num_views: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... and the last."""
    steps = [base * 10**power for power in range(len(str(num_views))) for base in (1, 2, 5)]
    return (*(step for step in steps if step < num_views), num_views)
