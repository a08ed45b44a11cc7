"""Cost of a model: parameters, MACs, effective width and connections per layer.

The formulas need no torch, so `pretrain models` and `pretrain estimate` print at once. The costs of
timm's models are constants at the paper's image sizes; torch counts the costs at other sizes.

The letters are from the Mixer paper: S tokens, C channels, m = S C. gamma is the hidden width of a
mixing layer as a multiple of its input width (1 for an S-Mixer, which has no hidden layer). p is
the density of a SW-MLP.

A mixing layer is a sparse m x gamma m matrix. For token mixing, the matrix has C copies of a gamma
S x S matrix. For channel mixing, it has S copies of a gamma C x C matrix. Omega is the mean number
of entries of both matrices. Computed sizes are rounded to the nearest integer, as in the paper.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from pretrain.models.spec import (
    AnySpec,
    ImportSpec,
    MixerSpec,
    MlpSpec,
    SparseMlpSpec,
    StructuredMlpSpec,
    TimmModelSpec,
    TimmSpec,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Cost:
    """Cost of one image's forward pass. MACs include only matrix products, convolutions and
    attention, as in torch's FlopCounterMode."""

    num_parameters: int = 0
    multiply_adds: int = 0
    """Number of MACs. Papers call a MAC a "FLOP"."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.num_parameters + other.num_parameters, self.multiply_adds + other.multiply_adds
        )

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.num_parameters * times, self.multiply_adds * times)


TIMM_COSTS = {
    "resnet152_64": (64, Cost(58_143_808, 13_021_670_144), 2048),
    "resnet18_224": (224, Cost(11_176_512, 1_813_561_344), 512),
    "resnet18_32": (32, Cost(11_168_832, 555_417_600), 512),
    "vit_b_4": (64, Cost(85_291_776, 23_055_058_944), 768),
}
"""Image size in the paper, cost without the head at this size, and number of features, by model
name."""


def cost_of(spec: AnySpec, *, num_classes: int, image_size: int) -> Cost:
    """Return the cost, or zeros for a TimmModelSpec or ImportSpec, because their cost is
    unknown."""
    if isinstance(spec, TimmModelSpec | ImportSpec):
        return Cost()
    stem, blocks, num_features = _parts(spec, image_size=image_size)
    return stem + blocks + _linear(num_features, num_classes)


def num_block_parameters(spec: AnySpec, *, image_size: int) -> int:
    return _parts(spec, image_size=image_size)[1].num_parameters


def num_features_of(spec: AnySpec, *, image_size: int) -> int:
    return _parts(spec, image_size=image_size)[2]


def _parts(spec: AnySpec, *, image_size: int) -> tuple[Cost, Cost, int]:
    """Return the costs of stem and blocks, and the number of features. For timm and structured
    models, the complete cost is in the blocks."""
    spec.check(image_size=image_size)
    match spec:
        case MlpSpec():
            return _linear(3 * image_size**2, spec.width, bias=spec.bias), _mlp(spec), spec.width
        case MixerSpec():
            return *_mixer(spec, image_size=image_size), spec.num_channels
        case SparseMlpSpec():
            return *_sparse_mlp(spec, image_size=image_size), spec.width_at(image_size=image_size)
        case StructuredMlpSpec():
            return (
                Cost(),
                _structured(spec, image_size=image_size),
                spec.num_rows * spec.num_columns,
            )
        case TimmSpec():
            size, cost, num_features = TIMM_COSTS[spec.name]
            return (
                Cost(),
                cost if image_size == size else count_cost(spec, image_size=image_size),
                num_features,
            )
        case TimmModelSpec():
            return Cost(), Cost(), spec.num_features
        case ImportSpec():
            return Cost(), Cost(), 0  # unknown before the model is built


def forward_flops(spec: AnySpec, *, num_classes: int, image_size: int) -> int:
    """Return the floating-point operations of one image's forward pass, two per MAC."""
    return 2 * cost_of(spec, num_classes=num_classes, image_size=image_size).multiply_adds


def training_flops(spec: AnySpec, *, num_classes: int, image_size: int) -> int:
    """Return the floating-point operations of one image's forward and backward pass. The backward
    pass costs twice the forward pass, minus the gradient of the image. (For structured and timm
    models, this small gradient is included.)"""
    match spec:
        case MlpSpec():
            first = spec.width
        case MixerSpec() | SparseMlpSpec():
            first = spec.num_channels
        case _:
            first = 0
    return (
        3 * forward_flops(spec, num_classes=num_classes, image_size=image_size)
        - 2 * first * 3 * image_size**2
    )


def num_parameters(model: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _linear(num_inputs: int, num_outputs: int, *, rows: int = 1, bias: bool = True) -> Cost:
    """Return the cost of applying one matrix to `rows` vectors of an image."""
    size = num_inputs * num_outputs
    return Cost(size + (num_outputs if bias else 0), rows * size)


def _norm(size: int) -> Cost:
    return Cost(num_parameters=2 * size)


def _mlp(spec: MlpSpec) -> Cost:
    width, hidden = spec.width, spec.hidden_width
    norm = Cost() if spec.norm == "none" else _norm(width)
    linear = partial(_linear, bias=spec.bias)
    mixing = (
        linear(width, hidden) + linear(hidden, width)
        if spec.bottleneck == "inverted"
        else linear(width, width)
    )
    return (norm + mixing) * spec.depth


def _mixer(spec: MixerSpec, *, image_size: int) -> tuple[Cost, Cost]:
    num_patches = spec.num_patches(image_size=image_size)
    tokens = spec.tokens(image_size=image_size)
    channels = spec.num_channels
    token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=tokens)
    linear = partial(_linear, bias=spec.bias)
    total = _norm(channels) * (spec.final_norm + 2 * spec.depth)
    for block in range(spec.depth):
        inputs = tokens if block else num_patches
        if spec.layers_per_mixing == 1:
            total += linear(inputs, tokens, rows=channels) + linear(channels, channels, rows=tokens)
        else:
            total += linear(inputs, token_hidden, rows=channels) + linear(
                token_hidden, tokens, rows=channels
            )
            total += linear(channels, channel_hidden, rows=tokens) + linear(
                channel_hidden, channels, rows=tokens
            )
    if spec.num_tokens is not None:  # the first block's skip path
        total += _linear(num_patches, tokens, rows=channels, bias=False) + _norm(channels)
    return linear(3 * spec.patch_size**2, channels, rows=num_patches), total


def _sparse_mlp(spec: SparseMlpSpec, *, image_size: int) -> tuple[Cost, Cost]:
    """Return the costs of stem and blocks, with the expected number of connections. The layer from
    S0 C to m entries belongs to the stem."""

    def sparse(num_inputs: int, num_outputs: int) -> Cost:
        size = num_inputs * num_outputs
        weights = round(spec.density * size) if spec.is_sparse else size
        return Cost(weights + num_outputs * spec.bias, weights)

    num_patches, width = (image_size // spec.patch_size) ** 2, spec.width_at(image_size=image_size)
    stem = _linear(3 * spec.patch_size**2, spec.num_channels, rows=num_patches, bias=spec.bias)
    norms = _norm(width) * (spec.depth + spec.final_norm)
    entries = num_patches * spec.num_channels
    if entries != width:
        stem += (
            sparse(entries, width)
            if spec.widen == "sparse"
            else _linear(entries, width, bias=spec.bias)
        )
    if spec.expansion is None:
        return stem, norms + sparse(width, width) * spec.depth
    hidden = spec.hidden_width(width)
    return stem, norms + (sparse(width, hidden) + sparse(hidden, width)) * spec.depth


def _structured(spec: StructuredMlpSpec, *, image_size: int) -> Cost:
    """Return the cost of x (H rows of W entries) -> B1 -> act -> B2, without biases."""
    rows, columns = spec.num_rows, spec.num_columns
    total = Cost()
    for height, width in (
        (image_size, image_size if spec.grayscale else 3 * image_size),
        (rows, columns),
    ):
        if spec.form == "monarch":  # one matrix per row, then one per column
            total += (
                _linear(width, columns, bias=False) * height
                + _linear(height, rows, bias=False) * columns
            )
        else:
            total += _linear(width, columns, rows=height, bias=False) + _linear(
                height, rows, rows=columns, bias=False
            )
    return total


def count_cost(spec: TimmSpec, *, image_size: int) -> Cost:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from pretrain.models.build import build_model

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build_model(spec, num_classes=0, image_size=image_size).eval()
        model(torch.empty(1, 3, image_size, image_size))
    return Cost(num_parameters(model), counter.get_total_flops() // 2)


def tokens_for(omega: float, *, num_channels: int, gamma: float = 1.0) -> int:
    """Return the tokens S of a Mixer with Omega connections per layer. S solves gamma (C S^2 + C^2
    S) / 2 = Omega, which is symmetric in S and C."""
    _check_positive(omega=omega, gamma=gamma, num_channels=num_channels)
    # (-C + sqrt(C^2 + d)) / 2 would lose all digits if C^2 is much larger than d
    d = 8 * omega / (gamma * num_channels)
    found = round(d / (2 * (num_channels + math.sqrt(num_channels**2 + d))))
    if found < 1:
        least = gamma * (num_channels + num_channels**2) / 2
        raise UserError(
            "num_channels",
            f"{num_channels} are too many for omega {omega:g} and gamma {gamma:g}",
            f"give fewer, or an omega of at least {math.ceil(least)}",
            code="bad-value",
        )
    return found


def widest_side(omega: float, *, gamma: float = 1.0) -> float:
    """Return C* = S* = (Omega / gamma)^(1/3), which maximizes the width m = S C."""
    _check_positive(omega=omega, gamma=gamma)
    return math.cbrt(omega / gamma)


def width_and_connections(spec: AnySpec, *, image_size: int) -> tuple[int | None, float | None]:
    """Return the width m, and Omega for the actual (rounded) hidden sizes. A value is None if the
    papers do not define it for the model.

    A first block that maps S0 to S tokens is treated like the other blocks. A mask has its expected
    number of connections.
    """
    match spec:
        case MlpSpec():
            return spec.width, float(
                spec.width * (spec.hidden_width if spec.bottleneck == "inverted" else spec.width)
            )
        case MixerSpec():
            tokens, channels = spec.tokens(image_size=image_size), spec.num_channels
            across = (
                (tokens, channels)
                if spec.layers_per_mixing == 1
                else spec.hidden_sizes(num_tokens=tokens)
            )
            return tokens * channels, tokens * channels * sum(across) / 2
        case SparseMlpSpec():
            width = spec.width_at(image_size=image_size)
            return width, spec.density * (spec.expansion or 1.0) * width**2
        case StructuredMlpSpec():
            return spec.num_rows * spec.num_columns, None
        case TimmSpec() | TimmModelSpec() | ImportSpec():
            return None, None


def _check_positive(**given: float) -> None:
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(
                name, f"{value} is not valid", "use a number greater than 0", code="bad-value"
            )
