"""Base class of all models: embed, blocks, norm, pool, head, and methods for timm's tools.

A model family defines how an image becomes the first block's input (`embed`), and how features
become one vector (`pool`) or a map (`as_map`). Shapes: B batch, F features in the family's shape, N
num_features, K classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_prep.errors import UserError
from pretrain.models.layers.linear import Linear
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

    def __init__(self, *, num_features: int, num_classes: int, pixels_per_place: int):
        """`pixels_per_place`: side in pixels of the image square that one position of `as_map`
        covers."""
        super().__init__()
        self.num_features = self.head_hidden_size = self.embed_dim = num_features
        self.num_classes, self.pixels_per_place = num_classes, pixels_per_place
        self.grad_checkpointing = False

    @abstractmethod
    def embed(self, x_BCHW: Tensor) -> Tensor: ...

    def pool(self, x_BF: Tensor) -> Tensor:
        return x_BF.flatten(1)

    def as_map(self, x_BF: Tensor) -> Tensor:
        """Return (B, channels, height, width). Features without positions become a 1 x 1 map."""
        return x_BF.flatten(1)[:, :, None, None]

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        x_BF = self.embed(x_BCHW)
        for block in self.blocks:
            x_BF = self._run(block, x_BF)
        return self.norm(x_BF)

    def forward_head(self, x_BF: Tensor, pre_logits: bool = False) -> Tensor:
        pooled_BN = self.pool(x_BF)
        return pooled_BN if pre_logits else self.head(pooled_BN)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def _run(self, block: nn.Module, x_BF: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, x_BF, use_reentrant=False)
        return block(x_BF)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one whose outputs start at zero. For 0 classes, the model
        returns pooled features."""
        if global_pool not in (None, "", "avg"):
            raise UserError(
                "global_pool", f"{global_pool!r} is not valid", "use avg", code="bad-value"
            )
        self.num_classes = num_classes
        self.head = (
            classifier(self.num_features, num_classes)
            .to(next(self.parameters()))
            .train(self.training)
        )
        with torch.no_grad():
            for weight in self.head.parameters():
                weight.zero_()

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [
            {
                "module": f"blocks.{number}",
                "num_chs": self.num_features,
                "reduction": self.pixels_per_place,
            }
            for number in range(len(self.blocks))
        ]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the features and the outputs of the blocks `indices` (an integer n: the last n
        blocks), as maps or as (B, positions, channels)."""
        taken = taken_blocks(indices, num_blocks=len(self.blocks))
        x_BF, found = self.embed(x), []
        for number, block in enumerate(self.blocks):
            x_BF = self._run(block, x_BF)
            if number in taken:
                map_BCHW = self.as_map(self.norm(x_BF) if norm else x_BF)
                found.append(
                    map_BCHW if output_fmt == "NCHW" else map_BCHW.flatten(2).transpose(1, 2)
                )
            if stop_early and number == max(taken):
                break
        return found if intermediates_only else (self.norm(x_BF), found)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] | None = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove the blocks after the last block in `indices`. Return `indices` counted
        from 0."""
        taken = taken_blocks(indices, num_blocks=len(self.blocks))
        self.blocks = self.blocks[: max(taken) + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return taken

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable and any("num_batches_tracked" in name for name, _ in self.named_buffers()):
            raise UserError(
                "set_grad_checkpointing",
                "batch norm would update its averages twice a step",
                "choose a model without batch norm",
                code="conflict",
            )
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        del coarse
        return {
            "stem": r"^(?:stem|widen)\.",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def no_weight_decay(self) -> set[str]:
        return set()


def classifier(num_features: int, num_classes: int) -> nn.Module:
    return Linear(num_features, num_classes) if num_classes else nn.Identity()


def taken_blocks(indices: int | Sequence[int] | None, *, num_blocks: int) -> list[int]:
    if indices is None:
        return list(range(num_blocks))
    wanted = range(-indices, 0) if isinstance(indices, int) else indices
    if not wanted or not all(-num_blocks <= number < num_blocks for number in wanted):
        raise UserError(
            "indices",
            f"{indices} is not valid",
            f"use numbers below {num_blocks}",
            code="bad-value",
        )
    return [number % num_blocks for number in wanted]
