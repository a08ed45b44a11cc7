"""MLP-Mixer. Shapes: B batch, S tokens, C channels, P patch, K classes."""

import torch
from torch import Tensor, nn

from pretrain.models.spec import MixerSpec


class TwoLayer(nn.Module):
    """Linear, GELU, Linear on the last axis."""

    def __init__(self, size: int, *, hidden: int):
        super().__init__()
        self.inner = nn.Linear(size, hidden)
        self.outer = nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(nn.functional.gelu(self.inner(x)))
        return y


class MixerBlock(nn.Module):
    """U = X + W2 GELU(W1 LN(X)) across tokens, then Y = U + GELU(LN(U) W3) W4 across channels."""

    def __init__(self, *, num_tokens: int, num_channels: int, token_hidden: int, channel_hidden: int):
        super().__init__()
        self.token_norm = nn.LayerNorm(num_channels)
        self.token_mixing = TwoLayer(num_tokens, hidden=token_hidden)
        self.channel_norm = nn.LayerNorm(num_channels)
        self.channel_mixing = TwoLayer(num_channels, hidden=channel_hidden)

    def forward(self, x_BSC: Tensor) -> Tensor:
        mixed_BCS = self.token_mixing(self.token_norm(x_BSC).transpose(1, 2))
        x_BSC = x_BSC + mixed_BCS.transpose(1, 2)
        mixed_BSC: Tensor = self.channel_mixing(self.channel_norm(x_BSC))
        return x_BSC + mixed_BSC


class Mixer(nn.Module):
    def __init__(self, spec: MixerSpec, *, num_classes: int, image_size: int):
        super().__init__()
        spec.check(image_size=image_size)
        num_tokens = spec.num_tokens(image_size=image_size)
        token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=num_tokens)
        self.patch_size, self.num_features, self.num_classes = spec.patch_size, spec.num_channels, num_classes
        self.stem = nn.Linear(3 * spec.patch_size**2, spec.num_channels)
        self.blocks = nn.ModuleList(
            MixerBlock(
                num_tokens=num_tokens,
                num_channels=spec.num_channels,
                token_hidden=token_hidden,
                channel_hidden=channel_hidden,
            )
            for _ in range(spec.depth)
        )
        self.norm = nn.LayerNorm(spec.num_channels)
        self.head = nn.Linear(spec.num_channels, num_classes)

    def patches(self, x_BCHW: Tensor) -> Tensor:
        """(B, S, 3 P P): every patch as one row, in reading order."""
        batch, colours, height, width = x_BCHW.shape
        size = self.patch_size
        grid = x_BCHW.reshape(batch, colours, height // size, size, width // size, size)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, colours * size * size)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        x_BSC: Tensor = self.stem(self.patches(x_BCHW))
        for block in self.blocks:
            x_BSC = block(x_BSC)
        y_BSC: Tensor = self.norm(x_BSC)
        return y_BSC

    def forward_head(self, x_BSC: Tensor, pre_logits: bool = False) -> Tensor:
        pooled_BC = x_BSC.mean(dim=1)
        if pre_logits:
            return pooled_BC
        logits_BK: Tensor = self.head(pooled_BC)
        return logits_BK

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
