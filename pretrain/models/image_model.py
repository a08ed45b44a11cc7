"""What all our models are: embed, blocks, norm, pool, head, under the names that timm's tools ask for.

A family says how an image becomes the first block's input (`embed`), how features become one vector (`pool`) and how they are laid
out as a picture (`as_grid`). Shapes: B batch, F features of whatever shape the family has, N num_features, K classes.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.models.spec import Activation

ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
}


class ImageModel(nn.Module, ABC):
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def __init__(self, *, num_features: int, num_classes: int):
        super().__init__()
        self.num_features = self.head_hidden_size = self.embed_dim = num_features
        self.num_classes = num_classes
        self.checkpoint_blocks = False

    @abstractmethod
    def embed(self, x_BCHW: Tensor) -> Tensor: ...

    @abstractmethod
    def pool(self, x_BF: Tensor) -> Tensor: ...

    def as_grid(self, x_BF: Tensor) -> Tensor:
        """(B, channels, height, width), where features have places; else as they are."""
        return x_BF

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        x_BF = self.embed(x_BCHW)
        for block in self.blocks:
            x_BF = self._run(block, x_BF)
        y_BF: Tensor = self.norm(x_BF)
        return y_BF

    def forward_head(self, x_BF: Tensor, pre_logits: bool = False) -> Tensor:
        pooled_BN = self.pool(x_BF)
        if pre_logits:
            return pooled_BN
        logits_BK: Tensor = self.head(pooled_BN)
        return logits_BK

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def _run(self, block: nn.Module, x_BF: Tensor) -> Tensor:
        if self.checkpoint_blocks and self.training and torch.is_grad_enabled():
            kept: Tensor = checkpoint(block, x_BF, use_reentrant=False)
            return kept
        y_BF: Tensor = block(x_BF)
        return y_BF

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head whose outputs start at zero; none at all (the pooled features) with 0 classes."""
        assert global_pool in (None, "", "avg"), global_pool
        self.num_classes = num_classes
        old = next(self.parameters())
        if num_classes == 0:
            self.head = nn.Identity()
            return
        self.head = nn.Linear(self.num_features, num_classes, device=old.device, dtype=old.dtype)
        self.head.train(self.training)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
