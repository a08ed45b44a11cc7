"""How near to the matrix products alone is a model's forward and backward pass? And to the obvious
code, and to timm's?

    .venv/bin/python benchmarks/models.py [--quick] [--only mixer_b_w,...] [--device cuda] [--dtype
    bfloat16] [--batch N]
                                          [--compile whole|blocks|no] [--mode
                                          max-autotune-no-cudagraphs] [--threads N] [--cpu-time]

Contestants, each a whole step (forward, backward to all weights, none to the pictures) on one
batch:
  products     the same matrix products on tensors made beforehand, nothing between them
  products, 8  the same with every size filled up to a multiple of 8, as
  pretrain/models/layers/linear.py does it: the limit plain        the paper's formula as one would
  first write it, eager (models_peers.py) ours         eager, and compiled
  normal       an RP model without its permutations, eager and compiled
  timm         timm's MlpMixer of the same shapes, where it has them, eager and compiled
Compiled is the whole model, or (--compile blocks, the default on a CPU, where compiling is slow)
each block by itself: equal blocks then share one graph.
TFLOP/s are the FLOPs of `products` over the time, whatever zeros are multiplied besides.
`activations` are the bytes that a forward pass keeps for the backward pass (weights and pictures
excluded); `peak` is CUDA's, of one step beyond what was allocated before it. `compiled in` is the
first step, with inductor's caches off. `of the rate` (CUDA): the TFLOP/s as a share of the rate of
a large square product measured in the same rounds. --cpu-time counts CPU seconds of one thread
instead of wall time: the only fair clock where others use the same cores.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from frame import add_sizes, commit, keep, machine, ratio, sized
from models_peers import Product, bare_products, plain, products_of, step_flops, timm_mixer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pretrain.engine.step import keep_freed_memory
from pretrain.models.build import build_model
from pretrain.models.layers.linear import aligned
from pretrain.models.presets import preset, spec_of
from pretrain.models.spec import MixerSpec

PRODUCTS, LIMIT, SQUARE = "products", "products, 8", "large square product"


@dataclass(frozen=True)
class Size:
    """Images in a batch on a CPU, and on a GPU; classes where they are not the preset's."""

    cpu: int
    gpu: int
    num_classes: int | None = None


MODELS = {
    "mlp_b12_wi1024": Size(256, 16_384, 11_230),
    "mlp_l6_wi1024": Size(256, 16_384, 11_230),
    "mixer_b_16": Size(2, 128),
    "mixer_b_w_c3": Size(2, 128),
    "rp_mixer_b_w": Size(2, 128),
    "mixer_ss_8": Size(16, 1024),
    "mixer_ss_w": Size(16, 1024),
    "rp_mixer_ss_w": Size(16, 1024),
    "smixer_c128": Size(32, 1024),
    "rp_smixer_c128": Size(32, 1024),
    "smixer_c32": Size(64, 1024),
}


@dataclass
class Contestant:
    run: Callable[[], None]
    activations: int = 0
    peak: int = 0
    compiled_in_s: float = 0.0
    flops: int = 0


@dataclass
class Field:
    """One model's contestants on one batch."""

    images: Tensor
    clock: Callable[[], float]
    found: dict[str, Contestant] = field(default_factory=dict)

    def add(self, name: str, model: nn.Module, *, flops: int, is_compiled: bool = False) -> None:
        contestant = Contestant(lambda: step(model, self.images), flops=flops)
        took_s = self.seconds(contestant.run)
        contestant.compiled_in_s = took_s if is_compiled else 0.0
        contestant.activations = activation_bytes(model, self.images)
        contestant.peak = peak_bytes(contestant.run) if self.images.is_cuda else 0
        model.zero_grad(set_to_none=True)
        self.found[name] = contestant

    def seconds(self, run: Callable[[], None]) -> float:
        self._wait()
        began_s = self.clock()
        run()
        self._wait()
        return self.clock() - began_s

    def _wait(self) -> None:
        if self.images.is_cuda:
            torch.cuda.synchronize()

    def rates(self, *, rounds: int, repeats: int) -> dict[str, list[float]]:
        """Steps per second, everybody once per round."""
        found: dict[str, list[float]] = {name: [] for name in self.found}
        for number in range(rounds + 1):
            for name, contestant in self.found.items():

                def runs(run: Callable[[], None] = contestant.run) -> None:
                    for _ in range(repeats):
                        run()

                took_s = self.seconds(runs)
                if number:  # the first round warms up
                    found[name].append(repeats / took_s)
        return found


def step(model: nn.Module, images: Tensor) -> None:
    for weight in model.parameters():
        weight.grad = None
    model(images).sum().backward()


def activation_bytes(model: nn.Module, images: Tensor) -> int:
    """Of distinct storages saved for the backward pass."""
    known = {
        tensor.untyped_storage().data_ptr()
        for tensor in [*model.parameters(), *model.buffers(), images]
    }
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _logits = model(images)  # held: what is freed could have its address used twice
    return sum(sizes.values())


def peak_bytes(run: Callable[[], None]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def contestants(name: str, options: argparse.Namespace, *, batch: int) -> Field:
    spec, image_size = spec_of(name), preset(name).image_size
    sizes = {
        "num_classes": MODELS[name].num_classes or preset(name).num_classes,
        "image_size": image_size,
    }
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    images = torch.randn(batch, 3, image_size, image_size, device=device, dtype=dtype)
    field = Field(images, time.process_time if options.cpu_time else time.perf_counter)

    def ready(model: nn.Module) -> nn.Module:
        return model.to(device, dtype).train()

    products = products_of(ready(build_model(spec, **sizes, seed=0)), images)
    flops = step_flops(products)
    field.found[PRODUCTS] = Contestant(bare_products(products, like=images), flops=flops)
    filled = [
        Product(product.rows, aligned(product.inputs), aligned(product.outputs))
        for product in products
    ]
    field.found[LIMIT] = Contestant(bare_products(filled, like=images), flops=flops)
    if device.type == "cuda":
        side = 8192
        left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        into = torch.empty_like(left)
        field.found[SQUARE] = Contestant(
            lambda: torch.mm(left, right, out=into) and None, flops=2 * side**3
        )
    field.add("plain", ready(plain(spec, **sizes)), flops=flops)

    def add(name: str, make: Callable[[], nn.Module | None]) -> None:
        model = make()
        if model is not None:
            field.add(name, ready(model), flops=flops)
        if model is not None and options.compile != "no":
            model = ready(make() or model)
            compile_model(model, how=options.compile, mode=options.mode)
            field.add(f"{name}, compiled", model, flops=flops, is_compiled=True)

    add("ours", lambda: build_model(spec, **sizes, seed=0))
    if isinstance(spec, MixerSpec) and spec.permuted_blocks:
        normal = spec.model_copy(update={"permuted_blocks": ()})
        add("normal", lambda: build_model(normal, **sizes, seed=0))
    add("timm", lambda: timm_mixer(spec, **sizes))
    return field


def compile_model(model: nn.Module, *, how: str, mode: str) -> None:
    torch._dynamo.reset_code_caches()  # or it would find the graphs that another contestant made
    parts = model.blocks if how == "blocks" else [model]
    for part in parts:  # type: ignore[union-attr]
        part.compile(mode=mode)


def show(
    name: str,
    field: Field,
    rates: dict[str, list[float]],
    *,
    batch: int,
    options: argparse.Namespace,
) -> None:
    rounds, on_gpu = len(rates[LIMIT]), SQUARE in rates
    title = f"{name}, batch {batch:,}, {options.dtype}, {rounds} rounds"
    if options.cpu_time:
        title += ", CPU time of one thread"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    columns = [
        "",
        "ms",
        "images/s",
        "of products",
        "of limit",
        "x plain",
        "x timm",
        "x normal",
        "TFLOP/s",
        "activations MB",
        "compiled in s",
    ]
    for column in columns + (["of the rate", "peak MB"] if on_gpu else []):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for contestant, values in rates.items():
        entry, per_s = field.found[contestant], statistics.median(values)
        kind, _, how = contestant.partition(", ")
        against = {
            other: ", ".join(filter(None, (other, how)))
            for other in ("timm", "normal")
            if kind == "ours"
        }
        row = [
            contestant,
            f"{1000 / per_s:,.1f}",
            f"{batch * per_s:,.0f}" if contestant != SQUARE else "",
        ]
        row += [
            f"{ratio(rates, contestant, of):.1%}" if contestant != SQUARE else ""
            for of in (PRODUCTS, LIMIT)
        ]
        row += [f"{ratio(rates, contestant, 'plain'):.2f}" if entry.activations else ""]
        row += [
            f"{ratio(rates, contestant, each):.2f}" if each in rates else ""
            for each in against.values()
        ] or ["", ""]
        row += [
            f"{entry.flops * per_s / 1e12:.3g}",
            f"{entry.activations / 1e6:,.1f}" if entry.activations else "",
        ]
        row += [f"{entry.compiled_in_s:.1f}" if entry.compiled_in_s else ""]
        if on_gpu:
            rate = field.found[SQUARE].flops
            row += [
                f"{ratio(rates, contestant, SQUARE) * entry.flops / rate:.1%}",
                f"{entry.peak / 1e6:,.0f}",
            ]
        table.add_row(*row)
    Console(width=132).print(table)
    ours = "ours, compiled" if "ours, compiled" in rates else "ours"
    keep({f"{name}: of products": ratio(rates, ours, PRODUCTS)})
    if "timm, compiled" in rates:
        keep({f"{name}: compiled of timm": ratio(rates, ours, "timm, compiled")})


def arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--only", default="", help="some of " + ", ".join(MODELS))
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="bfloat16 on a GPU, else float32",
    )
    parser.add_argument("--batch", type=int)
    parser.add_argument(
        "--mode", default="default", help="of torch.compile, for ours and timm's alike"
    )
    parser.add_argument(
        "--compile", choices=("whole", "blocks", "no"), help="default: whole on a GPU, else blocks"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of one thread")
    options = parser.parse_args()
    options.dtype = options.dtype or (
        "bfloat16" if options.device.startswith("cuda") else "float32"
    )
    options.compile = options.compile or (
        "whole" if options.device.startswith("cuda") else "blocks"
    )
    if options.cpu_time:
        options.threads = 1
    return options


def main() -> None:
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = options.device.startswith("cuda")
    if not on_gpu:
        # as training does; or who comes after whom would decide who pays for pages
        keep_freed_memory()
    names = options.only.split(",") if options.only else list(MODELS)
    if not options.only:
        names = sized(
            options,
            full=names,
            quick=["mlp_b12_wi1024", "mixer_ss_w", "rp_mixer_ss_w"],
            dry=["smixer_c32"],
        )
    for name in names:
        batch = options.batch or (MODELS[name].gpu if on_gpu else MODELS[name].cpu)
        torch.compiler.reset()
        field = contestants(name, options, batch=batch)
        rates = field.rates(
            rounds=options.rounds or sized(options, full=7, quick=3, dry=1),
            repeats=10 if on_gpu else 1,
        )
        show(name, field, rates, batch=batch, options=options)
        del field
    print(
        f"{machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, commit"
        f" {commit()}"
    )
    print(f"load {os.getloadavg()[0]:.1f}, compiled: {options.compile}, mode {options.mode}")


if __name__ == "__main__":
    main()
