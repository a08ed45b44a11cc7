"""The MLPs of "Scaling MLPs": the whole image is one vector. Shapes: B batch, D = 3 H W, M width, K classes."""

import torch
from torch import Tensor, nn

from pretrain.models.spec import MlpSpec


class InvertedBlock(nn.Module):
    """z + Wc GELU(We LN(z)), We: M -> expansion M."""

    def __init__(self, width: int, *, expansion: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, expansion * width)
        self.contract = nn.Linear(expansion * width, width)

    def forward(self, x_BM: Tensor) -> Tensor:
        y: Tensor = self.contract(nn.functional.gelu(self.expand(self.norm(x_BM))))
        return x_BM + y


class StandardBlock(nn.Module):
    """GELU(W LN(z)), without a skip path."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x_BM: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(self.norm(x_BM)))


class Mlp(nn.Module):
    def __init__(self, spec: MlpSpec, *, num_classes: int, image_size: int):
        super().__init__()
        self.num_features, self.num_classes = spec.width, num_classes
        self.stem = nn.Linear(3 * image_size**2, spec.width)
        self.blocks = nn.ModuleList(
            InvertedBlock(spec.width, expansion=spec.expansion)
            if spec.bottleneck == "inverted"
            else StandardBlock(spec.width)
            for _ in range(spec.depth)
        )
        self.head = nn.Linear(spec.width, num_classes)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        x_BM: Tensor = self.stem(x_BCHW.flatten(1))
        for block in self.blocks:
            x_BM = block(x_BM)
        return x_BM

    def forward_head(self, x_BM: Tensor, pre_logits: bool = False) -> Tensor:
        if pre_logits:
            return x_BM
        logits_BK: Tensor = self.head(x_BM)
        return logits_BK

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
