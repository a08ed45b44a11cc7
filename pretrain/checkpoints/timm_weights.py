"""Convert weights between our names and timm's: export our Mixers, and import timm's models."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from data_prep.errors import UserError
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.weights import load_strictly
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import TIMM_NORM_EPS, AnySpec, MixerSpec


def pairs(theirs: str, ours: str, parts: tuple[str, ...] = ("weight", "bias")) -> dict[str, str]:
    return {f"{theirs}.{part}": f"{ours}.{part}" for part in parts}


def mixer_names(depth: int) -> dict[str, str]:
    """Map timm's name of each Mixer weight to our name."""
    table = pairs("stem.proj", "stem")
    for block in (f"blocks.{i}" for i in range(depth)):
        for number, ours in enumerate(("token", "channel"), start=1):
            table |= pairs(f"{block}.norm{number}", f"{block}.{ours}_norm")
            table |= pairs(f"{block}.mlp_{ours}s.fc1", f"{block}.{ours}_mixing.inner")
            table |= pairs(f"{block}.mlp_{ours}s.fc2", f"{block}.{ours}_mixing.outer")
    return table | pairs("norm", "norm") | pairs("head", "head")


def to_timm(weights: Mapping[str, Tensor], spec: MixerSpec) -> dict[str, Tensor]:
    """Return a Mixer's weights under timm's names. The weights are scaled so that timm's epsilon
    gives the same predictions.

    (s x) / sqrt(s^2 var + eps) = x / sqrt(var + eps / s^2). All terms that are added to the
    residual stream are multiplied by s.
    """
    scale = math.sqrt(TIMM_NORM_EPS / spec.norm_eps)
    added = re.compile(r"stem\.|blocks\.\d+\.\w+_mixing\.outer\.")
    theirs = {
        name: weights[ours].detach() * scale if added.match(ours) else weights[ours].detach()
        for name, ours in mixer_names(spec.depth).items()
    }
    patches = (spec.num_channels, 3, spec.patch_size, spec.patch_size)
    return theirs | {"stem.proj.weight": theirs["stem.proj.weight"].reshape(patches)}


@torch.no_grad()
def model_of_timm(directory: Path, *, card: ModelCard) -> ImageModel:
    """Use timm to load weights that timm saved, copy them into the model of `card`, and check that
    both models predict the same."""
    import timm  # takes seconds, and other folders do not need it

    source, size = f"{directory} (timm's {card.model.label})", card.image_size
    try:
        theirs = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
        head = theirs.get_classifier()
        assert isinstance(head, nn.Linear | nn.Conv2d | nn.Identity), type(head).__name__
        prefix = next(name for name, module in theirs.named_modules() if module is head)
        weights = {f"body.{name}": tensor for name, tensor in theirs.state_dict().items()}
        for part in ("weight", "bias"):
            if (tensor := weights.pop(f"body.{prefix}.{part}", None)) is not None:
                weights[f"head.{part}"] = tensor.flatten(1) if part == "weight" else tensor
        ours = build_model(card.model, num_classes=len(card.classes), image_size=size).eval()
        load_strictly(ours, weights, source=source, label=card.model.label)
        generator = torch.Generator().manual_seed(0)
        x_BCHW = torch.rand(2, 3, size, size, generator=generator)
        expected = (
            theirs(x_BCHW) if card.classes else theirs.forward_head(theirs.forward_features(x_BCHW))
        )
        apart = float((ours(x_BCHW) - expected.flatten(1)).abs().max() / expected.abs().max())
        assert apart < 1e-4, f"predictions differ by {apart:.1e} of the largest"
    except (AttributeError, AssertionError, RuntimeError, LookupError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"the model cannot be split into features and a classifier ({reason})"
        raise UserError(source, problem, "choose another model", code="unsupported") from None
    return ours


def by_our_names(weights: dict[str, Tensor], spec: AnySpec) -> dict[str, Tensor]:
    """Rename the weights of a Mixer that was exported for plain timm. Return other weights
    unchanged."""
    if not isinstance(spec, MixerSpec) or "stem.proj.weight" not in weights:
        return weights
    names = mixer_names(spec.depth)
    ours = {names.get(name, name): tensor for name, tensor in weights.items()}
    return ours | {"stem.weight": ours["stem.weight"].flatten(1)}
