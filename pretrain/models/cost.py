"""What a model costs, by closed formulas on its spec: parameters, multiply-adds, buffers, connections.

There is no torch here and nothing is built: `pretrain models` answers at once, and a SW-MLP of width 150,528 has a cost, too. Tests
hold the formulas to the built modules and to torch's FlopCounterMode.
"""

from typing import TYPE_CHECKING

from pretrain.models.baseline_cost import NUM_FEATURES, body_cost
from pretrain.models.cost_parts import (
    Cost,
    batch_norm,
    block_diagonal,
    layer_norm,
    linear,
    masked_linear,
    permutation,
    sparse_linear,
)
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, StructuredMlpSpec, TimmSpec

if TYPE_CHECKING:
    from torch import nn


def cost_of(spec: AnySpec, *, num_classes: int, image_size: int) -> Cost:
    spec.check(image_size=image_size)
    match spec:
        case MlpSpec():
            body, num_features = _mlp(spec, image_size=image_size), spec.width
        case MixerSpec():
            body, num_features = _mixer(spec, image_size=image_size), spec.num_channels
        case SparseMlpSpec():
            body, num_features = _sparse_mlp(spec, image_size=image_size), spec.width_at(image_size=image_size)
        case StructuredMlpSpec():
            body, num_features = _structured(spec, image_size=image_size), spec.num_rows * spec.num_columns
        case TimmSpec():
            body, num_features = body_cost(spec.name, image_size=image_size), NUM_FEATURES[spec.name]
    return body + linear(num_features, num_classes)


def forward_flops(spec: AnySpec, *, num_classes: int, image_size: int) -> int:
    """Floating-point operations of one image's forward pass, two per multiply-add."""
    return cost_of(spec, num_classes=num_classes, image_size=image_size).flops


def num_parameters(model: "nn.Module") -> int:
    """Of a built model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _mlp(spec: MlpSpec, *, image_size: int) -> Cost:
    width, hidden = spec.width, spec.hidden_width
    norm = {"layer": layer_norm(width), "batch": batch_norm(width), "none": Cost()}[spec.norm]
    mixing = linear(width, hidden) + linear(hidden, width) if spec.bottleneck == "inverted" else linear(width, width)
    return linear(3 * image_size**2, width) + (norm + mixing) * spec.depth


def _mixer(spec: MixerSpec, *, image_size: int) -> Cost:
    num_patches, tokens = spec.num_patches(image_size=image_size), spec.tokens(image_size=image_size)
    channels = spec.num_channels
    total = linear(3 * spec.patch_size**2, channels, rows=num_patches) + layer_norm(channels, rows=tokens)
    for block in range(spec.depth):
        inputs = tokens if block else num_patches
        across_tokens, across_channels = _mixings(spec, num_inputs=inputs, num_tokens=tokens)
        total += layer_norm(channels, rows=inputs) + across_tokens + layer_norm(channels, rows=tokens) + across_channels
        if block == 0 and spec.num_tokens is not None:
            total += linear(num_patches, tokens, rows=channels, bias=False) + layer_norm(channels, rows=tokens)
        if spec.is_permuted(block):
            total += permutation(inputs * channels) + permutation(tokens * channels) * 3
    return total


def _mixings(spec: MixerSpec, *, num_inputs: int, num_tokens: int) -> tuple[Cost, Cost]:
    """(across tokens, across channels)"""
    channels = spec.num_channels
    if spec.layers_per_mixing == 1:
        return linear(num_inputs, num_tokens, rows=channels), linear(channels, channels, rows=num_tokens)
    token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=num_tokens)
    return (
        linear(num_inputs, token_hidden, rows=channels) + linear(token_hidden, num_tokens, rows=channels),
        linear(channels, channel_hidden, rows=num_tokens) + linear(channel_hidden, channels, rows=num_tokens),
    )


def _sparse_mlp(spec: SparseMlpSpec, *, image_size: int) -> Cost:
    num_patches, width = (image_size // spec.patch_size) ** 2, spec.width_at(image_size=image_size)
    total = linear(3 * spec.patch_size**2, spec.num_channels, rows=num_patches)
    if num_patches * spec.num_channels != width:
        total += linear(num_patches * spec.num_channels, width)
    hidden = spec.hidden_width(width)
    shapes = [(width, width)] if spec.expansion is None else [(width, hidden), (hidden, width)]
    matrix = sparse_linear if spec.is_sparse else masked_linear
    for num_inputs, num_outputs in shapes:
        total += matrix(num_inputs, num_outputs, density=spec.density) * spec.depth
    return total + layer_norm(width) * (spec.depth + 1)


def _structured(spec: StructuredMlpSpec, *, image_size: int) -> Cost:
    """x (H rows of W entries) -> B1 -> act -> B2; no biases in either."""
    rows, columns = spec.num_rows, spec.num_columns
    length = image_size if spec.greyscale else 3 * image_size
    first, second = (image_size, length), (rows, columns)
    if spec.form == "monarch":
        # Every row is mixed by a matrix of its own, then every column of what came of it.
        matrices = [
            block_diagonal(height, width, columns) + block_diagonal(columns, height, rows)
            for height, width in (first, second)
        ]
    else:
        matrices = [
            linear(width, columns, rows=height, bias=False) + linear(height, rows, rows=columns, bias=False)
            for height, width in (first, second)
        ]
    return matrices[0] + matrices[1]
