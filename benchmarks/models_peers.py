"""Peers of our models in benchmarks/models.py: direct translations of the papers' formulas, timm's
MlpMixer, and bare matrix products.

Shapes: B batch, S tokens, C channels, N rows of a product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec


def plain(spec: AnySpec, *, num_classes: int, image_size: int) -> nn.Module:
    if isinstance(spec, MlpSpec):
        return PlainMlp(spec, num_classes=num_classes, image_size=image_size)
    assert isinstance(spec, MixerSpec), spec
    return PlainMixer(spec, num_classes=num_classes, image_size=image_size)


def two_layers(size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))


def one_layer(size_in: int, size_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size_in, size_out), nn.GELU())


class PlainMlp(nn.Module):
    def __init__(self, spec: MlpSpec, *, num_classes: int, image_size: int):
        super().__init__()
        self.stem = nn.Linear(3 * image_size**2, spec.width)
        self.has_skip = spec.bottleneck == "inverted"
        self.norms = nn.ModuleList(nn.LayerNorm(spec.width) for _ in range(spec.depth))
        self.layers = nn.ModuleList(
            (
                two_layers(spec.width, spec.hidden_width)
                if self.has_skip
                else one_layer(spec.width, spec.width)
            )
            for _ in range(spec.depth)
        )
        self.head = nn.Linear(spec.width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)) if self.has_skip else layer(norm(x))
        return self.head(x)


class PlainMixerBlock(nn.Module):
    def __init__(
        self,
        spec: MixerSpec,
        *,
        num_inputs: int,
        num_tokens: int,
        is_permuted: bool,
        has_token_skip: bool,
    ):
        super().__init__()
        channels = spec.num_channels
        self.skip = nn.Linear(num_inputs, num_tokens, bias=False) if has_token_skip else None
        self.skip_norm = nn.LayerNorm(channels)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        if spec.layers_per_mixing == 1:
            self.tokens = one_layer(num_inputs, num_tokens)
            self.channels = one_layer(channels, channels)
        else:
            token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=num_tokens)
            self.tokens = two_layers(num_tokens, token_hidden)
            self.channels = two_layers(channels, channel_hidden)
        sizes = (num_inputs, num_tokens, num_tokens, num_tokens) if is_permuted else ()
        for number, size in enumerate(sizes):
            self.register_buffer(f"permutation{number}", torch.randperm(size * channels))
        self.is_permuted = is_permuted

    def mix(self, x_BSC: Tensor, layer: nn.Module, *, first: int, copies: int) -> Tensor:
        before = getattr(self, f"permutation{first}")
        after = getattr(self, f"permutation{first + 1}")
        parts = x_BSC.flatten(1)[:, before].reshape(len(x_BSC), copies, -1)
        return layer(parts).flatten(1)[:, after].reshape(len(x_BSC), -1, x_BSC.shape[-1])

    def forward(self, x_BSC: Tensor) -> Tensor:
        y = self.norms[0](x_BSC)
        if self.is_permuted:
            y = self.mix(y, self.tokens, first=0, copies=y.shape[2])
        else:
            y = self.tokens(y.transpose(1, 2)).transpose(1, 2)
        if self.skip is not None:
            x_BSC = self.skip_norm(self.skip(x_BSC.transpose(1, 2)).transpose(1, 2))
        x_BSC = x_BSC + y
        y = self.norms[1](x_BSC)
        y = (
            self.mix(y, self.channels, first=2, copies=y.shape[1])
            if self.is_permuted
            else self.channels(y)
        )
        return x_BSC + y


class PlainMixer(nn.Module):
    def __init__(self, spec: MixerSpec, *, num_classes: int, image_size: int):
        super().__init__()
        self.patch = spec.patch_size
        patches, tokens = (
            spec.num_patches(image_size=image_size),
            spec.tokens(image_size=image_size),
        )
        self.stem = nn.Linear(3 * self.patch**2, spec.num_channels)
        self.blocks = nn.Sequential(
            *(
                PlainMixerBlock(
                    spec,
                    num_inputs=tokens if number else patches,
                    num_tokens=tokens,
                    is_permuted=spec.is_permuted(number),
                    has_token_skip=number == 0 and spec.num_tokens is not None,
                )
                for number in range(spec.depth)
            )
        )
        self.norm = nn.LayerNorm(spec.num_channels)
        self.head = nn.Linear(spec.num_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = nn.functional.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.stem(patches))).mean(dim=1))


def timm_mixer(spec: AnySpec, *, num_classes: int, image_size: int) -> nn.Module | None:
    """Return timm's MlpMixer of the same shapes; None if timm cannot build it (other number of
    tokens than patches, permutations, or one layer per mixing)."""
    can = isinstance(spec, MixerSpec) and spec.layers_per_mixing == 2 and spec.num_tokens is None
    if not can or spec.permuted_blocks:
        return None
    hidden = spec.hidden_sizes(num_tokens=spec.tokens(image_size=image_size))
    # timm truncates ratio x channels
    ratios = tuple((size + 0.5) / spec.num_channels for size in hidden)
    model = MlpMixer(
        num_classes=num_classes,
        img_size=image_size,
        patch_size=spec.patch_size,
        num_blocks=spec.depth,
        embed_dim=spec.num_channels,
        mlp_ratio=ratios,
    )
    assert (
        model.blocks[0].mlp_tokens.fc1.out_features,
        model.blocks[0].mlp_channels.fc1.out_features,
    ) == hidden
    return model


@dataclass(frozen=True)
class Product:
    """Shape of the forward product of one linear layer: (rows, inputs) x (inputs, outputs)."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


def products_of(model: nn.Module, images: Tensor) -> list[Product]:
    """Run a forward pass, and return the shapes of its products in order."""
    found: list[Product] = []

    def note(layer: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        # not in_features, because inputs can be padded
        rows = inputs[0].numel() // inputs[0].shape[-1]
        found.append(Product(rows, layer.in_features, layer.out_features))

    hooks = [
        layer.register_forward_hook(note)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return found


def step_flops(products: list[Product]) -> int:
    """Return FLOPs of the forward product and both backward products of each layer. The first layer
    computes no gradient of the images."""
    return 3 * sum(product.flops for product in products) - products[0].flops


def bare_products(products: list[Product], *, like: Tensor) -> Callable[[], None]:
    """Return a function that runs all products of a step on prepared tensors. Each layer has its
    own weights and gradients. Layers of one shape share activations, which are too large for a
    cache."""
    activations = {
        p: (like.new_empty(p.rows, p.inputs).normal_(), like.new_empty(p.rows, p.outputs).normal_())
        for p in set(products)
    }
    results = {p: (torch.empty_like(x), torch.empty_like(y)) for p, (x, y) in activations.items()}
    weights = [like.new_empty(p.outputs, p.inputs).normal_() for p in products]
    gradients = [torch.empty_like(weight) for weight in weights]

    def run() -> None:
        for number, (product, weight, gradient) in enumerate(
            zip(products, weights, gradients, strict=True)
        ):
            (x, dy), (dx, y) = activations[product], results[product]
            torch.mm(x, weight.T, out=y)
            torch.mm(dy.T, x, out=gradient)
            if number:
                torch.mm(dy, weight, out=dx)

    return run
