"""The GPU's kernels compared with the plain code: in Triton's interpreter, in a process without
other Triton imports. Compilation for a GPU that is absent. The complete augmentation on `cuda` with
fake tensors, which have shapes and no device.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pretrain.augment import on_cpu
from pretrain.augment.augmentation import Augmentation, Normalization, kernels
from pretrain.augment.crops import resample, resample_levels
from pretrain.config import AugmentSettings
from tests import forked
from tests.pretrain.augment.pictures import batch_of, make, pictures
from tests.pretrain.augment.test_augmentation import CIFAR, COLORS, FLOATS, PAPER_A, RESIZED
from tests.pretrain.augment.test_on_cpu import MEAN, SCALE, plain_mix, random_boxes

AREA = AugmentSettings(crop_scale=(0.4, 1.0), crop_interpolation="area", mixup_alpha=0.8)
PREVIOUS = AREA.model_copy(update={"mixup_pairing": "ffcv"})
"""The recipe of both ImageNet-21k configs."""


def crops() -> None:
    """Compare floats with `resample` and float64 mixing, and levels bit for bit."""
    for stored, size, area in (
        (64, 64, False),
        (72, 64, True),
        (20, 33, False),
        (37, 16, True),
        (256, 224, False),
        (1, 4, False),
    ):
        count = 2 if size > 64 else 4
        images, boxes = pictures(count, stored), random_boxes(count, stored)
        kernels()._BLOCK = 512 if size < 40 else 2**16 if size > 64 else 4096
        how: dict[str, Any] = {
            "weights": np.random.Generator(np.random.Philox(3)).random(count),
            "area": area,
            "size": size,
        }
        found, weights = kernels().crop_mix_normalize(
            images, boxes, colors_23=torch.tensor([MEAN, SCALE]), **how
        )
        assert found.is_contiguous() and torch.equal(
            weights, torch.from_numpy(how["weights"]).float()
        )
        plain = plain_mix(resample(images, boxes, size=size, area=area), how["weights"])
        torch.testing.assert_close(found.double(), plain, rtol=0, atol=1e-5)
        before, _ = kernels().crop_mix_normalize(
            images,
            boxes,
            colors_23=torch.tensor([MEAN, SCALE]),
            **how | {"weights": how["weights"][1:]},
        )
        each = plain_mix(resample(images, boxes, size=size, area=area), None)
        own = torch.from_numpy(how["weights"][1:]).view(-1, 1, 1, 1)
        torch.testing.assert_close(
            before.double(), own * each[1:] + (1 - own) * each[:-1], rtol=0, atol=1e-5
        )
        of_cpu = on_cpu.crop_mix_normalize(
            images, boxes, mean=MEAN, scale=SCALE, dtype=torch.float32, **how
        )
        torch.testing.assert_close(found, of_cpu, rtol=0, atol=1e-4)
        if size <= 64:
            cubic = None if area else np.arange(count) % 2 == 0
            levels, _ = kernels().crop_mix_normalize(
                images, boxes, size=size, area=area, cubic=cubic, levels=True
            )
            assert torch.equal(
                levels, resample_levels(images, boxes, size=size, area=area, cubic=cubic)
            ), (stored, size)


def recipes() -> None:
    """Compare `prepare` with `plain` as on a GPU. The interpreter truncates to bfloat16, a GPU
    rounds: a difference of one last bit."""
    for settings in (FLOATS, AREA, PREVIOUS, RESIZED, PAPER_A):
        dtype = torch.bfloat16 if settings is AREA else torch.float32
        batch = batch_of(pictures(6, 20), np.arange(6))
        if settings.mixes_previous:  # one additional image
            batch = replace(batch, mix_keys=batch.mix_keys[1:])
        plain, ours = (make(settings, normalization=COLORS, dtype=dtype) for _ in range(2))
        plain._on_cpu = plain._in_one_pass = False
        ours._on_cpu, ours._kernels, ours._in_one_pass = (
            False,
            kernels(),
            settings.is_crop_flip_mixup,
        )
        for one, other in (
            (ours.prepare(batch), plain.prepare(batch)),
            (ours.plain(batch), plain.plain(batch)),
        ):
            tolerance: dict[str, float] = (
                {"rtol": 2**-7, "atol": 2**-7}
                if dtype == torch.bfloat16
                else {"rtol": 0, "atol": 1e-4}
            )
            torch.testing.assert_close(one.images_BCHW, other.images_BCHW, **tolerance)
            for name in ("labels_B", "other_labels_B", "weight_B"):
                assert getattr(one, name) is getattr(other, name) is None or torch.equal(
                    getattr(one, name), getattr(other, name)
                )


def interpreted(name: str) -> int:
    from triton.runtime.interpreter import InterpretedFunction

    # functions that a kernel calls are interpreted directly, because patching the language for each
    # call takes minutes
    InterpretedFunction.__call__ = lambda self, *args, **how: self.rewrite()(*args, **how)  # type: ignore[method-assign]
    globals()[name]()
    return 0


@pytest.mark.processes
@pytest.mark.parametrize("case", [crops, recipes], ids=lambda case: case.__name__)
def test_interpreted_kernels_make_what_the_plain_forms_make(
    case: Callable[[], None], tmp_path: Path
) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    output = tmp_path / "output"
    process = forked.begin(
        f"{__name__}:interpreted", case.__name__, environment=environment, output=output
    )
    assert forked.wait([process], timeout_s=280) == [0], output.read_text()


@pytest.mark.processes
@pytest.mark.parametrize("kernel", ["pairs", "previous", "levels"])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton, compiler = pytest.importorskip("triton"), pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    levels = kernel == "levels"
    constants: dict[str, int] = {
        "TAPS": 5 if levels else 2,
        "MIXING": ["levels", "pairs", "previous"].index(kernel),
    }
    constants |= {"AREA": False, "CUBIC": levels, "LEVELS": levels}
    constants |= {"NORMALIZED": not levels, "BLOCK": 512}
    signature = {
        "images": "*u8",
        "boxes": "*fp32",
        "colors": "*fp32",
        "out": "*u8" if levels else "*bf16",
    }
    signature |= dict.fromkeys(("count", "stored", "size", "blocks"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    source = compiler.ASTSource(
        fn=kernels()._gather, signature=signature, constexprs=constants, attrs={}
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": not levels}
    )
    # integer levels need sums without fused products; bfloat16 rounds to nearest
    assert ("fma.rn" in made.asm["ptx"], "cvt.rn.bf16" in made.asm["ptx"]) == (
        not levels,
        not levels,
    )
    assert len(made.asm["cubin"]) > 5_000


@pytest.mark.parametrize(
    "settings",
    [PAPER_A, CIFAR, FLOATS, AREA, PREVIOUS, RESIZED],
    ids=["Mixer paper", "padding", "floats", "area", "previous", "resized"],
)
@pytest.mark.parametrize("way", ["prepare", "plain"])
def test_on_a_gpu_that_is_fake_nothing_is_waited_for(settings: AugmentSettings, way: str) -> None:
    with FakeTensorMode():
        there = Augmentation(
            settings,
            seed=3,
            image_size=16,
            normalization=Normalization(*COLORS),
            device=torch.device("cuda", 0),
            dtype=torch.bfloat16,
        )
        batch = batch_of(torch.empty((48, 20, 20, 3), dtype=torch.uint8), np.arange(48))
        count = 47 if way == "prepare" and settings.mixes_previous else 48
        prepared = getattr(there, way)(replace(batch, mix_keys=batch.mix_keys[-count:]))
    images = prepared.images_BCHW
    assert (images.shape, images.dtype, images.device.type) == (
        (count, 3, 16, 16),
        torch.bfloat16,
        "cuda",
    )
    assert there._in_one_pass is (settings in (FLOATS, AREA, PREVIOUS)) and (
        images.is_contiguous() or not there._in_one_pass
    )
    assert {tensor.device.type for tensor in vars(prepared).values() if tensor is not None} == {
        "cuda"
    }
