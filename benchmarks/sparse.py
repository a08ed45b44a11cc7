"""A square layer of an SW-MLP as a masked dense matrix and as a sparse one: time and memory, over density and width.

    .venv/bin/python benchmarks/sparse.py [--quick]

Time: forward and backward of one layer at batch 128, fp32, gradients of input, weights and bias; the masked layer's does not depend
on the density. Memory: what training with Lion keeps per layer (weights, gradient and one state in fp32; the mask as bytes, or the
pattern and its transpose as int32), and for a masked layer the product of weights and mask, which its backward pass needs. AdamW
has one more state. Activations are the same for both. A ratio is a median over rounds of the ratio within a round.
"""

import time
from collections.abc import Callable

import torch
from frame import arguments, commit, machine, rates, ratio
from rich.console import Console
from rich.table import Table
from torch import nn

from pretrain.models.sparse_linear import MaskedLinear, SparseLinear, storage_for

BATCH = 128
DENSITIES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)


def steps_of(layer: nn.Module, width: int) -> Callable[[], float]:
    x_BN, gradient_BM = torch.randn(BATCH, width, requires_grad=True), torch.randn(BATCH, width)

    def steps() -> float:
        """As many as take a twentieth of a second, so that a pause of the machine is not all of a measurement."""
        began_s, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began_s < 0.05:
            layer.zero_grad()
            x_BN.grad = None
            layer(x_BN).backward(gradient_BM)
            count += 1
        return float(count)

    return steps


def kept_bytes(layer: nn.Module) -> int:
    """Weights, gradient and Lion's state, buffers, and the product that a masked layer's backward pass needs."""
    size = sum(3 * tensor.nbytes for tensor in layer.parameters()) + sum(tensor.nbytes for tensor in layer.buffers())
    return size + (layer.weight.nbytes if isinstance(layer, MaskedLinear) else 0)


def compare(width: int, densities: tuple[float, ...], *, rounds: int, table: Table) -> None:
    masked = MaskedLinear(width, num_outputs=width, density=0.5, variance=1 / width)
    layers = {
        density: SparseLinear(width, num_outputs=width, density=density, variance=1 / width) for density in densities
    }
    steps = {"masked": steps_of(masked, width)} | {f"{key}": steps_of(layer, width) for key, layer in layers.items()}
    found = rates(steps, rounds=rounds)
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
            storage_for(density),
        )


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(2)
    torch.manual_seed(0)
    table = Table(title=f"forward + backward, batch {BATCH}, {torch.get_num_threads()} threads", title_justify="left")
    for column in ("width", "density", "masked ms", "sparse ms", "faster", "masked MB", "sparse MB", "smaller", "auto"):
        table.add_column(column, justify="right", no_wrap=True)
    for width in (540, 1619, 4096) if options.quick else (540, 724, 935, 1619, 4096):
        compare(width, DENSITIES[::3] if options.quick else DENSITIES, rounds=3 if options.quick else 5, table=table)
    if not options.quick:
        compare(16384, tuple(density for density in DENSITIES if density <= 0.1), rounds=3, table=table)
    Console(width=120).print(table)
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
