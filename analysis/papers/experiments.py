"""Rows of docs/papers.md and of `analysis paper`: each figure, table and proposition of both
papers. A row has plans or a command, or the reason why it has none, and numbers that the paper
prints."""

from dataclasses import dataclass
from typing import Literal

Paper = Literal["mixer", "scaling-mlps"]
TITLES: dict[Paper, str] = {
    "mixer": "Understanding MLP-Mixer as a Wide and Sparse MLP",
    "scaling-mlps": "Scaling MLPs: A Tale of Inductive Bias",
}


@dataclass(frozen=True)
class Experiment:
    name: str
    about: str
    plans: tuple[str, ...] = ()
    """Names of files in configs/plan/, without .yaml."""
    verb: str = ""
    """Arguments of `analysis`, with placeholders RUN and DATA."""
    command: str = ""
    """Complete command of another program."""
    reason: str = ""
    """Reason why the row has no plan and no command."""
    printed: str = ""


WIDTHS = "widths --omega 10^8 --gamma 1"
EXPERIMENTS: dict[Paper, tuple[Experiment, ...]] = {
    "mixer": (
        Experiment("Figs 1, S.9", "Masks of the effective matrices", verb="masks"),
        Experiment(
            "Fig. 2a-c",
            "CKA of Mixers and SW-MLPs, by density",
            ("mixer_fig2_cka",),
            "cka RUN_A RUN_B DATA",
        ),
        Experiment("Fig. 2d", "Monarch and Kronecker MLPs on MNIST", ("mixer_fig2d_monarch",)),
        Experiment(
            "Prop. 3.2, Prop. 3.3 (Lemma B.1), Cor. 3.4",
            "Both sides on random matrices",
            verb="structure",
        ),
        Experiment(
            "Fig. 3",
            "Width and density at fixed Omega, by channels",
            verb=WIDTHS,
            printed="The width is largest at C = S = (Omega / gamma)^(1/3).",
        ),
        Experiment(
            "Fig. 4 left",
            "Error at Omega = 2^19, by gamma m",
            ("mixer_fig4_width",),
            printed="Mixer and SW-MLP: wider is better.",
        ),
        Experiment(
            "Fig. 4 right",
            "Largest singular value, by width",
            verb="spectra --fig4",
            printed="SW-MLP: sqrt(L+). Mixers: 1 + sqrt(gamma).",
        ),
        Experiment(
            "Fig. 5",
            "S-Mixer, RP S-Mixer and SW-MLP at fixed Omega, by width",
            ("mixer_fig5_cifar10", "mixer_fig5_cifar100", "mixer_fig5_stl10"),
        ),
        Experiment(
            "Fig. 6a-c, Table S.2",
            "Error by C and S, normal and RP",
            ("mixer_fig6_tableS2", "mixer_fig6_textC5"),
            printed="The error is least near C = S.",
        ),
        Experiment("Fig. 6d", "ImageNet, by patch size", ("mixer_fig6_imagenet",)),
        Experiment("Fig. 7", "Normal and RP Mixers, by depth", ("mixer_fig7_depth",)),
        Experiment(
            "Table 1, CIFAR",
            "Mixer-SS-W and Mixer-SS/8",
            ("mixer_table1_cifar",),
            "table runs/plans/mixer_table1_cifar",
        ),
        Experiment(
            "Table 1, ImageNet",
            "Mixer-B/16 and Mixer-B-W",
            ("mixer_table1_imagenet",),
            "table runs/plans/mixer_table1_imagenet",
        ),
        Experiment(
            "Table S.1", "Parts of each model", reason="our copy of the paper lacks the marks"
        ),
        Experiment("Fig. S.1 left", "SW-MLP at Omega = 2^16, by density", ("mixer_figS1_left",)),
        Experiment(
            "Fig. S.1 center, right",
            "Singular values of a sparse matrix; largest value by exponent a",
            verb="spectra --figs1",
            printed="p = Omega^-a; a = 1.5, Omega = 10^3, 50 trials. The maximum rises with a.",
        ),
        Experiment(
            "Fig. S.2",
            "MLP-Mixer, RP MLP-Mixer and SW-MLP with hidden layers, by width",
            ("mixer_figS2",),
        ),
        Experiment("Fig. S.3", "Error by gamma, and by C", ("mixer_figS3_left", "mixer_figS3")),
        Experiment(
            "Fig. S.4",
            "One of four blocks randomly permuted",
            ("mixer_figS4_caption", "mixer_figS4_text"),
        ),
        Experiment("Fig. S.5", "Error by patch size, normal and RP", ("mixer_figS5",)),
        Experiment("Fig. S.6", "Test loss of S-Mixers, by C", ("mixer_figS6",)),
        Experiment("Fig. S.7", "Test and training loss with AutoAugment", ("mixer_figS7",)),
        Experiment("Fig. S.8", "Losses and test accuracy with AdamW", ("mixer_figS8",)),
        Experiment(
            "Table S.3",
            "Memory, FLOPs and seconds an epoch",
            verb="cost",
            printed="SW-MLP 28.2, RP 6.41, Mixer 6.08 s an epoch.",
        ),
    ),
    "scaling-mlps": (
        Experiment(
            "Figs 1, 6, 7, 8",
            "Scaling laws of the linear error",
            ("scaling_laws",),
            "scaling POINTS.parquet",
            printed=(
                "alpha 0.12, 0.25, 0.35 (targets not named); alpha_P about 1, alpha_N about 0.35;"
                " P* ~ C^0.35, N* ~ C^0.65."
            ),
        ),
        Experiment("Figs 2, 3", "Sketches of architectures", reason="a drawing without data"),
        Experiment(
            "Table 1", "From scratch", ("scaling_scratch",), "table runs/plans/scaling_scratch"
        ),
        Experiment(
            "Table 2", "Fine-tuned", ("scaling_transfer",), "table runs/plans/scaling_transfer"
        ),
        Experiment(
            "Public checkpoints",
            "Fine-tuned, with 100 views, and probed (README of the code)",
            ("scaling_public",),
            "table runs/plans/scaling_public",
        ),
        Experiment(
            "Table 3", "Linear probes", ("scaling_probe",), "table runs/plans/scaling_probe"
        ),
        Experiment(
            "Fig. 4",
            "Error upstream and downstream, by batch size",
            ("scaling_batch_size",),
            printed="Larger batches transfer better.",
        ),
        Experiment(
            "Fig. 5",
            "Parameters of the models",
            command="pretrain models --match 'mlp_b*' --classes 11230",
            printed="9, 12, 24, 37, 74 and 124 million.",
        ),
        Experiment(
            "4.5",
            "Seconds an epoch and memory on one GPU",
            command=".venv/bin/python benchmarks/gpu.py --only make-64 run-b12 run-b6",
            printed="B-12/Wi-1024 450 s, B-6/Wi-1024 250 s, batch 16,384, 24 GB (A5000).",
        ),
        Experiment(
            "Table 4",
            "Latency and throughput",
            verb="efficiency",
            printed=(
                "B-12/Wi-768 21.2 ms and 16,063 images/s; ResNet-152 423 and 506; ViT-B/4 424 and"
                " 222; Mixer-B/4 400 and 319 (A5000)."
            ),
        ),
        Experiment(
            "Fig. 9",
            "Ablations",
            ("scaling_ablation",),
            printed=(
                "Better: GELU, skips, inverted bottlenecks, pre-LN, LayerNorm, augmentation, LION;"
                " a little: clipping, weight decay, dropout."
            ),
        ),
        Experiment(
            "Figs 10, 11",
            "First-layer filters by data and augmentation",
            verb="filters RUN...",
            printed="More data and augmentation make filters local.",
        ),
    ),
}
