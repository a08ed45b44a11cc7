"""Forward and backward passes, compared with bare matrix products, plain code, and timm.

    .venv/bin/python benchmarks/models.py [--quick] [--only mixer_b_w,...] [--batch N]
                                          [--compile MODE] [--rounds N] [--cpu-time]

Each contestant takes a step on one batch: forward, and backward to all weights but not to the
images. It runs in fp32 on a CPU and in bf16 on a GPU.

  products      the same matrix products on prepared tensors, without other operations
  products, 8   these products with every size padded to a multiple of 8, as in pretrain/models/layers/linear.py
  plain         a direct translation of the paper's formula, eager (models_peers.py)
  ours          our model, eager and compiled
  normal        an RP model without its permutations, eager and compiled
  timm          timm's MlpMixer of the same shapes (if possible), eager and compiled

`--compile blocks`, the default on a CPU, compiles each block separately, because compiling is slow
and equal blocks share one graph. `kept` counts the bytes that a forward pass keeps for the backward
pass, without weights and images. --cpu-time counts CPU seconds of one thread instead of wall time.
Use --cpu-time if other processes use the same cores.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from frame import Rates, add_sizes, keep, print_table, rates, ratio, repeated, sized
from models_peers import Product, bare_products, plain, products_of, timm_mixer
from torch import Tensor, nn

from pretrain.engine.step import keep_freed_memory
from pretrain.models.build import build_model
from pretrain.models.layers.linear import aligned
from pretrain.models.presets import preset, spec_of
from pretrain.models.spec import MixerSpec

PRODUCTS, LIMIT = "products", "products, 8"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TIMES = 10 if ON_GPU else 1
"""Number of steps of a contestant in each round."""


@dataclass(frozen=True)
class Size:
    """Batch size on a CPU and on a GPU, and number of classes (default: from the preset)."""

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


def step(model: nn.Module, images: Tensor) -> None:
    for weight in model.parameters():
        weight.grad = None
    model(images).sum().backward()


def kept_bytes(model: nn.Module, images: Tensor) -> int:
    """Return the bytes of all storages that autograd saves for the backward pass."""
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
        _logits = model(images)  # held, because a new tensor could get a freed address
    return sum(sizes.values())


class Contestants:
    def __init__(self, name: str, options: argparse.Namespace, *, batch: int):
        spec, size = spec_of(name), preset(name).image_size
        shapes = {
            "num_classes": MODELS[name].num_classes or preset(name).num_classes,
            "image_size": size,
        }
        self.images = torch.randn(batch, 3, size, size, device=DEVICE, dtype=DTYPE)
        self.kept: dict[str, int] = {}
        model = build_model(spec, **shapes, seed=0).to(DEVICE, DTYPE)
        products = products_of(model, self.images)
        filled = [
            Product(each.rows, aligned(each.inputs), aligned(each.outputs)) for each in products
        ]
        self.steps = {
            PRODUCTS: repeated(bare_products(products, like=self.images), times=TIMES),
            LIMIT: repeated(bare_products(filled, like=self.images), times=TIMES),
        }
        self._add("plain", lambda: plain(spec, **shapes), compiled="no")
        self._add("ours", lambda: build_model(spec, **shapes, seed=0), compiled=options.compile)
        if isinstance(spec, MixerSpec) and spec.permuted_blocks:
            normal = spec.model_copy(update={"permuted_blocks": ()})
            self._add(
                "normal", lambda: build_model(normal, **shapes, seed=0), compiled=options.compile
            )
        if timm_mixer(spec, **shapes) is not None:
            self._add("timm", lambda: timm_mixer(spec, **shapes), compiled=options.compile)

    def _add(self, name: str, make: Callable[[], nn.Module], *, compiled: str) -> None:
        """Add a model as two contestants: eager and compiled."""
        for is_compiled in (False, True) if compiled != "no" else (False,):
            model = make().to(DEVICE, DTYPE).train()
            if is_compiled:
                torch._dynamo.reset_code_caches()  # otherwise graphs of another contestant are reused
                for part in model.blocks if compiled == "blocks" else [model]:
                    part.compile()
            label = f"{name}, compiled" if is_compiled else name
            step(model, self.images)
            self.kept[label] = kept_bytes(model, self.images)
            self.steps[label] = repeated(lambda model=model: step(model, self.images), times=TIMES)


def show(name: str, found: Rates, kept: dict[str, int], options: argparse.Namespace) -> None:
    rows = []
    for contestant, values in found.items():
        kind, _, how = contestant.partition(", ")
        peers = [", ".join(filter(None, (peer, how))) for peer in ("timm", "normal")]
        against = [PRODUCTS, LIMIT, *(("plain", *peers) if kind == "ours" else ("", "", ""))]
        rows.append(
            (
                contestant,
                f"{1000 / statistics.median(values):,.1f}",
                *(f"{ratio(found, contestant, of):.2f}" if of in found else "" for of in against),
                f"{kept[contestant] / 1e6:,.1f}" if contestant in kept else "",
            )
        )
    clock = ", CPU time of one thread" if options.cpu_time else ""
    title = f"{name}, {DTYPE}, {len(found[LIMIT])} rounds, compiled: {options.compile}{clock}"
    columns = ("", "ms", f"x {PRODUCTS}", f"x {LIMIT}", "x plain", "x timm", "x normal", "kept MB")
    print_table(title, columns, rows)
    ours = "ours, compiled" if "ours, compiled" in found else "ours"
    keep({f"{name}: of products": ratio(found, ours, PRODUCTS)})
    if "timm, compiled" in found:
        keep({f"{name}: compiled of timm": ratio(found, ours, "timm, compiled")})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--only", default="", help="models from " + ", ".join(MODELS))
    parser.add_argument("--batch", type=int)
    parser.add_argument(
        "--compile",
        choices=("whole", "blocks", "no"),
        default="whole" if ON_GPU else "blocks",
        help="default: `whole` on a GPU, otherwise `blocks`",
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of one thread")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.cpu_time:
        torch.set_num_threads(1)
    if not ON_GPU:
        keep_freed_memory()  # as in training; otherwise page faults depend on the order
    quick = ["mlp_b12_wi1024", "mixer_ss_w", "rp_mixer_ss_w"]
    names = sized(options, full=list(MODELS), quick=quick, dry=["smixer_c32"])
    for name in options.only.split(",") if options.only else names:
        batch = options.batch or (MODELS[name].gpu if ON_GPU else MODELS[name].cpu)
        torch.compiler.reset()
        contestants = Contestants(name, options, batch=batch)
        found = rates(
            contestants.steps,
            rounds=options.rounds or sized(options, full=7, quick=3, dry=1),
            clock=time.process_time if options.cpu_time else time.perf_counter,
        )
        show(f"{name}, batch {batch:,}", found, contestants.kept, options)
        del contestants


if __name__ == "__main__":
    main()
