"""Table S.3 of the Mixer paper: memory, FLOPs and seconds per epoch of a SW-MLP, an RP-Mixer and an
MLP-Mixer of the same widths.

The command times training steps without data loading. The caption has S = 64, C = 48, L = 3 and
gamma = 2. AdamW, batch 128 and float32 are from C.3 (runtime of Table 1). The SW-MLP has a block
for each mixing (2 L) and the Mixer's Omega. The paper's SW-MLP has dense weights and a mask of 4
bytes per entry. Another row of our table stores only existing connections. Each round measures all
models, and ratios are medians over rounds, because the speed of a shared machine drifts.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.nn import functional

from analysis.output import Result, draw_legend, mark
from analysis.speed.efficiency import machine
from data_prep.progress import ProgressLine
from finetune.looks import looks, panels, set_log_ticks
from pretrain.models.build import build_model
from pretrain.models.spec import AnySpec, MixerSpec, SparseMlpSpec

IMAGE_SIZE, NUM_CLASSES, BATCH, EPOCH = 32, 10, 128, 50_000
NOTE = (
    "paper: Table S.3, on a V100. The table prints C = 48, but FLOPs and SW-MLP memory fit C = 64."
    " The printed memory of Mixers is ten times the float32 weights at C = 64 (docs/papers.md). An"
    " epoch is 50,000 images in batches of 128: forward, backward and AdamW in float32, no data"
    " loading."
)


class Model(NamedTuple):
    name: str
    spec: AnySpec
    bytes_per_weight: int = 4
    """Bytes of a weight; 8 with its mask entry."""
    paper_memory: str = ""
    paper_flops: str = ""
    paper_epoch_s: float | None = None


def models_of(num_channels: int) -> tuple[Model, ...]:
    """Return the models of the table with `num_channels` channels (48 in the caption)."""
    mixer = {"patch_size": 4, "num_channels": num_channels, "depth": 3, "expansion": 2.0}
    density = (1 / (IMAGE_SIZE // 4) ** 2 + 1 / num_channels) / 2  # as in a Mixer (section 3.4)
    sparse = mixer | {"kind": "sw_mlp", "depth": 6, "density": density}
    normal = MixerSpec.model_validate(mixer | {"kind": "mixer"})
    rp = normal.model_copy(update={"permuted_blocks": "all"})
    stored = SparseMlpSpec.model_validate(sparse | {"storage": "sparse"})
    masked = stored.model_copy(update={"storage": "masked"})
    return (
        Model("MLP-Mixer", normal, 4, "3.93 MB", "12.5 M", 6.08),
        Model("RP-Mixer", rp, 4, "3.94 MB", "12.5 M", 6.41),
        Model("SW-MLP, stored sparse", stored),
        Model("SW-MLP, masked", masked, 8, "3.22 GB", "805 M", 28.2),
    )


def cost(device: torch.device, *, quick: bool) -> Result:
    place = machine(device.type)
    rounds, steps = (1, 1) if quick else (5, 3)
    rows = measure(models_of(48), device=device.type, num_rounds=rounds, num_steps=steps)
    shown = rows.rename(columns={"ratio": "epoch / first"})
    shown = shown.assign(memory_mb=rows.bytes / 1e6, mflop=rows.flop / 1e6)
    shown["paper epoch / first"] = rows.paper_epoch_s / rows.paper_epoch_s[0]
    title = f"{place}, median of {rounds} rounds of {steps} steps"
    facts = {"machine": place, "rounds": rounds, "steps": steps}
    printed = [title, shown.drop(columns=["bytes", "flop"]), NOTE]
    return Result(rows, facts, {"": draw(rows, device=device.type)}, printed=printed)


def measure(
    models: Sequence[Model], *, device: str, num_rounds: int, num_steps: int
) -> pd.DataFrame:
    """Return one row for each model, with the ratio of its time to the first model's."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator).to(device)
    labels = torch.arange(BATCH, device=device) % NUM_CLASSES
    sizes = {"num_classes": NUM_CLASSES, "image_size": IMAGE_SIZE}

    def step_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()
        line.advance(1)
        return (time.perf_counter() - began_s) / count

    with ProgressLine(
        "training steps", total=(num_rounds + 1) * len(models), unit="models"
    ) as line:
        built = []
        for each in models:
            model = build_model(each.spec, **sizes, seed=0).to(device)
            built.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))
            step_s(*built[-1], 1)  # warm-up
        rounds = [[step_s(*each, num_steps) for each in built] for _ in range(num_rounds)]
    seconds = pd.DataFrame(rounds)
    rows = pd.DataFrame([block_cost(each) for each in models], columns=["bytes", "flop"])
    rows["model"] = [each.name for each in models]
    rows["epoch_s"] = -(-EPOCH // BATCH) * seconds.median()
    rows["ratio"] = seconds.div(seconds[0], axis=0).median()
    for name in ("paper_memory", "paper_flops", "paper_epoch_s"):
        rows[name] = [getattr(each, name) for each in models]
    return rows.astype({"paper_epoch_s": float})


def block_cost(model: Model) -> tuple[int, int]:
    """Return bytes and FLOPs of the mixing matrices of a model, counted as in the table."""
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
    label: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 6}
    with looks():
        figure, (axes,) = panels(1, height=1.9)
        columns = {"epoch_s": f"measured, {device}", "paper_epoch_s": "paper, V100"}
        for number, (column, name) in enumerate(columns.items()):
            known = rows[rows[column].notna()]
            style = mark(number) | {"linestyle": ""}
            axes.plot(known[column], known.model, **style, label=name)
            for seconds, model in zip(known[column], known.model, strict=True):
                axes.annotate(f"{seconds:,.3g}", (seconds, model), (0, 4), **label)
        axes.set(xscale="log", xlabel="training (s / epoch)")
        axes.invert_yaxis()
        axes.margins(0.12, 0.2)
        set_log_ticks(axes.xaxis, most=5)
        draw_legend(figure, [axes])
    return figure
