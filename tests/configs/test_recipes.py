"""The recipe of each config of the papers, as `show` resolves it, against literals that name their
place in paper or public code.

Written down from our notes of papers and code (docs/papers.md, "Recipes"), not read from the
configs.
"""

from functools import cache
from typing import Any

import pytest

from cluster.work import COMMANDS, Kind, Work
from data_prep.settings import flatten
from tests.ranks import REPOSITORY

KINDS: dict[str, Kind] = {
    "pretrain": "pretrain",
    "finetune": "tune",
    "probe": "probe",
    "evaluate": "evaluate",
}
CODE = "B, public code"
ROWS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "pretrain/imagenet21k_b12_wi1024_paper": [
        (
            "B, table of models: B-12/Wi-1024",
            {
                "model.depth": 12,
                "model.width": 1024,
                "model.expansion": 4.0,
                "model.bottleneck": "inverted",
            },
        ),
        (
            "B 3, blocks: GELU, pre-LN, a skip path each",
            {"model.activation": "gelu", "model.norm": "layer", "model.norm_place": "before"},
        ),
        (
            "B, pretraining: LION, 400 epochs, batch 16,384",
            {
                "optimizer.name": "lion",
                "train.duration": "400 epochs",
                "train.global_batch_size": 16384,
            },
        ),
        (
            "B, pretraining: smoothing 0.3, MixUp 0.8, flips",
            {
                "train.label_smoothing": 0.3,
                "augment.mixup_alpha": 0.8,
                "augment.flip_probability": 0.5,
            },
        ),
        (
            "B, scaling-law runs: 1e-5, decay 1e-3",
            {"optimizer.lr": 1e-5, "optimizer.weight_decay": 1e-3},
        ),
        (
            f"{CODE}, scheduler none, crop 0.08-1",
            {"schedule.name": "constant", "augment.crop_scale": [0.08, 1.0]},
        ),
        (
            f"{CODE}, FFCV's MixUp; all tensors decay",
            {"augment.mix_with": "previous", "optimizer.decay": "all"},
        ),
    ],
    "pretrain/imagenet21k_b12_wi1024_public": [
        (
            f"{CODE}, README: batch 16,384; checkpoints of 800 epochs",
            {"train.global_batch_size": 16384, "train.duration": "800 epochs"},
        ),
        (
            f"{CODE}, defaults: lr 5e-5, decay 0",
            {"optimizer.name": "lion", "optimizer.lr": 5e-5, "optimizer.weight_decay": 0.0},
        ),
        (
            f"{CODE}, defaults: smoothing 0.3, MixUp 0.8, no clip",
            {
                "train.label_smoothing": 0.3,
                "augment.mixup_alpha": 0.8,
                "engine.gradient_clip_norm": 0.0,
            },
        ),
        (
            f"{CODE}, loader: crop 0.08-1, ratio 3/4-4/3, INTER_AREA",
            {
                "augment.crop_scale": [0.08, 1.0],
                "augment.crop_ratio": [0.75, 4 / 3],
                "augment.crop_interpolation": "area",
                "augment.mix_with": "previous",
                "data.last_batch": "drop",
            },
        ),
        (
            f"{CODE}, float32 and no scheduler",
            {"engine.precision": "fp32", "schedule.name": "constant"},
        ),
    ],
    "pretrain/imagenet1k_b6_wi1024_scratch": [
        (
            "B, Table 1: B-6/Wi-1024, LION 5e-5, 1,000 epochs",
            {
                "model.depth": 6,
                "model.width": 1024,
                "optimizer.name": "lion",
                "optimizer.lr": 5e-5,
                "train.duration": "1000 epochs",
                "data.image_size": 64,
            },
        ),
        (
            f"{CODE}, defaults: decay 0, batch 4,096, constant",
            {
                "optimizer.weight_decay": 0.0,
                "train.global_batch_size": 4096,
                "schedule.name": "constant",
                "train.label_smoothing": 0.3,
                "augment.mixup_alpha": 0.8,
                "augment.crop_scale": [0.08, 1.0],
            },
        ),
    ],
    "pretrain/cifar10_resnet18": [
        (
            "B, Table 1: ResNet18 at the original resolution; the rest is ours",
            {"model.name": "resnet18_32", "data.image_size": None},
        )
    ],
    "pretrain/imagenet1k_mixer_b_w": [
        (
            "A, Table 1: S = 256, C = 588, L = 8, gamma = 3456/844",
            {
                "model.patch_size": 14,
                "model.num_channels": 588,
                "model.depth": 8,
                "model.expansion": 4.0948,
                "data.image_size": 224,
            },
        ),
        (
            "A, C.5: AdamW 1e-3, decay 0.05, 300 epochs, batch 4,096",
            {
                "optimizer.name": "adamw",
                "optimizer.lr": 1e-3,
                "optimizer.weight_decay": 0.05,
                "train.duration": "300 epochs",
                "train.global_batch_size": 4096,
            },
        ),
        (
            "A, C.5: warm-up 5 epochs from 1e-6, cosine to 1e-5",
            {
                "schedule.warmup": "5 epochs",
                "schedule.warmup_from": 1e-6,
                "schedule.name": "cosine",
                "schedule.final_lr": 1e-5,
            },
        ),
        (
            "A, C.5: erasing, RandAugment, MixUp, CutMix, smoothing",
            {
                "augment.erase_probability": 0.25,
                "augment.mixup_alpha": 0.8,
                "augment.auto_augment": "rand-m9-mstd0.5-inc1",
                "augment.cutmix_alpha": 1.0,
                "augment.switch_probability": 0.5,
                "train.label_smoothing": 0.1,
            },
        ),
    ],
    "pretrain/cifar10_smixer": [
        (
            "A, C.4: Nesterov SGD 0.02, momentum 0.9, cosine",
            {
                "optimizer.name": "sgd",
                "optimizer.lr": 0.02,
                "optimizer.momentum": 0.9,
                "optimizer.nesterov": True,
                "schedule.name": "cosine",
            },
        ),
        (
            "A, C.4: batch 128, 200 epochs, crop + flip",
            {
                "train.global_batch_size": 128,
                "train.duration": "200 epochs",
                "augment.crop_padding": 4,
                "augment.flip_probability": 0.5,
                "augment.auto_augment": None,
            },
        ),
        (
            "A, C.4: P = 4, 8 blocks, one layer a mixing, S = 113, C = 32",
            {
                "model.patch_size": 4,
                "model.depth": 8,
                "model.layers_per_mixing": 1,
                "model.num_tokens": 113,
                "model.num_channels": 32,
            },
        ),
        ("A: 32-bit float", {"engine.precision": "fp32"}),
    ],
    "pretrain/cifar10_mixer_ss_w": [
        (
            "A, Table 1: AdamW 0.04, batch 1,024, 4,000 epochs, cosine, AutoAugment",
            {
                "optimizer.name": "adamw",
                "optimizer.lr": 0.04,
                "train.global_batch_size": 1024,
                "train.duration": "4000 epochs",
                "schedule.name": "cosine",
                "augment.auto_augment": "cifar10",
            },
        ),
        (
            "A, Table 1: Mixer-SS-W, S = 64, C = 487, L = 2, gamma 4",
            {
                "model.patch_size": 4,
                "model.num_channels": 487,
                "model.depth": 2,
                "model.expansion": 4.0,
            },
        ),
        (
            "torch.optim.AdamW's own decay",
            {"optimizer.weight_decay": 1e-2, "optimizer.decay": "all"},
        ),
        ("A: 32-bit float", {"engine.precision": "fp32"}),
    ],
    "pretrain/mnist_monarch": [
        (
            "A, Fig. 2d: AdamW 0.01, cosine, 200 epochs",
            {
                "optimizer.name": "adamw",
                "optimizer.lr": 0.01,
                "schedule.name": "cosine",
                "train.duration": "200 epochs",
                "model.form": "monarch",
            },
        ),
        (
            "torch.optim.AdamW's own decay",
            {"optimizer.weight_decay": 1e-2, "optimizer.decay": "all"},
        ),
    ],
    "finetune/cifar10_b12_wi1024_paper": [
        (
            "B 4.3: SGD with momentum, 0.01 head, 0.001 body",
            {"optimizer.name": "sgd", "optimizer.lr": 1e-3, "optimizer.head_lr_scale": 10.0},
        ),
        (
            "B 4.3: 50 epochs; Table 2: three runs",
            {"train.duration": "50 epochs", "seeds": [0, 1, 2]},
        ),
        (
            f"{CODE}: no scheduler, clip 1, no decay, plain momentum",
            {
                "schedule.name": "constant",
                "engine.gradient_clip_norm": 1.0,
                "optimizer.weight_decay": 0.0,
                "optimizer.nesterov": False,
                "optimizer.momentum": 0.9,
            },
        ),
        (
            f"{CODE}: torch's head, the target's statistics",
            {"new_head": "torch", "channel_stats": "target"},
        ),
    ],
    "finetune/cifar10_b12_wi1024_public": [
        (
            f"{CODE}, README: batch 2,048, 100 epochs, crop 0.4-1 at ratio 1, smoothing 0.3",
            {
                "train.duration": "100 epochs",
                "train.global_batch_size": 2048,
                "augment.crop_scale": [0.4, 1.0],
                "augment.crop_ratio": [1.0, 1.0],
                "train.label_smoothing": 0.3,
                "augment.mixup_alpha": 0.0,
            },
        ),
        (
            f"{CODE}: lr 0.01 for the head, a tenth for the body, no decay",
            {
                "optimizer.lr": 1e-3,
                "optimizer.head_lr_scale": 10.0,
                "optimizer.weight_decay": 0.0,
                "optimizer.nesterov": False,
            },
        ),
        (
            f"{CODE}: no scheduler, clip 1, torch's head, the target's statistics",
            {
                "schedule.name": "constant",
                "new_head": "torch",
                "engine.gradient_clip_norm": 1.0,
                "channel_stats": "target",
                "data.last_batch": "drop",
            },
        ),
    ],
    "probe/cifar10_b12_wi1024_paper": [
        (
            "B A.3: LION 1e-5, 50 epochs, frozen body",
            {"optimizer": "lion", "lrs": [1e-5], "epochs": [50], "standardize": False, "views": 50},
        ),
        (
            f"{CODE}: constant rate, smoothing 0.3, clip 1, batch 4,096, no decay",
            {
                "schedule.name": "constant",
                "label_smoothing": 0.3,
                "gradient_clip_norm": 1.0,
                "batch_size": 4096,
                "weight_decays": [0.0],
                "channel_stats": "target",
            },
        ),
    ],
    "evaluate/cifar10_b12_wi1024_public": [
        (
            f"{CODE}, README: 100 test crops, top-1 of their mean softmax",
            {"views": 100, "include_plain": False, "data.split": "test"},
        )
    ],
}


@cache
def resolved(name: str) -> dict[str, Any]:
    return flatten(
        Work(
            KINDS[name.partition("/")[0]], str(REPOSITORY / f"configs/{name}.yaml")
        ).settings.model_dump(mode="json")
    )


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, rows in ROWS.items() for place, _ in rows]
)
def test_a_recipe_has_the_value_that_is_printed(name: str, place: str) -> None:
    values = dict(ROWS[name])[place]
    assert {key: resolved(name)[key] for key in values} == values, place


def test_every_config_but_the_demo_has_its_rows() -> None:
    files = {
        f"{kind}/{path.stem}"
        for kind in KINDS
        for path in (REPOSITORY / "configs" / kind).glob("*.yaml")
    }
    assert {name for name in files if "demo" not in name} == set(ROWS)
    assert set(KINDS.values()) < set(COMMANDS)
