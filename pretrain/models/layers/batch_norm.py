"""Batch norm in the precision of its running statistics. DeepSpeed converts weights to bf16, but
not buffers, and torch rejects this mixture."""

from torch import Tensor, nn
from torch.nn.functional import batch_norm


def _forward(norm: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    assert norm.momentum is not None
    if norm.training:
        norm.num_batches_tracked.add_(1)
    exact = norm.running_mean.dtype
    y = batch_norm(
        x.to(exact),
        norm.running_mean,
        norm.running_var,
        norm.weight.to(exact),
        norm.bias.to(exact),
        training=norm.training,
        momentum=norm.momentum,
        eps=norm.eps,
    )
    return y.to(x.dtype)


class BatchNorm1d(nn.BatchNorm1d):
    forward = _forward  # type: ignore[assignment]


class BatchNorm2d(nn.BatchNorm2d):
    forward = _forward  # type: ignore[assignment]
