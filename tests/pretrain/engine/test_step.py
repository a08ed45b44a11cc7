"""The loss compiled for GPUs equals the plain loss. The blocks to compile are found in any model."""

import threading

import pytest
import torch
from torch import Tensor

from pretrain.augment.augmentation import Prepared
from pretrain.engine.step import loss_of, norm_of, one_pass_loss, repeated_parts, working_in
from pretrain.models.build import build_model
from pretrain.models.layers.products import products
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, TimmModelSpec, TimmSpec

LABELS, OTHERS, SHARE = (
    torch.tensor([0, 6, 3, 3]),
    torch.tensor([2, 6, 0, 1]),
    torch.tensor([1.0, 0.3, 0.0, 0.7]),
)
MIXED = (LABELS, OTHERS, SHARE)
ALONE = (LABELS, None, None)


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) * 5
    return made.to(dtype).requires_grad_()


def by_hand(
    x_BK: Tensor,
    labels_B: Tensor,
    others_B: Tensor | None,
    share_B: Tensor | None,
    smoothing: float,
) -> Tensor:
    """Return the cross entropy, -sum(target x log softmax), in float64 with an explicit target."""
    target_BK = torch.zeros(x_BK.shape, dtype=torch.float64)
    for row, label in enumerate(labels_B.tolist()):
        target_BK[row, label] += 1.0 if share_B is None else float(share_B[row])
        if others_B is not None and share_B is not None:
            target_BK[row, int(others_B[row])] += 1 - float(share_B[row])
    target_BK = (1 - smoothing) * target_BK + smoothing / x_BK.shape[1]
    wide_BK = x_BK.double()
    return -(target_BK * (wide_BK - wide_BK.exp().sum(1, keepdim=True).log())).sum(1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("labels", [ALONE, MIXED], ids=["alone", "mixed"])
def test_both_losses_are_the_loss(
    dtype: torch.dtype, smoothing: float, labels: tuple[Tensor, Tensor, Tensor]
) -> None:
    exact, plain, one_pass = logits(dtype), logits(dtype), logits(dtype)
    losses = [
        by_hand(exact, *labels, smoothing),
        loss_of(plain, Prepared(plain, *labels), label_smoothing=smoothing),
        one_pass_loss(one_pass, *labels, smoothing),
    ]
    for loss in losses:
        loss.backward()
    for loss, of in zip(losses[1:], (plain, one_pass), strict=True):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), losses[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            of.grad, exact.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


@pytest.mark.parametrize("labels", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize(
    ("value", "smoothing"),
    [(float("nan"), 0.0), (float("nan"), 0.3), (float("inf"), 0.0), (float("-inf"), 0.3)],
)
def test_one_logit_that_is_not_finite_shows_in_both(
    labels: tuple[Tensor, Tensor, Tensor], value: float, smoothing: float
) -> None:
    x = logits().detach()
    x[1, 4] = value
    assert not loss_of(x, Prepared(x, *labels), label_smoothing=smoothing).isfinite()
    assert not one_pass_loss(x, *labels, smoothing).isfinite()


@pytest.mark.parametrize("labels", [ALONE, MIXED], ids=["alone", "mixed"])
def test_an_answer_that_is_ruled_out_is_no_fault_in_either(
    labels: tuple[Tensor, Tensor, Tensor],
) -> None:
    x = torch.cat([logits().detach(), torch.full((4, 1), float("-inf"))], dim=1)
    expected = by_hand(x[:, :-1], *labels, 0.0)
    for found in (
        loss_of(x, Prepared(x, *labels), label_smoothing=0.0),
        one_pass_loss(x, *labels, 0.0),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "kind", "count"),
    [
        (MlpSpec(kind="mlp", depth=4, width=8, skip_every=2), "InvertedBlock", 4),
        (
            MixerSpec(
                kind="mixer",
                patch_size=16,
                num_channels=6,
                num_tokens=5,
                depth=3,
                permuted_blocks=(1,),
            ),
            "MixerBlock",
            3,
        ),
        (
            SparseMlpSpec(
                kind="sw_mlp", patch_size=16, num_channels=6, width=96, density=0.5, depth=1
            ),
            "StandardBlock",
            1,
        ),
        (TimmSpec(kind="timm", name="resnet18_32"), "BasicBlock", 8),
        (TimmModelSpec(kind="timm_model", name="mixer_s32_224", num_features=512), "MixerBlock", 8),
        (
            TimmModelSpec(kind="timm_model", name="convnext_atto", num_features=320),
            "ConvNeXtBlock",
            12,
        ),
    ],
    ids=lambda value: value.label if not isinstance(value, str | int) else value,
)
def test_the_blocks_of_any_model_are_found(spec: AnySpec, kind: str, count: int) -> None:
    with torch.device("meta"):
        model = build_model(
            spec, num_classes=3, image_size=224 if isinstance(spec, TimmModelSpec) else 64
        )
    parts = repeated_parts(model)
    assert [type(part).__name__ for part in parts] == [kind] * count
    assert len({id(part) for part in parts}) == count


def test_the_norm_of_many_numbers_keeps_its_digits_on_a_cpu() -> None:
    many, few = (
        torch.randn(count, generator=torch.Generator().manual_seed(0)) for count in (2**24, 3)
    )
    exact = torch.cat([many, few]).double().square().sum().sqrt()
    assert float(norm_of([many.view(2**10, -1), few]) / exact) == pytest.approx(1, abs=1e-6)
    assert norm_of([many, few / 0]).isinf()


def test_tf32_is_left_behind_neither_for_others_nor_for_later() -> None:
    order, switches = [], (torch.backends.cuda.matmul, torch.backends.cudnn)

    def seen() -> set[bool]:
        return {each.allow_tf32 for each in switches}

    def augment() -> None:
        with products(in_tf32=False):
            order.append(("augment", seen()))

    other = threading.Thread(target=augment)
    with pytest.raises(OSError, match="a step fails"), working_in("tf32"):
        other.start()
        other.join(0.05)
        order.append(("step", seen()))
        raise OSError("a step fails")
    other.join()
    with working_in("fp32"):
        order.append(("fp32", seen()))
    assert order == [("step", {True}), ("augment", {False}), ("fp32", {False})]
    assert [each.allow_tf32 for each in switches] == [False, True]  # torch's defaults
