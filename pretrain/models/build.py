"""Build a module from a spec, with weights that depend only on the seed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pretrain.models.image_model import ImageModel
from pretrain.models.mixer import Mixer
from pretrain.models.mlp import Mlp
from pretrain.models.presets import preset, spec_of
from pretrain.models.sparse_mlp import SparseMlp
from pretrain.models.spec import (
    AnySpec,
    MixerSpec,
    MlpSpec,
    SparseMlpSpec,
    StructuredMlpSpec,
    TimmModelSpec,
    TimmSpec,
)
from pretrain.models.structured import StructuredMlp


def build(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: int | None = None,
    seed: int | None = None,
    **changes: Any,
) -> ImageModel:
    """Build a model of the papers by name, with other values for some fields. Size and classes are
    the paper's by default."""
    return build_model(
        spec_of(name, **changes),
        num_classes=preset(name).num_classes if num_classes is None else num_classes,
        image_size=image_size or preset(name).image_size,
        seed=seed,
    )


def build_model(
    spec: AnySpec, *, num_classes: int, image_size: int, seed: int | None = None
) -> ImageModel:
    """Build the model. With a seed the initial weights are the same in every process."""
    spec.check(image_size=image_size)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = _with_biases(spec, num_classes=num_classes, image_size=image_size)
    if not getattr(spec, "bias", True):
        for name, module in model.named_modules():
            if (
                "bias" in module._parameters
                and name != "head"
                and not isinstance(module, nn.LayerNorm | _BatchNorm)
            ):
                module.bias = None
    return model


def _with_biases(spec: AnySpec, *, num_classes: int, image_size: int) -> ImageModel:
    size = {"num_classes": num_classes, "image_size": image_size}
    match spec:
        case MlpSpec():
            return Mlp(spec, **size)
        case MixerSpec():
            return Mixer(spec, **size)
        case SparseMlpSpec():
            return SparseMlp(spec, **size)
        case StructuredMlpSpec():
            return StructuredMlp(spec, **size)
        case TimmSpec() | TimmModelSpec():
            from pretrain.models.timm_baselines import TimmModel

            return TimmModel(spec, **size)


def pooled_features(model: ImageModel, images_BCHW: Tensor) -> Tensor:
    """Return one vector per image, the input of a linear probe."""
    return model.forward_head(model.forward_features(images_BCHW), pre_logits=True)
