"""Build a module from a spec, with weights that depend only on the seed."""

from typing import Any

import torch
from torch import Tensor, nn

from pretrain.models.image_model import ImageModel
from pretrain.models.mixer import Mixer
from pretrain.models.mlp import Mlp
from pretrain.models.presets import preset, spec_of
from pretrain.models.sparse_mlp import SparseMlp
from pretrain.models.spec import (
    AnySpec,
    ImportSpec,
    MixerSpec,
    MlpSpec,
    SparseMlpSpec,
    StructuredMlpSpec,
    TimmModelSpec,
    TimmSpec,
)
from pretrain.models.structured import StructuredMlp

NORMS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)


def build(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: int | None = None,
    seed: int | None = None,
    **changes: Any,
) -> ImageModel:
    """Build a named model of the papers. `changes` replace fields of its spec. Image size and
    classes default to the paper's."""
    return build_model(
        spec_of(name, **changes),
        num_classes=preset(name).num_classes if num_classes is None else num_classes,
        image_size=image_size or preset(name).image_size,
        seed=seed,
    )


def build_model(
    spec: AnySpec, *, num_classes: int, image_size: int, seed: int | None = None
) -> ImageModel:
    """Return a new model. Equal seeds give equal weights in every process."""
    spec.check(image_size=image_size)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model: ImageModel
        match spec:
            case MlpSpec():
                model = Mlp(spec, num_classes=num_classes, image_size=image_size)
            case MixerSpec():
                model = Mixer(spec, num_classes=num_classes, image_size=image_size)
            case SparseMlpSpec():
                model = SparseMlp(spec, num_classes=num_classes, image_size=image_size)
            case StructuredMlpSpec():
                model = StructuredMlp(spec, num_classes=num_classes, image_size=image_size)
            case TimmSpec() | TimmModelSpec() | ImportSpec():
                from pretrain.models.timm_baselines import TimmModel

                model = TimmModel(spec, num_classes=num_classes, image_size=image_size)
    if not getattr(spec, "bias", True):
        for name, module in model.named_modules():
            has_bias = isinstance(getattr(module, "bias", None), nn.Parameter) and name != "head"
            if has_bias and not isinstance(module, NORMS):
                module.bias = None
    return model


def pooled_features(model: ImageModel, images_BCHW: Tensor) -> Tensor:
    """Return one vector per image, the input of a linear probe."""
    return model.forward_head(model.forward_features(images_BCHW), pre_logits=True)
