"""The `augment` section of a config. No torch here.

Pictures go through it in timm's order: crop, flip, auto-augment, normalise, random erasing, then MixUp or CutMix.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from data_prep.manifest import Filter
from data_prep.settings import Settings
from pretrain.augment.policies import parse_policy

Interpolation = Literal["bilinear", "bicubic", "area", "random"]
PaddingMode = Literal["constant", "reflect"]
EraseMode = Literal["const", "rand", "pixel"]


class AugmentSettings(Settings):
    crop_scale: tuple[float, float] | None = None
    """Random resized crop: share of the image's area, such as [0.4, 1.0]; null takes the whole image."""
    crop_ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    crop_interpolation: Interpolation | None = None
    """bilinear and bicubic are antialiased; random is one of these two for each picture, which is timm's way; area is OpenCV's
    INTER_AREA, which is FFCV's. Left out, or null: what the checkpoint was fed with, and bilinear where there is none. Plain
    pictures are resized with the same filter (random: bilinear)."""
    crop_padding: int = Field(0, ge=0, le=1024)
    """Crop with padding: so many pixels on each side, then a crop of the stored size (32-pixel recipes take 4); 0 is off."""
    padding_mode: PaddingMode = "constant"
    """constant is black."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    auto_augment: str | None = None
    """timm's names: rand-m9-mstd0.5-inc1 and its family (m, n, p, mstd, mmax, inc, tweights), original, originalr, v0, v0r."""
    erase_probability: float = Field(0.0, ge=0, le=1)
    """Random erasing; 0 is off."""
    erase_mode: EraseMode = "pixel"
    """Filled with the mean colour, with one random colour, or with noise."""
    erase_count: int = Field(1, ge=1, le=100)
    """At most so many blocks in a picture, sharing the area of one."""
    mixup_alpha: float = Field(0.0, ge=0)
    """MixUp with lambda ~ Beta(alpha, alpha) between neighbours of a batch; 0 is off."""
    cutmix_alpha: float = Field(0.0, ge=0)
    """CutMix, likewise."""
    mix_probability: float = Field(1.0, ge=0, le=1)
    """Of a pair of neighbours being mixed at all."""
    switch_probability: float = Field(0.5, ge=0, le=1)
    """Of CutMix rather than MixUp, where both are on."""

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> "AugmentSettings":
        for name, bounds, top in (("crop_scale", self.crop_scale, 1.0), ("crop_ratio", self.crop_ratio, 10.0)):
            if bounds is not None and not 0 < bounds[0] <= bounds[1] <= top:
                raise ValueError(
                    f"augment.{name}: {list(bounds)} will not do; write [low, high] with 0 < low <= high <= {top:g}"
                )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "AugmentSettings":
        if self.crop_padding and self.crop_scale is not None:
            raise ValueError(
                f"augment.crop_padding: {self.crop_padding} will not do with crop_scale {list(self.crop_scale)}, which crops "
                "too; set crop_padding=0 or crop_scale=null"
            )
        if self.auto_augment is not None:
            parse_policy(self.auto_augment)
        return self

    @property
    def is_crop_flip_mixup(self) -> bool:
        """Nothing but what can be done in one pass over the pictures."""
        others = self.crop_padding or self.auto_augment or self.erase_probability > 0
        return not others and self.crop_interpolation in (None, "bilinear", "area") and "CutMix" not in self.mixing

    @property
    def plain_filter(self) -> Filter:
        """With which a picture that is not augmented is resized, too."""
        chosen = self.crop_interpolation
        return "bilinear" if chosen is None or chosen == "random" else chosen

    def fed_as(self, filter_: Filter) -> Self:
        """The same, with the filter that a checkpoint's card names, unless another is asked for."""
        return self.model_copy(update={"crop_interpolation": self.crop_interpolation or filter_})

    @property
    def mixing(self) -> dict[str, str]:
        """Which of the two ways to mix neighbours are on: name -> the field that turns it off."""
        ways = {"MixUp": ("mixup_alpha", self.mixup_alpha), "CutMix": ("cutmix_alpha", self.cutmix_alpha)}
        return {name: field for name, (field, alpha) in ways.items() if alpha > 0 and self.mix_probability > 0}
