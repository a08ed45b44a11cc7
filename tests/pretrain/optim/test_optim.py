"""Optimizers compared with plain references, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pretrain.config import OptimizerSettings, ScheduleSettings, parse_length
from pretrain.models.build import build, build_model
from pretrain.models.spec import MlpSpec
from pretrain.optim import Lion, build_optimizer, lion, parameter_groups, set_lr
from pretrain.optim.schedule import Schedule

SHAPES = [(7, 5), (3,), (600, 1100), (0, 4)]


def trained(
    optimizer_of: Callable[[list[nn.Parameter]], Optimizer], steps: int = 6
) -> list[Tensor]:
    """Return weights and momenta after some steps. Some rows have zero gradients, as below a head
    that starts at zero."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]
    optimizer = optimizer_of(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
            weight.grad[:2] = 0
        optimizer.step()
    return [
        tensor.detach()
        for weight in weights
        for tensor in (weight, optimizer.state[weight]["exp_avg"])
    ]


def lion_groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    first = {"params": weights[::2], "lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    return [
        first,
        {"params": weights[1::2], "lr": 1e-2, "betas": (0.95, 0.98), "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_lion_equals_timms_to_the_bit(in_one_pass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations, several groups, one thread and several. timm rounds its momentum
    differently (lerp)."""
    if not in_one_pass:
        monkeypatch.setattr(lion, "suit_one_pass", lambda _: False)
    theirs = trained(lambda weights: timm.optim.Lion(lion_groups(weights), lr=1.0, foreach=False))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            ours = trained(lambda weights: Lion(lion_groups(weights), lr=1.0))
            assert all(map(torch.equal, ours[::2], theirs[::2]))
            torch.testing.assert_close(ours[1::2], theirs[1::2], rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_lion_moves_nothing_without_gradient_and_hides_no_nan(
    in_one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_one_pass:
        monkeypatch.setattr(lion, "suit_one_pass", lambda _: False)
    weight = nn.Parameter(torch.ones(6))
    optimizer = Lion([weight], lr=0.1)
    weight.grad = torch.tensor([0.0, 1.0, -1.0, math.nan, math.inf, -0.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([1.0, 0.9, 1.1, math.nan, math.nan, 1.0], nan_ok=True)


@pytest.fixture(params=["pass", "operations", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three ways of stepping shards: on CPUs, on devices without Triton, and on GPUs (the kernel in
    Triton's interpreter)."""
    monkeypatch.setattr(lion, "suit_one_pass", lambda _: request.param == "pass")
    monkeypatch.setattr(lion, "suits_kernel", lambda _: request.param == "kernel")
    if request.param == "kernel":
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        from pretrain.optim import lion_kernel

        interpreted = interpreter.InterpretedFunction(lion_kernel.lion_kernel.fn)
        monkeypatch.setattr(lion_kernel, "lion_kernel", interpreted)
    return str(request.param)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_lion_steps_shards_as_it_steps_weights_and_skips_what_is_not_finite(
    way: str, share: float
) -> None:
    """The shard has pieces and padding. Gradients with `share` 1/4 equal gradients divided by four, bit
    for bit."""
    sizes, generator = (300, 17, 5000), torch.Generator().manual_seed(0)
    plain = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    shard = torch.cat([*plain, torch.ones(3)]).detach()
    copy = shard.clone()
    ours, theirs = (
        Lion(weights, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1) for weights in ([shard], plain)
    )
    for step in range(4):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        gradients[2][:1000] = 0
        if step in (0, 2):  # including the first step
            before = [each.clone() for each in (shard, copy)]
            ours.step_shards(
                [[each * math.nan for each in gradients]], [copy], torch.tensor(math.nan)
            )
            assert torch.equal(before[0], shard) and torch.equal(before[1], copy)
        ours.step_shards([gradients], [copy], torch.tensor(share))
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient * share
        theirs.step()
    assert torch.equal(shard, torch.cat([*plain, torch.ones(3)])) and torch.equal(copy, shard)
    momenta = torch.cat([theirs.state[weight]["exp_avg"] for weight in plain])
    limit = (
        1e-6 if way == "kernel" else 0
    )  # the interpreter rounds twice where the device rounds once
    assert torch.allclose(ours.state[shard]["exp_avg"][:-3], momenta, rtol=limit, atol=limit / 10)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy in the interpreter
def test_a_shard_hides_no_momentum_that_is_not_a_number(way: str) -> None:
    shard, copy = torch.ones(4), torch.zeros(4)
    optimizer = Lion([shard], lr=0.1)
    optimizer.state[shard]["exp_avg"] = torch.tensor([math.nan, math.inf, 0.0, 1.0])
    optimizer.step_shards([[torch.zeros(4)]], [copy], torch.tensor(1.0))
    assert copy.tolist() == pytest.approx([math.nan, math.nan, 1.0, 0.9], nan_ok=True)


@pytest.mark.processes
def test_lions_kernel_compiles_for_a_gpu_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled code rounds like the reference: four fused operations per element, bf16 to
    nearest."""
    compiler = pytest.importorskip("triton.compiler")
    if not (Path(compiler.__file__).parents[1] / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("Triton has no assembler here")
    from triton.backends.compiler import GPUTarget

    from pretrain.optim.lion_kernel import BLOCK, lion_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = ["*fp32", "*bf16", "*fp32", "*bf16", "*fp32", "i32", *["fp32"] * 6, "constexpr"]
    source = compiler.ASTSource(
        lion_kernel, dict(zip(lion_kernel.arg_names, kinds, strict=True)), {"BLOCK": BLOCK}
    )
    code = compiler.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
    each = BLOCK // (8 * 32)
    assert code["cubin"] and code["ptx"].count("fma.rn.f32") == 4 * each
    assert code["ptx"].count("cvt.rn.bf16.f32") == each


def one_matrix(*values: float) -> nn.Module:
    holder = nn.Module()
    holder.matrix = nn.Parameter(torch.tensor([values]))
    return holder


GRADIENTS = ([0.3, 0.1], [-0.2, 0.4], [0.0, 1.0])


@pytest.mark.parametrize("nesterov", [True, False])
def test_decoupled_sgd_is_plain_or_nesterovs_beside_a_plain_shrinking(nesterov: bool) -> None:
    holder = one_matrix(1.0, -2.0)
    settings = OptimizerSettings(
        name="sgd", lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=nesterov
    )
    optimizer = build_optimizer(holder, settings)
    value, momentum = [1.0, -2.0], [0.0, 0.0]
    for gradient in GRADIENTS:
        holder.matrix.grad = torch.tensor([gradient])
        optimizer.step()
        momentum = [0.9 * m + g for m, g in zip(momentum, gradient, strict=True)]
        steps = [g + 0.9 * m if nesterov else m for g, m in zip(gradient, momentum, strict=True)]
        value = [v * (1 - 0.1 * 0.5) - 0.1 * step for v, step in zip(value, steps, strict=True)]
        assert holder.matrix.flatten().tolist() == pytest.approx(value, rel=1e-5)


def test_adamw_is_torchs_with_the_betas_that_are_asked_for() -> None:
    settings = OptimizerSettings(name="adamw", lr=0.1, weight_decay=0.5, betas=(0.8, 0.95))
    optimizer = build_optimizer(one_matrix(1.0, -2.0), settings)
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.8, 0.95), 0.5)


def test_groups_decay_matrices_alone_and_scale_the_head() -> None:
    model = build_model(MlpSpec(kind="mlp", depth=1, width=4), num_classes=3, image_size=8)
    groups = parameter_groups(model, OptimizerSettings(weight_decay=0.1, head_lr_scale=10.0))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = {
        (g["weight_decay"], g["lr_scale"]): sorted(names[id(p)] for p in g["params"])
        for g in groups
    }
    assert listed[0.1, 10.0] == ["head.weight"] and listed[0.0, 10.0] == ["head.bias"]
    assert listed[0.1, 1.0] == ["blocks.0.contract.weight", "blocks.0.expand.weight", "stem.weight"]
    assert sum(len(found) for found in listed.values()) == len(names)
    of_all = parameter_groups(model, OptimizerSettings(weight_decay=0.1, decay="all"))
    assert {group["weight_decay"] for group in of_all} == {0.1} and sum(
        len(group["params"]) for group in of_all
    ) == len(names)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.01)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01, 0.1}


def test_schedules_warm_up_and_fall_to_their_end() -> None:
    names: dict[Any, tuple[float, float, float]] = {  # after a quarter, halfway, at the end
        "cosine": (0.55 + 0.45 * math.sqrt(0.5), 0.55, 0.1),
        "linear": (0.775, 0.55, 0.1),
        "constant": (1.0, 1.0, 1.0),
    }
    for name, fallen in names.items():
        settings = ScheduleSettings(name=name, final_lr=0.1)
        schedule = Schedule(settings, 1.0, num_steps=104, warmup_steps=4)
        assert [schedule.lr(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert [schedule.lr(step) for step in (29, 54, 104)] == pytest.approx(fallen)
        assert schedule.lr(200) == schedule.lr(104)
        assert all(schedule.lr(step) >= schedule.lr(step + 1) for step in range(4, 104))
        assert Schedule(settings, 1.0, num_steps=10).lr(0) == 1.0
    settings = ScheduleSettings(name="wsd", cooldown="4 steps", final_lr=0.2)
    stable = Schedule(settings, 1.0, num_steps=10, cooldown_steps=4)
    assert [stable.lr(step) for step in (0, 5, 6, 7, 8, 9, 10)] == pytest.approx(
        [1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_a_warm_up_begins_where_it_is_told_to() -> None:
    """The ImageNet-1k recipe of the Mixer paper, with 313 steps per epoch."""
    settings = ScheduleSettings(final_lr=1e-5, warmup_from=1e-6)
    schedule = Schedule(settings, 1e-3, warmup_steps=5 * 313, num_steps=300 * 313)
    assert schedule.lr(0) == 1e-6 and schedule.lr(313) == pytest.approx(1e-6 + 0.2 * (1e-3 - 1e-6))
    assert schedule.lr(5 * 313) == 1e-3 and schedule.lr(300 * 313) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("5000 steps", 5000),
        ("1 step", 1),
        ("2 epochs", 200),
        ("1.1 epochs", 110),
        ("1_000 samples", 2),
        ("1001 samples", 3),
    ],
)
def test_durations_become_steps(text: str, steps: int) -> None:
    assert parse_length(text).steps(global_batch_size=500, num_samples=50_000) == steps


def test_what_a_model_excepts_is_not_decayed() -> None:
    with torch.device("meta"):
        model = build("vit_b_4")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, OptimizerSettings(weight_decay=0.1))
    free = {
        names[parameter]
        for group in groups
        if not group["weight_decay"]
        for parameter in group["params"]
    }
    assert free >= {"body.cls_token", "body.pos_embed", "body.blocks.0.attn.qkv.bias"}
    assert "body.blocks.0.attn.qkv.weight" not in free
