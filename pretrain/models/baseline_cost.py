"""The cost of the two models that paper B compares with, from their published structure (no torch, no timm)."""

from typing import Literal

from pretrain.models.cost_parts import Cost, batch_norm, layer_norm, linear

Baseline = Literal["resnet152_64", "vit_b_4"]

NUM_FEATURES: dict[Baseline, int] = {"resnet152_64": 2048, "vit_b_4": 768}

RESNET_STEM_PADDING = 0
"""Paper B says that the stem's stride and the max-pooling were removed, and prints 13.07 G. With the stem's usual padding of 3 its
counter gives 14.98 G; without padding (58 x 58 after the stem instead of 64 x 64) 13.07 G: so that is what was counted."""


def body_cost(name: Baseline, *, image_size: int) -> Cost:
    """Without the head."""
    return resnet152(image_size) if name == "resnet152_64" else _vit_b_4(image_size)


def resnet152(image_size: int, *, padding: int = RESNET_STEM_PADDING) -> Cost:
    """Bottlenecks of 1 x 1, 3 x 3 (which has the stride), 1 x 1; the first one of a stage has a 1 x 1 skip path."""
    size, num_inputs = image_size + 2 * padding - 6, 64
    total = _convolution(3, 64, kernel=7, size=size)
    for width, num_blocks, stride in ((64, 3, 1), (128, 8, 2), (256, 36, 2), (512, 3, 2)):
        for block in range(num_blocks):
            total += _convolution(num_inputs, width, kernel=1, size=size)
            if block == 0:
                size = (size - 1) // stride + 1
                total += _convolution(num_inputs, 4 * width, kernel=1, size=size)
            total += _convolution(width, width, kernel=3, size=size)
            total += _convolution(width, 4 * width, kernel=1, size=size)
            num_inputs = 4 * width
    return total


def _convolution(num_inputs: int, num_outputs: int, *, kernel: int, size: int) -> Cost:
    """With the batch norm that follows it; `size`: of the output's sides."""
    pixels = size**2
    return linear(num_inputs * kernel**2, num_outputs, rows=pixels, bias=False) + batch_norm(num_outputs, rows=pixels)


def _vit_b_4(image_size: int) -> Cost:
    width, num_patches = 768, (image_size // 4) ** 2
    tokens = num_patches + 1
    block = (
        layer_norm(width, rows=tokens) * 2
        + linear(width, 3 * width, rows=tokens)
        + Cost(multiply_adds=2 * tokens**2 * width)  # queries x keys, then weights x values
        + linear(width, width, rows=tokens)
        + linear(width, 4 * width, rows=tokens)
        + linear(4 * width, width, rows=tokens)
    )
    embeddings = Cost(num_parameters=(tokens + 1) * width)  # of places, and the class token
    return linear(3 * 16, width, rows=num_patches) + embeddings + block * 12 + layer_norm(width, rows=tokens)
