"""The chosen head as a classifier of plain features: standardisation folded in, judged once, saved with its backbone.

D features, E rows of a head (rows.py), K classes, B batch.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.manifest import Filter, Manifest
from finetune.backbone import Backbone
from finetune.probe.rows import Rows, Standard
from pretrain.checkpoints.files import save_folder
from pretrain.checkpoints.run import checkpoints_dir


@dataclass(frozen=True)
class Classifier:
    weight_KD: Tensor
    bias_K: Tensor

    @staticmethod
    def of(head_EK: Tensor, standard: Standard) -> "Classifier":
        """What the head says of standardised features, said of features as they are."""
        num_features = len(standard.mean_D)
        weight_DK, bias_K = head_EK[:num_features].cpu().double(), head_EK[num_features].cpu().double()
        scaled_DK = weight_DK / standard.std_D.double().unsqueeze(1)
        bias_K = bias_K - standard.mean_D.double() @ scaled_DK
        return Classifier(scaled_DK.T.float().contiguous(), bias_K.float())


@dataclass(frozen=True)
class TestScores:
    __test__ = False  # pytest takes what is called Test for its own

    top1: float
    top5: float
    class_mean: float
    """The mean over classes of the share that is right of each; classes without samples do not count."""


@torch.no_grad()
def test_scores(classifier: Classifier, rows: Rows) -> TestScores:
    """`rows` are not standardised."""
    weight_DK, bias_K = classifier.weight_KD.T.to(rows.device), classifier.bias_K.to(rows.device)
    num_features, num_classes = weight_DK.shape
    counts_2K = torch.zeros(2, num_classes, dtype=torch.float64, device=rows.device)
    right5 = torch.zeros((), dtype=torch.float64, device=rows.device)
    for x_BE, labels_B in rows.chunks():
        top = (x_BE[:, :num_features] @ weight_DK + bias_K).topk(min(5, num_classes), dim=1).indices
        hits = top == labels_B.unsqueeze(1)
        counts_2K[0] += torch.bincount(labels_B[hits[:, 0]], minlength=num_classes)
        counts_2K[1] += torch.bincount(labels_B, minlength=num_classes)
        right5 += hits.any(dim=1).sum()
    right_K, number_K = counts_2K
    has_samples = number_K > 0
    class_mean = (right_K[has_samples] / number_K[has_samples]).mean()
    total = number_K.sum()
    return TestScores(*(float(value) for value in (right_K.sum() / total, right5 / total, class_mean)))


test_scores.__test__ = False  # type: ignore[attr-defined]


def save_classifier(
    run_dir: Path,
    classifier: Classifier,
    backbone: Backbone,
    manifest: Manifest,
    *,
    fed_interpolation: Filter,
    step: int,
    run_key: str,
) -> Path:
    """RUN/checkpoints/step-NNNNNNNN: what evaluate, tune and export take."""
    assert backbone.weights is not None and backbone.model is not None
    classes = manifest.classes
    backbone.model.reset_classifier(len(classes))
    weights = {name: tensor.detach().cpu() for name, tensor in backbone.model.state_dict().items()}
    weights |= {"head.weight": classifier.weight_KD, "head.bias": classifier.bias_K}
    card = backbone.weights.card.model_copy(
        update={
            "classes": classes,
            "dataset": manifest.name,
            "stored_crop": manifest.crop,
            "stored_interpolation": manifest.interpolation,
            "fed_interpolation": fed_interpolation,
            "content_hash": manifest.content_hash,
            "pixels_hash": manifest.pixels_hash,
            "step": step,
            "run_key": run_key,
        }
    )
    place = checkpoints_dir(run_dir) / f"step-{step:08d}"
    save_folder(place, card=card, weights=weights)
    return place
