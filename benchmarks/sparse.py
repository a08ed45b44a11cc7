"""A square layer of an SW-MLP as a masked dense matrix and as a sparse one: time and memory, over
density and width.

    .venv/bin/python benchmarks/sparse.py [--quick] [--cpu-time]

Time: forward and backward of one layer at batch 128, fp32, gradients of input, weights and bias;
the masked layer's does not depend on the density. Two threads and wall time; --cpu-time: CPU
seconds of one thread, which is fair where others use the same cores. Memory: what training with
Lion keeps per layer (weights, gradient and one state in fp32; the mask as bytes, or the pattern and
its transpose as int32), and for a masked layer the product of weights and mask, which its backward
pass needs. AdamW has one more state. Activations are the same for both. A ratio is a median over
rounds of the ratio within a round.
"""

import argparse
import time
from collections.abc import Callable

import torch
from frame import add_sizes, commit, machine, ratio, sized
from rich.console import Console
from rich.table import Table
from torch import nn

from pretrain.models.layers.sparse import MaskedLinear, SparseLinear
from pretrain.models.spec import SparseMlpSpec

BATCH = 128
DENSITIES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)


def steps_of(layer: nn.Module, width: int, clock: Callable[[], float]) -> Callable[[], float]:
    """A measurement: steps per second, over as many as take a twentieth of a second."""
    x_BN, gradient_BM = torch.randn(BATCH, width, requires_grad=True), torch.randn(BATCH, width)

    def rate() -> float:
        began_s, count = clock(), 0
        while count == 0 or clock() - began_s < 0.05:
            layer.zero_grad()
            x_BN.grad = None
            layer(x_BN).backward(gradient_BM)
            count += 1
        return count / (clock() - began_s)

    return rate


def kept_bytes(layer: nn.Module) -> int:
    """Weights, gradient and Lion's state, buffers, and the product that a masked layer's backward
    pass needs."""
    size = sum(3 * tensor.nbytes for tensor in layer.parameters()) + sum(
        tensor.nbytes for tensor in layer.buffers()
    )
    return size + (layer.weight.nbytes if isinstance(layer, MaskedLinear) else 0)


def compare(
    width: int,
    densities: tuple[float, ...],
    *,
    rounds: int,
    clock: Callable[[], float],
    table: Table,
) -> None:
    masked = MaskedLinear(width, num_outputs=width, density=0.5, variance=1 / width)
    layers = {
        density: SparseLinear(width, num_outputs=width, density=density, variance=1 / width)
        for density in densities
    }
    measurements = {"masked": steps_of(masked, width, clock)}
    measurements |= {
        f"{density}": steps_of(layer, width, clock) for density, layer in layers.items()
    }
    found: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(rounds + 1):
        for name, measure in measurements.items():
            rate = measure()
            if number:  # the first is a warm-up
                found[name].append(rate)
    masked_ms = 1000 / sorted(found["masked"])[rounds // 2]
    for density, layer in layers.items():
        times = ratio(found, f"{density}", "masked")
        table.add_row(
            f"{width:,}",
            f"{density:g}",
            f"{masked_ms:,.2f}",
            f"{masked_ms / times:,.2f}",
            f"{times:.2f}x",
            f"{kept_bytes(masked) / 1e6:,.1f}",
            f"{kept_bytes(layer) / 1e6:,.1f}",
            f"{kept_bytes(masked) / kept_bytes(layer):.2f}x",
            "sparse" if SparseMlpSpec(kind="sw_mlp", density=density).is_sparse else "masked",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of one thread")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else 2)
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.manual_seed(0)
    kind = "CPU time of 1 thread" if options.cpu_time else "2 threads"
    table = Table(
        title=f"forward + backward, batch {BATCH}, {kind}", title_justify="left", box=None
    )
    for column in (
        "width",
        "density",
        "masked ms",
        "sparse ms",
        "faster",
        "masked MB",
        "sparse MB",
        "smaller",
        "auto",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    densities = sized(options, full=DENSITIES, quick=DENSITIES[::3], dry=DENSITIES[:1])
    for width in sized(
        options, full=(540, 724, 935, 1619, 4096), quick=(540, 1619, 4096), dry=(540,)
    ):
        compare(
            width,
            densities,
            rounds=sized(options, full=5, quick=3, dry=1),
            clock=clock,
            table=table,
        )
    if (
        not options.quick and not options.dry_run
    ):  # beyond 0.1 the patterns alone would take gigabytes
        compare(
            16384,
            tuple(each for each in DENSITIES if each <= 0.1),
            rounds=3,
            clock=clock,
            table=table,
        )
    Console(width=120).print(table)
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
