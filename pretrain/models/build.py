"""spec -> module, with weights that are a function of the seed alone, and their number and cost."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretrain.models.mixer import Mixer
from pretrain.models.mlp import Mlp
from pretrain.models.spec import MixerSpec, MlpSpec

ImageModel = Mlp | Mixer


def build_model(spec: MlpSpec | MixerSpec, *, num_classes: int, image_size: int, seed: int | None = None) -> ImageModel:
    """The model with its initial weights; with a seed they are the same in every process."""
    spec.check(image_size=image_size)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        match spec:
            case MlpSpec():
                return Mlp(spec, num_classes=num_classes, image_size=image_size)
            case MixerSpec():
                return Mixer(spec, num_classes=num_classes, image_size=image_size)


def pooled_features(model: ImageModel, images_BCHW: Tensor) -> Tensor:
    """One vector per image: what a linear probe sees."""
    return model.forward_head(model.forward_features(images_BCHW), pre_logits=True)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def forward_flops(spec: MlpSpec | MixerSpec, *, num_classes: int, image_size: int) -> int:
    """Floating-point operations of one image's forward pass (two per multiply-add), counted on shapes alone."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build_model(spec, num_classes=num_classes, image_size=image_size)
        model(torch.empty(1, 3, image_size, image_size))
    return int(counter.get_total_flops())
