"""Buffers of a model: permutations, masks and running averages. They are saved and restored with
the weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pretrain.ranks.collectives import mean_over_ranks


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the model's buffers by name, on the CPU. Running averages are in fp32."""
    return {
        name: (
            (value.float() if value.is_floating_point() else value)
            .detach()
            .cpu()
            .clone()
            .contiguous()
        )
        for name, value in _buffers_of(model).items()
    }


@torch.no_grad()
def average_over_ranks(model: nn.Module) -> None:
    """Replace each running average by its mean over all ranks, before the averages are used or
    saved.

    Running averages are linear in the samples, so the result does not depend on the number of
    calls.
    """
    for value in _buffers_of(model).values():
        if value.is_floating_point():
            mean_over_ranks(value)


@torch.no_grad()
def restore_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the buffers from a complete state dict. `load_state_dict` also updates buffers that
    depend on others."""
    names = list(_buffers_of(model))
    missing = [name for name in names if name not in weights]
    assert not missing, f"the state lacks {missing}"
    model.load_state_dict({name: weights[name] for name in names}, strict=False)
