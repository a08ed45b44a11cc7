"""The choices of `pretrain start`, each with its reason: functions of the data and the machine alone, so that the same command
makes the same config. What time and memory it takes is measured, not chosen: see command.py. No torch here.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data_prep.settings import SettingsError, UserError, apply_override
from pretrain.checkpoints.card import ModelCard
from pretrain.models.cost import cost_of
from pretrain.models.presets import spec_of
from pretrain.start.look import Data, Machine, Pictures

FEW = 20_000
"""Pictures to train on: below, weights that have seen others are worth more than anything that can be chosen here."""
PAPER = "Scaling MLPs"
EXPECTED = (
    f"Few pictures are hard for an MLP from scratch. In {PAPER} 50,000 (CIFAR-10) gave 58.1 % in 100 epochs, 70.1 % in 1,000\n"
    "with augmentation, and 93.6 % from weights pretrained on ImageNet-21k; from those 5,000 (STL-10) gave 88.9 %."
)


@dataclass(frozen=True)
class Choice:
    key: str
    value: Any
    reason: str


def image_size(pictures: Pictures) -> tuple[int, str]:
    """What pictures are stored at, and why."""
    seen = f"yours are {pictures.width} x {pictures.height} in the median"
    if min(pictures.width, pictures.height) < 48:
        return 32, f"{seen}, so 64 px would only blow them up"
    return 64, f"what the models of {PAPER} are made for; {seen}"


def pretraining(data: Data, machine: Machine, *, name: str) -> list[Choice]:
    count, size, classes = data.num_train, data.manifest.image_size, len(data.manifest.classes)
    wide = [preset for least, preset in _MODELS if count >= least and (machine.gpus or least < 200_000)][-1]
    batch = _batch(count, most=4096 if machine.gpus else 1024)
    cost = cost_of(spec_of(wide), num_classes=classes, image_size=size)
    epochs = 100 if machine.gpus else max(10, min(100, 4_000_000 // count))
    gained = f"1,000 with augmentation gave {PAPER} 12 points more on CIFAR-10"
    longer = gained if epochs == 100 else "CPUs are slow, and more is better"
    on_gpu = [Choice("train.local_batch_size", "auto", "what a GPU holds at once; the batch stays what it is")] * bool(machine.gpus)
    gain = "GPUs are made for it" if machine.gpus else "CPUs gain nothing from less"
    return [
        *_data(data, name=name),
        Choice("model.preset", wide, f"{cost.num_parameters / 1e6:.1f} M weights: {_WIDTH_REASON[bool(machine.gpus)]}"),
        *_AUGMENT,
        Choice("optimizer.lr", _lr(batch), f"of LION, {PAPER}' optimizer, for batches of {batch}; halve it if the loss jumps"),
        Choice("optimizer.weight_decay", 0.1, "the demo's; the paper's 1e-3 is for millions of pictures"),
        Choice("schedule.warmup", _epochs(epochs / 50), "the first steps of random weights are wild; then a cosine to 0"),
        Choice("train.duration", _epochs(epochs), f"can be raised later, in the same run: {longer}"),
        *_batches(batch, count),
        *on_gpu,
        *_cadence(epochs, data),
        Choice("engine.precision", "bf16" if machine.gpus else "fp32", gain),
        Choice("engine.gradient_clip_norm", 1.0, "a batch of odd pictures moves the weights no further"),
    ]


def tuning(data: Data, *, name: str, pretrained: str, card: ModelCard) -> list[Choice]:
    count = data.num_train
    batch, epochs = _batch(count, most=1024), 30 if count < FEW else 15
    return [
        *_data(data, name=name, keep_size=True),
        Choice("pretrained", pretrained, f"{card.model.label} at {card.image_size} px, of {card.dataset}; all of it learns on"),
        *_AUGMENT,
        Choice("optimizer.name", "adamw", "reaches in few steps what the paper's SGD needs many for"),
        Choice("optimizer.lr", 3e-4, "of the body, which knows most already"),
        Choice("optimizer.head_lr_scale", 10.0, f"the new head learns ten times as fast, as in {PAPER}"),
        Choice("optimizer.weight_decay", 0.05, "AdamW's usual one"),
        Choice("schedule.warmup", _epochs(epochs / 15), "so that a head of random weights does not spoil the body"),
        Choice("train.duration", _epochs(epochs), f"{PAPER} tunes for 50 to 100; can be raised later, in the same run"),
        *_batches(batch, count),
        *_cadence(epochs, data),
    ]


def probing(data: Data, *, name: str, pretrained: str, card: ModelCard) -> list[Choice]:
    if data.judged is None:
        raise UserError(f"{data.directory}: has no split to test on; build it with source.val_share=0.1, or tune (without --probe)")
    found = [choice for choice in _data(data, name=name, keep_size=True) if choice.key != "data.eval_split"]
    about = f"{card.model.label} at {card.image_size} px, of {card.dataset}; stays as it is"
    found.append(Choice("pretrained", pretrained, about))
    if data.judged != "val":  # before the end of the section
        found.insert(2, Choice("data.test_split", data.judged, "the split that it has"))
    if data.num_train < FEW:
        found.append(Choice("lrs", [3e-4, 1e-3, 3e-3, 1e-2, 3e-2], "larger than by default: few pictures make few steps"))
    return found


def num_ranks(machine: Machine) -> int:
    """A process for each GPU: a power of two, which every batch splits over. One for all cores."""
    return 1 << max(0, len(machine.gpus).bit_length() - 1)


def tree_of(choices: Sequence[Choice]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for choice in choices:
        apply_override(tree, f"{choice.key}={in_yaml(choice.value)}")
    return tree


def render(choices: Sequence[Choice], head: Sequence[str]) -> str:
    """YAML: a line for each choice, its reason behind it."""
    rows, section = list[tuple[str, str]](), ""
    for choice in choices:
        above, dot, key = choice.key.rpartition(".")
        if dot and above != section:
            rows.append((f"{above}:", ""))
        section = above
        rows.append((f"{'  ' * bool(dot)}{key}: {in_yaml(choice.value)}", choice.reason))
    width = max(len(words) for words, reason in rows if reason)
    lines = [f"{words:{width}}  # {reason}" if reason else words for words, reason in rows]
    return "\n".join([*(f"# {line}" for line in head), *lines]) + "\n"


def in_yaml(value: Any) -> str:
    """As people write it, where that is read back as the same value."""
    plain, read = f"{value:g}" if isinstance(value, float) else str(value), dict[str, Any]()
    if not isinstance(value, str | float) or " #" in plain or ": " in plain:
        return json.dumps(value)
    with suppress(SettingsError):
        apply_override(read, f"value={plain}")
    return plain if read.get("value") == value else json.dumps(value)


_MODELS = ((0, "mlp_b6_wi256"), (20_000, "mlp_b6_wi512"), (200_000, "mlp_b6_wi1024"), (2_000_000, "mlp_b12_wi1024"))
"""From so many pictures on; the wider ones on GPUs alone."""
_WIDTH_REASON = {
    True: "grows with the pictures: Wi-256, from 20,000 on Wi-512, from 200,000 Wi-1024, from 2 million B-12",
    False: "Wi-256, from 20,000 pictures on Wi-512: larger ones take CPUs too long",
}


_AUGMENT = (
    Choice("augment.crop_scale", [0.4, 1.0], f"random crops of 40 to 100 % of the area, as in the public code of {PAPER}"),
    Choice("augment.flip_probability", 0.5, "half of them mirrored; 0 where that is another thing (digits, letters, maps)"),
)


def _batches(batch: int, count: int) -> list[Choice]:
    return [
        Choice("train.global_batch_size", batch, f"{-(-count // batch):,} steps an epoch; a larger one would make fewer"),
        Choice("train.label_smoothing", 0.1, "keeps it from being too sure of few pictures"),
    ]


def _lr(batch: int) -> float:
    return float(f"{1e-4 * (batch / 64) ** 0.5:.1g}")


def _batch(count: int, *, most: int) -> int:
    """A power of two, about eight of which make an epoch of few pictures."""
    return max(16, min(most, 1 << max(0, (count // 8).bit_length() - 1)))


def _epochs(count: float) -> str:
    return f"{max(1, round(count))} epochs"


def _data(data: Data, *, name: str, keep_size: bool = False) -> list[Choice]:
    manifest, judged = data.manifest, data.judged
    found = [Choice("run_dir", f"runs/{name}", "checkpoints, journal, result; another one is another run")]
    counts = [count for count in manifest.splits[data.train].class_counts if count]
    each = f"{min(counts):,} to {max(counts):,} of each" if min(counts) < max(counts) else f"{max(counts):,} of each"
    where = f"{data.num_train:,} pictures of {len(manifest.classes):,} classes ({each}), {manifest.image_size} px"
    found.append(Choice("data.dataset", str(data.directory), where))
    if data.train != "train":
        found.append(Choice("data.train_split", data.train, "the split that it has"))
    if judged != "val":
        why = "the split that it has" if judged else "it has no other split: nothing tells how good the model is on new pictures"
        found.append(Choice("data.eval_split", judged, why))
    if manifest.encoding == "keep" and not keep_size:
        found.append(
            Choice("data.image_size", manifest.image_size, "what the model is fed: the dataset keeps the pictures' own sizes")
        )
    return found


def _cadence(epochs: int, data: Data) -> list[Choice]:
    every = _epochs(epochs / 20)
    seen = f"on the {data.num_judged:,} pictures of {data.judged}"
    return [
        *([Choice("train.eval_every", every, f"about twenty times, {seen}")] if data.judged else []),
        Choice("checkpoint.every", every, f"what a crash may cost; the newest two stay{', and the best' * bool(data.judged)}"),
    ]
