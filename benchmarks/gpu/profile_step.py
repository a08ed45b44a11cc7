"""Where does the time of a training step go? The real engine at full size, on a resident batch,
under torch's profiler; in the project:

    profile_step.py [--model mlp_b12_wi1024] [--batch 16384] [--classes 11230] [--stage 1]
    [--precision bf16] [--compile]
                    [--augment] [--out F.json]

Prints wall time, images/s, the share of the device's measured product rate, how long the device was
busy, and for each phase of the step (by when the host launched it) the host's time, device time,
launches, and time per kind of kernel. A phase is what the engine calls by name (`PHASES`, and those
of an update): one that the profile has no sign of is an error, for the code has moved on. `loss` is
its forward pass; the loss's gradient is the first kernel of `backward`. `--augment`: a stored batch
is augmented anew in each step, on the same stream. Without a GPU the host's times alone (give small
sizes).
"""

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pretrain.augment.augmentation import Augmentation, Normalisation, Prepared
from pretrain.config import AugmentSettings, EngineSettings, OptimizerSettings
from pretrain.data.loader import Batch
from pretrain.data.order import BatchPlan
from pretrain.engine import deepspeed as engine_module
from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
from pretrain.models.build import build_model
from pretrain.models.cost import forward_flops
from pretrain.models.presets import preset, spec_of
from pretrain.optim import Lion, build_optimizer
from pretrain.ranks.world import read_world

KINDS = (
    ("products", ("gemm", "cutlass", "nvjet", "cublas", "xmma", "splitk", "bmm", "_mm_")),
    ("communication", ("nccl",)),
    ("layer norm", ("layer_norm", "layernorm", "gammabeta")),
    ("inductor's fused", ("triton_",)),
    ("foreach", ("multi_tensor_apply", "foreach")),
    ("softmax", ("softmax",)),
    ("reductions", ("reduce",)),
    ("copies, casts", ("copy", "memcpy", "cat", "memset", "fill")),
    ("elementwise", ("elementwise", "gelu", "vectorized", "index", "gather", "scatter")),
)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in KINDS if any(word in low for word in words)), "other")


def phased(target: Any, name: str, phase: str) -> str:
    """From now on the method's launches belong to `phase`."""
    plain = getattr(target, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"phase {phase}"):
            return plain(*args, **kwargs)

    setattr(target, name, wrapped)
    return phase


def mark_phases(engine: DeepSpeedEngine) -> list[str]:
    """What a step is made of; those within another count there alone."""
    whole, zero, update = engine._engine, engine._optimizer, engine._update
    marks = [
        (whole, "forward", "forward"),
        (engine_module, "loss_of", "loss"),
        (whole, "backward", "backward"),
    ]
    if update is not None:  # stages 1 and 2, without offload and fp16: sharded_update.py
        marks += [(update, "step", "update, gather"), (update, "_norm", "norm")]
        marks += [
            (
                update._plain,
                "step_shards" if isinstance(update._plain, Lion) else "step",
                "optimizer",
            )
        ]
        if whole.enable_backward_allreduce:
            marks += [(zero, "independent_gradient_partition_epilogue", "end of reduction")]
    elif engine.settings.zero_stage == 0:
        marks += [
            (engine, "_update_plain", "update"),
            (engine_module, "norm_of", "norm"),
            (zero, "step", "optimizer"),
        ]
    else:  # DeepSpeed's
        marks += [(zero, "step", "update, DeepSpeed's"), (zero.optimizer, "step", "optimizer")]
    return [phased(*each) for each in marks]


def product_rate(device: torch.device) -> float:
    """FLOP/s of a large product on random numbers; the median of some."""
    side = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [timed(lambda: torch.mm(left, right), device, times=10) for _ in range(7)]
    return 2 * side**3 / statistics.median(seconds)


def timed(run: Callable[[], object], device: torch.device, *, times: int) -> float:
    """Seconds of one."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(times):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / times


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def read_trace(path: Path, *, steps: int) -> dict[str, Any]:
    events = json.loads(path.read_text())["traceEvents"]
    whole = [
        e for e in events if e.get("cat") == "user_annotation" and e.get("name") == "whole step"
    ]
    low, high = min(e["ts"] for e in whole), max(e["ts"] + e["dur"] for e in whole)
    phases = sorted(
        (
            (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix("phase "))
            for e in events
            if e.get("cat") == "user_annotation" and e["name"].startswith("phase ")
        ),
        key=lambda each: each[1] - each[0],
    )
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {
        e["args"]["correlation"]: e["ts"] for e in runtime if "correlation" in e.get("args", {})
    }
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    def phase_at(moment: float) -> str:
        return next(
            (name for first, last, name in phases if first <= moment <= last), "between"
        )  # the innermost

    table: dict[str, dict[str, Any]] = collections.defaultdict(
        lambda: {
            "host_ms": 0.0,
            "times": 0.0,
            "device_ms": 0.0,
            "launches": 0,
            "kinds": collections.Counter(),
        }
    )
    for first, last, name in phases:
        table[name]["host_ms"] += (last - first) / 1000 / steps
        table[name]["times"] += 1 / steps
    kernels: collections.Counter[str] = collections.Counter()
    for event in device:
        phase = phase_at(launched.get(event["args"].get("correlation"), event["ts"]))
        row, took = table[phase], event["dur"] / 1000 / steps
        row["device_ms"] += took
        row["launches"] += 1 / steps
        row["kinds"][kind_of(event["name"])] += took
        kernels[event["name"]] += took
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in device]
    first, last = (min(s for s, _ in spans), max(e for _, e in spans)) if spans else (low, high)
    streams = collections.Counter(e["args"].get("stream") for e in device)
    waits = collections.Counter(
        e["name"] for e in runtime if e["name"] in WAITS and low <= e["ts"] <= high
    )
    return {
        "device_busy_ms": busy_us(spans) / 1000 / steps,
        "device_idle_share": 1 - busy_us(spans) / (last - first) if spans else None,
        "host_ms": sum(e["dur"] for e in whole) / 1000 / steps,
        "launches": len(device) / steps,
        "streams": len(streams),
        "waits": {name: count / steps for name, count in waits.items()},
        "phases": {
            name: row | {"kinds": dict(row["kinds"].most_common())}
            for name, row in sorted(
                table.items(), key=lambda i: (-i[1]["device_ms"], -i[1]["host_ms"])
            )
        },
        "kernels": dict(kernels.most_common(14)),
    }


def stored(count: int, size: int, num_classes: int) -> Batch:
    rng = np.random.default_rng(0)
    ids = np.arange(count, dtype=np.int64)
    images = torch.from_numpy(rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, num_classes, count))
    if torch.cuda.is_available():
        images, labels = images.pin_memory(), labels.pin_memory()
    return Batch(images, labels, np.zeros(count, np.int64), ids, ids // 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mlp_b12_wi1024")
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--classes", type=int, default=11_230)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--optimizer", default="lion")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--steps", type=int, default=4, help="under the profiler")
    parser.add_argument("--rounds", type=int, default=7, help="of 10 steps, without it")
    parser.add_argument("--out", type=Path, default=os.environ.get("BENCHMARK_FIGURES"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    world = read_world()
    device = start_distributed(world, timeout_s=120)
    spec, size = spec_of(options.model), options.image_size or preset(options.model).image_size
    shapes: dict[str, Any] = {"num_classes": options.classes, "image_size": size}
    engine = DeepSpeedEngine(
        build_model(spec, **shapes, seed=0),
        make_optimizer=lambda module: build_optimizer(module, OptimizerSettings(name=options.optimizer)),
        settings=EngineSettings(zero_stage=options.stage, precision=options.precision, compile=options.compile),
        plan=BatchPlan(options.batch, options.batch, 1), label_smoothing=0.3, device=device, world=world,
    )  # fmt: skip
    recipe = AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8)
    augmentation = Augmentation(
        recipe,
        seed=0,
        image_size=size,
        normalisation=Normalisation((0.48, 0.45, 0.41), (0.27, 0.26, 0.27)),
        device=device,
        dtype=engine.input_dtype,
    )
    batch = stored(options.batch, size, options.classes)
    resident: Prepared = augmentation.prepare(batch)

    def step() -> None:
        prepared = resident
        if options.augment:
            with record_function("phase augmentation"):
                prepared = augmentation.prepare(batch)
        engine.train_step([prepared], lr=1e-5)

    began_s = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began_s
    for _ in range(3):
        step()
    on_gpu = device.type == "cuda"
    seconds = [timed(step, device, times=10 if on_gpu else 1) for _ in range(options.rounds)]
    per_step_s, rate = statistics.median(seconds), product_rate(device)
    # what the step's products cost; the first layer's input needs no gradient
    first_layer = 0
    if spec.kind == "mlp":
        first_layer = 2 * 3 * size**2 * spec.width
    elif spec.kind == "mixer":
        first_layer = (
            2 * spec.num_patches(image_size=size) * 3 * spec.patch_size**2 * spec.num_channels
        )
    flops = (3 * forward_flops(spec, **shapes) - first_layer) * options.batch
    found: dict[str, Any] = {
        "setting": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "ms": 1000 * per_step_s,
        "ms_min": 1000 * min(seconds),
        "ms_max": 1000 * max(seconds),
        "first_step_s": first_s,
        "images_per_s": options.batch / per_step_s,
        "teraflops": flops / per_step_s / 1e12,
        "product_rate_teraflops": rate / 1e12,
        "share_of_product_rate": flops / per_step_s / rate,
        "epoch_of_12.5M_s": 12.5e6 * per_step_s / options.batch,
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }
    names = mark_phases(engine) + (["augmentation"] if options.augment else [])
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    step()
    with profile(activities=activities) as recorded:
        for _ in range(options.steps):
            with record_function("whole step"):
                step()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        found |= read_trace(path, steps=options.steps)
    show(found)
    missing = [name for name in names if name not in found["phases"]]
    if missing:
        print(
            f"BAD these phases did not occur, so their time is in others: {', '.join(missing)};"
            " mend mark_phases"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    os._exit(int(bool(missing)))


def show(found: dict[str, Any]) -> None:
    setting = found["setting"]
    words = (
        f"{setting['model']}, batch {int(setting['batch']):,}, {setting['classes']} classes, ZeRO"
        f" {setting['stage']}"
    )
    words += f", {setting['precision']}, {'compiled' if setting['compile'] == 'True' else 'eager'}"
    print(
        words + (", augmented" if setting["augment"] == "True" else "") + f" on {found['device']}"
    )
    print(
        f"  {found['ms']:.2f} ms a step ({found['ms_min']:.2f} to {found['ms_max']:.2f}),"
        f" {found['images_per_s']:,.0f} images/s, {found['teraflops']:.1f} TFLOP/s ="
        f" {found['share_of_product_rate']:.1%} of {found['product_rate_teraflops']:.0f}; epoch of"
        f" 12.5M {found['epoch_of_12.5M_s']:.1f} s; first step {found['first_step_s']:.0f} s"
    )
    if found["device_idle_share"] is not None:
        print(
            f"  under the profiler: device busy {found['device_busy_ms']:.2f} ms a step, idle"
            f" {found['device_idle_share']:.1%}; host {found['host_ms']:.2f} ms;"
            f" {found['launches']:.0f} launches; waits {found['waits']}; peak"
            f" {found['peak_gb']:.1f} GB"
        )
    for phase, row in found["phases"].items():
        kinds = ", ".join(f"{kind} {took:.2f}" for kind, took in list(row["kinds"].items())[:5])
        device = (
            f"device {row['device_ms']:7.2f} ms, {row['launches']:4.0f} launches   {kinds}"
            if found["device"] != "cpu"
            else ""
        )
        print(f"    {phase:20} {row['times']:4.0f} x  host {row['host_ms']:7.2f} ms  {device}")
    for name, took in list(found["kernels"].items())[:10]:
        print(f"      {took:6.2f} ms  {name[:110]}")


if __name__ == "__main__":
    main()
