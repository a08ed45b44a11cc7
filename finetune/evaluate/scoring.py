"""Predictions of a model on a split, and the scores that follow from them.

Shapes: K classes of the dataset, N samples, A top predictions, M entries of `moments`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pretrain.data.order import Ids

Floats = NDArray[np.float64]
NUM_BINS = 15
"""Number of confidence bins for the calibration error."""
OTHER = "(other)"
"""Name of all predictions that are not classes of the dataset."""


@dataclass(frozen=True)
class Answers:
    """Labels and predictions, as class numbers of the model. One row for each sample."""

    samples_N: Ids
    labels_N: Ids
    answers_NA: Ids
    """Predicted classes, the most probable first."""
    probabilities_NA: Floats
    losses_N: Floats
    """Negative log of the label's probability. The probability is averaged over views."""
    entropies_N: Floats
    """Entropy of the predicted probabilities, in nats."""
    squares_N: Floats
    """Sum of the squared probabilities, for the Brier score."""
    answers_NM: Ids
    """The most probable class after each number of views in `moments`."""
    losses_NM: Floats
    moments: tuple[int, ...] = ()
    """Numbers of views after which the prediction of the running mean is recorded."""

    @classmethod
    def of_ranks(cls, shares: Sequence["Answers"], *, num_samples: int, num_bad: int) -> "Answers":
        """Join the rows of all ranks, and check that each sample occurs once."""
        samples = np.concatenate([share.samples_N for share in shares])
        order = np.argsort(samples, kind="stable")
        columns = {
            name: np.concatenate([getattr(share, name) for share in shares])[order]
            for name in COLUMNS
        }
        present = samples[order]
        assert (np.diff(present) > 0).all(), "a sample was predicted twice"
        assert len(present) + num_bad == num_samples, (len(present), num_bad, num_samples)
        assert not len(present) or 0 <= present[0] <= present[-1] < num_samples
        return cls(**columns, moments=shares[0].moments)

    def __len__(self) -> int:
        return len(self.samples_N)

    @property
    def is_right(self) -> NDArray[np.bool_]:
        return np.equal(self.answers_NA[:, 0], self.labels_N)

    @property
    def is_in_top5(self) -> NDArray[np.bool_]:
        return np.asarray((self.answers_NA == self.labels_N[:, None]).any(axis=1))


COLUMNS = tuple(field.name for field in fields(Answers) if field.name != "moments")


def scores_of(answers: Answers) -> dict[str, float]:
    """Return the scores as {name in result.json without `eval/`: value}."""
    bins = calibration(answers.probabilities_NA[:, 0], answers.is_right)
    # squared distance between probabilities and truth, summed over classes: between 0 and 2
    brier = answers.squares_N - 2 * np.exp(-answers.losses_N) + 1
    return {
        "top1": float(answers.is_right.mean()),
        "top5": float(answers.is_in_top5.mean()),
        "loss": float(answers.losses_N.mean()),
        "ece": float((bins["gap"] * bins["count"]).sum() / len(answers)),
        "mce": float(bins["gap"].max()),
        "brier": float(brier.mean()),
        "entropy": float(answers.entropies_N.mean()),
    }


def calibration(confidences_N: Floats, right_N: NDArray[np.bool_]) -> pd.DataFrame:
    """Return count, mean confidence, accuracy, and |confidence - accuracy| for each bin.

    Bins have equal widths and include their upper edges.
    """
    frame = pd.DataFrame({"confidence": confidences_N, "accuracy": right_N})
    edges = np.linspace(0, 1, NUM_BINS + 1)
    places = pd.cut(frame["confidence"].clip(0, 1), edges, labels=False, include_lowest=True)
    bins = frame.groupby(places).mean().reindex(range(NUM_BINS))
    bins["count"] = places.value_counts().reindex(range(NUM_BINS), fill_value=0)
    bins["gap"] = (bins["confidence"] - bins["accuracy"]).abs()
    return bins


def predictions_by_class(
    answers: Answers, *, names: Sequence[str], numbers: Sequence[int]
) -> pd.DataFrame:
    """Return label, prediction and scores of each sample. `names`: class names of the dataset;
    `numbers`: their class numbers in the model."""
    name_of = pd.Series(names, index=numbers)
    return pd.DataFrame(
        {
            "label": name_of.loc[answers.labels_N].to_numpy(),
            "answer": name_of.reindex(answers.answers_NA[:, 0]).fillna(OTHER).to_numpy(),
            "top1": answers.is_right,
            "top5": answers.is_in_top5,
            "loss": answers.losses_N,
        }
    )


def confusion_of(predictions: pd.DataFrame) -> pd.DataFrame:
    """Return (label, prediction, count) of each pair that occurs, the most frequent first."""
    pairs = predictions.groupby(["label", "answer"]).size().reset_index(name="count")
    return pairs.sort_values("count", ascending=False, kind="stable", ignore_index=True)


def classes_of(
    predictions: pd.DataFrame, *, names: Sequence[str], numbers: Sequence[int]
) -> pd.DataFrame:
    """Return a row of scores for each class, the lowest accuracy first. Classes without images are
    last."""
    by_label = predictions.groupby("label")
    classes = by_label[["top1", "top5", "loss"]].mean().reindex(list(names))
    classes.insert(0, "images", by_label.size().reindex(list(names), fill_value=0))
    classes.insert(0, "class", list(numbers))
    classes.insert(4, "precision", predictions.groupby("answer")["top1"].mean().reindex(names))
    wrong = confusion_of(predictions[~predictions["top1"]]).drop_duplicates("label")
    classes["most_taken_for"] = wrong.set_index("label")["answer"].reindex(list(names))
    return classes.rename_axis("name").sort_values(["top1", "loss"], ascending=[True, False])


def confusion_matrix(confusion: pd.DataFrame, names: Sequence[str], *, size: int) -> Floats:
    """Return counts (label, prediction), with neighboring classes merged into `size` blocks. An
    extra last column counts predictions of other classes, if there are any."""
    block_of = {name: place * size // len(names) for place, name in enumerate(names)}
    rows, columns = (confusion[name].map(block_of).fillna(size) for name in ("label", "answer"))
    matrix = np.zeros((size, size + 1))
    np.add.at(matrix, (rows.to_numpy(int), columns.to_numpy(int)), confusion["count"])
    return matrix if (columns == size).any() else matrix[:, :size]


def curve_of(answers: Answers) -> list[dict[str, Any]]:
    """Return top-1 and loss after each number of views in `moments`."""
    top1_M = (answers.answers_NM == answers.labels_N[:, None]).mean(axis=0).tolist()
    columns = (answers.moments, top1_M, answers.losses_NM.mean(axis=0).tolist())
    return [
        {"num_views": num_views, "top1": top1, "loss": loss}
        for num_views, top1, loss in zip(*columns, strict=True)
    ]
