"""Paper A's SW-MLP: an MLP whose matrices have each connection with probability p, as wide as a
Mixer's S C entries.

    stem      per-patch linear to C channels, then one vector of S0 C entries; where m differs, a linear to m, dense or sparse
    blocks    x + act((M * W) LN(x)), or with a hidden layer x + (M2 * W2) act((M1 * W1) LN(x)), gamma m wide
    head      norm, linear on all m entries

The paper prints the block. It does not print how S0 C entries become m, nor what stands between the
last block and the classes: both are ours. So are biases, which start at 0, as the Mixers have them.
Weights start as N(0, 1/(p m)), also those of the hidden form, so that of gamma m x m entries the
largest singular value is near sqrt(c^2 + 3 c^2 (1 - p) / (sqrt(gamma) p m)), where c = 1 +
sqrt(gamma), while p m is above some 30. The paper's L+ has sqrt(gamma) over q^2, which agrees at
gamma = 1; elsewhere it agrees if q^2 is read as p gamma m, and not as p m (measured, and only so
are a matrix and its transpose alike).

Shapes: B batch, S0 patches, C channels, M width, K classes.
"""  # noqa: E501 (a table)

from typing import Any

from torch import Tensor, nn

from pretrain.models.image_model import ImageModel, classifier
from pretrain.models.layers.linear import Linear
from pretrain.models.layers.sparse import MaskedLinear, SparseLinear, largest_singular_value
from pretrain.models.mixer import patches
from pretrain.models.mlp import Block, InvertedBlock, StandardBlock
from pretrain.models.spec import SparseMlpSpec


def _layer(
    spec: SparseMlpSpec, num_inputs: int, *, width: int, num_outputs: int
) -> MaskedLinear | SparseLinear:
    layer = SparseLinear if spec.is_sparse else MaskedLinear
    return layer(
        num_inputs,
        num_outputs=num_outputs,
        density=spec.density,
        variance=1 / (spec.density * width),
    )


def _block_layer(
    spec: SparseMlpSpec, num_inputs: int, *, width: int, num_outputs: int
) -> MaskedLinear | SparseLinear:
    layer = _layer(spec, num_inputs, width=width, num_outputs=num_outputs)
    if spec.init_gain == "spectral" and not layer.bias.is_meta:
        largest, weights = (
            largest_singular_value(layer.matrix()),
            layer.values if spec.is_sparse else layer.weight,
        )
        if largest:  # a matrix without connections stays one
            weights.data *= (num_inputs**0.5 + num_outputs**0.5) / width**0.5 / largest
    return layer


def _block(spec: SparseMlpSpec, width: int) -> Block:
    """x + act((M * W) LN(x)), or x + (M2 * W2) act((M1 * W1) LN(x)) with W1: m -> gamma m."""
    norm, common = (
        nn.LayerNorm(width),
        dict[str, Any](activation=spec.activation, dropout=spec.dropout),
    )
    if spec.expansion is None:
        return StandardBlock(
            norm, _block_layer(spec, width, width=width, num_outputs=width), **common
        )
    hidden = spec.hidden_width(width)
    expand, contract = (
        _block_layer(spec, num, width=width, num_outputs=out)
        for num, out in ((width, hidden), (hidden, width))
    )
    return InvertedBlock(norm, expand, contract, outer_activation=spec.outer_activation, **common)


class SparseMlp(ImageModel):
    def __init__(self, spec: SparseMlpSpec, *, num_classes: int, image_size: int):
        width = spec.width_at(image_size=image_size)
        super().__init__(num_features=width, num_classes=num_classes, pixels_per_place=image_size)
        self.patch_size = spec.patch_size
        num_entries = (image_size // spec.patch_size) ** 2 * spec.num_channels
        self.stem = Linear(3 * spec.patch_size**2, spec.num_channels)
        if width == num_entries:
            self.widen: nn.Module = nn.Identity()
        elif spec.widen == "dense":
            self.widen = Linear(num_entries, width)
        else:
            self.widen = _layer(spec, num_entries, width=num_entries, num_outputs=width)
        self.blocks = nn.ModuleList(_block(spec, width) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(width)
        self.head = classifier(width, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return self.widen(self.stem(patches(x_BCHW, size=self.patch_size)).flatten(1))
