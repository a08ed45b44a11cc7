"""The parts whose sum is a model's cost: one matrix, one norm, one permutation, as plain integers (no torch here).

A multiply-add is one multiplication and one addition; papers print multiply-adds as "FLOPs", here each is called what it is.
Counted are matrix products, convolutions and attention, as torch's FlopCounterMode counts them.
"""

from dataclasses import dataclass, fields

_FLOAT_BYTES = 4
_INDEX_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Of one image's forward pass."""

    num_parameters: int = 0
    multiply_adds: int = 0
    norm_operations: int = 0
    """5 per entry of a layer norm, 2 per entry of a batch norm in evaluation: what fvcore's FlopCountAnalysis, with which paper B
    counted, has on top of the multiply-adds."""
    buffer_bytes: int = 0
    """Masks, indices, permutations with their inverses, statistics of batch norms: in memory, not all of it in a checkpoint."""
    connections: int = 0
    """Multiply-adds by a weight that may differ from zero: for a masked matrix the expected number."""

    @property
    def flops(self) -> int:
        return 2 * self.multiply_adds

    @property
    def printed_flops(self) -> int:
        """As paper B counted them."""
        return self.multiply_adds + self.norm_operations

    @property
    def weight_bytes(self) -> int:
        """In float32."""
        return _FLOAT_BYTES * self.num_parameters

    def __add__(self, other: "Cost") -> "Cost":
        names = [field.name for field in fields(self)]
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __mul__(self, times: int) -> "Cost":
        return Cost(**{field.name: getattr(self, field.name) * times for field in fields(self)})


def linear(num_inputs: int, num_outputs: int, *, rows: int = 1, bias: bool = True) -> Cost:
    """One matrix, applied to `rows` vectors of an image."""
    products = rows * num_inputs * num_outputs
    return Cost(
        num_parameters=num_inputs * num_outputs + (num_outputs if bias else 0),
        multiply_adds=products,
        connections=products,
    )


def block_diagonal(num_blocks: int, num_inputs: int, num_outputs: int) -> Cost:
    """`num_blocks` different matrices side by side, without biases."""
    return linear(num_inputs, num_outputs, bias=False) * num_blocks


def layer_norm(size: int, *, rows: int = 1) -> Cost:
    return Cost(num_parameters=2 * size, norm_operations=5 * rows * size)


def batch_norm(size: int, *, rows: int = 1) -> Cost:
    """Statistics in float32 and a step count of 8 bytes."""
    return Cost(num_parameters=2 * size, norm_operations=2 * rows * size, buffer_bytes=2 * _FLOAT_BYTES * size + 8)


def permutation(size: int) -> Cost:
    """An index and its inverse."""
    return Cost(buffer_bytes=2 * _INDEX_BYTES * size)


def masked_linear(num_inputs: int, num_outputs: int, *, density: float) -> Cost:
    """A dense matrix times a mask of a byte per entry, and a bias."""
    size = num_inputs * num_outputs
    return Cost(
        num_parameters=size + num_outputs,
        multiply_adds=size,
        buffer_bytes=size,
        connections=round(density * size),
    )


def sparse_linear(num_inputs: int, num_outputs: int, *, density: float) -> Cost:
    """As many connections as are expected, and a bias. Buffers: compressed rows of the matrix, and of its transpose with the
    order of its values."""
    connections = round(density * num_inputs * num_outputs)
    return Cost(
        num_parameters=connections + num_outputs,
        multiply_adds=connections,
        buffer_bytes=_INDEX_BYTES * (3 * connections + num_inputs + num_outputs + 2),
        connections=connections,
    )
