"""What "Scaling MLPs: A Tale of Inductive Bias" (Bachmann et al., NeurIPS 2023) prints of transfer, in per cent of top-1.

Table 2 is of MLPs trained from scratch, Table 3 of MLPs pretrained on ImageNet-21k. MLP is the standard MLP, MLP-Inv the one with
inverted bottlenecks, DA data augmentation (random flips and crops), TTA test-time augmentation. A number that the papers do not
print stands nowhere.
"""

from dataclasses import dataclass
from typing import Literal

SOURCE = "Scaling MLPs, NeurIPS 2023"
COLUMNS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "stl10": "STL-10",
    "tinyimagenet": "TinyImageNet",
    "imagenet1k": "ImageNet",
}
"""By the `target` tag of a run."""

JUDGED_ON = {"cifar10": "test", "cifar100": "test", "stl10": "test", "tinyimagenet": "val", "imagenet1k": "val"}
"""The split that everybody's numbers are of, as `data_prep` names it: any other may have been chosen on, or trained on."""

Method = Literal["scratch", "tune", "probe", "tta", "knn"]


@dataclass(frozen=True)
class Row:
    name: str
    method: Method
    model: str
    """As a run's tag `model` has it."""
    augmented: bool
    epochs: int | None = None
    """Of training from scratch; None, where we have no length of the paper's, takes any."""
    public: bool = False
    """Of the weights that the authors have published (800 epochs); else of weights that were pretrained here."""
    top1: tuple[float | None, ...] = ()
    """Per cent, in the order of the table's columns."""


@dataclass(frozen=True)
class Table:
    title: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


STANDARD, SMALL, LARGE, PUBLIC = "MLP-6/1024", "B-6/Wi-1024", "B-12/Wi-1024", "public checkpoint"
"""Table 2 is of depth 6 and width 1024."""

FROM_SCRATCH = Table(
    "From scratch",
    f"{SOURCE}, Table 2",
    ("cifar10", "cifar100", "tinyimagenet", "imagenet1k"),
    (
        Row("MLP, 100 epochs", "scratch", STANDARD, False, 100, top1=(47.1, 16.5, 7.3, 4.7)),
        Row("MLP + DA", "scratch", STANDARD, True, top1=(49.3, 18.0, 8.7, 11.5)),
        Row("MLP-Inv", "scratch", SMALL, False, top1=(58.1, 30.5, 8.9, 8.7)),
        Row("MLP-Inv + DA, 1000 epochs", "scratch", SMALL, True, 1000, top1=(70.1, 48.3, 27.2, 28.7)),
        Row("MLP-Inv + DA, 5000 epochs", "scratch", SMALL, True, 5000, top1=(75.4, 50.4, 31.2, 31.7)),
    ),
)

PRETRAINED = Table(
    "Pretrained on ImageNet-21k",
    f"{SOURCE}, Table 3",
    ("cifar10", "cifar100", "stl10", "tinyimagenet", "imagenet1k"),
    (
        Row(f"fine-tune {SMALL}, no DA", "tune", SMALL, False, top1=(69.9, 43.0, 51.5, 47.1, 15.2)),
        Row(f"fine-tune {SMALL} + DA", "tune", SMALL, True, top1=(91.5, 76.4, 85.0, 62.7, 38.7)),
        Row(f"fine-tune {LARGE} + DA", "tune", LARGE, True, top1=(93.6, 79.2, 88.9, 69.9, 42.5)),
        Row(f"fine-tune {LARGE} + DA, {PUBLIC}", "tune", LARGE, True, public=True, top1=(94.2, 80.0, 89.9, 69.9, 43.2)),
        Row(f"fine-tune {LARGE} + DA + TTA, {PUBLIC}", "tta", LARGE, True, public=True, top1=(95.5, 82.6, 92.2, 73.1, 51.4)),
        Row(f"linear probe {SMALL} + DA", "probe", SMALL, True, top1=(87.8, 73.2, 85.2, 61.3, 39.2)),
        Row(f"linear probe {LARGE} + DA", "probe", LARGE, True, top1=(90.6, 74.5, 88.3, 68.5, 40.7)),
    ),
)

TABLES = (FROM_SCRATCH, PRETRAINED)
