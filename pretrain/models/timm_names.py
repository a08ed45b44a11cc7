"""Import this module to register the named models with timm: `timm.create_model("mlp_b12_wi1024",
num_classes=..., img_size=...)`.

Fields of a spec are keyword arguments, for example `timm.create_model("mixer_b_w", depth=4)`.
Training does not import this module, because timm takes seconds to import.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from data_prep.errors import UserError
from pretrain.models.build import build, build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.presets import PRESETS
from pretrain.models.spec import AnySpec, ModelSpec

COMMON_CFG = {
    "fixed_input_size": True,
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "classifier": "head",
}
default_cfgs = generate_default_cfgs(
    {
        name: COMMON_CFG
        | {
            "num_classes": preset.num_classes,
            "input_size": (3, preset.image_size, preset.image_size),
        }
        for name, preset in PRESETS.items()
    }
)
_EVERY_BLOCK = {"out_indices": None, "feature_cls": "getter"}
"""Defaults for timm's `features_only`: return the features of all blocks."""


def _one_side(img_size: int | tuple[int, int], in_chans: int) -> int:
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if in_chans != 3:
        raise UserError("in_chans", f"{in_chans} is not valid", "use 3 (RGB)", code="bad-value")
    if height != width:
        raise UserError(
            "img_size", f"{height} x {width} is not valid", "use square images", code="bad-value"
        )
    return height


def _entry_point(name: str) -> Callable[..., ImageModel]:
    def construct(
        num_classes: int,
        img_size: int | tuple[int, int],
        in_chans: int = 3,
        drop_rate: float | None = None,
        **changes: Any,
    ) -> ImageModel:
        if drop_rate:
            changes["dropout"] = drop_rate
        return build(
            name, num_classes=num_classes, image_size=_one_side(img_size, in_chans), **changes
        )

    def entry(pretrained: bool = False, **kwargs: Any) -> ImageModel:
        return build_model_with_cfg(
            construct, name, pretrained, feature_cfg=dict(_EVERY_BLOCK), **kwargs
        )

    entry.__name__, entry.__module__ = name, __name__
    return entry


for _name in PRESETS:
    setattr(sys.modules[__name__], _name, register_model(_entry_point(_name)))


def _of_spec(
    spec: dict[str, Any],
    num_classes: int = 1000,
    img_size: int | tuple[int, int] = 64,
    in_chans: int = 3,
) -> ImageModel:
    parsed: AnySpec = TypeAdapter(ModelSpec).validate_json(json.dumps(spec))
    return build_model(parsed, num_classes=num_classes, image_size=_one_side(img_size, in_chans))


def wide_mlps(pretrained: bool = False, **kwargs: Any) -> ImageModel:
    """Build the model of any spec. The config.json of every checkpoint names this architecture, so
    that `timm.create_model("local-dir:DIRECTORY")` works."""
    return build_model_with_cfg(
        _of_spec, "wide_mlps", pretrained, feature_cfg=dict(_EVERY_BLOCK), **kwargs
    )


register_model(wide_mlps)
