"""The ceilings of the device, and the pieces of our step against what they could be; in the project:

    pieces.py [--only ceilings,products,...]


ceilings   a large product, a copy on the device, copies between host and device (pinned and not)
products   every product of B-12/Wi-1024 and of Mixer-B-W at its real shape: share of the large product; in FP8, too
block      one block forward and backward, eager and compiled, against its six products alone: what lies between them costs
loss       two cross-entropies, eager and compiled, against the one pass of pretrain/engine/step.py
lion       pretrain/optim/lion.py's update, the same compiled, one Triton kernel; five reads and writes of 4 bytes are the limit
augment    pretrain/augment on the device (on_gpu.py), against its plain operations, and what the host draws for it
Candidates are checked against what they would replace; "off by" is that. On a CPU: a dry run at small sizes.
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pretrain.augment.augmentation import Augmentation, Normalisation, Prepared
from pretrain.augment.crops import draw_boxes
from pretrain.augment.draws import Draws
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batch
from pretrain.engine.step import loss_of, one_pass_loss
from pretrain.models.mixer import MixerBlock
from pretrain.models.mlp import InvertedBlock
from pretrain.models.presets import spec_of
from pretrain.optim.lion import by_operations

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BF16 = torch.bfloat16
found: dict[str, dict[str, float]] = {}


def ms(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Median of single runs between events, after some that warm up."""
    for _ in range(3 if ON_GPU else 1):
        run()
    if not ON_GPU:
        began_s = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - began_s)
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


# ---- ceilings --------------------------------------------------------------------------------------------------------


def large_product() -> float:
    side = 8192 if ON_GPU else 512
    left, right, into = random(side, side), random(side, side), random(side, side)
    return 2 * side**3 / ms(lambda: torch.mm(left, right, out=into)) / 1e9


def ceilings() -> None:
    note("ceilings", "product of 8192 x 8192, bf16", large_product(), "TFLOP/s")
    source = random(2**31 if ON_GPU else 2**20)
    target = torch.empty_like(source)
    took = ms(lambda: target.copy_(source))
    note("ceilings", "copy on the device, read and written", 2 * source.nbytes / took / 1e6, "GB/s")
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
        note("ceilings", "host to device, pinned", size / ms(lambda: there.copy_(pinned, non_blocking=True)) / 1e6, "GB/s")
        note("ceilings", "device to host, pinned", size / ms(lambda: pinned.copy_(there, non_blocking=True)) / 1e6, "GB/s")


# ---- products --------------------------------------------------------------------------------------------------------


def products() -> None:
    rate = large_product()
    batch, tokens = (16_384, 256) if ON_GPU else (256, 16)
    images = 256 if ON_GPU else 2
    rows, lanes = images * tokens, images * 592
    shapes = {
        "B-12 expand": (batch, 1024, 4096), "B-12 contract": (batch, 4096, 1024), "B-12 stem": (batch, 12_288, 1024),
        "B-12 head, 11,232": (batch, 1024, 11_232),
        "Mixer-B-W tokens in": (lanes, tokens, 1176), "Mixer-B-W tokens out": (lanes, 1176, tokens),
        "Mixer-B-W channels in": (rows, 592, 2688), "Mixer-B-W channels out": (rows, 2688, 592),
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
            times = 12 if name in ("B-12 expand", "B-12 contract") else 8 if name.startswith("Mixer") else 1
            total[name.split()[0]][0] += times * flops
            total[name.split()[0]][1] += times * took
        if ON_GPU and name in ("B-12 expand", "B-12 contract"):
            try:
                x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
                one = torch.ones((), device=DEVICE)
                took = ms(lambda x8=x8, w8=w8, one=one: torch._scaled_mm(x8, w8.T, one, one, out_dtype=BF16, use_fast_accum=True))
                note("products", f"{name}, forward in FP8", flops / took / 1e9, "TFLOP/s", f"{flops / took / 1e9 / rate:.0%}")
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
            lambda: InvertedBlock(spec_of("mlp_b12_wi1024")),
            random(batch, 1024),
            6 * 2.0 * batch * 1024 * 4096,
        )  # type: ignore[arg-type]
    }
    spec: Any = spec_of("mixer_b_w")
    tokens = spec.tokens(image_size=224)
    token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=tokens)
    flops = 6 * 2.0 * images * (588 * tokens * token_hidden + tokens * 588 * channel_hidden)
    make = lambda: MixerBlock(spec, num_inputs=tokens, num_tokens=tokens, is_permuted=False, has_token_skip=False)  # noqa: E731
    cases["block of Mixer-B-W"] = (make, random(images, tokens, 588), flops)
    rate = large_product()
    for name, (make_block, x, flops) in cases.items():
        gradient = torch.randn_like(x)
        for how in ("eager", "compiled"):
            torch.manual_seed(0)
            layer = make_block().to(DEVICE, BF16).train()
            if how == "compiled":
                layer.compile()
            x.requires_grad_()

            def run(layer: torch.nn.Module = layer, x: Tensor = x, gradient: Tensor = gradient) -> None:
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
                f"{flops / took / 1e9:.0f} TFLOP/s, {flops / took / 1e9 / rate:.0%} of the large product",
            )


# ---- loss ------------------------------------------------------------------------------------------------------------


def two_losses(logits: Tensor, labels: Tensor, others: Tensor, weight: Tensor, smoothing: float) -> Tensor:
    """As one would first write it."""
    first, second = (cross_entropy(logits.float(), each, label_smoothing=smoothing, reduction="none") for each in (labels, others))
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

    ways = {
        "two cross-entropies, eager": graded(lambda: two_losses(logits, labels, others, weight, 0.3)),
        "the product's loss_of": graded(lambda: loss_of(logits, mixed, label_smoothing=0.3)),
        "one label alone, the product's": graded(lambda: loss_of(logits, Prepared(logits, labels), label_smoothing=0.3)),
    }
    for name, plain in {"two cross-entropies": two_losses, "one_pass_loss": one_pass_loss}.items():
        compiled = torch.compile(plain, dynamic=False)
        ways[f"{name}, compiled"] = graded(lambda compiled=compiled: compiled(logits, labels, others, weight, 0.3))
    first = next(iter(ways.values()))
    expected, gradient = first(), logits.grad.clone()  # type: ignore[union-attr]
    limit = 3 * logits.nbytes / 4.3e12 * 1e3
    for name, run in ways.items():
        value = run().detach()
        away = float((value - expected.detach()).abs()) if "one label" not in name else float("nan")
        far = float((logits.grad - gradient).float().norm() / gradient.float().norm()) if "one label" not in name else float("nan")  # type: ignore[operator]
        note(
            "loss",
            name,
            ms(run),
            "ms",
            f"off by {away:.1e}, gradient by {far:.1e}; three passes over bf16 at 4.3 TB/s: {limit:.2f} ms",
        )


# ---- Lion ------------------------------------------------------------------------------------------------------------


def lion() -> None:
    size = 124_800_000 if ON_GPU else 100_003
    weights, momenta, gradients = (
        random(size, dtype=torch.float32),
        random(size, dtype=torch.float32) * 1e-3,
        random(size, dtype=torch.float32) * 1e-3,
    )
    limit = 5 * 4 * size / 4.3e9
    start = [weights.clone(), momenta.clone()]
    lr, decay, betas = 1e-4, 1e-3, (0.9, 0.99)

    def now() -> None:
        by_operations([weights], [gradients], [momenta], {"lr": lr, "betas": betas, "weight_decay": decay})

    def plain(w: Tensor, g: Tensor, m: Tensor, kept: Tensor, rate: Tensor) -> None:
        way = torch.sign(torch.lerp(g, m, betas[0]))
        m.mul_(betas[1]).add_(g, alpha=1 - betas[1])
        w.mul_(kept).sub_(rate * way).add_(m, alpha=0)

    compiled = torch.compile(plain)
    kept, rate = torch.tensor(1 - lr * decay, device=DEVICE), torch.tensor(lr, device=DEVICE)
    ways: dict[str, Callable[[], object]] = {
        "now: foreach operations": now,
        "compiled": lambda: compiled(weights, gradients, momenta, kept, rate),
    }
    kernel = triton_lion() if ON_GPU else None
    if kernel is not None:
        low, grid = torch.empty(size, device=DEVICE, dtype=BF16), (-(-size // 4096),)
        good = torch.ones((), device=DEVICE)
        ways["one Triton kernel, bf16 copy written, guarded by a norm"] = lambda: kernel[grid](
            weights, gradients, momenta, low, good, rate, kept, size, betas[0], betas[1], 4096, num_warps=8
        )
    results = {}
    for name, run in ways.items():
        weights.copy_(start[0])
        momenta.copy_(start[1])
        run()
        results[name] = weights.clone()
        away = int((results[name] != results["now: foreach operations"]).sum())
        note("lion", name, ms(run), "ms", f"{away:,} of {size:,} weights differ after a step; limit at 4.3 TB/s {limit:.2f} ms")


def triton_lion() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def step(w_ptr, g_ptr, m_ptr, low_ptr, norm_ptr, lr_ptr, kept_ptr, size, beta1, beta2, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        norm = tl.load(norm_ptr)
        if tl.abs(norm) < float("inf"):  # a step whose norm is not finite changes nothing, and nobody waits to know
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            w, g, m = tl.load(w_ptr + at, inside), tl.load(g_ptr + at, inside), tl.load(m_ptr + at, inside)
            way = tl.fma(1 - beta1, g, m * beta1)
            sign = tl.where(way > 0, 1.0, tl.where(way < 0, -1.0, 0.0))
            m = tl.fma(1 - beta2, g, m * beta2)
            w = tl.fma(-tl.load(lr_ptr), sign, w * tl.load(kept_ptr)) + m * 0
            tl.store(w_ptr + at, w, inside)
            tl.store(m_ptr + at, m, inside)
            tl.store(low_ptr + at, w.to(tl.bfloat16), inside)

    return step


# ---- augmentation -----------------------------------------------------------------------------------------------------


def augment() -> None:
    cases = (
        {"64 px": (16_384, 64, 64), "256 to 224 px": (512, 256, 224)}
        if ON_GPU
        else {"64 px": (16, 64, 64), "72 to 64": (8, 72, 64)}
    )
    for name, sizes in cases.items():
        augment_at(name, *sizes)


def augment_at(name: str, count: int, stored: int, size: int) -> None:
    recipe, ids = AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8), np.arange(count, dtype=np.int64)
    images, labels = torch.randint(0, 256, (count, stored, stored, 3), dtype=torch.uint8), torch.randint(0, 10, (count,))
    if ON_GPU:
        images, labels = images.pin_memory(), labels.pin_memory()
    batch = Batch(images, labels, np.zeros(count, np.int64), ids, ids // 2)
    how = {"normalisation": Normalisation((0.48, 0.45, 0.41), (0.27, 0.26, 0.27)), "device": DEVICE, "dtype": BF16}
    product, plain = (Augmentation(recipe, seed=0, image_size=size, **how) for _ in range(2))
    plain._kernels, plain._in_one_pass, plain._on_cpu = None, False, False  # the operations that are the kernel's reference
    there = Batch(images.to(DEVICE), labels.to(DEVICE), batch.epochs, ids, ids // 2)
    expected, least = plain.prepare(batch).images_BCHW, (images.nbytes + 2 * count * 3 * size**2) / 4.3e9
    for way, made in {"the product's": product, "single operations": plain}.items():
        away = float((made.prepare(batch).images_BCHW.float() - expected.float()).abs().max())
        took = ms(lambda made=made: made.prepare(batch))
        note("augment", f"{name}, {way}: all of prepare", took, "ms", f"{count / took * 1e3:,.0f} images/s; off by {away:.2g}")
        resident = ms(lambda made=made: made.prepare(there))
        note("augment", f"{name}, {way}: of pictures on the device", resident, "ms", f"read and written once: {least:.2f} ms")
    draws, mixer = Draws((0, batch.epochs, batch.samples)), product._mixer
    assert mixer is not None
    began_s = time.perf_counter()
    for _ in range(5):
        draw_boxes(recipe, draws, count=count, stored_size=stored)
        mixer.draw(Draws((0, batch.mix_keys)), size=size)
    note("augment", f"{name}, drawn on the host by one thread", (time.perf_counter() - began_s) * 200, "ms")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections")
    parser.add_argument("--out", type=Path, default=os.environ.get("BENCHMARK_FIGURES"))
    return parser.parse_args()


SECTIONS = {"ceilings": ceilings, "products": products, "block": block, "loss": loss, "lion": lion, "augment": augment}


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
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
