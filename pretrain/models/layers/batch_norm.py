"""Batch norm in the precision of its running statistics. DeepSpeed converts weights to bf16, not
buffers, and torch rejects the mixture."""

from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm


class _Exact(_BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert (
            self.running_mean is not None
            and self.num_batches_tracked is not None
            and self.momentum is not None
        )
        if self.training:
            self.num_batches_tracked.add_(1)
        exact = self.running_mean.dtype
        y = batch_norm(
            x.to(exact),
            self.running_mean,
            self.running_var,
            self.weight.to(exact),
            self.bias.to(exact),
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )
        return y.to(x.dtype)


class BatchNorm1d(_Exact, nn.BatchNorm1d):
    pass


class BatchNorm2d(_Exact, nn.BatchNorm2d):
    pass
