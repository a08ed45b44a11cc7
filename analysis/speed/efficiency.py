"""The efficiency table of Scaling MLPs: parameters, MACs, latency and throughput of four models at
64 px.

One process measures all models in every round, because the speed of a shared machine drifts. Ratios
are computed within a round. Latency is the time of one image; throughput is measured with a batch.
Images are on the device, so data loading is excluded. On CUDA, a second throughput includes the
transfer. Each batch (uint8 pixels in pinned memory) is copied to the device and converted before
its forward pass, without overlap.
"""

import math
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from analysis.output import Result, draw_legend, mark
from finetune.looks import GRAY, looks, panels, set_log_ticks
from pretrain.engine.step import DTYPES, working_in
from pretrain.models.build import build_model
from pretrain.models.cost import Cost, cost_of
from pretrain.models.presets import preset, spec_of
from pretrain.tracking.node import cpu_name
from pretrain.tracking.run_tags import git_commit

IMAGE_SIZE, NUM_CLASSES = 64, 1000
MEASURED = ("latency_s", "images_per_s", "images_per_s_with_transfer")


class Published(NamedTuple):
    """A row of Table 4, measured on an A5000, with the throughput at the best batch size."""

    label: str
    million_parameters: float
    giga_multiply_adds: float
    images_per_s: int
    latency_ms: float


PUBLISHED = {
    "mlp_b12_wi768": Published("B-12/Wi-768", 66.89, 0.0668, 16_063, 21.2),
    "resnet152_64": Published("ResNet-152", 60.19, 13.07, 506, 423),
    "vit_b_4": Published("ViT-B/4", 86.06, 23.08, 222, 424),
    "mixer_b_4": Published("Mixer-B/4", 63.82, 19.36, 319, 400),
}


NOTE = (
    "paper: Table 4, on an A5000. Printed latency x throughput is many images, so the latency is"
    " not of one image. Without the transfer, A.5 prints 6 x throughput for the MLP."
)


class Conditions(NamedTuple):
    device: str
    dtype: str
    is_compiled: bool
    batch_size: int
    num_rounds: int
    seconds: float
    """Shortest duration of a measurement, which has at least one forward pass."""


def efficiency(conditions: Conditions) -> Result:
    place = machine(conditions.device)
    models = {
        name: build_model(spec_of(name), num_classes=NUM_CLASSES, image_size=IMAGE_SIZE, seed=0)
        for name in PUBLISHED
    }
    rows = summarize(measure(models, conditions, image_size=IMAGE_SIZE))
    mode = "compiled" if conditions.is_compiled else "eager"
    how = f"{conditions.dtype}, {mode}, batch {conditions.batch_size}"
    rounds = f"medians of {conditions.num_rounds} rounds"
    title = f"One forward pass at {IMAGE_SIZE} px, {how}, {rounds}; {place}"
    shown = pd.DataFrame(
        {
            "model": rows.paper_label,
            "params (M)": rows.num_parameters / 1e6,
            "MACs (G)": rows.multiply_adds / 1e9,
            "latency (ms)": rows.latency_ms,
            "latency / first": rows.latency_ratio,
            "images/s": rows.images_per_s,
            "images/s / first": rows.throughput_ratio,
            "images/s with transfer": rows.images_per_s_with_transfer,
            "without / with": rows.transfer_factor,
        }
    )
    paper = rows.filter(like="paper_").rename(columns=lambda name: name.removeprefix("paper_"))
    facts = {"machine": place, "conditions": conditions._asdict(), "image_size": IMAGE_SIZE}
    if conditions.device == "cpu":
        title += "; a CPU needs no transfer"
    printed = [title, shown, paper, NOTE]
    return Result(rows, facts, {"": draw(rows, conditions)}, printed=printed)


def cost_of_named(name: str) -> Cost:
    assert preset(name).image_size == IMAGE_SIZE, name
    return cost_of(spec_of(name), num_classes=NUM_CLASSES, image_size=IMAGE_SIZE)


def measure(
    models: Mapping[str, nn.Module], conditions: Conditions, *, image_size: int
) -> pd.DataFrame:
    """Return latency_s, images_per_s and images_per_s_with_transfer (null on a CPU) for each round
    and model."""
    device, dtype = torch.device(conditions.device), DTYPES[conditions.dtype]
    size, is_cuda = conditions.batch_size, device.type == "cuda"
    generator, shape = torch.Generator().manual_seed(0), (size, 3, image_size, image_size)
    images = torch.randn(shape, generator=generator).to(device, dtype)
    pixels = torch.zeros(shape, dtype=torch.uint8, pin_memory=is_cuda)

    def seconds(model: nn.Module, count: int, least_s: float, *, transfer: bool = False) -> float:
        """Return the mean time of a forward pass until its results are ready."""
        batch, num_passes, began_s = images[:count].contiguous(), 0, time.perf_counter()
        while num_passes == 0 or time.perf_counter() - began_s < least_s:
            if transfer:
                batch = pixels[:count].to(device, non_blocking=True).to(dtype)
            model(batch)
            if is_cuda:
                torch.cuda.synchronize(device)
            num_passes += 1
        return (time.perf_counter() - began_s) / num_passes

    rows, ready = [], dict[str, nn.Module]()
    with torch.inference_mode(), working_in(conditions.dtype):
        for name, model in models.items():
            ready[name] = model.to(device, dtype).eval()
            if conditions.is_compiled:
                ready[name].compile(dynamic=False)
            for count in (1, size):  # compiles and selects kernels
                seconds(ready[name], count, 0)
        for number in range(conditions.num_rounds):
            for name, model in ready.items():
                latency_s = seconds(model, 1, conditions.seconds)
                images_per_s = size / seconds(model, size, conditions.seconds)
                transferred_s = math.nan
                if is_cuda:
                    transferred_s = seconds(model, size, conditions.seconds, transfer=True)
                rows.append((name, number, latency_s, images_per_s, size / transferred_s))
    return pd.DataFrame(rows, columns=["model", "round", *MEASURED])


def summarize(timings: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each model: medians, median ratios to the first model within a round,
    cost, and published numbers."""
    measured = timings.pivot(index="round", columns="model")[[*MEASURED]]
    names = timings.model.unique().tolist()
    latency, rate, with_transfer = (measured[each][names] for each in MEASURED)
    medians = {
        "latency_ms": 1000 * latency.median(),
        "images_per_s": rate.median(),
        "latency_ratio": latency.div(latency[names[0]], axis=0).median(),
        "throughput_ratio": rate.div(rate[names[0]], axis=0).median(),
        "images_per_s_with_transfer": with_transfer.median(),
        "transfer_factor": (rate / with_transfer).median(),
    }
    costs = pd.DataFrame([vars(cost_of_named(name)) for name in names], index=names)
    paper = pd.DataFrame([PUBLISHED[name] for name in names], index=names).add_prefix("paper_")
    paper["paper_latency_images"] = paper.paper_latency_ms / 1000 * paper.paper_images_per_s
    return pd.concat([costs, pd.DataFrame(medians), paper], axis=1).reset_index(names="model")


def machine(device: str) -> str:
    """Return the GPU, or the processor and its present load, and the versions of torch and of the
    code."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        load, count = os.getloadavg()[0], torch.get_num_threads()
        where = f"{cpu_name()}, {count} thread{'s' if count > 1 else ''}, initial load {load:.1f}"
    return f"{where}, torch {torch.__version__}, commit {git_commit()}"


def draw(rows: pd.DataFrame, conditions: Conditions) -> Figure:
    """Draw images per second against MACs. On a dashed line, MACs per second equal the first
    model's."""
    macs = rows.multiply_adds / 1e9
    with looks():
        figure, (axes,) = panels(1, height=2.7)
        for number, (_, row) in enumerate(rows.iterrows()):
            style = mark(number) | {"linestyle": ""}
            axes.plot(macs[number], row.images_per_s, **style, label=row.paper_label)
            published = row.paper_giga_multiply_adds, row.paper_images_per_s
            axes.plot(*published, **style, fillstyle="none")
        dashed: dict[str, Any] = {"color": GRAY, "linestyle": "--", "linewidth": 0.7}
        for rates, fill, name in (
            (rows.images_per_s, "full", f"measured, {conditions.device} {conditions.dtype}"),
            (rows.paper_images_per_s, "none", "paper, A5000"),
        ):
            limit = f"MACs/s of {rows.paper_label[0]}"
            axes.plot(macs, rates[0] * macs[0] / macs, **dashed, label=limit)
            axes.plot([], [], "o", color=GRAY, fillstyle=fill, label=name)
        axes.set(xscale="log", yscale="log", xlabel="MACs of an image (G)")
        set_log_ticks(axes.xaxis)
        set_log_ticks(axes.yaxis)
        axes.set_ylabel("throughput (images/s)")
        draw_legend(figure, [axes])
    return figure
