"""The compiled CPU augmentation compared with `resample`, torchvision and plain arithmetic; its
errors, and the place of its cache."""

import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from pretrain.augment import on_cpu
from pretrain.augment.crops import Boxes, resample, whole_boxes
from pretrain.augment.on_cpu import crop, crop_mix_normalize
from pretrain.compiled import Compiled
from pretrain.optim import lion
from tests.pretrain.augment.pictures import pictures
from tests.ranks import REPOSITORY

MEAN, SCALE = (120.0, 110.0, 100.0), (0.02, 0.017, 0.025)


def random_boxes(count: int, stored: int, *, seed: int = 1) -> Boxes:
    """Return boxes of integer pixels and any size. The first is the complete image, the last its
    last pixel."""
    generator = np.random.Generator(np.random.Philox(seed))
    height, width = (generator.integers(1, stored + 1, count).astype(np.float64) for _ in range(2))
    height[0] = width[0] = stored
    height[-1] = width[-1] = 1
    top, left = (
        np.floor(generator.random(count) * (stored - side + 1)) for side in (height, width)
    )
    top[-1] = left[-1] = stored - 1
    return Boxes(top, left, height, width, generator.random(count) < 0.5)


def plain_mix(cropped: Tensor, weights: NDArray[np.float64] | None) -> Tensor:
    """Return MixUp and normalization in float64, image by image."""
    values = cropped.double()
    if weights is not None:
        values = torch.stack(
            [w * values[i] + (1 - w) * values[i ^ 1] for i, w in enumerate(weights.tolist())]
        )
    mean, scale = (torch.tensor(side, dtype=torch.float64).view(3, 1, 1) for side in (MEAN, SCALE))
    return (values - mean) * scale


@pytest.mark.parametrize(
    ("stored", "size"),
    [
        (32, 13),
        (64, 32),
        (48, 48),
        (20, 64),
        (96, 64),
        (256, 224),
        (1, 4),
        (2, 1),
        (3, 5),
        (200, 7),
    ],
)
def test_crop_equals_resample_and_torchvision(stored: int, size: int) -> None:
    count = 10 if stored > 96 else 40
    images, boxes = pictures(count, stored), random_boxes(count, stored)
    ours = crop(images, boxes, size=size)
    assert (
        ours.shape == (count, 3, size, size)
        and ours.dtype == torch.float32
        and ours.is_contiguous()
    )
    torch.testing.assert_close(ours, resample(images, boxes, size=size), rtol=0, atol=1e-2)
    for number in range(0, count, 3):
        box = [int(side[number]) for side in (boxes.top, boxes.left, boxes.height, boxes.width)]
        expected = reference.resized_crop(
            images[number].permute(2, 0, 1).float(), *box, [size, size], antialias=True
        )
        expected = reference.horizontal_flip(expected) if boxes.flip[number] else expected
        torch.testing.assert_close(ours[number], expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize(("stored", "size"), [(24, 32), (64, 64), (96, 64)])
@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_and_normalized(stored: int, size: int, mixed: bool) -> None:
    images, boxes = pictures(12, stored), random_boxes(12, stored)
    weights = np.random.Generator(np.random.Philox(3)).random(12) if mixed else None
    ours = crop_mix_normalize(
        images, boxes, size=size, mean=MEAN, scale=SCALE, weights=weights, dtype=torch.float32
    )
    expected = plain_mix(resample(images, boxes, size=size), weights)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-2 * min(SCALE))


def test_ties_round_to_even() -> None:
    """257 is halfway between bfloat16's 256 and 258; 259 is halfway between 258 and 260. 255 * 257
    = 65535 exceeds 8 bits."""
    images = torch.full((1, 2, 2, 3), 1, dtype=torch.uint8)
    ours = crop_mix_normalize(
        images,
        whole_boxes(1, 2),
        size=2,
        mean=(0.0, 0.0, 0.0),
        scale=(257.0, 259.0, -257.0),
        weights=None,
        dtype=torch.bfloat16,
    )
    assert ours[0, :, 0, 0].tolist() == [256.0, 260.0, -256.0]


@pytest.mark.parametrize("spread", ["rows", "transposed", "expanded", "cut"])
def test_pictures_need_not_be_contiguous(spread: str) -> None:
    images = pictures(8, 12)
    views = {
        "rows": images[::2],
        "transposed": images.transpose(1, 2),
        "expanded": images[:1].expand(5, -1, -1, -1),
        "cut": images[:, 2:9, 3:10],
    }
    view = views[spread]
    boxes = random_boxes(len(view), view.shape[1])
    assert not view.is_contiguous()
    assert torch.equal(
        crop(view, boxes, size=9),
        crop(view.clone(memory_format=torch.contiguous_format), boxes, size=9),
    )


def test_bytes_behind_the_pictures_do_not_matter() -> None:
    """The loads reach past a row's last pixel: these bytes must not matter, and stay inside the
    memory."""
    boxes, size = random_boxes(2, 6), 5
    around = torch.zeros((4, 6, 6, 3), dtype=torch.uint8)
    around[1:3] = pictures(2, 6)
    first = crop(around[1:3], boxes, size=size)
    around[0], around[3] = 255, 255
    assert torch.equal(crop(around[1:3], boxes, size=size), first)


def test_threads_give_the_same_and_nothing_is_compiled_again() -> None:
    images, boxes = pictures(64, 20), random_boxes(64, 20)
    whole = crop(images, boxes, size=24)

    def part(start: int) -> Tensor:
        z = slice(start, start + 4)
        return crop(
            images[z],
            Boxes(boxes.top[z], boxes.left[z], boxes.height[z], boxes.width[z], boxes.flip[z]),
            size=24,
        )

    with ThreadPoolExecutor(4) as pool:
        assert torch.equal(torch.cat(list(pool.map(part, range(0, 64, 4)))), whole)
    frozen = boxes.top.astype(np.float32)
    frozen.flags.writeable = False
    crop(images, Boxes(frozen, boxes.left, boxes.height, boxes.width, boxes.flip), size=24)
    crop(images[:1, :1, :1], whole_boxes(1, 1), size=1)
    assert len(on_cpu._augment.dispatcher.signatures) == 1


def test_out_takes_the_result() -> None:
    images, boxes = pictures(4, 8), random_boxes(4, 8)
    settings: dict[str, Any] = {
        "size": 8,
        "mean": MEAN,
        "scale": SCALE,
        "weights": None,
        "dtype": torch.bfloat16,
    }
    out = torch.full((4, 3, 8, 8), torch.nan, dtype=torch.bfloat16)
    assert crop_mix_normalize(images, boxes, out=out, **settings) is out
    assert torch.equal(out, crop_mix_normalize(images, boxes, **settings))
    with pytest.raises(AssertionError, match="out is"):
        crop_mix_normalize(images, boxes, out=out[:2], **settings)


def test_what_would_lead_the_loops_astray_is_refused() -> None:
    images, good = pictures(4, 8), whole_boxes(4, 8)
    for field, value in (
        ("top", 1.0),
        ("left", -1.0),
        ("height", 0.5),
        ("width", 9.0),
        ("top", np.nan),
    ):
        sides = {name: getattr(good, name) for name in ("top", "left", "height", "width", "flip")}
        with pytest.raises(AssertionError, match="leaves its image"):
            crop(images, Boxes(**{**sides, field: np.array([0.0, 0.0, 0.0, value])}), size=8)
    for wrong in (images.float(), images[..., :2], images[:, :4], images[0], images.to("meta")):
        with pytest.raises(AssertionError):
            crop(wrong, good, size=8)
    with pytest.raises(AssertionError, match="images of 3"):
        crop(images[:3], good, size=8)
    for weights in (np.ones(3), np.ones(4)):
        with pytest.raises(AssertionError, match="pairs"):
            crop_mix_normalize(
                images[:3],
                whole_boxes(3, 8),
                size=8,
                mean=MEAN,
                scale=SCALE,
                weights=weights,
                dtype=torch.float32,
            )
    with pytest.raises(AssertionError, match="float16"):
        crop_mix_normalize(
            images, good, size=8, mean=MEAN, scale=SCALE, weights=None, dtype=torch.float16
        )


EDGES = """
import types, numpy as np, torch, on_cpu as a
for stored, size in ((1, 1), (1, 5), (2, 1), (3, 2), (9, 40), (16, 2), (33, 32), (64, 5), (40, 40)):
    for batch in (1, 2, 6):
        for side in {1, (stored + 1) // 2, stored}:
            for place in {0, stored - side}:
                start, extent = np.full(batch, float(place)), np.full(batch, float(side))
                boxes = types.SimpleNamespace(
                    top=start, left=start, height=extent, width=extent, flip=np.arange(batch) % 2 == 0
                )
                images = torch.full((batch, stored, stored, 3), 7, dtype=torch.uint8)
                assert (a.crop(images, boxes, size=size) - 7).abs().max() < 1e-4, (stored, size, batch, side, place)
"""


def crop_elsewhere(folder: Path, **settings: str) -> None:
    """Run EDGES in a separate process with a copy of the source in `folder` and an unwritable home
    directory."""
    shutil.copy(on_cpu.__file__, folder / "on_cpu.py")
    home = folder / "home"
    home.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{REPOSITORY}",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
    }
    environment |= {"NUMBA_OPT": "0", "NUMBA_CACHE_DIR": ""}  # compiled in half the time
    words, how = [sys.executable, "-c", EDGES], {"cwd": folder, "env": environment | settings}
    done = subprocess.run(words, **how, capture_output=True, text=True, timeout=150, check=False)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_it_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """A file blocks numba's cache directory next to the source and in the home directory, even for
    root.

    This copy checks its indices (the real one does not): loads past an image stay in its spare
    bytes.
    """
    (tmp_path / "__pycache__").touch()
    crop_elsewhere(tmp_path, NUMBA_BOUNDSCHECK="1")
    assert (tmp_path / "__pycache__").is_file()


@pytest.mark.processes
def test_a_cache_file_cut_short_is_made_anew(tmp_path: Path) -> None:
    line = on_cpu._augment.dispatcher.py_func.__code__.co_firstlineno
    index = (
        tmp_path
        / "__pycache__"
        / f"on_cpu._augment-{line}.py{sys.version_info[0]}{sys.version_info[1]}.nbi"
    )
    index.parent.mkdir()
    index.touch()
    crop_elsewhere(tmp_path)
    assert index.stat().st_size > 0


@pytest.mark.parametrize("loops", [on_cpu._augment, lion._update], ids=["augment", "lion"])
def test_a_full_disk_under_its_cache_costs_the_cache_alone(
    loops: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_disabled, called = list[bool](), list[Any]()

    def full(*arguments: Any) -> None:
        if not is_disabled:
            raise OSError(errno.ENOSPC, "No space left on device")
        called.append(arguments)

    full._cache = SimpleNamespace(flush=full, disable=lambda: is_disabled.append(True))  # type: ignore[attr-defined]
    monkeypatch.setattr(loops, "dispatcher", full)
    loops(1, 2)
    assert called == [(1, 2)]
