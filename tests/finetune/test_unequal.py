"""If classes are unequal, every accuracy that is printed has its mean over classes and the fraction
of the largest class.

9 of 23 images are of the first of 8 classes. The class mean is checked against scikit-learn.
"""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from sklearn.metrics import balanced_accuracy_score

from data_prep.manifest import load_manifest
from finetune.cli import main
from finetune.evaluate.command import print_result
from finetune.tune.config import in_words
from pretrain.config import AugmentSettings, DataSettings
from pretrain.data.datasets import Part, load_training_data
from pretrain.data.reader import ShardReader
from pretrain.loop.evaluate import evaluate
from pretrain.loop.train import summary
from pretrain.loop.trainer import Outcome
from pretrain.ranks.preemption import StopFlag
from tests.conftest import Capture
from tests.finetune.test_evaluate import views_of
from tests.finetune.tiny import ALONE, judge, model_of, plain_logits

pytestmark = pytest.mark.usefixtures("without_pictures")
BASELINES = "chance 12.5 %, largest class 39.1 %"


@pytest.fixture(scope="module")
def expected(folder: Path, unequal: Path) -> tuple[float, float]:
    """Return (top-1, class mean), which differ."""
    logits, labels = plain_logits(folder, unequal)
    answers = logits.argmax(dim=1).numpy()
    top1 = float((answers == labels).mean())
    class_mean = float(balanced_accuracy_score(labels, answers))
    assert abs(top1 - class_mean) > 0.01
    return top1, class_mean


def test_evaluate(
    folder: Path, unequal: Path, tmp_path: Path, expected: tuple[float, float]
) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_result(judge(folder, unequal, tmp_path / "run"), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert BASELINES in said and f"mean {expected[1]:.2%}" in said


def test_predict(
    folder: Path, unequal: Path, tmp_path: Path, expected: tuple[float, float], capsys: Capture
) -> None:
    images = unequal.parent / "images" / "val"
    assert main(["predict", str(folder), str(images), "--out", str(tmp_path / "out.csv")]) == 0
    said = capsys.readouterr().out
    assert f"top-1 {100 * expected[0]:.1f} %, class mean {100 * expected[1]:.1f} %" in said
    assert f"23 labeled images ({BASELINES})" in said and "more have no class" not in said


def test_predict_without_labels_prints_no_accuracy(
    folder: Path, unequal: Path, tmp_path: Path, capsys: Capture
) -> None:
    for number, path in enumerate((unequal.parent / "images" / "val").rglob("*.png")):
        (tmp_path / f"{number}.png").symlink_to(path)
    assert main(["predict", str(folder), str(tmp_path), "--out", str(tmp_path / "out.csv")]) == 0
    assert "top-1" not in capsys.readouterr().out


@torch.no_grad()
def test_training(folder: Path, unequal: Path, expected: tuple[float, float]) -> None:
    """Check the evaluation and the last lines of one seed and of several seeds."""
    data = load_training_data(DataSettings(dataset=str(unequal)))
    reader = ShardReader([Part(unequal, load_manifest(unequal), "val")])
    scores = evaluate(
        model_of(folder),
        reader,
        views_of(AugmentSettings(), seed=0),
        local_batch_size=7,
        world=ALONE,
        stop=StopFlag(),
    )
    assert (scores.top1, scores.class_top1) == pytest.approx(expected)
    assert "eval/class_top1" in scores.metrics()
    top1 = f"top-1 {100 * expected[0]:.1f} %, class mean {100 * expected[1]:.1f} % ({BASELINES})"
    assert top1 in summary(Outcome(1, True, scores), Path("r"), data)[0]
    mean = {"eval/top1": 0.5, "eval/class_top1": 0.25, "num_runs": 2}
    assert (
        in_words(mean, baselines=data.baselines)
        == f"top-1 50.00 %, class mean 25.00 % over 2 runs ({BASELINES})"
    )
