"""MLP-Mixer, S-Mixer and their RP variants. Shapes: B batch, S tokens (S0 patches), C channels, P
patch, M = S C, K classes."""

from math import isqrt

from torch import Tensor, nn

from pretrain.models.image_model import ACTIVATIONS, ImageModel, classifier
from pretrain.models.layers.linear import Linear
from pretrain.models.layers.permutation import generator_beside_weights, pk, random_permutation
from pretrain.models.spec import MixerSpec


class TwoLayer(nn.Module):
    """W2 act(W1 x) on the last axis. `init: normal` draws W1 from N(0, 1/inputs) and W2 from N(0,
    1/outputs)."""

    def __init__(self, spec: MixerSpec, num_inputs: int, *, hidden: int, num_outputs: int):
        super().__init__()
        self.inner = Linear(num_inputs, hidden, hands_zeros_on=True)
        self.activation = ACTIVATIONS[spec.activation]()
        self.outer = Linear(hidden, num_outputs)
        self.dropout = nn.Dropout(spec.dropout)
        if spec.init == "normal":
            start_normal(self.inner, variance=1 / num_inputs)
            start_normal(self.outer, variance=1 / num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.inner(x)))
        return self.dropout(self.outer(hidden))


class OneLayer(nn.Module):
    """act(W x) on the last axis."""

    def __init__(self, spec: MixerSpec, num_inputs: int, *, hidden: int, num_outputs: int):  # noqa: ARG002
        super().__init__()
        self.linear = Linear(num_inputs, num_outputs)
        self.activation = ACTIVATIONS[spec.activation]()
        self.dropout = nn.Dropout(spec.dropout)
        if spec.init == "normal":
            start_normal(self.linear, variance=1 / num_inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.linear(x)))


def start_normal(linear: nn.Linear, *, variance: float) -> None:
    nn.init.normal_(linear.weight, std=variance**0.5)
    nn.init.zeros_(linear.bias)


class TokenSkip(nn.Module):
    """LN(W~ X): the skip path of a block from S0 to S tokens."""

    def __init__(self, spec: MixerSpec, num_patches: int, *, num_tokens: int):
        super().__init__()
        self.linear = Linear(num_patches, num_tokens, bias=False)
        self.norm = nn.LayerNorm(spec.num_channels, eps=spec.norm_eps)
        nn.init.normal_(self.linear.weight, std=num_patches**-0.5)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.norm(self.linear(x_BSC.transpose(1, 2)).transpose(1, 2))


class MixerBlock(nn.Module):
    """U = X + token mixing of LN(X), then Y = U + channel mixing of LN(U).

    An RP block permutes all M entries at random before and after each mixing. Other blocks only
    transpose the axes before and after the token mixing.
    """

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
        token_hidden, channel_hidden = spec.hidden_sizes(num_tokens=num_tokens)
        self.skip = (
            TokenSkip(spec, num_inputs, num_tokens=num_tokens) if has_token_skip else nn.Identity()
        )
        self.token_norm = nn.LayerNorm(channels, eps=spec.norm_eps)
        mixing = TwoLayer if spec.layers_per_mixing == 2 else OneLayer
        self.token_mixing = mixing(spec, num_inputs, hidden=token_hidden, num_outputs=num_tokens)
        self.channel_norm = nn.LayerNorm(channels, eps=spec.norm_eps)
        self.channel_mixing = mixing(spec, channels, hidden=channel_hidden, num_outputs=channels)
        self.is_permuted = is_permuted
        if is_permuted:
            random = generator_beside_weights()
            self.before_tokens = random_permutation(num_inputs * channels, generator=random)
            self.after_tokens = random_permutation(num_tokens * channels, generator=random)
            self.before_channels = random_permutation(num_tokens * channels, generator=random)
            self.after_channels = random_permutation(num_tokens * channels, generator=random)

    def forward(self, x_BSC: Tensor) -> Tensor:
        batch, channels, normed_BSC = x_BSC.shape[0], x_BSC.shape[2], self.token_norm(x_BSC)
        if self.is_permuted:
            places = {"before": self.before_tokens, "after": self.after_tokens}
            mixed_BM = pk(normed_BSC.flatten(1), self.token_mixing, num_copies=channels, **places)
            mixed_BSC = mixed_BM.reshape(batch, mixed_BM.shape[1] // channels, channels)
        else:
            mixed_BSC = self.token_mixing(normed_BSC.transpose(1, 2)).transpose(1, 2)
        x_BSC = self.skip(x_BSC) + mixed_BSC
        normed_BSC, tokens = self.channel_norm(x_BSC), x_BSC.shape[1]
        if self.is_permuted:
            places = {"before": self.before_channels, "after": self.after_channels}
            return x_BSC + pk(
                normed_BSC.flatten(1), self.channel_mixing, num_copies=tokens, **places
            ).reshape(x_BSC.shape)
        return x_BSC + self.channel_mixing(normed_BSC)


class Mixer(ImageModel):
    def __init__(self, spec: MixerSpec, *, num_classes: int, image_size: int):
        super().__init__(
            num_features=spec.num_channels,
            num_classes=num_classes,
            pixels_per_place=spec.patch_size,
        )
        num_patches = spec.num_patches(image_size=image_size)
        num_tokens = spec.tokens(image_size=image_size)
        self.patch_size = spec.patch_size
        self.stem = Linear(3 * spec.patch_size**2, spec.num_channels)
        self.blocks = nn.ModuleList(
            MixerBlock(
                spec,
                num_inputs=num_tokens if number else num_patches,
                num_tokens=num_tokens,
                is_permuted=spec.is_permuted(number),
                has_token_skip=number == 0 and spec.num_tokens is not None,
            )
            for number in range(spec.depth)
        )
        self.norm = (
            nn.LayerNorm(spec.num_channels, eps=spec.norm_eps) if spec.final_norm else nn.Identity()
        )
        self.head = classifier(spec.num_channels, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return self.stem(patches(x_BCHW, size=self.patch_size))

    def pool(self, x_BF: Tensor) -> Tensor:
        return x_BF.mean(dim=1)

    def as_map(self, x_BF: Tensor) -> Tensor:
        """Return the tokens as a square map in the order of the patches, or as one column if their
        number is not a square."""
        side = isqrt(x_BF.shape[1])
        width = side if side**2 == x_BF.shape[1] else 1
        return x_BF.transpose(1, 2).reshape(
            x_BF.shape[0], self.num_features, x_BF.shape[1] // width, width
        )


def patches(x_BCHW: Tensor, *, size: int) -> Tensor:
    """Return (B, S0, 3 P P): every patch as one row, in reading order."""
    batch, colors, height, width = x_BCHW.shape
    rows, columns = height // size, width // size
    grid = x_BCHW.reshape(batch, colors, rows, size, columns, size)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, colors * size * size)
