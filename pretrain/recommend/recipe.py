"""Choices of `pretrain recommend`. They depend only on the data and the machine, so the same
command makes the same config.

The lines of a config, each with its reason, are in train.yaml, tune.yaml and probe.yaml next to
this file. This file fills in the values in braces. command.py measures time and memory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.settings import in_yaml
from pretrain.checkpoints.card import ModelCard
from pretrain.models.cost import cost_of
from pretrain.models.presets import spec_of
from pretrain.recommend.look import Data, Machine, Pictures

FEW = 20_000
"""Number of training images below which pretrained weights matter more than any setting."""
PAPER = "Scaling MLPs"
EXPECTED = (
    f"An MLP from scratch needs many images. In {PAPER}, 50,000 images (CIFAR-10) gave 58.1 %"
    " top-1 in 100 epochs,\nand 70.1 % in 1,000 with augmentation. Weights pretrained on"
    " ImageNet-21k gave 93.6 %, and 88.9 % for 5,000 images (STL-10)."
)
WEIGHTS = (
    "RUN is one of your runs, hf-hub:USER/NAME, timm:NAME (for example timm:mixer_b16_224), or a"
    " folder of finetune import.\ngithub.com/gregorbachmann/scaling_mlps links public weights."
    " Import them: finetune import FILE --out runs/public, then --from runs/public"
)

_MODELS = (
    (0, "mlp_b6_wi256"),
    (20_000, "mlp_b6_wi512"),
    (200_000, "mlp_b6_wi1024"),
    (2_000_000, "mlp_b12_wi1024"),
)
"""Smallest number of training images for each model. The two largest models are only for GPUs."""
_ON_GPUS = {
    "local_batch": "auto",
    "width_reason": (
        "grows with the number of images: Wi-256, Wi-512 from 20,000 on, Wi-1024 from 200,000,"
        " B-12 from 2 million"
    ),
    "precision": "bf16",
    "precision_reason": "the fastest type on GPUs",
}
_ON_CPUS = {
    "width_reason": "Wi-256, or Wi-512 from 20,000 images on: CPUs are too slow for more",
    "precision": "fp32",
    "precision_reason": "CPUs gain nothing from lower precision",
}


def image_size(pictures: Pictures) -> tuple[int, str]:
    """Return the size of stored images, and the reason."""
    seen = f"the median of your images is {pictures.width} x {pictures.height}"
    if min(pictures.width, pictures.height) < 48:
        return 32, f"{seen}, so 64 px would only enlarge them"
    return 64, f"the size of the models of {PAPER}; {seen}"


def pretraining(data: Data, machine: Machine, *, name: str) -> dict[str, Any]:
    count, manifest = data.num_train, data.manifest
    wide = [
        preset for least, preset in _MODELS if count >= least and (machine.gpus or least < 200_000)
    ][-1]
    epochs = 100 if machine.gpus else max(10, min(100, 4_000_000 // count))
    gained = f"1,000 epochs with augmentation gave {PAPER} 12 percentage points more on CIFAR-10"
    found = _common(
        data, name=name, epochs=epochs, warmup=epochs / 50, most=4096 if machine.gpus else 1024
    )
    found |= {"fed_size": manifest.image_size} if manifest.encoding == "keep" else {}
    cost = cost_of(spec_of(wide), num_classes=len(manifest.classes), image_size=manifest.image_size)
    return {
        **found,
        **(_ON_GPUS if machine.gpus else _ON_CPUS),
        "preset": wide,
        "weights_m": cost.num_parameters / 1e6,
        "lr": float(f"{1e-4 * (found['batch'] / 64) ** 0.5:.1g}"),
        "longer": gained if epochs == 100 else "CPUs are slow, and more epochs are better",
    }


def tuning(data: Data, *, name: str, pretrained: str, card: ModelCard) -> dict[str, Any]:
    epochs, about = 30 if data.num_train < FEW else 15, f"{card.model.label}"
    found = _common(data, name=name, epochs=epochs, warmup=epochs / 15, most=1024)
    return found | {
        "pretrained": pretrained,
        "model": about,
        "trained_size": card.image_size,
        "trained_on": card.dataset,
    }


def _common(data: Data, *, name: str, epochs: int, warmup: float, most: int) -> dict[str, Any]:
    manifest, count, judged = data.manifest, data.num_train, data.judged
    counts = [count for count in manifest.splits[data.train].class_counts if count]
    least = min(16, 1 << max(0, count.bit_length() - 1))  # at most the number of images
    batch = max(least, min(most, 1 << max(0, (count // 8).bit_length() - 1)))
    every = _epochs(epochs / 20)
    found = {
        "paper": PAPER,
        "run_dir": f"runs/{name}",
        "dataset": str(data.directory),
        "count": count,
        "num_classes": len(manifest.classes),
        "each": (
            f"{min(counts):,} to {max(counts):,} of each"
            if min(counts) < max(counts)
            else f"{max(counts):,} of each"
        ),
        "size": manifest.image_size,
        "warmup": _epochs(warmup),
        "duration": _epochs(epochs),
        "batch": batch,  # a power of two; about eight batches an epoch for few images
        "steps": -(-count // batch),
        "every": every,
        "and_best": " and the best" * (judged == "val"),
    }
    found |= {"keep_best": False} if judged not in (None, "val") else {}
    found |= {"train_split": data.train} if data.train != "train" else {}
    found |= (
        {"eval_every": every, "judged": judged, "num_judged": data.num_judged} if judged else {}
    )
    none = "the dataset has no other split, so accuracy on new images stays unknown"
    found |= (
        {"eval_split": judged, "eval_reason": "the available split" if judged else none}
        if judged != "val"
        else {}
    )
    return found | ({"test_split": judged} if judged not in (None, "val") else {})


def num_ranks(machine: Machine, *, batch: int) -> int:
    """Return the number of processes: one without GPUs, otherwise the largest power of two up to
    the GPU count and half of `batch`."""
    return min(max(1, batch // 2), 1 << max(0, len(machine.gpus).bit_length() - 1))


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the template's config with aligned reasons. Lines whose values are missing are
    skipped."""
    rows = []
    in_words = {name: in_yaml(value) for name, value in values.items()}
    for line in (Path(__file__).parent / f"{template}.yaml").read_text().splitlines():
        words, _, reason = line.partition("  # ")
        if values.keys() >= set(re.findall(r"{(\w+)", words)):
            rows.append((words.format_map(in_words), reason.format_map(values) if reason else ""))
    width = max(len(words) for words, reason in rows if reason)
    return "".join(
        f"{words:{width}}  # {reason}\n" if reason else f"{words}\n" for words, reason in rows
    )


def _epochs(count: float) -> str:
    return f"{max(1, round(count))} epochs"
