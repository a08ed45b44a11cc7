"""Scores of a table of predictions, compared with scikit-learn, plain loops and values by hand."""

from dataclasses import replace

import numpy as np
import pytest
import sklearn.metrics as sk

from finetune.evaluate.scoring import (
    OTHER,
    Answers,
    calibration,
    classes_of,
    confusion_matrix,
    confusion_of,
    predictions_by_class,
    scores_of,
)

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")
NUMBERS = (4, 0, 7, 2, 6, 1)
"""The dataset's classes as numbers of a model with 9 classes; 3, 5 and 8 are not in the dataset."""


def table(probabilities_NK: np.ndarray, labels_N: np.ndarray) -> Answers:
    order = np.argsort(-probabilities_NK, axis=1)[:, :5]
    size = len(labels_N)
    return Answers(
        samples_N=np.arange(size),
        labels_N=labels_N,
        answers_NA=order,
        probabilities_NA=np.take_along_axis(probabilities_NK, order, axis=1),
        losses_N=-np.log(probabilities_NK[np.arange(size), labels_N]),
        entropies_N=-(probabilities_NK * np.log(probabilities_NK)).sum(axis=1),
        squares_N=(probabilities_NK**2).sum(axis=1),
        answers_NM=np.zeros((size, 0), np.int64),
        losses_NM=np.zeros((size, 0)),
    )


def random_case(size: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Return labels of all classes but one, and probabilities that correlate with the labels."""
    generator = np.random.default_rng(0)
    labels = generator.choice(np.array(NUMBERS)[:5], size)
    logits = generator.normal(size=(size, 9)) * 1.5
    logits[np.arange(size), labels] += 1.5
    probabilities = np.exp(logits)
    return probabilities / probabilities.sum(axis=1, keepdims=True), labels


def test_scores_are_those_of_scikit_learn() -> None:
    probabilities, labels = random_case()
    found, classes = scores_of(table(probabilities, labels)), list(range(9))
    expected = {
        "top1": sk.accuracy_score(labels, probabilities.argmax(axis=1)),
        "top5": sk.top_k_accuracy_score(labels, probabilities, k=5, labels=classes),
        "loss": sk.log_loss(labels, probabilities, labels=classes),
        "brier": ((probabilities - np.eye(9)[labels]) ** 2).sum(axis=1).mean(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_confusion_matrix_and_the_classes_are_those_of_scikit_learn() -> None:
    probabilities, labels = random_case()
    tops = probabilities.argmax(axis=1)
    rows = predictions_by_class(table(probabilities, labels), names=NAMES, numbers=NUMBERS)
    confusion, others = confusion_of(rows), [3, 5, 8]
    theirs = sk.confusion_matrix(labels, tops, labels=[*NUMBERS, *others])
    expected = np.concatenate([theirs[:6, :6], theirs[:6, 6:].sum(axis=1, keepdims=True)], axis=1)
    assert expected[:, 6].sum() > 10
    assert (confusion_matrix(confusion, NAMES, size=6) == expected).all()
    blocks = confusion_matrix(confusion, NAMES, size=3)
    assert blocks.shape == (3, 4)
    assert blocks[0, 1] == expected[:2, 2:4].sum() and blocks[2, 3] == expected[4:, 6].sum()

    found = classes_of(rows, names=NAMES, numbers=NUMBERS)
    recall = sk.recall_score(labels, tops, labels=NUMBERS[:5], average=None)
    precision = sk.precision_score(labels, tops, labels=NUMBERS, average=None, zero_division=np.nan)
    order = np.argsort(recall).tolist()
    assert list(found.index) == [*(NAMES[number] for number in order), "fox"]
    assert found["top1"].tolist() == pytest.approx([*recall[order], np.nan], nan_ok=True)
    assert found["precision"].tolist() == pytest.approx(
        precision[[*order, 5]].tolist(), nan_ok=True
    )
    assert found["images"].sum() == len(labels) and found["images"].iloc[-1] == 0
    wrong = expected.copy()
    wrong[range(6), range(6)] = 0
    taken_for = [[*NAMES, OTHER][number] for number in wrong[order].argmax(axis=1)]
    assert found["most_taken_for"].tolist()[:5] == taken_for
    pairs = confusion[confusion["label"] != confusion["answer"]]
    assert pairs["count"].tolist() == sorted(wrong[wrong > 0].tolist(), reverse=True)


def test_calibration_is_counted_by_hand() -> None:
    """Among 15 bins 0.05 is in the first, 0.5 in the eighth, 0.95 and 1.0 in the last; 1/3 ends the
    fifth."""
    confidences = np.array([0.05, 1 / 3, 0.5, 0.5, 0.95, 1.0])
    right = np.array([False, True, True, False, True, False])
    found = calibration(confidences, right)
    assert found["count"].tolist() == [1, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2]
    gaps = found["gap"].dropna().tolist()
    assert gaps == pytest.approx([0.05, 2 / 3, 0.0, 0.475])


def test_a_sample_that_is_lost_or_comes_twice_is_an_error_of_ours() -> None:
    def share(*samples: int) -> Answers:
        whole = table(*(each[: len(samples)] for each in random_case()))
        return replace(whole, samples_N=np.array(samples))

    found = Answers.of_ranks([share(3, 0), share(2)], num_samples=4, num_bad=1)
    assert found.samples_N.tolist() == [0, 2, 3]
    assert found.labels_N.tolist() == random_case()[1][[1, 0, 0]].tolist()
    with pytest.raises(AssertionError):
        Answers.of_ranks([share(3, 0), share(2)], num_samples=4, num_bad=0)
    with pytest.raises(AssertionError, match="twice"):
        Answers.of_ranks([share(3, 0), share(3)], num_samples=4, num_bad=1)
