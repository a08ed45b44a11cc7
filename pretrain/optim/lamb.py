"""LAMB (You et al. 2020): Adam's direction, as long for each parameter as that parameter is large.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   r = m' / (sqrt(v') + eps) + wd w   (m', v' without the bias of their start)
    w -= lr |w| / |r| r

The norms are those of a whole parameter. Parameters that are not meant to decay (norms, biases)
take the step r as it is, for of a bias that starts at zero |w| says nothing; the group says so
(`is_decayed`), since a decay of 0 must not turn LAMB into Adam. A parameter whose |w| or |r| is
zero takes r as it is, too.

ZeRO steps flat shards in which lie pieces of several parameters. The engine says which (`bind`);
the squares of the norms are then summed over pieces and ranks in one exchange per step, in which
every rank takes part, whatever it owns. No step waits for the device, except where an offloaded
optimizer exchanges over NCCL. As torch's own fused optimizers do, it divides gradients by
`grad_scale` and changes nothing where `found_inf` is 1, if it has these attributes.
"""  # noqa: E501 (a table)

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pretrain.optim.segments import Segment
from pretrain.ranks.collectives import is_distributed

EPS = 1e-6


@dataclass(frozen=True)
class _Piece:
    """A stretch of one parameter, and its direction before the step has its length."""

    parameter_number: int
    weight: Tensor
    direction: Tensor
    lr: float


class Lamb(Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "is_decayed": True}
        )
        self._segments: dict[Tensor, tuple[Segment, ...]] | None = None
        self._numbers: dict[Tensor, Tensor] = {}
        """By tensor, beside it on its device: the parameters that its pieces are of."""
        self._num_parameters = 0
        self._taken: Tensor | None = None
        """0 in a step that is skipped, else 1; None where no step is."""

    def bind(self, segments: Mapping[Tensor, Sequence[Segment]]) -> None:
        """The tensors that are stepped are shards, made of these pieces; every rank calls it.
        Without it each is a parameter."""
        self._segments = {tensor: tuple(pieces) for tensor, pieces in segments.items()}
        named = {
            tensor: [each.parameter_number for each in pieces]
            for tensor, pieces in self._segments.items()
        }
        # once: what copies a list to a GPU waits for it
        self._numbers = {
            tensor: torch.tensor(each, dtype=torch.long, device=tensor.device)
            for tensor, each in named.items()
        }
        highest = torch.tensor(
            max((number for each in named.values() for number in each), default=-1)
        )
        self._num_parameters = int(_over_ranks(highest, dist.ReduceOp.MAX)) + 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a closure is never used here"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self._taken = None if found_inf is None else 1 - found_inf
        pieces: list[_Piece] = []
        decayed: list[Tensor] = []
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                direction = self._direction(weight, group)
                if not group["is_decayed"]:
                    weight.add_(
                        direction if self._taken is None else direction * self._taken,
                        alpha=-group["lr"],
                    )
                    continue
                whole = (Segment(len(decayed), 0, weight.numel()),)
                for segment in whole if self._segments is None else self._segments[weight]:
                    stretch = slice(segment.offset, segment.offset + segment.length)
                    flat, flat_direction = weight.view(-1)[stretch], direction.view(-1)[stretch]
                    pieces.append(
                        _Piece(segment.parameter_number, flat, flat_direction, group["lr"])
                    )
                decayed.append(weight)
        # asked of the groups, which are alike on all ranks: one that owns no piece of them must
        # take part, too
        if any(group["is_decayed"] and group["params"] for group in self.param_groups):
            self._take(pieces, decayed)

    def _direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's, plus the decay."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        beta1, beta2 = group["betas"]
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind not in state:
                state[kind] = torch.zeros_like(weight)
        if self._taken is None:
            # a checkpoint may have left a tensor; from here on it is a number, and nobody waits for
            # it
            state["step"] = int(state.get("step", 0)) + 1
            state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            state["step"] = state.get("step", 0) + self._taken.double()
            gradient = torch.where(
                self._taken > 0, gradient / getattr(self, "grad_scale", 1.0), 0.0
            )
            state["exp_avg"].mul_(torch.where(self._taken > 0, beta1, 1.0)).add_(
                gradient, alpha=1 - beta1
            )
            state["exp_avg_sq"].mul_(torch.where(self._taken > 0, beta2, 1.0)).addcmul_(
                gradient, gradient, value=1 - beta2
            )
        step = (
            state["step"] if self._taken is None else state["step"].clamp(min=1)
        )  # the first may have been skipped
        scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(EPS)
        direction: Tensor = (state["exp_avg"] / (1 - beta1**step)).div_(scale)
        return (
            direction.add_(weight, alpha=group["weight_decay"])
            if group["weight_decay"]
            else direction
        )

    def _take(self, pieces: Sequence[_Piece], decayed: Sequence[Tensor]) -> None:
        """`decayed`: the tensors that the pieces are of, in their order."""
        device = next(weight.device for group in self.param_groups for weight in group["params"])
        if pieces:
            norms = torch._foreach_norm(
                [tensor for piece in pieces for tensor in (piece.weight, piece.direction)]
            )
            squares_P2 = torch.stack(norms).square().view(-1, 2)
        else:
            squares_P2 = torch.zeros(0, 2, device=device)
        if self._segments is not None:
            mine_P2 = torch.zeros(self._num_parameters, 2, device=device)
            if pieces:
                mine_P2.index_add_(
                    0, torch.cat([self._numbers[weight] for weight in decayed]), squares_P2
                )
            squares_P2 = _over_ranks(mine_P2, dist.ReduceOp.SUM)
        weights_P, directions_P = squares_P2.sqrt().unbind(1)
        ratios_P = torch.where((weights_P > 0) & (directions_P > 0), weights_P / directions_P, 1.0)
        ratios_P = ratios_P if self._taken is None else ratios_P * self._taken
        for piece in pieces:
            piece.weight.addcmul_(
                piece.direction, ratios_P[piece.parameter_number], value=-piece.lr
            )


def _over_ranks(values: Tensor, operation: Any) -> Tensor:
    """Reduced over all ranks, where the backend wants it: an optimizer that is offloaded steps on
    the CPU beside NCCL."""
    if not is_distributed():
        return values
    there = values.to("cuda") if dist.get_backend() == "nccl" else values.cpu()
    dist.all_reduce(there, op=operation)
    return there.to(values.device)
