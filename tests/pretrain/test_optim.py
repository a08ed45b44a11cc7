"""Optimizers against references, and the learning rate as a function of the step."""

import pytest
import timm.optim
import torch
from torch import nn

from pretrain.config import OptimizerSettings
from pretrain.durations import parse_length
from pretrain.models.build import build, build_model
from pretrain.models.spec import MlpSpec
from pretrain.optim import Lion, build_optimizer, parameter_groups, set_lr
from pretrain.schedule import Schedule


def trained(optimizer_of: object, steps: int = 20) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3))]
    optimizer = optimizer_of(weights)  # type: ignore[operator]
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_lion_equals_timms_to_the_bit() -> None:
    settings = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    ours = trained(lambda weights: Lion(weights, **settings))
    theirs = trained(lambda weights: timm.optim.Lion(weights, **settings, foreach=False))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_lion_leaves_weights_without_gradient_alone() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Lion([weight], lr=0.1)
    weight.grad = torch.tensor([0.0, 1.0, -1.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([1.0, 0.9, 1.1])


def test_decoupled_sgd_is_nesterov_beside_a_plain_shrinking() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    settings = OptimizerSettings(name="sgd", lr=0.1, weight_decay=0.5, momentum=0.9)
    holder = nn.Module()
    holder.matrix = nn.Parameter(weight.detach().view(1, 2).clone())
    optimizer = build_optimizer(holder, settings)
    value, momentum = [1.0, -2.0], [0.0, 0.0]
    for gradient in ([0.3, 0.1], [-0.2, 0.4], [0.0, 1.0]):
        holder.matrix.grad = torch.tensor([gradient])
        optimizer.step()
        momentum = [0.9 * m + g for m, g in zip(momentum, gradient, strict=True)]
        value = [v * (1 - 0.1 * 0.5) - 0.1 * (g + 0.9 * m) for v, g, m in zip(value, gradient, momentum, strict=True)]
        assert holder.matrix.flatten().tolist() == pytest.approx(value, rel=1e-5)


def test_groups_decay_matrices_alone_and_scale_the_head() -> None:
    model = build_model(MlpSpec(kind="mlp", depth=1, width=4), num_classes=3, image_size=8)
    groups = parameter_groups(model, OptimizerSettings(weight_decay=0.1, head_lr_scale=10.0))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = {(g["weight_decay"], g["lr_scale"]): sorted(names[id(p)] for p in g["params"]) for g in groups}
    assert listed[0.1, 10.0] == ["head.weight"] and listed[0.0, 10.0] == ["head.bias"]
    assert listed[0.1, 1.0] == ["blocks.0.contract.weight", "blocks.0.expand.weight", "stem.weight"]
    assert sum(len(found) for found in listed.values()) == len(names)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.01)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01, 0.1}


def test_cosine_warms_up_and_falls_to_its_end() -> None:
    schedule = Schedule("cosine", base_lr=1.0, final_lr=0.1, warmup_steps=4, num_steps=104)
    assert [schedule.lr(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule.lr(54) == pytest.approx(0.55)
    assert schedule.lr(104) == pytest.approx(0.1)
    assert all(schedule.lr(step) >= schedule.lr(step + 1) for step in range(4, 104))
    assert Schedule("constant", 1.0, 0.0, 0, 10).lr(9) == 1.0


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("5000 steps", 5000),
        ("1 step", 1),
        ("2 epochs", 20),
        ("1.5 epochs", 15),
        ("1_000 samples", 10),
        ("1001 samples", 11),
    ],
)
def test_durations_become_steps(text: str, steps: int) -> None:
    assert parse_length(text).steps(global_batch_size=100, num_samples=1000) == steps


def test_what_a_model_excepts_is_not_decayed() -> None:
    with torch.device("meta"):
        model = build("vit_b_4")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, OptimizerSettings(weight_decay=0.1))
    free = {names[parameter] for group in groups if not group["weight_decay"] for parameter in group["params"]}
    assert free >= {"body.cls_token", "body.pos_embed", "body.blocks.0.attn.qkv.bias"}
    assert "body.blocks.0.attn.qkv.weight" not in free
