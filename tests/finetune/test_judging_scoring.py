"""Scores of a table of answers, against scikit-learn, plain loops and counts by hand."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as sk

from finetune.evaluate.evaluate import moments_up_to
from finetune.evaluate.report import (
    draw_calibration,
    draw_confusion,
    draw_views,
    write_confusion,
    write_per_class,
)
from finetune.evaluate.scoring import Answers, Confusion, Moment, PerClass, calibration, scores_of

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")
NUMBERS = (4, 0, 7, 2, 6, 1)
"""What the model, which has 9 classes, calls them; 3, 5 and 8 are not the dataset's."""


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
    """Labels of all classes but one, and probabilities that know something of them."""
    generator = np.random.default_rng(0)
    labels = generator.choice(np.array(NUMBERS)[:5], size)
    logits = generator.normal(size=(size, 9)) * 1.5
    logits[np.arange(size), labels] += 1.5
    probabilities = np.exp(logits)
    return probabilities / probabilities.sum(axis=1, keepdims=True), labels


def test_scores_are_those_of_scikit_learn() -> None:
    probabilities, labels = random_case()
    found = scores_of(table(probabilities, labels))
    assert found["top5"] == pytest.approx(
        sk.top_k_accuracy_score(labels, probabilities, k=5, labels=list(range(9)))
    )
    assert found["loss"] == pytest.approx(sk.log_loss(labels, probabilities, labels=list(range(9))))
    truth = np.eye(9)[labels]
    by_confidence = calibration(probabilities.max(axis=1), probabilities.argmax(axis=1) == labels)
    assert found["ece"] == pytest.approx(by_confidence.expected_error)
    assert found["brier"] == pytest.approx(((probabilities - truth) ** 2).sum(axis=1).mean())


def test_the_confusion_matrix_and_the_classes_are_those_of_scikit_learn(tmp_path: Path) -> None:
    probabilities, labels = random_case()
    answers, tops = table(probabilities, labels), probabilities.argmax(axis=1)
    confusion = Confusion.of(answers, names=NAMES, numbers=NUMBERS)
    others = [3, 5, 8]
    theirs = sk.confusion_matrix(labels, tops, labels=[*NUMBERS, *others])
    expected = np.concatenate([theirs[:6, :6], theirs[:6, 6:].sum(axis=1, keepdims=True)], axis=1)
    assert expected[:, 6].sum() > 10 and (confusion.matrix() == expected).all()
    blocks = confusion.matrix(num_blocks=3)
    assert (
        blocks.shape == (3, 4)
        and blocks[0, 1] == expected[:2, 2:4].sum()
        and blocks[2, 3] == expected[4:, 6].sum()
    )

    found = PerClass.of(answers, confusion, numbers=NUMBERS)
    assert found.counts_K.tolist()[5] == 0 and np.isnan(found.top1_K[5])
    recall = sk.recall_score(labels, tops, labels=NUMBERS[:5], average=None)
    precision = sk.precision_score(labels, tops, labels=NUMBERS, average=None, zero_division=np.nan)
    assert found.top1_K[:5] == pytest.approx(recall) and found.precision_K == pytest.approx(
        precision, nan_ok=True
    )
    assert found.order().tolist() == np.argsort(recall).tolist()
    wrong = expected.copy()
    wrong[range(6), range(6)] = 0
    assert found.taken_for_K.tolist() == [*wrong[:5].argmax(axis=1).tolist(), -1]
    pairs = confusion.most_confused(3)
    assert [count for _, _, count in pairs] == sorted(wrong.ravel().tolist(), reverse=True)[:3]
    assert all(
        wrong[NAMES.index(a), [*NAMES, "(other)"].index(b)] == count for a, b, count in pairs
    )

    write_per_class(tmp_path / "classes.csv", found, confusion, numbers=NUMBERS)
    rows = list(csv.DictReader((tmp_path / "classes.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [*(NAMES[i] for i in np.argsort(recall)), "fox"]
    assert rows[-1]["top1"] == "" and float(rows[0]["top1"]) == pytest.approx(
        recall.min(), abs=1e-6
    )
    write_confusion(tmp_path / "confusion.parquet", confusion)


def test_calibration_is_counted_by_hand() -> None:
    """Of 15 bins: 0.05 is in the first, 0.5 in the eighth, 0.95 and 1.0 in the last; 1/3 ends the
    fifth."""
    confidences = np.array([0.05, 1 / 3, 0.5, 0.5, 0.95, 1.0])
    right = np.array([False, True, True, False, True, False])
    found = calibration(confidences, right)
    assert found.counts.tolist() == [1, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2]
    gaps = [(1, 0.05), (1, 2 / 3), (2, 0.0), (2, 0.475)]
    assert found.expected_error == pytest.approx(sum(count * gap for count, gap in gaps) / 6)
    assert found.max_error == pytest.approx(2 / 3)


def test_a_sample_that_is_lost_or_comes_twice_is_an_error_of_ours() -> None:
    def share(*samples: int) -> Answers:
        whole = table(*(each[: len(samples)] for each in random_case()))
        return replace(whole, samples_N=np.array(samples))

    found = Answers.of_ranks([share(3, 0), share(2)], num_samples=4, num_bad=1)
    assert found.left_out(num_samples=4).tolist() == [1] and found.samples_N.tolist() == [0, 2, 3]
    assert found.labels_N.tolist() == random_case()[1][[1, 0, 0]].tolist()
    with pytest.raises(AssertionError):
        Answers.of_ranks([share(3, 0), share(2)], num_samples=4, num_bad=0)
    with pytest.raises(AssertionError, match="twice"):
        Answers.of_ranks([share(3, 0), share(3)], num_samples=4, num_bad=1)


def test_the_moments_of_a_curve() -> None:
    assert [moments_up_to(views) for views in (1, 4, 100)] == [
        (1,),
        (1, 2, 4),
        (1, 2, 5, 10, 20, 50, 100),
    ]


@pytest.mark.parametrize("size", [6, 60, 1000])
def test_pictures_are_drawn_of_few_and_of_many_classes(tmp_path: Path, size: int) -> None:
    generator = np.random.default_rng(1)
    labels = np.arange(size).repeat(3)
    answers = np.where(
        generator.random(len(labels)) < 0.5, labels, generator.integers(0, size + 1, len(labels))
    )
    names = tuple(f"class number {number:04d}" for number in range(size))
    confusion = Confusion(names, labels, answers, np.ones(len(labels), np.int64))
    bins = calibration(generator.random(300), generator.random(300) < 0.5)
    figures = [
        draw_confusion(confusion, title=f"{size} classes"),
        draw_calibration(bins, title="calibration"),
    ]
    figures.append(draw_views([Moment(1, 0.5, 1.0), Moment(2, 0.6, 0.9)], title="views"))
    cells = [text.get_text() for text in figures[0].axes[0].texts if text.get_text()]
    assert bool(cells) == (size <= 12)
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000
