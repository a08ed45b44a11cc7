"""Importing this module makes our named models answer to `timm.create_model("mlp_b12_wi1024", num_classes=..., img_size=...)`.

It is apart from `build` because importing timm costs seconds that a training process need not spend.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from pretrain.models.build import build, build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.presets import PRESETS
from pretrain.models.spec import AnySpec, ModelSpec

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


def check_colours(in_chans: int) -> None:
    if in_chans != 3:
        raise ValueError(f"in_chans: {in_chans} will not do; these models take RGB images")


def _entry_point(name: str) -> Callable[..., ImageModel]:
    def construct(num_classes: int | None = None, img_size: int | None = None, in_chans: int = 3) -> ImageModel:
        check_colours(in_chans)
        return build(name, num_classes=num_classes, image_size=img_size)

    def entry(pretrained: bool = False, **kwargs: Any) -> ImageModel:
        model: ImageModel = build_model_with_cfg(construct, name, pretrained, **kwargs)
        return model

    entry.__name__, entry.__module__ = name, __name__
    return entry


for _name in PRESETS:
    _registered = register_model(_entry_point(_name))
    setattr(sys.modules[__name__], _name, _registered)


def _of_spec(spec: dict[str, Any], num_classes: int = 1000, img_size: int = 64, in_chans: int = 3) -> ImageModel:
    check_colours(in_chans)
    parsed: AnySpec = TypeAdapter(ModelSpec).validate_json(json.dumps(spec))
    return build_model(parsed, num_classes=num_classes, image_size=img_size)


def wide_mlps(pretrained: bool = False, **kwargs: Any) -> ImageModel:
    """Any spec: the architecture that the config.json of every checkpoint names, for `create_model("local-dir:DIRECTORY")`."""
    model: ImageModel = build_model_with_cfg(_of_spec, "wide_mlps", pretrained, **kwargs)
    return model


register_model(wide_mlps)
