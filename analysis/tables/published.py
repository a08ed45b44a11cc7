"""What the papers' tables print, and of which runs each cell is. A number that we have not seen in
them stands nowhere.

A is "Understanding MLP-Mixer as a Wide and Sparse MLP" (Hayase and Karakida, ICML 2024), B "Scaling
MLPs: A Tale of Inductive Bias" (Bachmann et al., NeurIPS 2023). MLP is B's standard MLP, MLP-Inv
the one with inverted bottlenecks, DA data augmentation (random flips and crops), TTA test-time
augmentation. All is top-1 in per cent: A prints errors, here is what they leave of 100.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from pretrain.models.presets import spec_of
from pretrain.models.spec import AnySpec

A, B = "Understanding MLP-Mixer, ICML 2024", "Scaling MLPs, NeurIPS 2023"
REAL = "-real"
"""Behind a target: judged by its reassessed labels."""
COLUMNS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "stl10": "STL-10",
    "tinyimagenet": "TinyImageNet",
    "imagenet1k": "ImageNet",
    f"imagenet1k{REAL}": "ImageNet ReaL",
}
"""By the `target` tag of a run."""

JUDGED_ON = {
    each: "test" if each in ("cifar10", "cifar100", "stl10") else "val" for each in COLUMNS
}
"""The split that everybody's numbers are of, as `data_prep` names it: any other may have been
chosen on, or trained on."""

Method = Literal["scratch", "tune", "probe", "tta", "knn"]


@dataclass(frozen=True)
class Wanted:
    """Of which runs a cell is, and what the paper has there."""

    target: str
    method: Method | None
    """None: the paper cites the number, so no run is beside it."""
    model: AnySpec | None = None
    augmented: bool = True
    """In the pretraining and in what follows it."""
    epochs: int | None = None
    """Of training from scratch; None, where we have no length of the paper's, takes any."""
    public: bool = False
    """Of the weights that the authors have published (800 epochs); else of weights that were
    pretrained here (400 epochs)."""
    top1: float | None = None
    std: float | None = None


class Row(NamedTuple):
    name: str
    cells: tuple[Wanted, ...]


@dataclass(frozen=True)
class Table:
    title: str
    source: str
    targets: tuple[str, ...]
    """Names of `COLUMNS`, or the words of the column."""
    rows: tuple[Row, ...]
    plan: str
    """Of configs/plan/, which makes its runs."""
    decimals: int = 1
    """That the paper prints."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(COLUMNS.get(each, each) for each in self.targets)


def _row(
    name: str,
    targets: tuple[str, ...],
    top1: tuple[float | None, ...],
    method: Method | None,
    model: AnySpec | None = None,
    **more: Any,
) -> Row:
    """Of the last targets the paper may have no number: mostly none by ReaL labels."""
    return Row(
        name,
        tuple(
            Wanted(each, method, model, top1=value, **more)
            for each, value in zip_longest(targets, top1)
        ),
    )


# ---- B
# --------------------------------------------------------------------------------------------------

IMAGENET = ("imagenet1k", f"imagenet1k{REAL}")
MANY = ("cifar10", "cifar100", "tinyimagenet", *IMAGENET)
ALL = ("cifar10", "cifar100", "stl10", "tinyimagenet", *IMAGENET)
STANDARD, SMALL, LARGE = (
    spec_of(name) for name in ("mlp_l6_wi1024", "mlp_b6_wi1024", "mlp_b12_wi1024")
)
"""The standard MLP of Table 1 is of depth 6 and width 1024."""
B6, B12, PUBLIC = SMALL.label, LARGE.label, "public checkpoint"

FROM_SCRATCH = Table(
    "From scratch",
    f"{B}, Table 1",
    MANY,
    (
        _row(
            "MLP, 100 epochs",
            MANY,
            (47.1, 16.5, 7.3, 4.7),
            "scratch",
            STANDARD,
            augmented=False,
            epochs=100,
        ),
        _row("MLP + DA", MANY, (49.3, 18.0, 8.7, 11.5), "scratch", STANDARD),
        _row("MLP-Inv", MANY, (58.1, 30.5, 8.9, 8.7), "scratch", SMALL, augmented=False),
        _row(
            "MLP-Inv + DA, 1000 epochs",
            MANY,
            (70.1, 48.3, 27.2, 28.7),
            "scratch",
            SMALL,
            epochs=1000,
        ),
        _row(
            "MLP-Inv + DA, 5000 epochs",
            MANY,
            (75.4, 50.4, 31.2, 31.7),
            "scratch",
            SMALL,
            epochs=5000,
        ),
        _row("ResNet18", MANY, (), "scratch", spec_of("resnet18_32")),
    ),
    "b_scratch",
)

FINE_TUNED = Table(
    "Pretrained on ImageNet-21k, fine-tuned",
    f"{B}, Table 2; of the {PUBLIC}: README of its code",
    ALL,
    (
        _row(
            f"fine-tune {B6}, no DA",
            ALL,
            (69.9, 43.0, 51.5, 47.1, 15.2),
            "tune",
            SMALL,
            augmented=False,
        ),
        _row(f"fine-tune {B6} + DA", ALL, (91.5, 76.4, 85.0, 62.7, 38.7), "tune", SMALL),
        _row(f"fine-tune {B12} + DA", ALL, (93.6, 79.2, 88.9, 69.9, 42.5), "tune", LARGE),
        _row(
            f"fine-tune {B12} + DA, {PUBLIC}",
            ALL,
            (94.2, 80.0, 89.9, 69.9, 43.2, 48.6),
            "tune",
            LARGE,
            public=True,
        ),
        _row(
            f"fine-tune {B12} + DA + TTA, {PUBLIC}",
            ALL,
            (95.5, 82.6, 92.2, 73.1, 51.4, 57.9),
            "tta",
            LARGE,
            public=True,
        ),
    ),
    "b_transfer",
)

PROBED = Table(
    "Pretrained on ImageNet-21k, linear probe",
    f"{B}, Table 3",
    ALL,
    (
        _row(
            f"linear probe {B6}, no DA",
            ALL,
            (65.1, 41.3, 53.4, 45.6, 13.0),
            "probe",
            SMALL,
            augmented=False,
        ),
        _row(f"linear probe {B6} + DA", ALL, (87.8, 73.2, 85.2, 61.3, 39.2), "probe", SMALL),
        _row(f"linear probe {B12} + DA", ALL, (90.6, 74.5, 88.3, 68.5, 40.7), "probe", LARGE),
    ),
    "b_probe",
)

# ---- A
# --------------------------------------------------------------------------------------------------

THREE = ("cifar10", "cifar100", "stl10")
TABLE1_SMALL = Table(
    "Wide Mixers on CIFAR and STL-10",
    f"{A}, Table 1, upper half",
    THREE,
    (
        _row("Mixer-SS/8", THREE, (84.09, 55.76), "scratch", spec_of("mixer_ss_8"), epochs=4000),
        _row("Mixer-SS-W", THREE, (87.93, 61.87), "scratch", spec_of("mixer_ss_w"), epochs=4000),
        _row("beta-LASSO", THREE, (85.19, 59.56), None),
    ),
    "a_table1_cifar",
    decimals=2,
)
TABLE1_LARGE = Table(
    "Wide Mixers on ImageNet",
    f"{A}, Table 1, lower half",
    IMAGENET,
    (
        _row("Mixer-B/16", IMAGENET, (76.44,), "scratch", spec_of("mixer_b_16"), epochs=300),
        _row(
            "Mixer-B-W, gamma 4.0948 (Table 1)",
            IMAGENET,
            (76.74,),
            "scratch",
            spec_of("mixer_b_w"),
            epochs=300,
            std=0.19,
        ),
        _row(
            "Mixer-B-W, gamma 4.57 (C.3)",
            IMAGENET,
            (76.74,),
            "scratch",
            spec_of("mixer_b_w_c3"),
            epochs=300,
            std=0.19,
        ),
    ),
    "a_table1_imagenet",
    decimals=2,
)


def _fig6(omega: str, shapes: dict[int, int], lengths: dict[str, int]) -> Table:
    """S-Mixers of 12 blocks, of which Table S.2 prints the settings, each beside its RP variant.
    `shapes`: S by C; `lengths`: epochs by target. What they reached are curves of the figure, of
    which we have no numbers."""
    rows = (
        Row(
            f"S {tokens}, C {channels}",
            tuple(
                Wanted(
                    target,
                    "scratch",
                    spec_of(preset, num_channels=channels, num_tokens=tokens, depth=12),
                    epochs=epochs,
                )
                for target, epochs in lengths.items()
                for preset in ("smixer_c128", "rp_smixer_c128")
            ),
        )
        for channels, tokens in shapes.items()
    )
    columns = tuple(f"{COLUMNS[target]}{how}" for target in lengths for how in ("", ", RP"))
    return Table(
        f"S-Mixers of Omega = {omega}",
        f"{A}, Table S.2 for Fig. 6",
        columns,
        tuple(rows),
        "a_fig6_tableS2",
    )


TABLES = (
    *(FROM_SCRATCH, FINE_TUNED, PROBED, TABLE1_SMALL, TABLE1_LARGE),
    _fig6(
        "2^21",
        {16: 504, 32: 346, 64: 226, 128: 128, 226: 64, 346: 32, 504: 16},
        {"cifar10": 2000, "cifar100": 600},
    ),
    _fig6("2^18", {16: 173, 32: 113, 48: 83, 64: 64, 83: 48, 113: 32, 173: 16}, {"stl10": 2000}),
)
