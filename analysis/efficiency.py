"""The efficiency table of paper B: parameters, multiply-adds, latency and throughput of four models
at 64 px.

All models are measured in one process, one after the other in every round, because a shared machine
drifts: what counts is the ratio within a round, and its median over the rounds. Latency is the time
of one image alone, throughput that of a batch; neither has any data loading in it, the images lie
on the device. The paper's own figures stand beside ours.
"""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn

from analysis.device import device_of
from analysis.output import mark
from analysis.tables.pages import for_console
from finetune.looks import GREY, looks, panels
from pretrain.engine.step import DTYPES, working_in
from pretrain.models.build import build_model
from pretrain.models.cost import Cost, cost_of
from pretrain.models.presets import preset, spec_of
from pretrain.tracking.run_tags import git_commit

IMAGE_SIZE, NUM_CLASSES = 64, 1000
COLUMNS = (
    *("model", "params", "multiply-adds", "latency", "of first", "images/s", "of first"),
    *("paper: m.-adds", "latency", "images/s", "of first"),
)
PAPER_NOTE = "paper: as printed, on an A5000."


class Printed(NamedTuple):
    """What paper B prints in Table 4, on one A5000; the throughput is that of the best batch."""

    label: str
    million_parameters: float
    giga_multiply_adds: float
    images_per_s: int
    latency_ms: float


PRINTED = {
    "mlp_b12_wi768": Printed("B-12/Wi-768", 66.89, 0.0668, 16_063, 21.2),
    "resnet152_64": Printed("ResNet-152", 60.19, 13.07, 506, 423),
    "vit_b_4": Printed("ViT-B/4", 86.06, 23.08, 222, 424),
    "mixer_b_4": Printed("Mixer-B/4", 63.82, 19.36, 319, 400),
}


class Conditions(NamedTuple):
    device: str
    dtype: str
    is_compiled: bool
    batch_size: int
    num_rounds: int
    seconds: float
    """That one measurement lasts at least; it is one forward pass at least."""


class Timings(NamedTuple):
    """Of one model, one entry for each round."""

    latency_s: list[float]
    images_per_s: list[float]


class Row(NamedTuple):
    name: str
    cost: Cost
    latency_ms: float
    images_per_s: float
    times_the_latency: float
    """Of the first model: the median over the rounds of the ratio within a round."""
    times_the_rate: float


def conditions_for(
    device: str | None,
    *,
    dtype: str | None,
    compiled: bool | None,
    batch_size: int | None,
    quick: bool,
) -> Conditions:
    """What was asked for, and else what suits the device: bf16 and compiled on CUDA, float32 and
    eager on a CPU."""
    on_gpu = device_of(device).type == "cuda"
    usual_batch = (512 if quick else 1024) if on_gpu else (4 if quick else 16)
    rounds, seconds = (3, 0.2) if quick else (7, 1.0)
    given = (
        dtype or ("bf16" if on_gpu else "fp32"),
        on_gpu if compiled is None else compiled,
        batch_size or usual_batch,
    )
    return Conditions("cuda" if on_gpu else "cpu", *given, rounds, seconds)


def measure_named(names: list[str], conditions: Conditions) -> list[Row]:
    """Of named models with ImageNet's classes at 64 px; ratios are to the first."""
    models = {
        name: build_model(spec_of(name), num_classes=NUM_CLASSES, image_size=IMAGE_SIZE, seed=0)
        for name in names
    }
    return summarise(
        {name: cost_of_named(name) for name in names},
        measure(models, conditions, image_size=IMAGE_SIZE),
    )


def cost_of_named(name: str) -> Cost:
    assert preset(name).image_size == IMAGE_SIZE, name
    return cost_of(spec_of(name), num_classes=NUM_CLASSES, image_size=IMAGE_SIZE)


def measure(
    models: Mapping[str, nn.Module], conditions: Conditions, *, image_size: int
) -> dict[str, Timings]:
    device, dtype, whole = (
        torch.device(conditions.device),
        DTYPES[conditions.dtype],
        conditions.batch_size,
    )
    images = torch.randn(
        whole, 3, image_size, image_size, generator=torch.Generator().manual_seed(0)
    ).to(device, dtype)

    def seconds(name: str, size: int, *, at_least_s: float) -> float:
        """Of a call, each of which is waited for: somebody wants its result."""
        batch, count, began_s = images[:size].contiguous(), 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began_s < at_least_s:
            forwards[name](batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            count += 1
        return (time.perf_counter() - began_s) / count

    found, forwards = (
        {name: Timings([], []) for name in models},
        dict[str, Callable[[torch.Tensor], object]](),
    )
    with torch.inference_mode(), working_in(conditions.dtype):
        for name, model in models.items():
            plain = model.to(device, dtype).eval()
            forwards[name] = (
                torch.compile(plain, dynamic=False) if conditions.is_compiled else plain
            )
            for size in (1, whole):  # compiles, and chooses kernels
                seconds(name, size, at_least_s=0)
        for _ in range(conditions.num_rounds):
            for name in forwards:
                found[name].latency_s.append(seconds(name, 1, at_least_s=conditions.seconds))
                found[name].images_per_s.append(
                    whole / seconds(name, whole, at_least_s=conditions.seconds)
                )
    return found


def summarise(costs: Mapping[str, Cost], timings: Mapping[str, Timings]) -> list[Row]:
    """Ratios are to the first of `timings`."""
    first = next(iter(timings.values()))

    def ratio(found: Timings, number: int) -> float:
        return statistics.median(
            ours / theirs for ours, theirs in zip(found[number], first[number], strict=True)
        )

    return [
        Row(
            name,
            costs[name],
            1000 * statistics.median(found[0]),
            statistics.median(found[1]),
            ratio(found, 0),
            ratio(found, 1),
        )
        for name, found in timings.items()
    ]


def machine(conditions: Conditions) -> str:
    """What it runs on and beside what: the load of a shared machine, before we add to it, belongs
    to the figures."""
    if conditions.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        load, count = os.getloadavg()[0], torch.get_num_threads()
        where = f"{_processor()}, {count} thread{'s' if count > 1 else ''}, load {load:.1f} before"
    return f"{where}, torch {torch.__version__}, commit {git_commit()}"


def _processor() -> str:
    found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()  # ARM's has no name there


def title(conditions: Conditions, machine: str) -> str:
    how = (
        f"{conditions.dtype}, {'compiled' if conditions.is_compiled else 'eager'}, batch"
        f" {conditions.batch_size}"
    )
    return (
        f"One forward pass at {IMAGE_SIZE} px, {how}, medians of {conditions.num_rounds} rounds;"
        f" {machine}"
    )


def cells(row: Row, *, first: str) -> tuple[str, ...]:
    printed = PRINTED[row.name]
    return (
        printed.label,
        f"{row.cost.num_parameters / 1e6:.2f} M",
        _giga(row.cost.multiply_adds / 1e9),
        f"{row.latency_ms:,.1f} ms",
        f"{row.times_the_latency:.3g} x",
        f"{row.images_per_s:,.0f}" if row.images_per_s >= 100 else f"{row.images_per_s:.3g}",
        f"{row.times_the_rate:.3g} x",
        _giga(printed.giga_multiply_adds),
        f"{printed.latency_ms:g} ms",
        f"{printed.images_per_s:,}",
        f"{printed.images_per_s / PRINTED[first].images_per_s:.3g} x",
    )


def _giga(value: float) -> str:
    return f"{value:.2f} G" if value >= 1 else f"{1000 * value:.1f} M"


def print_table(rows: list[Row], console: Console, *, heading: str) -> None:
    console.print(
        heading, for_console(COLUMNS, [cells(row, first=rows[0].name) for row in rows]), sep="\n"
    )
    console.print(PAPER_NOTE, style="dim")


def facts_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        printed = {f"paper_{name}": value for name, value in PRINTED[row.name]._asdict().items()}
        found.append(
            {
                "model": row.name,
                **asdict(row.cost),
                **dict(zip(Row._fields[2:], row[2:], strict=True)),
                **printed,
            }
        )
    return found


def draw(rows: Sequence[Row], conditions: Conditions) -> Figure:
    """Images a second against multiply-adds: on the dashed line a model does as many of these a
    second as the first one."""
    with looks():
        figure, (axes,) = panels(1, height=2.7)
        for number, row in enumerate(rows):
            printed, style = PRINTED[row.name], mark(number) | {"linestyle": ""}
            axes.plot(row.cost.multiply_adds / 1e9, row.images_per_s, **style, label=printed.label)
            axes.plot(printed.giga_multiply_adds, printed.images_per_s, **style, fillstyle="none")
        costs = [row.cost.multiply_adds / 1e9 for row in rows]
        for first, fill in (
            (rows[0].images_per_s, "full"),
            (PRINTED[rows[0].name].images_per_s, "none"),
        ):
            axes.plot(
                costs,
                [first * costs[0] / cost for cost in costs],
                color=GREY,
                linestyle="--",
                linewidth=0.7,
            )
            name = (
                "paper, A5000"
                if fill == "none"
                else f"here, {conditions.device} {conditions.dtype}"
            )
            axes.plot([], [], "o", color=GREY, fillstyle=fill, label=name)
        axes.plot(
            [],
            [],
            "--",
            color=GREY,
            linewidth=0.7,
            label=f"multiply-adds/s of {PRINTED[rows[0].name].label}",
        )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="multiply-adds of an image (G)",
            ylabel="throughput (images/s)",
        )
        figure.legend(loc="outside upper center", ncols=2)
    return figure
