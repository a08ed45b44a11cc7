"""Importing this module makes our named models answer to `timm.create_model("mlp_b12_wi1024", num_classes=..., img_size=...)`.

It is apart from `build` because importing timm costs seconds that a training process need not spend.
"""

import sys
from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from pretrain.models.build import build
from pretrain.models.image_model import ImageModel
from pretrain.models.presets import PRESETS

default_cfgs = generate_default_cfgs(
    {
        name: {
            "num_classes": preset.num_classes,
            "input_size": (3, preset.image_size, preset.image_size),
            "first_conv": "stem",
            "classifier": "head",
        }
        for name, preset in PRESETS.items()
    }
)


def _entry_point(name: str) -> Callable[..., ImageModel]:
    def construct(num_classes: int | None = None, img_size: int | None = None, in_chans: int = 3) -> ImageModel:
        if in_chans != 3:
            raise ValueError(f"in_chans: {in_chans} will not do; these models take RGB images")
        return build(name, num_classes=num_classes, image_size=img_size)

    def entry(pretrained: bool = False, **kwargs: Any) -> ImageModel:
        model: ImageModel = build_model_with_cfg(construct, name, pretrained, **kwargs)
        return model

    entry.__name__, entry.__module__ = name, __name__
    return entry


for _name in PRESETS:
    _registered = register_model(_entry_point(_name))
    setattr(sys.modules[__name__], _name, _registered)
