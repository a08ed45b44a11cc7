"""GPU code on fake tensors of torch, which have shapes, types and devices, but no numbers.

This finds tensors that stay on the CPU, numpy calls on GPU tensors, and every `.item()`, which
would wait for the device. Only the forward pass runs, because autograd requests a stream from the
driver. test_cuda.py compares numbers on a real GPU.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from finetune.evaluate.evaluate import _Mean
from finetune.probe.config import KnnSettings, ProbeSettings
from finetune.probe.heads import Update, as_columns, clip, errors_of, losses_of
from finetune.probe.knn import answers, neighbors_of, unit_rows
from pretrain.augment.augmentation import Augmentation, Normalization, Prepared
from pretrain.config import AugmentSettings, OptimizerSettings, PixelOrder
from pretrain.data.loader import Batch
from pretrain.engine.ema import WeightAverage
from pretrain.engine.step import loss_of, one_pass_loss
from pretrain.loop.evaluate import _count
from pretrain.models.build import build_model, pooled_features
from pretrain.models.presets import spec_of
from pretrain.optim import build_optimizer

COUNT, SIZE = 4, 16
PAPER_B = {"crop_scale": (0.4, 1.0), "mixup_alpha": 0.8}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    def numpy(tensor: Tensor) -> NDArray[Any]:
        assert tensor.device.type == "cpu", "numpy of a tensor that lies on a GPU"
        return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    monkeypatch.setattr(FakeTensor, "numpy", numpy, raising=False)
    with FakeTensorMode(), torch.no_grad():
        yield torch.device("cuda", 0)


def on(device: torch.device, found: Any) -> None:
    tensors = [each for each in found if each is not None]
    assert tensors and all(each.device == device for each in tensors), [
        each.device for each in tensors
    ]


def moved(
    make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype = torch.float32
) -> Any:
    """Return a module of fake tensors. It is built with numbers (for random masks and orders), and
    `to` cannot replace these by fake tensors."""
    with unset_fake_temporarily():
        model = make()
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty(weight.shape, dtype=dtype, device=device)
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = torch.empty(buffer.shape, dtype=kept, device=device)
    return model


def stored(size: int = SIZE) -> Batch:
    ids = np.arange(COUNT)
    images, labels = (
        torch.zeros(COUNT, size, size, 3, dtype=torch.uint8),
        torch.zeros(COUNT, dtype=torch.long),
    )
    return Batch(images, labels, np.zeros(COUNT, np.int64), ids, ids // 2)


def augmentation(settings: dict[str, Any], device: torch.device, **words: Any) -> Augmentation:
    normal = Normalization((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    words = {"image_size": SIZE, "normalization": normal, "dtype": torch.bfloat16} | words
    return Augmentation(AugmentSettings(**settings), seed=0, device=device, **words)


@pytest.mark.parametrize("permute", ["before", "after"])
def test_pixels_are_put_in_order_there(device: torch.device, permute: Any) -> None:
    pixels = PixelOrder(pixel_permutation=3, permute=permute)
    on(device, vars(augmentation(PAPER_B, device, pixels=pixels).prepare(stored(20))).values())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize("size", [SIZE, 20])
def test_pictures_are_judged_there(device: torch.device, interpolation: str, size: int) -> None:
    plain = augmentation({"crop_interpolation": interpolation}, device).plain(stored(size))
    on(device, [plain.images_BCHW, plain.labels_B])
    logits, mask = (
        torch.zeros(COUNT, 9, device=device, dtype=torch.bfloat16),
        torch.ones(COUNT, dtype=torch.bool, device=device),
    )
    on(device, [_count(logits, plain.labels_B, mask)])
    mean = _Mean(plain.labels_B, (1, 2))
    for _ in range(2):
        mean.add(logits)
    on(device, mean.rows())


MODELS = {
    "mlp_b6_wi256": (spec_of("mlp_b6_wi256"), 64),
    "mixer": (spec_of("mixer_ss_w"), 32),
    "rp mixer": (spec_of("rp_mixer_ss_w"), 32),
    "sw_mlp": (spec_of("sw_mlp_540"), 32),
    "monarch": (spec_of("monarch_mnist", grayscale=False), 28),
    "kronecker": (spec_of("kronecker_mnist", grayscale=False), 28),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mixed", [True, False])
def test_a_step_goes_forward_there(device: torch.device, name: str, mixed: bool) -> None:
    spec, size = MODELS[name]
    model = moved(
        partial(build_model, spec, num_classes=11, image_size=size, seed=0), device, torch.bfloat16
    ).train()
    labels = torch.zeros(COUNT, dtype=torch.long, device=device)
    others = (labels, torch.ones(COUNT, device=device)) if mixed else (None, None)
    batch = Prepared(
        torch.zeros(COUNT, 3, size, size, device=device, dtype=torch.bfloat16), labels, *others
    )
    logits = model(batch.images_BCHW)
    as_compiled = one_pass_loss(logits, batch.labels_B, batch.other_labels_B, batch.weight_B, 0.1)
    on(device, [logits, loss_of(logits, batch, label_smoothing=0.1), as_compiled])
    on(device, [pooled_features(model.eval(), batch.images_BCHW)])


@pytest.mark.parametrize(
    "name", ["lion", "adamw"]
)  # fake tensors do not support torch's kernel for sgd
def test_weights_are_updated_there(device: torch.device, name: Any) -> None:
    model = moved(lambda: nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20)), device)
    optimizer = build_optimizer(model, OptimizerSettings(name=name, lr=1e-3, weight_decay=0.1))
    average = WeightAverage(list(model.parameters()), decay=0.9)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        average.update(torch.ones((), dtype=torch.bool, device=device))
    on(
        device,
        [
            value
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        ],
    )
    on(device, average.shards)


@pytest.mark.parametrize("optimizer", ["lion", "sgd", "adamw"])
def test_heads_are_trained_there(device: torch.device, optimizer: Any) -> None:
    """Train a grid of two candidates like `train_heads`."""
    width, num_classes = 16, 5
    heads = torch.zeros(2, width, num_classes, device=device)
    update = Update(
        as_columns(heads),
        ProbeSettings(run_dir="x", data={"dataset": "y"}, optimizer=optimizer),
        num_features=15,
    )
    x_BE, labels_B = (
        torch.zeros(COUNT, width, device=device),
        torch.zeros(COUNT, dtype=torch.long, device=device),
    )
    for _ in range(2):
        logits = x_BE @ update.weights_EC
        gradient = x_BE.T @ errors_of(logits, labels_B, num_classes=num_classes, smoothing=0.1)
        clip(gradient, norm=1.0, num_classes=num_classes)
        update.step(
            gradient, lr_C=torch.ones(10, device=device), decay_C=torch.ones(10, device=device)
        )
    on(
        device,
        [update.weights_EC, losses_of(x_BE @ update.weights_EC, labels_B, num_classes=num_classes)],
    )


@pytest.mark.parametrize("weights", ["softmax", "uniform", "distance"])
def test_neighbors_are_found_there(device: torch.device, weights: Any) -> None:
    settings = KnnSettings(run_dir="x", data={"dataset": "y"}, neighbors=(1, 3), weights=weights)
    (queries,) = unit_rows([torch.ones(COUNT, 8)], device=device)
    similar, rows = neighbors_of(
        queries, unit_rows([torch.ones(7, 8), torch.ones(5, 8)], device=device), count=3
    )
    labels = torch.zeros(12, dtype=torch.long, device=device)
    on(device, [similar, rows, *answers(similar, labels[rows], settings, num_classes=4).values()])
