"""What a model is, as plain validated numbers (no torch here), and the names of the papers' models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from data_prep.settings import Settings, nearest


class MlpSpec(Settings):
    """Paper B: Linear(3 H W, width), `depth` blocks, Linear(width, classes)."""

    kind: Literal["mlp"]
    depth: int = Field(6, ge=1)
    width: int = Field(1024, ge=1)
    expansion: int = Field(4, ge=1)
    """Hidden width of a block is expansion x width (bottleneck: inverted only)."""
    bottleneck: Literal["inverted", "none"] = "inverted"
    """inverted: z + Wc GELU(We LN(z)), the B-L/Wi-m models; none: GELU(W LN(z)), the standard MLP."""

    def check(self, *, image_size: int) -> None:
        """Raises `ValueError` when the model cannot take such images; an MLP takes any."""


class MixerSpec(Settings):
    """Paper A: per-patch linear, `depth` mixing blocks on (S tokens, C channels), norm, mean over tokens, linear."""

    kind: Literal["mixer"]
    patch_size: int = Field(16, ge=1)
    num_channels: int = Field(768, ge=1)
    depth: int = Field(12, ge=1)
    expansion: float = Field(4.0, gt=0)
    """gamma: hidden width of both mixings, as a multiple of tokens and of channels."""
    token_hidden: int | None = Field(None, ge=1)
    channel_hidden: int | None = Field(None, ge=1)
    """Hidden widths given outright, where a paper does not use one gamma for both."""

    def check(self, *, image_size: int) -> None:
        if image_size % self.patch_size:
            fits = [size for size in range(1, image_size + 1) if image_size % size == 0]
            near = min(fits, key=lambda size: abs(size - self.patch_size))
            raise ValueError(
                f"model.patch_size: {self.patch_size} does not divide image size {image_size}; the nearest that does is {near}"
            )

    def num_tokens(self, *, image_size: int) -> int:
        return (image_size // self.patch_size) ** 2

    def hidden_sizes(self, *, num_tokens: int) -> tuple[int, int]:
        """(token mixing, channel mixing)."""
        token_hidden = self.token_hidden or round(self.expansion * num_tokens)
        return token_hidden, self.channel_hidden or round(self.expansion * self.num_channels)


ModelSpec = Annotated[MlpSpec | MixerSpec, Field(discriminator="kind")]

PRESETS: dict[str, dict[str, Any]] = {
    **{
        f"mlp_b{depth}_wi{width}": {"kind": "mlp", "depth": depth, "width": width}
        for depth, width in [(6, 256), (6, 512), (6, 1024), (12, 256), (12, 512), (12, 768), (12, 1024)]
    },
    "mixer_b_16": {
        "kind": "mixer",
        "patch_size": 16,
        "num_channels": 768,
        "depth": 12,
        "token_hidden": 384,
        "channel_hidden": 3072,
    },
    "mixer_b_w": {"kind": "mixer", "patch_size": 14, "num_channels": 588, "depth": 8, "expansion": 4.57},
}


def expand_preset(model: object) -> object:
    """`preset: NAME` plus changed fields -> all fields; anything else is left for the schema to judge."""
    if not isinstance(model, dict) or "preset" not in model:
        return model
    name = model["preset"]
    if name not in PRESETS:
        raise ValueError(f"model.preset: {name!r} is not a known model; {nearest(str(name), list(PRESETS))}")
    return PRESETS[name] | {key: value for key, value in model.items() if key != "preset"}
