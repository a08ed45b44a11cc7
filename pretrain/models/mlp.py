"""MLPs of "Scaling MLPs": the complete image is one vector. Shapes: B batch, D = 3 H W, M width, K
classes."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from pretrain.models.image_model import ACTIVATIONS, ImageModel, classifier
from pretrain.models.layers.batch_norm import BatchNorm1d
from pretrain.models.layers.linear import Linear
from pretrain.models.spec import Activation, MlpSpec

NORMS: dict[str, type[nn.Module]] = {
    "layer": nn.LayerNorm,
    "batch": BatchNorm1d,
    "none": nn.Identity,
}


class Block(nn.Module, ABC):
    """z + branch(norm(z)), or norm(z + branch(z)). Without a skip path the sum has no z."""

    def __init__(
        self,
        norm: nn.Module,
        *,
        activation: Activation,
        dropout: float,
        has_skip: bool = True,
        is_norm_after: bool = False,
    ):
        super().__init__()
        self.norm, self.has_skip, self.is_norm_after = norm, has_skip, is_norm_after
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    @abstractmethod
    def branch(self, x_BM: Tensor) -> Tensor: ...

    def forward(self, x_BM: Tensor) -> Tensor:
        y_BM = self.branch(x_BM if self.is_norm_after else self.norm(x_BM))
        if self.has_skip:
            y_BM = x_BM + y_BM
        return self.norm(y_BM) if self.is_norm_after else y_BM


class InvertedBlock(Block):
    """Wc act(We x), We: M -> expansion M; or act(Wc act(We x))."""

    def __init__(
        self,
        norm: nn.Module,
        expand: nn.Module,
        contract: nn.Module,
        *,
        outer_activation: bool = False,
        **common: Any,
    ):
        super().__init__(norm, **common)
        self.expand, self.contract = expand, contract
        self.outer = self.activation if outer_activation else nn.Identity()

    def branch(self, x_BM: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.expand(x_BM)))
        return self.dropout(self.outer(self.contract(hidden)))


class StandardBlock(Block):
    """act(W x), or W act(x)."""

    def __init__(
        self, norm: nn.Module, linear: nn.Module, *, activation_first: bool = False, **common: Any
    ):
        super().__init__(norm, **common)
        self.linear, self.activation_first = linear, activation_first

    def branch(self, x_BM: Tensor) -> Tensor:
        y_BM = (
            self.linear(self.activation(x_BM))
            if self.activation_first
            else self.activation(self.linear(x_BM))
        )
        return self.dropout(y_BM)


class SkipPath(nn.Sequential):
    """A skip path around several layers."""

    def forward(self, x_BM: Tensor) -> Tensor:
        y_BM: Tensor = super().forward(x_BM)  # type: ignore[no-untyped-call]
        return x_BM + y_BM


def _layer(spec: MlpSpec) -> Block:
    norm, common = (
        NORMS[spec.norm](spec.width),
        dict[str, Any](activation=spec.activation, dropout=spec.dropout),
    )
    common |= {"has_skip": spec.skip == 1, "is_norm_after": spec.norm_place == "after"}
    if spec.bottleneck == "none":
        return StandardBlock(
            norm, Linear(spec.width, spec.width), activation_first=spec.activation_first, **common
        )
    expand, contract = (
        Linear(spec.width, spec.hidden_width, hands_zeros_on=True),
        Linear(spec.hidden_width, spec.width),
    )
    return InvertedBlock(norm, expand, contract, **common)


class Mlp(ImageModel):
    def __init__(self, spec: MlpSpec, *, num_classes: int, image_size: int):
        super().__init__(
            num_features=spec.width, num_classes=num_classes, pixels_per_place=image_size
        )
        self.stem = Linear(3 * image_size**2, spec.width)
        layers = [_layer(spec) for _ in range(spec.depth)]
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
