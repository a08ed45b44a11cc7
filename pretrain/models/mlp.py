"""The MLPs of "Scaling MLPs": the whole image is one vector. Shapes: B batch, D = 3 H W, M width, K classes."""

from torch import Tensor, nn

from pretrain.models.image_model import ACTIVATIONS, ImageModel, classifier
from pretrain.models.layers.batch_norm import BatchNorm1d
from pretrain.models.layers.linear import Linear
from pretrain.models.spec import Activation, MlpSpec

NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "batch": BatchNorm1d, "none": nn.Identity}


class InvertedBlock(nn.Module):
    """z + Wc act(We norm(z)), We: M -> expansion M."""

    def __init__(self, norm: nn.Module, expand: nn.Module, contract: nn.Module, *, activation: Activation, dropout: float):
        super().__init__()
        self.norm, self.expand, self.contract = norm, expand, contract
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BM: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.expand(self.norm(x_BM))))
        return x_BM + self.dropout(self.contract(hidden))


class StandardBlock(nn.Module):
    """act(W norm(z)), or W act(norm(z)), without a skip path."""

    def __init__(self, spec: MlpSpec):
        super().__init__()
        self.norm = NORMS[spec.norm](spec.width)
        self.linear = Linear(spec.width, spec.width)
        self.activation = ACTIVATIONS[spec.activation]()
        self.dropout = nn.Dropout(spec.dropout)
        self.activation_first = spec.activation_first

    def forward(self, x_BM: Tensor) -> Tensor:
        normed_BM = self.norm(x_BM)
        y_BM = self.linear(self.activation(normed_BM)) if self.activation_first else self.activation(self.linear(normed_BM))
        return self.dropout(y_BM)


def _inverted(spec: MlpSpec) -> InvertedBlock:
    expand, contract = Linear(spec.width, spec.hidden_width, hands_zeros_on=True), Linear(spec.hidden_width, spec.width)
    return InvertedBlock(NORMS[spec.norm](spec.width), expand, contract, activation=spec.activation, dropout=spec.dropout)


class Mlp(ImageModel):
    def __init__(self, spec: MlpSpec, *, num_classes: int, image_size: int):
        super().__init__(num_features=spec.width, num_classes=num_classes, pixels_per_place=image_size)
        block = _inverted if spec.bottleneck == "inverted" else StandardBlock
        self.stem = Linear(3 * image_size**2, spec.width)
        self.blocks = nn.ModuleList(block(spec) for _ in range(spec.depth))
        self.norm = nn.Identity()
        self.head = classifier(spec.width, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return self.stem(x_BCHW.flatten(1))
