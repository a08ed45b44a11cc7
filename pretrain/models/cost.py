"""What a model costs, by closed formulas on its spec: parameters, multiply-adds, effective width,
connections per layer.

There is no torch here and nothing is built: `pretrain models` answers at once, and a SW-MLP of
width 150,528 has a cost, too. Tests hold the formulas to the built modules and to torch's
FlopCounterMode.

Letters as in paper A: S tokens, C channels, m = S C; gamma the hidden width of a mixing as a
multiple of its input (an S-Mixer has nothing hidden: 1); p the density of a SW-MLP. A mixing layer
is a sparse m x gamma m matrix: C copies of a gamma S x S one across tokens, S copies of a gamma C x
C one across channels; Omega is the mean of both numbers of entries. The calculators return the
integer nearest to the real solution: that is how every pair that the paper prints came about.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from pretrain.models.spec import (
    AnySpec,
    MixerSpec,
    MlpSpec,
    SparseMlpSpec,
    StructuredMlpSpec,
    TimmModelSpec,
    TimmSpec,
)

if TYPE_CHECKING:
    from torch import nn

RESNET_STEM_PADDING = 0
"""Paper B says that the stem's stride and the max-pooling were removed, and prints 13.07 G. With
the stem's usual padding of 3 its counter gives 14.98 G; without padding (58 x 58 after the stem
instead of 64 x 64) 13.07 G: so that is what was counted."""


@dataclass(frozen=True)
class Cost:
    """Of one image's forward pass. Counted are matrix products, convolutions and attention, as
    torch's FlopCounterMode does."""

    num_parameters: int = 0
    multiply_adds: int = 0
    """A multiplication and an addition each; papers print them as "FLOPs"."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.num_parameters + other.num_parameters, self.multiply_adds + other.multiply_adds
        )

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.num_parameters * times, self.multiply_adds * times)


def cost_of(spec: AnySpec, *, num_classes: int, image_size: int) -> Cost:
    """Zeros for any other model of timm's, of which no formula is known here."""
    if isinstance(spec, TimmModelSpec):
        return Cost()
    stem, blocks, num_features = _parts(spec, image_size=image_size)
    return stem + blocks + _linear(num_features, num_classes)


def num_block_parameters(spec: AnySpec, *, image_size: int) -> int:
    """Without stem and head, whose sizes follow from the task alone."""
    return _parts(spec, image_size=image_size)[1].num_parameters


def num_features_of(spec: AnySpec, *, image_size: int) -> int:
    """That its classifier sees."""
    return _parts(spec, image_size=image_size)[2]


def _parts(spec: AnySpec, *, image_size: int) -> tuple[Cost, Cost, int]:
    """Stem, blocks, and how many features the head gets. Of models of others and structured ones
    all counts as blocks."""
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
        case TimmSpec(name="resnet152_64"):
            return Cost(), _resnet152(image_size), 2048
        case TimmSpec(name="resnet18_32"):
            return Cost(), _resnet18(image_size), 512
        case TimmSpec():
            return Cost(), _vit_b_4(image_size), 768
        case TimmModelSpec():
            return Cost(), Cost(), spec.num_features


def forward_flops(spec: AnySpec, *, num_classes: int, image_size: int) -> int:
    """Floating-point operations of one image's forward pass, two per multiply-add."""
    return 2 * cost_of(spec, num_classes=num_classes, image_size=image_size).multiply_adds


def training_flops(spec: AnySpec, *, num_classes: int, image_size: int) -> int:
    """Of one image's forward and backward pass, which is twice the forward, but for a product as
    large as the first one: nobody asks for the gradient of a picture. (Of structured models and
    timm's, where it is small, it is counted.)
    """
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
    """Of a built model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _linear(num_inputs: int, num_outputs: int, *, rows: int = 1, bias: bool = True) -> Cost:
    """One matrix, applied to `rows` vectors of an image."""
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
    num_patches, tokens = (
        spec.num_patches(image_size=image_size),
        spec.tokens(image_size=image_size),
    )
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
    """Of a sparse layer the expected number of connections. What makes m entries of S0 C is of the
    stem."""

    def sparse(num_inputs: int, num_outputs: int) -> Cost:
        size = num_inputs * num_outputs
        weights = round(spec.density * size) if spec.is_sparse else size
        return Cost(weights + num_outputs * spec.bias, weights)

    num_patches, width = (image_size // spec.patch_size) ** 2, spec.width_at(image_size=image_size)
    stem, norms = (
        _linear(3 * spec.patch_size**2, spec.num_channels, rows=num_patches, bias=spec.bias),
        _norm(width) * (spec.depth + 1),
    )
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
    """x (H rows of W entries) -> B1 -> act -> B2; no biases in either."""
    rows, columns = spec.num_rows, spec.num_columns
    total = Cost()
    for height, width in (
        (image_size, image_size if spec.greyscale else 3 * image_size),
        (rows, columns),
    ):
        if (
            spec.form == "monarch"
        ):  # every row is mixed by a matrix of its own, then every column of what came of it
            total += (
                _linear(width, columns, bias=False) * height
                + _linear(height, rows, bias=False) * columns
            )
        else:
            total += _linear(width, columns, rows=height, bias=False) + _linear(
                height, rows, rows=columns, bias=False
            )
    return total


def _convolution(num_inputs: int, num_outputs: int, *, size: int, kernel: int = 1) -> Cost:
    """With the batch norm that follows it; `size`: of the map that it makes."""
    return _linear(num_inputs * kernel**2, num_outputs, rows=size**2, bias=False) + _norm(
        num_outputs
    )


def _resnet152(image_size: int) -> Cost:
    """Bottlenecks of 1 x 1, 3 x 3 (which has the stride), 1 x 1; the first one of a stage has a 1 x
    1 skip path."""
    size, num_inputs = image_size + 2 * RESNET_STEM_PADDING - 6, 64
    total = _convolution(3, 64, size=size, kernel=7)
    for width, num_blocks, stride in ((64, 3, 1), (128, 8, 2), (256, 36, 2), (512, 3, 2)):
        for block in range(num_blocks):
            total += _convolution(num_inputs, width, size=size)
            if block == 0:
                size = (size - 1) // stride + 1
                total += _convolution(num_inputs, 4 * width, size=size)
            total += _convolution(width, width, size=size, kernel=3) + _convolution(
                width, 4 * width, size=size
            )
            num_inputs = 4 * width
    return total


def _resnet18(size: int) -> Cost:
    """Two 3 x 3 a block; the first block of a stage but the first has the stride, and a 1 x 1 skip
    path."""
    total, num_inputs = _convolution(3, 64, size=size, kernel=3), 64
    for width in (64, 128, 256, 512):
        if width != num_inputs:
            size = (size - 1) // 2 + 1
            total += _convolution(num_inputs, width, size=size)
        total += (
            _convolution(num_inputs, width, size=size, kernel=3)
            + _convolution(width, width, size=size, kernel=3) * 3
        )
        num_inputs = width
    return total


def _vit_b_4(image_size: int) -> Cost:
    width, num_patches = 768, (image_size // 4) ** 2
    tokens = num_patches + 1
    block = (
        _norm(width) * 2
        + _linear(width, 3 * width, rows=tokens)
        + Cost(multiply_adds=2 * tokens**2 * width)  # queries x keys, then weights x values
        + _linear(width, width, rows=tokens)
        + _linear(width, 4 * width, rows=tokens)
        + _linear(4 * width, width, rows=tokens)
    )
    embeddings = Cost(num_parameters=(tokens + 1) * width)  # of places, and the class token
    return _linear(3 * 16, width, rows=num_patches) + embeddings + block * 12 + _norm(width)


# ---- effective width and connections per layer
# -------------------------------------------------------------------------


def tokens_for(omega: float, *, num_channels: int, gamma: float = 1.0) -> int:
    """S of a mixer with so many channels and connections per layer: the positive root of gamma (C
    S^2 + C^2 S) / 2 = Omega. Omega is the same when S and C change places, so it is C of a mixer
    with so many tokens, too."""
    _check_positive(omega=omega, gamma=gamma, num_channels=num_channels)
    # Not (-C + sqrt(C^2 + d)) / 2, which loses all digits where C^2 is far greater than d.
    d = 8 * omega / (gamma * num_channels)
    found = round(d / (2 * (num_channels + math.sqrt(num_channels**2 + d))))
    if found < 1:
        least = gamma * (num_channels + num_channels**2) / 2
        raise UserError(
            "omega",
            f"{omega:g} is too small for num_channels {num_channels} with gamma {gamma:g}",
            f"give {math.ceil(least)} or more",
            code="bad-value",
        )
    return found


def widest_side(omega: float, *, gamma: float = 1.0) -> float:
    """C* = S* = (Omega / gamma)^(1/3): m = S C is the greatest where tokens and channels are as
    many."""
    _check_positive(omega=omega, gamma=gamma)
    return math.cbrt(omega / gamma)


def sparse_width(omega: float, *, density: float, gamma: float = 1.0) -> int:
    """m of a SW-MLP: Omega = p gamma m^2."""
    _check_positive(omega=omega, gamma=gamma, density=density)
    return max(1, round(math.sqrt(omega / (density * gamma))))


def width_and_connections(spec: AnySpec, *, image_size: int) -> tuple[int | None, float | None]:
    """m, and Omega of the blocks' matrices as they are built (hidden sizes rounded); None where the
    papers define none.

    A first block that makes S tokens of S0 counts like the others, and a mask's entries by their
    expected number.

    Mixer-B/16 with its hidden sizes 384 and 3072 has 260,112,384: the 2.6e8 that the paper's table
    prints. The table has 2.6e8 for Mixer-B-W, too, whose own gamma = 4.57 gives 2.9e8, and gamma =
    4 would give 2.54e8. The sweep over P is at 290,217,984: that of S = 196, C = 768 with gamma = 4
    for both mixings.
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
        case TimmSpec() | TimmModelSpec():
            return None, None


def _check_positive(**given: float) -> None:
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(
                name, f"{value} is not valid", "give a number greater than 0", code="bad-value"
            )
