"""Peers of the training step in benchmarks/train.py: plain PyTorch DDP, and the step that *Scaling
MLPs* describes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from models_peers import plain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pretrain.augment.augmentation import Prepared
from pretrain.config import OptimizerSettings
from pretrain.engine.step import loss_of
from pretrain.models.build import build_model
from pretrain.models.spec import AnySpec
from pretrain.optim import build_optimizer

Step = Callable[[Prepared], Tensor]


def ddp_step(
    spec: AnySpec,
    *,
    num_classes: int,
    image_size: int,
    label_smoothing: float,
    device: torch.device,
) -> Step:
    """Return the step of our model and optimizer in plain DDP: fp32 on a CPU, bf16 autocast and
    compiled on a GPU. The process group must exist."""
    model = build_model(spec, num_classes=num_classes, image_size=image_size, seed=0).to(device)
    optimizer = build_optimizer(model, OptimizerSettings())
    ids = [int(os.environ["LOCAL_RANK"])] if device.type == "cuda" else None
    wrapped: nn.Module = DistributedDataParallel(model, device_ids=ids)
    if device.type == "cuda":
        wrapped.compile()

    def step(batch: Prepared) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(
                wrapped(batch.images_BCHW.float()), batch, label_smoothing=label_smoothing
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def public_step(
    spec: AnySpec,
    *,
    num_classes: int,
    image_size: int,
    label_smoothing: float,
    device: torch.device,
) -> Step:
    """Return the step of *Scaling MLPs*: fp32 with TF32 products, eager, and LION as in its
    pseudo-code (one weight at a time). Each step reads the loss."""
    model = plain(spec, num_classes=num_classes, image_size=image_size).to(device)
    optimizer = PlainLion(model)

    def step(batch: Prepared) -> Tensor:
        with tf32():
            loss = loss_of(model(batch.images_BCHW.float()), batch, label_smoothing=label_smoothing)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        loss.item()
        return loss.detach()

    return step


@contextmanager
def tf32() -> Iterator[None]:
    """Allow TF32 only within this context, because other contestants share the process."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class PlainLion(Optimizer):
    def __init__(self, model: nn.Module):
        super().__init__(
            model.parameters(), {"lr": 1e-5, "betas": (0.9, 0.99), "weight_decay": 1e-3}
        )

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(
                    (momentum * beta1 + weight.grad * (1 - beta1)).sign(), alpha=-group["lr"]
                )
                momentum.mul_(beta2).add_(weight.grad, alpha=1 - beta2)
