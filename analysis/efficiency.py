"""The efficiency table of paper B: parameters, multiply-adds, latency and throughput of four models at 64 px.

All models are measured in one process, one after the other in every round, because a shared machine drifts: what counts is the
ratio within a round, and its median over the rounds. Latency is the time of one image alone, throughput that of a batch; neither
has any data loading in it, the images lie on the device. `efficiency_table` prints and writes what is found here.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from data_prep.settings import UserError
from pretrain.models.build import build_model
from pretrain.models.cost import Cost, cost_of
from pretrain.models.presets import preset, spec_of

IMAGE_SIZE, NUM_CLASSES = 64, 1000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Printed:
    """What paper B prints, on one A5000; its batch, and the other models' latencies, are not in our notes of it."""

    label: str
    million_parameters: float
    giga_multiply_adds: float
    images_per_s: int
    latency_ms: float | None = None


PRINTED = {
    "mlp_b12_wi768": Printed("B-12/Wi-768", 66.89, 0.0668, 16_063, 21.2),
    "resnet152_64": Printed("ResNet-152", 60.19, 13.07, 506),
    "vit_b_4": Printed("ViT-B/4", 86.06, 23.08, 222),
    "mixer_b_4": Printed("Mixer-B/4", 63.82, 19.36, 319),
}


@dataclass(frozen=True)
class Conditions:
    device: str
    dtype: str
    is_compiled: bool
    batch_size: int
    num_rounds: int
    seconds: float
    """That one measurement lasts at least; it is one forward pass at least."""

    @property
    def words(self) -> str:
        how = "compiled" if self.is_compiled else "eager"
        return f"{self.dtype}, {how}, batch {self.batch_size}, medians of {self.num_rounds} rounds"


@dataclass(frozen=True)
class Timings:
    """Of one model, one entry for each round."""

    latency_s: list[float]
    images_per_s: list[float]


@dataclass(frozen=True)
class Row:
    name: str
    cost: Cost
    latency_ms: float
    images_per_s: float
    times_the_latency: float
    """Of the first model: the median over the rounds of the ratio within a round."""
    times_the_rate: float


def conditions_for(
    device: str | None, *, dtype: str | None, compiled: bool | None, batch_size: int | None, quick: bool
) -> Conditions:
    """What was asked for, and else what suits the device: bf16 and compiled on CUDA, float32 and eager on a CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch finds no CUDA device here; leave it out, or give cpu")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"--batch: {batch_size} will not do; give 1 or more")
    on_gpu = device == "cuda"
    usual_batch = (512 if quick else 1024) if on_gpu else (4 if quick else 16)
    return Conditions(
        device=device,
        dtype=dtype or ("bf16" if on_gpu else "fp32"),
        is_compiled=on_gpu if compiled is None else compiled,
        batch_size=batch_size or usual_batch,
        num_rounds=3 if quick else 7,
        seconds=0.2 if quick else 1.0,
    )


def measure_named(names: list[str], conditions: Conditions) -> list[Row]:
    """Of named models with ImageNet's classes at 64 px; ratios are to the first."""
    models = {name: build_model(spec_of(name), num_classes=NUM_CLASSES, image_size=IMAGE_SIZE, seed=0) for name in names}
    return summarise({name: cost_of_named(name) for name in names}, measure(models, conditions, image_size=IMAGE_SIZE))


def cost_of_named(name: str) -> Cost:
    assert preset(name).image_size == IMAGE_SIZE, name
    return cost_of(spec_of(name), num_classes=NUM_CLASSES, image_size=IMAGE_SIZE)


def measure(models: Mapping[str, nn.Module], conditions: Conditions, *, image_size: int) -> dict[str, Timings]:
    device, dtype = torch.device(conditions.device), _DTYPES[conditions.dtype]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(conditions.batch_size, 3, image_size, image_size, generator=generator)
    images = images.to(device, dtype)
    found = {name: Timings([], []) for name in models}
    with torch.inference_mode():
        forwards: dict[str, Callable[[int], object]] = {}
        for name, model in models.items():
            forwards[name] = _forward(model.to(device, dtype).eval(), images, compiled=conditions.is_compiled)
            for size in (1, conditions.batch_size):  # compiles, and chooses kernels
                _seconds_per_call(forwards[name], size, device=device, at_least_s=0)
        for _ in range(conditions.num_rounds):
            for name, forward in forwards.items():
                one, all_of_them = (
                    _seconds_per_call(forward, size, device=device, at_least_s=conditions.seconds)
                    for size in (1, conditions.batch_size)
                )
                found[name].latency_s.append(one)
                found[name].images_per_s.append(conditions.batch_size / all_of_them)
    return found


def _forward(model: nn.Module, images: torch.Tensor, *, compiled: bool) -> Callable[[int], object]:
    run = torch.compile(model, dynamic=False) if compiled else model
    batches = {size: images[:size].contiguous() for size in (1, len(images))}
    return lambda size: run(batches[size])


def _seconds_per_call(forward: Callable[[int], object], size: int, *, device: torch.device, at_least_s: float) -> float:
    """Each call is waited for: somebody wants its result."""
    count, began_s = 0, time.perf_counter()
    while True:
        forward(size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
        passed_s = time.perf_counter() - began_s
        if passed_s >= at_least_s:
            return passed_s / count


def summarise(costs: Mapping[str, Cost], timings: Mapping[str, Timings]) -> list[Row]:
    """Ratios are to the first of `timings`."""
    first = next(iter(timings.values()))
    return [
        Row(
            name=name,
            cost=costs[name],
            latency_ms=1000 * statistics.median(found.latency_s),
            images_per_s=statistics.median(found.images_per_s),
            times_the_latency=_median_ratio(found.latency_s, first.latency_s),
            times_the_rate=_median_ratio(found.images_per_s, first.images_per_s),
        )
        for name, found in timings.items()
    ]


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def machine(conditions: Conditions) -> str:
    """What it runs on and beside what: the load of a shared machine, before we add to it, belongs to the figures."""
    from pretrain.tracking.run_tags import git_commit

    if conditions.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        load = os.getloadavg()[0]
        count = torch.get_num_threads()
        where = f"{_processor()}, {count} thread{'s' if count > 1 else ''}, load {load:.1f} before"
    return f"{where}, torch {torch.__version__}, commit {git_commit()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
