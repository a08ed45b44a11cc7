"""The Mixer paper's shallow Monarch and Kronecker MLPs, x -> Bc B2 relu(B1 x), on images as H rows
of V entries.

B1 and B2 map (rows, columns) to another number of rows and columns, without biases. The classifier
Bc has a bias. Each small matrix starts as N(0, 1/inputs).

    Kronecker   X -> A X D^T          one matrix for all columns, one for all rows
    Monarch     X -> J^T L J R        a matrix per row of X, then one per column of the result

A Monarch layer with equal blocks is a Kronecker layer.

Shapes: B batch, H rows and V columns of the input, S rows and C columns of the output, K classes. V
is the image width W, or 3 W for the three colors of a row, one after the other.
"""

import torch
from torch import Tensor, nn

from pretrain.models.image_model import ACTIVATIONS, ImageModel, classifier
from pretrain.models.spec import StructuredMlpSpec

Grid = tuple[int, int]
"""(rows, columns)."""


class Kronecker(nn.Module):
    def __init__(self, grid: Grid, *, out: Grid):
        super().__init__()
        self.of_columns = _normal(out[0], grid[0])
        self.of_rows = _normal(out[1], grid[1])

    def forward(self, x_BHV: Tensor) -> Tensor:
        x_BHC = nn.functional.linear(x_BHV, self.of_rows)
        return nn.functional.linear(x_BHC.transpose(1, 2), self.of_columns).transpose(1, 2)


class Monarch(nn.Module):
    def __init__(self, grid: Grid, *, out: Grid):
        super().__init__()
        self.per_row = _normal(grid[0], out[1], grid[1])
        self.per_column = _normal(out[1], out[0], grid[0])

    def forward(self, x_BHV: Tensor) -> Tensor:
        x_BHC = torch.einsum("bhv,hcv->bhc", x_BHV, self.per_row)
        return torch.einsum("bhc,csh->bsc", x_BHC, self.per_column)


LAYERS = {"monarch": Monarch, "kronecker": Kronecker}


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


class StructuredBlock(nn.Module):
    """B2 act(x)."""

    def __init__(self, spec: StructuredMlpSpec, grid: Grid):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]()
        self.linear = LAYERS[spec.form](grid, out=grid)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.linear(self.activation(x_BSC))


class StructuredMlp(ImageModel):
    def __init__(self, spec: StructuredMlpSpec, *, num_classes: int, image_size: int):
        super().__init__(
            num_features=spec.num_rows * spec.num_columns,
            num_classes=num_classes,
            pixels_per_place=image_size,
        )
        grid = (spec.num_rows, spec.num_columns)
        self.grayscale = spec.grayscale
        self.stem = LAYERS[spec.form](
            (image_size, image_size * (1 if spec.grayscale else 3)), out=grid
        )
        self.blocks = nn.ModuleList([StructuredBlock(spec, grid)])
        self.norm = nn.Identity()
        self.head = classifier(self.num_features, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        rows_BHV = x_BCHW.mean(1) if self.grayscale else x_BCHW.transpose(1, 2).flatten(2)
        return self.stem(rows_BHV)
