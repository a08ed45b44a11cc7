"""What a model keeps beside its weights: permutations, masks, running averages. They are saved and
restored with the weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pretrain.ranks.collectives import mean_over_ranks


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers themselves, by name: what the state dict has beside the parameters."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU by name; averages in fp32, whatever the model computes in."""
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
    """Every rank gathers running averages of its own samples: before they are used or saved, all
    take the mean.

    Averages are linear in what they gathered, so it makes no difference how often that is done on
    the way.
    """
    for value in _buffers_of(model).values():
        if value.is_floating_point():
            mean_over_ranks(value)


@torch.no_grad()
def restore_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Takes them out of a whole state; through `load_state_dict`, so that what is derived from them
    is derived anew."""
    names = list(_buffers_of(model))
    missing = [name for name in names if name not in weights]
    assert not missing, f"the state lacks {missing}"
    model.load_state_dict({name: weights[name] for name in names}, strict=False)
