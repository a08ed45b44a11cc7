"""Paper A's Table S.3: what a SW-MLP, an RP-Mixer and an MLP-Mixer of the same widths cost in
memory, FLOPs and seconds an epoch.

The small size is measured, by training steps without data loading: S = C = 64, L = 3, gamma = 2,
batch 128, float32, as printed. A SW-MLP has a block for each mixing (2 L) and the Mixer's Omega.
The paper stores it dense with a mask of 4 bytes an entry; how we store it (only the connections
that exist) is a row of its own. The models take turns within a round, and ratios are medians over
the rounds, for a shared machine drifts.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch.nn import functional

from analysis.output import mark
from data_prep.progress import progress
from finetune.looks import looks, panels
from pretrain.models.build import build_model
from pretrain.models.spec import AnySpec, MixerSpec, SparseMlpSpec

IMAGE_SIZE, NUM_CLASSES, BATCH, EPOCH = 32, 10, 128, 50_000
_MIXER = {"kind": "mixer", "patch_size": 4, "num_channels": 64, "depth": 3, "expansion": 2.0}
_SPARSE = {
    "kind": "sw_mlp",
    "patch_size": 4,
    "num_channels": 64,
    "depth": 6,
    "expansion": 2.0,
    "density": 1 / 64,
}
COLUMNS = (
    *("model", "memory of the blocks", "FLOPs of them", "s / epoch", "of MLP-Mixer"),
    *("paper: memory", "FLOPs", "s / epoch", "of MLP-Mixer"),
)
NOTE = (
    "paper: Table S.3, on a V100; its memory of the small Mixers is ten times what their weights"
    " have in float32 (docs/papers.md). An epoch: 50,000 pictures in batches of 128, forward,"
    " backward and SGD in float32, no data loading."
)


class Model(NamedTuple):
    name: str
    spec: AnySpec
    bytes_per_weight: int
    """With a mask of its own for each weight: 8."""
    printed: tuple[str, str, float] | None


MODELS = (
    Model("MLP-Mixer", MixerSpec.model_validate(_MIXER), 4, ("3.9 MB", "12.5 M", 6.08)),
    Model(
        "RP-Mixer",
        MixerSpec.model_validate(_MIXER | {"permuted_blocks": "all"}),
        4,
        ("3.9 MB", "12.5 M", 6.41),
    ),
    Model(
        "SW-MLP, stored sparse",
        SparseMlpSpec.model_validate(_SPARSE | {"storage": "sparse"}),
        4,
        None,
    ),
    Model(
        "SW-MLP, masked",
        SparseMlpSpec.model_validate(_SPARSE | {"storage": "masked"}),
        8,
        ("3.22 GB", "805 M", 28.2),
    ),
)


class Row(NamedTuple):
    model: Model
    bytes: int
    flop: int
    epoch_s: float
    times_the_first: float


def measure(
    models: Sequence[Model] = MODELS, *, device: str, num_rounds: int, num_steps: int
) -> list[Row]:
    """The first is the one that ratios are to."""
    images = torch.randn(
        BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0)
    ).to(device)
    labels = torch.arange(BATCH, device=device) % NUM_CLASSES

    def step_s(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int
    ) -> float:
        began_s = time.perf_counter()
        for _ in range(num_steps):
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()
        line.advance(1)
        return (time.perf_counter() - began_s) / num_steps

    with progress("training steps", total=(num_rounds + 1) * len(models), unit="models") as line:
        built = []
        for each in models:
            model = build_model(
                each.spec, num_classes=NUM_CLASSES, image_size=IMAGE_SIZE, seed=0
            ).to(device)
            built.append((model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)))
            step_s(*built[-1], num_steps=1)  # chooses kernels, makes the optimizer's state
        rounds = [[step_s(*each, num_steps=num_steps) for each in built] for _ in range(num_rounds)]
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    ratios = [
        statistics.median(each[number] / each[0] for each in rounds)
        for number in range(len(models))
    ]
    num_per_epoch = -(-EPOCH // BATCH)
    return [
        Row(each, *_cost(each), num_per_epoch * median, ratio)
        for each, median, ratio in zip(models, medians, ratios, strict=True)
    ]


def _cost(model: Model) -> tuple[int, int]:
    """Bytes and FLOPs of the mixings' matrices alone, as the table counts them."""
    spec = model.spec
    if isinstance(spec, MixerSpec):
        tokens, channels = spec.tokens(image_size=IMAGE_SIZE), spec.num_channels
        hidden = spec.hidden_sizes(num_tokens=tokens)
        weights = 2 * spec.depth * (tokens * hidden[0] + channels * hidden[1])
        adds = 2 * spec.depth * tokens * channels * sum(hidden)
        return model.bytes_per_weight * weights, 2 * adds
    assert isinstance(spec, SparseMlpSpec)
    width = spec.width_at(image_size=IMAGE_SIZE)
    entries = 2 * spec.depth * width * spec.hidden_width(width)
    weights = round(spec.density * entries) if spec.is_sparse else entries
    return model.bytes_per_weight * weights, 2 * weights


def draw(rows: Sequence[Row], *, device: str) -> Figure:
    with looks():
        figure, (axes,) = panels(1, height=1.9)
        printed = [(row.model.printed[2], row.model.name) for row in rows if row.model.printed]
        ours = [(row.epoch_s, row.model.name) for row in rows]
        for number, (places, name) in enumerate(
            ((ours, f"here, {device}"), (printed, "paper, V100"))
        ):
            axes.plot(*zip(*places, strict=True), **mark(number) | {"linestyle": ""}, label=name)
            for place in places:
                axes.annotate(
                    f"{place[0]:,.3g}" if place[0] < 1000 else f"{place[0]:,.0f}",
                    place,
                    (0, 4),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                )
        axes.set(xscale="log", xlabel="training (s / epoch)")
        axes.invert_yaxis()
        axes.margins(0.12, 0.2)
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def facts_of(rows: Sequence[Row]) -> list[dict[str, str | int | float]]:
    return [{**row._asdict(), "model": row.model.name} for row in rows]


def cells(row: Row) -> tuple[str, ...]:
    memory, flop, epoch_s = row.model.printed or ("", "", None)
    first_s = MODELS[0].printed
    assert first_s is not None
    printed = ("", "") if epoch_s is None else (f"{epoch_s:g} s", f"{epoch_s / first_s[2]:.3g} x")
    bytes_, unit = (row.bytes / 1e9, "GB") if row.bytes >= 1e9 else (row.bytes / 1e6, "MB")
    ours = (
        f"{bytes_:.3g} {unit}",
        f"{row.flop / 1e6:,.1f} M",
        f"{row.epoch_s:,.1f} s",
        f"{row.times_the_first:.3g} x",
    )
    return (row.model.name, *ours, memory, flop, *printed)
