"""Time and memory of a square SW-MLP layer, masked and sparse, over density and width.

    .venv/bin/python benchmarks/sparse.py [--quick]

Time is for forward and backward of one layer at batch 128, fp32, two threads, with gradients of
input, weights and bias. The time of the masked layer does not depend on the density.
Memory is for training with Lion: weights, gradient and one state in fp32. A masked layer adds the
mask as bytes, and the product of weights and mask for the backward pass. A sparse layer adds the
pattern and its transpose as int32. AdamW has one more state. Both layers keep the same activations.
"""

import statistics
import time
from collections.abc import Callable

import torch
from frame import arguments, print_table, rates, ratio, sized
from torch import nn

from pretrain.models.layers.sparse import MaskedLinear, SparseLinear
from pretrain.models.spec import SparseMlpSpec

BATCH = 128
DENSITIES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)


def steps_of(layer: nn.Module, width: int) -> Callable[[], float]:
    """Return a function that takes training steps for 50 ms and returns their number."""
    x_BN, gradient_BM = torch.randn(BATCH, width, requires_grad=True), torch.randn(BATCH, width)

    def run() -> float:
        began_s, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began_s < 0.05:
            layer.zero_grad()
            x_BN.grad = None
            layer(x_BN).backward(gradient_BM)
            count += 1
        return count

    return run


def kept_bytes(layer: nn.Module) -> int:
    """Return the bytes of weights, gradient, Lion's state and buffers. For a masked layer, add the
    product of weights and mask for the backward pass."""
    size = sum(3 * tensor.nbytes for tensor in layer.parameters())
    size += sum(tensor.nbytes for tensor in layer.buffers())
    return size + (layer.weight.nbytes if isinstance(layer, MaskedLinear) else 0)


def compare(width: int, densities: tuple[float, ...], *, rounds: int) -> list[tuple[str, ...]]:
    words = {"num_outputs": width, "variance": 1 / width}
    masked = MaskedLinear(width, density=0.5, **words)
    layers = {density: SparseLinear(width, density=density, **words) for density in densities}
    contestants = {"masked": steps_of(masked, width)}
    contestants |= {f"{density}": steps_of(layer, width) for density, layer in layers.items()}
    found = rates(contestants, rounds=rounds)
    masked_ms = 1000 / statistics.median(found["masked"])
    rows = []
    for density, layer in layers.items():
        times = ratio(found, f"{density}", "masked")
        numbers = (masked_ms, masked_ms / times, kept_bytes(masked) / 1e6, kept_bytes(layer) / 1e6)
        auto = SparseMlpSpec(kind="sw_mlp", density=density).is_sparse
        rows.append(
            (
                f"{width:,}",
                f"{density:g}",
                *(f"{number:,.2f}" for number in numbers),
                f"{times:.2f} x",
                f"{kept_bytes(masked) / kept_bytes(layer):.2f} x",
                "sparse" if auto else "masked",
            )
        )
    return rows


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(2)
    torch.manual_seed(0)
    densities = sized(options, full=DENSITIES, quick=DENSITIES[::3], dry=DENSITIES[:1])
    widths = sized(options, full=(540, 724, 935, 1619, 4096), quick=(540, 1619, 4096), dry=(540,))
    rounds, rows = sized(options, full=5, quick=3, dry=1), []
    for width in widths:
        rows += compare(width, densities, rounds=rounds)
    if not options.quick and not options.dry_run:  # above 0.1, patterns take gigabytes
        rows += compare(16384, tuple(each for each in DENSITIES if each <= 0.1), rounds=3)
    columns = ("width", "density", "masked ms", "sparse ms", "masked MB", "sparse MB", "faster")
    print_table(f"forward + backward, batch {BATCH}", (*columns, "smaller", "auto"), rows)


if __name__ == "__main__":
    main()
