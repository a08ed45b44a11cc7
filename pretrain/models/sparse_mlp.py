"""The Mixer paper's SW-MLP: an MLP with sparse matrices. Its width m equals S C, the number of
entries of a Mixer. Each connection exists with probability p.

    stem      per-patch linear to C channels, one vector of S0 C entries, a linear to m if m differs
    blocks    x + act((M * W) LN(x)), or with a hidden layer of gamma m entries
              x + (M2 * W2) act((M1 * W1) LN(x))
    head      linear on all m entries, after a norm if `final_norm` is set

Section A.2.5 of the paper prints this order, but not the layer from S0 C to m. In the blocks,
biases start at 0 and weights as N(0, 1/(p m)). Dense layers start as in torch.

If p m is above about 30, the largest singular value of a gamma m x m matrix is near L. Here L^2 is
c^2 + 3 c^2 (1 - p) / (sqrt(gamma) p m) and c is 1 + sqrt(gamma). The paper's L+ agrees with
this measured value if its q^2 is read as p gamma m.

Shapes: B batch, S0 patches, C channels, M width, K classes.
"""

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
        weights = layer.values if isinstance(layer, SparseLinear) else layer.weight
        if largest := largest_singular_value(layer.matrix()):  # 0 if there are no connections
            weights.data *= (num_inputs**0.5 + num_outputs**0.5) / width**0.5 / largest
    return layer


def _block(spec: SparseMlpSpec, width: int) -> Block:
    norm, hidden = nn.LayerNorm(width), spec.hidden_width(width)
    if spec.expansion is None:
        return StandardBlock(norm, _block_layer(spec, width, width=width, num_outputs=width), spec)
    expand = _block_layer(spec, width, width=width, num_outputs=hidden)
    contract = _block_layer(spec, hidden, width=width, num_outputs=width)
    return InvertedBlock(norm, expand, contract, spec)


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
        self.norm = nn.LayerNorm(width) if spec.final_norm else nn.Identity()
        self.head = classifier(width, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return self.widen(self.stem(patches(x_BCHW, size=self.patch_size)).flatten(1))
