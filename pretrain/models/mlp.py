"""MLPs of "Scaling MLPs": the complete image is one vector. Shapes: B batch, M width."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from pretrain.models.image_model import ACTIVATIONS, ImageModel, classifier
from pretrain.models.layers.batch_norm import BatchNorm1d
from pretrain.models.layers.linear import Linear
from pretrain.models.spec import MlpSpec, SparseMlpSpec

NORMS: dict[str, type[nn.Module]] = {
    "layer": nn.LayerNorm,
    "batch": BatchNorm1d,
    "none": nn.Identity,
}


class Block(nn.Module, ABC):
    """Compute z + branch(norm(z)), or norm(z + branch(z)). Without a skip path the sum has no z."""

    def __init__(self, norm: nn.Module, spec: MlpSpec | SparseMlpSpec):
        super().__init__()
        self.norm = norm
        self.has_skip = not isinstance(spec, MlpSpec) or spec.skip == 1
        self.is_norm_after = isinstance(spec, MlpSpec) and spec.norm_place == "after"
        self.activation = ACTIVATIONS[spec.activation]()
        self.dropout = nn.Dropout(spec.dropout)

    @abstractmethod
    def branch(self, x_BM: Tensor) -> Tensor: ...

    def forward(self, x_BM: Tensor) -> Tensor:
        y_BM = self.branch(x_BM if self.is_norm_after else self.norm(x_BM))
        if self.has_skip:
            y_BM = x_BM + y_BM
        return self.norm(y_BM) if self.is_norm_after else y_BM


class InvertedBlock(Block):
    """Wc act(We x) with We: M -> expansion M; or act(Wc act(We x)) with an outer activation."""

    def __init__(
        self, norm: nn.Module, expand: nn.Module, contract: nn.Module, spec: MlpSpec | SparseMlpSpec
    ):
        super().__init__(norm, spec)
        self.expand, self.contract = expand, contract
        has_outer = isinstance(spec, SparseMlpSpec) and spec.outer_activation
        self.outer = self.activation if has_outer else nn.Identity()

    def branch(self, x_BM: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.expand(x_BM)))
        return self.dropout(self.outer(self.contract(hidden)))


class StandardBlock(Block):
    """act(W x), or W act(x) if `activation_first` is set."""

    def __init__(self, norm: nn.Module, linear: nn.Module, spec: MlpSpec | SparseMlpSpec):
        super().__init__(norm, spec)
        self.linear = linear
        self.activation_first = isinstance(spec, MlpSpec) and spec.activation_first

    def branch(self, x_BM: Tensor) -> Tensor:
        if self.activation_first:
            return self.dropout(self.linear(self.activation(x_BM)))
        return self.dropout(self.activation(self.linear(x_BM)))


class SkipPath(nn.Sequential):
    def forward(self, x_BM: Tensor) -> Tensor:
        y_BM: Tensor = super().forward(x_BM)  # type: ignore[no-untyped-call]
        return x_BM + y_BM


def build_layer(spec: MlpSpec) -> Block:
    norm, width, hidden = NORMS[spec.norm](spec.width), spec.width, spec.hidden_width
    if spec.bottleneck == "none":
        return StandardBlock(norm, Linear(width, width), spec)
    expand, contract = Linear(width, hidden, hands_zeros_on=True), Linear(hidden, width)
    return InvertedBlock(norm, expand, contract, spec)


class Mlp(ImageModel):
    def __init__(self, spec: MlpSpec, *, num_classes: int, image_size: int):
        super().__init__(
            num_features=spec.width, num_classes=num_classes, pixels_per_place=image_size
        )
        self.stem = Linear(3 * image_size**2, spec.width)
        layers = [build_layer(spec) for _ in range(spec.depth)]
        paths = (
            [SkipPath(*layers[at : at + spec.skip]) for at in range(0, spec.depth, spec.skip)]
            if spec.skip > 1
            else layers
        )
        self.blocks = nn.ModuleList(paths)
        self.norm = nn.Identity()
        self.head = classifier(spec.width, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return self.stem(x_BCHW.flatten(1))
