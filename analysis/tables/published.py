"""The numbers in the papers' tables, and the runs that belong to each row.

MLP is the standard MLP of Scaling MLPs, and MLP-Inv has inverted bottlenecks. DA is data
augmentation (random flips, crops and MixUp). TTA is test-time augmentation. Numbers are top-1 in
percent (100 minus the errors of the Mixer paper). Only numbers printed in a paper are listed.
"""

from typing import Literal, NamedTuple

from pretrain.models.presets import spec_of
from pretrain.models.spec import AnySpec

MIXER, SCALING = "Understanding MLP-Mixer, ICML 2024", "Scaling MLPs, NeurIPS 2023"
REAL = "-real"
"""Suffix of a benchmark with reassessed labels (ReaL)."""
COLUMNS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "stl10": "STL-10",
    "tinyimagenet": "TinyImageNet",
    "imagenet1k": "ImageNet",
    f"imagenet1k{REAL}": "ImageNet ReaL",
}
JUDGED_ON = {
    each: "test" if each in ("cifar10", "cifar100", "stl10") else "val" for each in COLUMNS
}
"""Split on which each benchmark is officially evaluated."""
Method = Literal["scratch", "tune", "probe", "tta", "knn"]


class Row(NamedTuple):
    name: str
    top1: tuple[float, ...] = ()
    """Accuracies in percent, for the first columns of the table."""
    method: Method | None = None
    """Training method; None if the paper cites the numbers."""
    model: AnySpec | None = None
    is_augmented: bool = True
    """True if the pretraining, or the training from scratch, has augmentation."""
    length: str = ""
    """Length of a training from scratch; empty for any length."""
    public_epochs: int | None = None
    """Epochs of the published weights; None for 400 epochs of pretraining."""
    stds: tuple[float, ...] = ()
    """Standard deviations in percentage points, for the first columns."""


class Table(NamedTuple):
    title: str
    source: str
    plan: str
    """Plan in configs/plan/ that trains the runs."""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    decimals: int = 1


IMAGENET = ("imagenet1k", f"imagenet1k{REAL}")
MANY = ("cifar10", "cifar100", "tinyimagenet", *IMAGENET)
ALL = ("cifar10", "cifar100", "stl10", "tinyimagenet", *IMAGENET)
STANDARD, SMALL, LARGE = (
    spec_of(name) for name in ("mlp_l6_wi1024", "mlp_b6_wi1024", "mlp_b12_wi1024")
)
"""Standard MLP of Table 1 (depth 6, width 1024), B-6/Wi-1024 and B-12/Wi-1024."""
B6, B12 = SMALL.label, LARGE.label
W, W_C3 = spec_of("mixer_b_w"), spec_of("mixer_b_w_c3")


def _fig6(omega: str, target: str, length: str, shapes: dict[int, int]) -> Table:
    """Return the table of the S-Mixers in Table S.2 and of their RP variants. The paper prints
    settings, and draws the errors in Figure 6. `shapes`: C -> S."""
    rows = tuple(
        Row(
            f"S {tokens}, C {channels}{', RP' if prefix else ''}",
            method="scratch",
            model=spec_of(
                f"{prefix}smixer_c128", num_channels=channels, num_tokens=tokens, depth=12
            ),
            length=length,
        )
        for channels, tokens in shapes.items()
        for prefix in ("", "rp_")
    )
    title = f"S-Mixers of Omega = {omega} on {COLUMNS[target]}"
    return Table(title, f"{MIXER}, Table S.2 for Fig. 6", "mixer_fig6_tableS2", (target,), rows)


SHAPES = {16: 504, 32: 346, 64: 226, 128: 128, 226: 64, 346: 32, 504: 16}
TABLES = (
    Table(
        "From scratch",
        f"{SCALING}, Table 1",
        "scaling_scratch",
        MANY,
        (
            Row(
                "MLP, 100 epochs", (47.1, 16.5, 7.3, 4.7), "scratch", STANDARD, False, "100 epochs"
            ),
            Row("MLP + DA", (49.3, 18.0, 8.7, 11.5), "scratch", STANDARD),
            Row("MLP-Inv", (58.1, 30.5, 8.9, 8.7), "scratch", SMALL, False),
            Row(
                "MLP-Inv + DA, 1000 epochs",
                (70.1, 48.3, 27.2, 28.7),
                "scratch",
                SMALL,
                True,
                "1000 epochs",
            ),
            Row(
                "MLP-Inv + DA, 5000 epochs",
                (75.4, 50.4, 31.2, 31.7),
                "scratch",
                SMALL,
                True,
                "5000 epochs",
            ),
            Row("ResNet18 + DA", (93.2, 75.6, 68.9, 69.7), "scratch", spec_of("resnet18_32")),
        ),
    ),
    Table(
        "Pretrained on ImageNet-21k, fine-tuned",
        f"{SCALING}, Table 2",
        "scaling_transfer",
        ALL,
        (
            Row(
                f"fine-tune {B6}, no DA",
                (69.9, 43.0, 51.5, 47.1, 15.2),
                "tune",
                SMALL,
                False,
                stds=(0.1, 0.4, 0.1, 0.1, 0.2),
            ),
            Row(
                f"fine-tune {B6} + DA",
                (91.5, 76.4, 85.0, 62.7, 38.7),
                "tune",
                SMALL,
                stds=(0.02, 0.2, 0.2, 0.1, 0.1),
            ),
            Row(
                f"fine-tune {B12} + DA",
                (93.6, 79.2, 88.9, 69.9, 42.5),
                "tune",
                LARGE,
                stds=(0.03, 0.1, 0.1, 0.4, 0.2),
            ),
        ),
    ),
    Table(
        "Public checkpoints, fine-tuned",
        f"{SCALING}, README of the code",
        "scaling_public",
        ALL,
        tuple(
            Row(
                f"{method} {model.label}, {epochs} epochs",
                top1,
                "tta" if method == "100 views" else "tune",
                model,
                public_epochs=epochs,
            )
            for method, model, epochs, top1 in (
                ("fine-tune", spec_of("mlp_b6_wi512"), 800, (88.5, 71.2, 79.9, 53.2, 33.3, 38.2)),
                ("fine-tune", spec_of("mlp_b12_wi512"), 600, (91.4, 75.1, 84.4, 60.0, 38.0, 42.8)),
                ("fine-tune", SMALL, 800, (92.5, 77.1, 86.5, 64.3, 40.0, 47.0)),
                ("fine-tune", LARGE, 800, (94.2, 80.0, 89.9, 69.9, 43.2, 48.6)),
                ("100 views", LARGE, 800, (95.5, 82.6, 92.2, 73.1, 51.4, 57.9)),
            )
        ),
    ),
    Table(
        "Pretrained on ImageNet-21k, linear probe",
        f"{SCALING}, Table 3",
        "scaling_probe",
        ALL,
        (
            Row(f"linear probe {B6}, no DA", (65.1, 41.3, 53.4, 45.6, 13.0), "probe", SMALL, False),
            Row(f"linear probe {B6} + DA", (87.8, 73.2, 85.2, 61.3, 39.2), "probe", SMALL),
            Row(f"linear probe {B12} + DA", (90.6, 74.5, 88.3, 68.5, 40.7), "probe", LARGE),
        ),
    ),
    Table(
        "Wide Mixers on CIFAR",
        f"{MIXER}, Table 1, upper half",
        "mixer_table1_cifar",
        ("cifar10", "cifar100"),
        (
            Row(
                "Mixer-SS/8",
                (84.09, 55.76),
                "scratch",
                spec_of("mixer_ss_8"),
                True,
                "4000 epochs",
                stds=(1.55, 1.83),
            ),
            Row(
                "Mixer-SS-W",
                (87.93, 61.87),
                "scratch",
                spec_of("mixer_ss_w"),
                True,
                "4000 epochs",
                stds=(0.47, 1.36),
            ),
            Row("beta-LASSO", (85.19, 59.56)),
        ),
        decimals=2,
    ),
    Table(
        "Wide Mixers on ImageNet",
        f"{MIXER}, Table 1, lower half",
        "mixer_table1_imagenet",
        IMAGENET,
        (
            Row("Mixer-B/16", (76.44,), "scratch", spec_of("mixer_b_16"), True, "300 epochs"),
            Row(
                "Mixer-B-W, gamma 4.0948 (Table 1)",
                (76.74,),
                "scratch",
                W,
                True,
                "300 epochs",
                stds=(0.19,),
            ),
            Row(
                "Mixer-B-W, gamma 4.57 (C.3)",
                (76.74,),
                "scratch",
                W_C3,
                True,
                "300 epochs",
                stds=(0.19,),
            ),
        ),
        decimals=2,
    ),
    _fig6("2^21", "cifar10", "2000 epochs", SHAPES),
    _fig6("2^21", "cifar100", "600 epochs", SHAPES),
    _fig6(
        "2^18", "stl10", "2000 epochs", {16: 173, 32: 113, 48: 83, 64: 64, 83: 48, 113: 32, 173: 16}
    ),
)
