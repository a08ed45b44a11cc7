"""The ceilings of the device, and the pieces of our step against what they could be; in the
project:

    pieces.py [--only ceilings,products,...]


ceilings   a large product, a copy on the device, copies between host and device (pinned and not)
products   every product of B-12/Wi-1024 and of Mixer-B-W at its real shape: share of the large product; in FP8, too
block      one block forward and backward, eager and compiled, against its six products alone: what lies between them costs
loss       the one pass of pretrain/engine/step.py, forward and backward, against two cross-entropies, eager and compiled
lion       pretrain/optim/lion.py's step of a shard (a kernel on a GPU), against its reference and the operations of stage 0
update     pretrain/engine/sharded_update.py, all of a step after the backward pass, against DeepSpeed's own; its norm alone
augment    pretrain/augment on the device (on_gpu.py): all of `prepare` against plain operations, and what the host draws for it
The product's pieces stand beside their plain forms ("off by": from those) and their limit: the
bytes that have to be read and written, at the rate of a copy on this device. On a CPU: a dry run at
small sizes, where the product has other pieces for CPUs.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pretrain.augment.augmentation import Augmentation, Normalisation, Prepared
from pretrain.augment.crops import draw_boxes
from pretrain.augment.draws import Draws
from pretrain.config import AugmentSettings, EngineSettings, OptimizerSettings
from pretrain.data.loader import Batch
from pretrain.data.order import BatchPlan
from pretrain.engine import deepspeed as engine_module
from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
from pretrain.engine.step import _compiled_loss, loss_of
from pretrain.models.build import build_model
from pretrain.models.layers.linear import aligned
from pretrain.models.mixer import MixerBlock
from pretrain.models.mlp import build_layer
from pretrain.models.presets import spec_of
from pretrain.optim import Lion, build_optimizer
from pretrain.optim.lion import by_operations, guarded
from pretrain.ranks.world import read_world

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BF16 = torch.bfloat16
found: dict[str, dict[str, float]] = {}


def ms(
    run: Callable[[], object], *, before: Callable[[], object] = lambda: None, repeats: int = 20
) -> float:
    """Median of single runs between events, after some that warm up; `before` each of them is not
    counted."""
    for _ in range(3 if ON_GPU else 1):
        before()
        run()
    if not ON_GPU:
        before()
        began_s = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - began_s)
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def note(section: str, name: str, value: float, unit: str, words: str = "") -> float:
    found.setdefault(section, {})[f"{name} [{unit}]"] = round(value, 4)
    print(f"  {name:58} {value:10.3f} {unit:9} {words}", flush=True)
    return value


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


@functools.cache
def bytes_per_ms() -> float:
    """Read and written by a copy on the device."""
    source = random(2**31 if ON_GPU else 2**20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / ms(lambda: target.copy_(source))


def limit(num_bytes: float) -> str:
    return f"limit, {num_bytes / 1e9:.2f} GB read and written: {num_bytes / bytes_per_ms():.3f} ms"


# ---- ceilings
# --------------------------------------------------------------------------------------------------------


def large_product() -> float:
    side = 8192 if ON_GPU else 512
    left, right, into = random(side, side), random(side, side), random(side, side)
    return 2 * side**3 / ms(lambda: torch.mm(left, right, out=into)) / 1e9


def ceilings() -> None:
    note("ceilings", "product of 8192 x 8192, bf16", large_product(), "TFLOP/s")
    note("ceilings", "copy on the device, read and written", bytes_per_ms() / 1e6, "GB/s")
    size = 16_384 * 12_288 if ON_GPU else 2**20
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    here = torch.randint(0, 255, (size,), dtype=torch.uint8)
    note(
        "ceilings",
        "host to device, pageable",
        size / ms(lambda: there.copy_(here), repeats=5) / 1e6,
        "GB/s",
        "a batch of 16,384 at 64 px",
    )
    if ON_GPU:
        pinned = here.pin_memory()
        note(
            "ceilings",
            "host to device, pinned",
            size / ms(lambda: there.copy_(pinned, non_blocking=True)) / 1e6,
            "GB/s",
        )
        note(
            "ceilings",
            "device to host, pinned",
            size / ms(lambda: pinned.copy_(there, non_blocking=True)) / 1e6,
            "GB/s",
        )


# ---- products
# --------------------------------------------------------------------------------------------------------


def products() -> None:
    rate = large_product()
    batch, images = (16_384, 256) if ON_GPU else (16, 1)
    spec: Any = spec_of("mixer_b_w")
    tokens = spec.tokens(image_size=224)
    token_hidden, channel_hidden, channels = (
        aligned(each) for each in (*spec.hidden_sizes(num_tokens=tokens), spec.num_channels)
    )
    rows, lanes = images * tokens, images * channels
    shapes = {
        "B-12 expand": (batch, 1024, 4096), "B-12 contract": (batch, 4096, 1024), "B-12 stem": (batch, 12_288, 1024),
        "B-12 head, 11,232": (batch, 1024, aligned(11_230)),
        "Mixer-B-W tokens in": (lanes, tokens, token_hidden), "Mixer-B-W tokens out": (lanes, token_hidden, tokens),
        "Mixer-B-W channels in": (rows, channels, channel_hidden), "Mixer-B-W channels out": (rows, channel_hidden, channels),
    }  # fmt: skip
    total: dict[str, list[float]] = {"B-12": [0, 0], "Mixer-B-W": [0, 0]}
    for name, (m, k, n) in shapes.items():
        x, w, dy = random(m, k), random(n, k), random(m, n)
        flops = 2 * m * k * n
        kinds = {
            "forward": lambda x=x, w=w: x @ w.T,
            "to input": lambda dy=dy, w=w: dy @ w,
            "to weight": lambda dy=dy, x=x: dy.T @ x,
        }
        for kind, run in kinds.items():
            if "stem" in name and kind == "to input":
                continue
            took = ms(run)
            note(
                "products",
                f"{name}, {kind} ({m:,} x {k:,} x {n:,})",
                flops / took / 1e9,
                "TFLOP/s",
                f"{flops / took / 1e9 / rate:.0%} of the large one",
            )
            times = (
                12
                if name in ("B-12 expand", "B-12 contract")
                else 8
                if name.startswith("Mixer")
                else 1
            )
            total[name.split()[0]][0] += times * flops
            total[name.split()[0]][1] += times * took
        if ON_GPU and name in ("B-12 expand", "B-12 contract"):
            try:
                x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
                one = torch.ones((), device=DEVICE)
                took = ms(
                    lambda x8=x8, w8=w8, one=one: torch._scaled_mm(
                        x8, w8.T, one, one, out_dtype=BF16, use_fast_accum=True
                    )
                )
                note(
                    "products",
                    f"{name}, forward in FP8",
                    flops / took / 1e9,
                    "TFLOP/s",
                    f"{flops / took / 1e9 / rate:.0%}",
                )
            except Exception as error:  # noqa: BLE001
                print(f"  {name} in FP8: {type(error).__name__} {str(error)[:100]}")
    for model, (flops, took) in total.items():
        note(
            "products",
            f"{model}: all products of a step, one after the other",
            flops / took / 1e9,
            "TFLOP/s",
            f"{flops / took / 1e9 / rate:.0%}; {took:.2f} ms",
        )


def block() -> None:
    batch, images = (16_384, 256) if ON_GPU else (64, 2)
    cases: dict[str, tuple[Callable[[], torch.nn.Module], Tensor, float]] = {
        "block of B-12/Wi-1024": (
            lambda: build_layer(spec_of("mlp_b12_wi1024")),
            random(batch, 1024),
            6 * 2.0 * batch * 1024 * 4096,
        )  # type: ignore[arg-type]
    }
    spec: Any = spec_of("mixer_b_w")
    tokens = spec.tokens(image_size=224)
    token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=tokens)
    flops = 6 * 2.0 * images * tokens * spec.num_channels * (token_hidden + channel_hidden)
    make = lambda: MixerBlock(  # noqa: E731
        spec, num_inputs=tokens, num_tokens=tokens, is_permuted=False, has_token_skip=False
    )
    cases["block of Mixer-B-W"] = (make, random(images, tokens, spec.num_channels), flops)
    rate = large_product()
    for name, (make_block, x, flops) in cases.items():
        gradient = torch.randn_like(x)
        for how in ("eager", "compiled"):
            torch.manual_seed(0)
            layer = make_block().to(DEVICE, BF16).train()
            if how == "compiled":
                layer.compile(dynamic=False)  # as compile_blocks
            x.requires_grad_()

            def run(
                layer: torch.nn.Module = layer, x: Tensor = x, gradient: Tensor = gradient
            ) -> None:
                for weight in layer.parameters():
                    weight.grad = None
                x.grad = None
                layer(x).backward(gradient)

            took = ms(run)
            note(
                "block",
                f"{name}, {how}",
                took,
                "ms",
                f"{flops / took / 1e9:.0f} TFLOP/s, {flops / took / 1e9 / rate:.0%} of the large"
                " product",
            )


# ---- loss
# ------------------------------------------------------------------------------------------------------------


def two_losses(
    logits: Tensor, labels: Tensor, others: Tensor, weight: Tensor, smoothing: float
) -> Tensor:
    """As one would first write it."""
    first, second = (
        cross_entropy(logits.float(), each, label_smoothing=smoothing, reduction="none")
        for each in (labels, others)
    )
    return torch.lerp(second, first, weight).mean()


def loss() -> None:
    batch, classes = (16_384, 11_230) if ON_GPU else (64, 1123)
    logits = random(batch, classes).requires_grad_()
    labels, others = (torch.randint(classes, (batch,), device=DEVICE) for _ in range(2))
    weight = torch.rand(batch, device=DEVICE)
    mixed = Prepared(logits, labels, others, weight)

    def graded(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            logits.grad = None
            value = make()
            value.backward()
            return value

        return run

    two = torch.compile(two_losses, dynamic=False)
    one = (
        loss_of
        if ON_GPU
        else lambda *_, **__: _compiled_loss()(logits, labels, others, weight, 0.3)
    )
    ways = {
        "plain: two cross-entropies, eager": graded(
            lambda: two_losses(logits, labels, others, weight, 0.3)
        ),
        "plain, compiled": graded(lambda: two(logits, labels, others, weight, 0.3)),
        "the product's, one pass": graded(lambda: one(logits, mixed, label_smoothing=0.3)),
        "the product's, of one label": graded(
            lambda: loss_of(logits, Prepared(logits, labels), label_smoothing=0.3)
        ),
    }
    first = next(iter(ways.values()))
    expected, gradient = first(), logits.grad.clone()  # type: ignore[union-attr]
    for name, run in ways.items():
        value, words = (
            run().detach(),
            limit(3 * logits.nbytes),
        )  # read for the loss; read and written for its gradient
        if "one label" not in name:
            far = float((logits.grad - gradient).float().norm() / gradient.float().norm())  # type: ignore[operator]
            words = (
                f"off by {float((value - expected.detach()).abs()):.1e}, gradient by {far:.1e};"
                f" {words}"
            )
        note("loss", name, ms(run), "ms", words)


# ---- LION and the update
# ---------------------------------------------------------------------------------------------


def lion() -> None:
    size, low = (124_800_000, BF16) if ON_GPU else (1_000_003, torch.float32)
    start = [random(size, dtype=torch.float32), random(size, dtype=torch.float32) * 1e-3]
    gradient, copy, share = (
        (random(size, dtype=torch.float32) * 1e-3).to(low),
        random(size, dtype=low),
        torch.ones((), device=DEVICE),
    )
    weight, momentum = (each.clone() for each in start)
    product = Lion([weight], lr=1e-4, weight_decay=10.0)
    product.state[weight]["exp_avg"] = momentum
    (group,), wide = product.param_groups, gradient.float()
    ways: dict[str, Callable[[], object]] = {
        "plain: the reference, and the copy": lambda: (
            guarded(weight, gradient, momentum, share, group),
            copy.copy_(weight),
        ),
        "the product's, of a shard": lambda: product.step_shards([[gradient]], [copy], share),
        "stage 0's foreach operations (fp32, no guard, no copy)": lambda: by_operations(
            [weight], [wide], [momentum], group
        ),
    }
    num_bytes, expected = size * (4 * 4 + 2 * gradient.element_size()), None
    for name, run in ways.items():
        weight.copy_(start[0])
        momentum.copy_(start[1])
        run()
        expected = torch.stack([weight, momentum]) if expected is None else expected
        away = int((torch.stack([weight, momentum]) != expected).sum())
        note(
            "lion",
            name,
            ms(run),
            "ms",
            f"{away:,} of {2 * size:,} weights and momenta differ; {limit(num_bytes)}",
        )


def update() -> None:
    model, batch = ("mlp_b12_wi1024", 256) if ON_GPU else ("mlp_b6_wi256", 8)
    world, expected = read_world(), None
    device = start_distributed(world, timeout_s=120)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(batch, 3, 64, 64, device=device, dtype=BF16, generator=generator)
    prepared = Prepared(images, torch.arange(batch, device=device) % 1000)
    for stage, way, on_device in (
        (1, "DeepSpeed's own", False),
        (1, "the product's", True),
        (2, "the product's", True),
    ):
        with patch.object(
            engine_module, "updates_on_device", lambda _, on_device=on_device: on_device
        ):
            engine = DeepSpeedEngine(
                build_model(spec_of(model), num_classes=1000, image_size=64, seed=0),
                make_optimizer=lambda module: build_optimizer(module, OptimizerSettings(lr=1e-4, weight_decay=1.0)),
                settings=EngineSettings(zero_stage=stage, gradient_clip_norm=1.0), plan=BatchPlan(batch, batch, 1),
                label_smoothing=0.3, device=device, world=world,
            )  # fmt: skip
        for _ in range(2):
            engine.train_step([prepared], lr=1e-4)
        found = torch.cat(
            [each.flatten().float() for each in engine.export_state().weights.values()]
        )
        expected = found if expected is None else expected
        away = (
            f"{int((found != expected).sum()):,} of {len(found):,} weights differ after two steps"
        )

        def backward(engine: Any = engine) -> None:
            engine._engine.backward(loss_of(engine._engine(images), prepared, label_smoothing=0.3))

        def norm(engine: Any = engine) -> None:
            ours = engine._update
            ours._norm([ours._pieces(number) for number in range(len(ours._shards))])

        # the gradients are fp32 at stage 2, and gone over once for the norm, once for LION
        name = f"ZeRO {stage}, {way}"
        each = 2 if stage == 1 else 4
        note(
            "update",
            name,
            ms(engine._update_sharded, before=backward),
            "ms",
            f"{away}; {limit(len(found) * (18 + 2 * each))}",
        )
        if on_device:
            backward()
            note("update", f"{name}: the norm alone", ms(norm), "ms", limit(len(found) * each))
        del engine


# ---- augmentation
# -----------------------------------------------------------------------------------------------------


def augment() -> None:
    cases = (
        {"64 px": (16_384, 64, 64), "256 to 224 px": (512, 256, 224)}
        if ON_GPU
        else {"64 px": (16, 64, 64), "72 to 64": (8, 72, 64)}
    )
    for name, sizes in cases.items():
        augment_at(name, *sizes)


def augment_at(name: str, count: int, stored: int, size: int) -> None:
    recipe, ids = (
        AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8),
        np.arange(count, dtype=np.int64),
    )
    images, labels = (
        torch.randint(0, 256, (count, stored, stored, 3), dtype=torch.uint8),
        torch.randint(0, 10, (count,)),
    )
    if ON_GPU:
        images, labels = images.pin_memory(), labels.pin_memory()
    batch = Batch(images, labels, np.zeros(count, np.int64), ids, ids // 2)
    how = {
        "normalisation": Normalisation((0.48, 0.45, 0.41), (0.27, 0.26, 0.27)),
        "device": DEVICE,
        "dtype": BF16,
    }
    product, plain = (Augmentation(recipe, seed=0, image_size=size, **how) for _ in range(2))
    plain._kernels, plain._in_one_pass, plain._on_cpu = (
        None,
        False,
        False,
    )  # the operations that are the kernel's reference
    there = Batch(images.to(DEVICE), labels.to(DEVICE), batch.epochs, ids, ids // 2)
    expected, least = (
        plain.prepare(batch).images_BCHW,
        limit(images.nbytes + 2 * count * 3 * size**2),
    )
    for way, made in {"the product's": product, "plain: single operations": plain}.items():
        away = float((made.prepare(batch).images_BCHW.float() - expected.float()).abs().max())
        took = ms(lambda made=made: made.prepare(batch))
        note(
            "augment",
            f"{name}, {way}: all of prepare",
            took,
            "ms",
            f"{count / took * 1e3:,.0f} images/s; off by {away:.2g}",
        )
        resident = ms(lambda made=made: made.prepare(there))
        note("augment", f"{name}, {way}: of pictures on the device", resident, "ms", least)
    draws, mixer = Draws((0, batch.epochs, batch.samples)), product._mixer
    assert mixer is not None
    began_s = time.perf_counter()
    for _ in range(5):
        draw_boxes(recipe, draws, count=count, stored_size=stored)
        mixer.draw(Draws((0, batch.mix_keys)), size=size)
    note(
        "augment",
        f"{name}, drawn on the host by one thread",
        (time.perf_counter() - began_s) * 200,
        "ms",
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections")
    parser.add_argument("--out", type=Path, default=os.environ.get("BENCHMARK_FIGURES"))
    return parser.parse_args()


SECTIONS = {
    "ceilings": ceilings,
    "products": products,
    "block": block,
    "loss": loss,
    "lion": lion,
    "update": update,
    "augment": augment,
}


def main() -> None:
    options = arguments()
    torch.set_num_threads(min(8, torch.get_num_threads()))
    print(torch.cuda.get_device_name() if ON_GPU else "no GPU: a dry run, the numbers mean nothing")
    failed = []
    for name in options.only.split(","):
        print(f"{name}:")
        try:
            SECTIONS[name]()
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            failed.append(name)
        if ON_GPU:
            torch.cuda.empty_cache()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))
    print(f"pieces: {'failed in ' + ', '.join(failed) if failed else 'all measured'}")
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # past what the process group would wait for


if __name__ == "__main__":
    main()
