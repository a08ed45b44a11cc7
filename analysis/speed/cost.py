"""Table S.3 of the Mixer paper: memory, FLOPs and seconds per epoch of a SW-MLP, an RP-Mixer and an
MLP-Mixer of the same widths.

The small size is measured, by training steps without data loading: S = C = 64, L = 3, gamma = 2,
batch 128, float32, as printed. A SW-MLP has a block for each mixing (2 L) and the Mixer's Omega.
The paper stores it dense with a mask of 4 bytes per entry; our storage (only the connections that
exist) is a row of its own. The models take turns within a round, and ratios are medians over the
rounds, because the speed of a shared machine drifts.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.nn import functional

from analysis.output import Result, mark, table_of
from analysis.speed.efficiency import choose_conditions, machine
from data_prep.progress import progress
from finetune.looks import looks, panels
from pretrain.models.build import build_model
from pretrain.models.spec import AnySpec, MixerSpec, SparseMlpSpec

IMAGE_SIZE, NUM_CLASSES, BATCH, EPOCH = 32, 10, 128, 50_000
_MIXER = {"kind": "mixer", "patch_size": 4, "num_channels": 64, "depth": 3, "expansion": 2.0}
_SPARSE = _MIXER | {"kind": "sw_mlp", "depth": 6, "density": 1 / 64}
COLUMNS = (
    *("model", "memory of the blocks", "FLOPs of them", "s / epoch", "of MLP-Mixer"),
    *("paper: memory", "FLOPs", "s / epoch", "of MLP-Mixer"),
)
NOTE = (
    "paper: Table S.3, on a V100; its memory of the small Mixers is ten times that of their"
    " weights in float32 (docs/papers.md). An epoch is 50,000 images in batches of 128: forward,"
    " backward and SGD in float32, no data loading."
)


class Model(NamedTuple):
    name: str
    spec: AnySpec
    bytes_per_weight: int
    """8 with a mask entry for each weight."""
    published: tuple[str, str, float] | None
    """Memory, FLOPs, seconds per epoch."""


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


def cost(device: str | None, *, quick: bool) -> Result:
    conditions = choose_conditions(device, "fp32", False, None, quick=quick)
    place = machine(conditions)
    rounds, steps = (1, 1) if quick else (5, 3)
    rows = measure(device=conditions.device, num_rounds=rounds, num_steps=steps)
    title = f"{place}, median of {rounds} rounds of {steps} steps"
    cells = [_cells(model, row) for model, (_, row) in zip(MODELS, rows.iterrows(), strict=True)]
    facts = {"machine": place, "rounds": rounds, "steps": steps}
    figure = draw(rows, device=conditions.device)
    return Result(rows, facts, {"": figure}, printed=[table_of(COLUMNS, cells, title=title), NOTE])


def measure(
    models: Sequence[Model] = MODELS, *, device: str, num_rounds: int, num_steps: int
) -> pd.DataFrame:
    """Return one row for each model; ratios are to the first."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator).to(device)
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
            step_s(*built[-1], num_steps=1)  # selects kernels, makes the optimizer's state
        rounds = [[step_s(*each, num_steps=num_steps) for each in built] for _ in range(num_rounds)]
    seconds = pd.DataFrame(rounds)
    costs = pd.DataFrame([block_cost(each) for each in models], columns=["bytes", "flop"])
    return costs.assign(
        model=[each.name for each in models],
        epoch_s=-(-EPOCH // BATCH) * seconds.median(),
        ratio=seconds.div(seconds[0], axis=0).median(),
    )


def block_cost(model: Model) -> tuple[int, int]:
    """Return bytes and FLOPs of the mixings' matrices, as the table counts them."""
    spec = model.spec
    if isinstance(spec, MixerSpec):
        tokens, channels = spec.tokens(image_size=IMAGE_SIZE), spec.num_channels
        hidden = spec.hidden_sizes(num_tokens=tokens)
        weights = 2 * spec.depth * (tokens * hidden[0] + channels * hidden[1])
        macs = 2 * spec.depth * tokens * channels * sum(hidden)
        return model.bytes_per_weight * weights, 2 * macs
    assert isinstance(spec, SparseMlpSpec)
    width = spec.width_at(image_size=IMAGE_SIZE)
    entries = 2 * spec.depth * width * spec.hidden_width(width)
    weights = round(spec.density * entries) if spec.is_sparse else entries
    return model.bytes_per_weight * weights, 2 * weights


def draw(rows: pd.DataFrame, *, device: str) -> Figure:
    here = list(zip(rows.epoch_s, rows.model, strict=True))
    paper = [(model.published[2], model.name) for model in MODELS if model.published]
    with looks():
        figure, (axes,) = panels(1, height=1.9)
        for number, (places, name) in enumerate(
            ((here, f"here, {device}"), (paper, "paper, V100"))
        ):
            axes.plot(*zip(*places, strict=True), **mark(number) | {"linestyle": ""}, label=name)
            for place in places:
                seconds = f"{place[0]:,.3g}" if place[0] < 1000 else f"{place[0]:,.0f}"
                style: dict[str, Any] = {
                    "textcoords": "offset points",
                    "ha": "center",
                    "fontsize": 6,
                }
                axes.annotate(seconds, place, (0, 4), **style)
        axes.set(xscale="log", xlabel="training (s / epoch)")
        axes.invert_yaxis()
        axes.margins(0.12, 0.2)
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def _cells(model: Model, row: "pd.Series") -> list[str]:
    size, unit = (row.bytes / 1e9, "GB") if row.bytes >= 1e9 else (row.bytes / 1e6, "MB")
    ours = (f"{size:.3g} {unit}", f"{row.flop / 1e6:,.1f} M", f"{row.epoch_s:,.1f} s")
    published = ["", "", "", ""]
    if model.published and MODELS[0].published:
        memory, flop, epoch_s = model.published
        published = [memory, flop, f"{epoch_s:g} s", f"{epoch_s / MODELS[0].published[2]:.3g} x"]
    return [model.name, *ours, f"{row.ratio:.3g} x", *published]
