"""Weights with timm's names: of a Mixer of ours, and of folders that timm has written."""

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
    """timm's name of each weight of a Mixer -> ours."""
    table = pairs("stem.proj", "stem")
    for i in range(depth):
        for theirs, ours in (("tokens", "token"), ("channels", "channel")):
            table |= pairs(
                f"blocks.{i}.norm{1 if ours == 'token' else 2}", f"blocks.{i}.{ours}_norm"
            )
            table |= pairs(f"blocks.{i}.mlp_{theirs}.fc1", f"blocks.{i}.{ours}_mixing.inner")
            table |= pairs(f"blocks.{i}.mlp_{theirs}.fc2", f"blocks.{i}.{ours}_mixing.outer")
    return table | pairs("norm", "norm") | pairs("head", "head")


def to_timm(weights: Mapping[str, Tensor], spec: MixerSpec) -> dict[str, Tensor]:
    """A Mixer's weights by timm's names, for a model that computes the same with timm's epsilon in
    its norms.

    (s x) / sqrt(s^2 var + eps) = x / sqrt(var + eps / s^2): where the epsilons differ, all that is
    added to the residual stream is scaled by s, which no norm lets through.
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
    """Of a folder that timm has written: read by timm, put into the model that the card names, and
    held to timm's answers."""
    import timm  # takes seconds, which no other folder need spend

    source = f"{directory}, of timm's {card.model.label}"
    try:
        theirs = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
        head = theirs.get_classifier()
        assert isinstance(head, nn.Linear | nn.Conv2d | nn.Identity), (
            f"its classifier is a {type(head).__name__}"
        )
        prefix = next(name for name, module in theirs.named_modules() if module is head) + "."
        ours = build_model(
            card.model, num_classes=len(card.classes), image_size=card.image_size
        ).eval()
        x_BCHW = torch.rand(
            2, 3, card.image_size, card.image_size, generator=torch.Generator().manual_seed(0)
        )
        weights = theirs.state_dict()
        renamed = {name: f"body.{name}" for name in weights} | {
            f"{prefix}{part}": f"head.{part}" for part in ("weight", "bias")
        }
        taken = {
            renamed[name]: tensor.flatten(1) if name == f"{prefix}weight" else tensor
            for name, tensor in weights.items()
        }
        load_strictly(ours, taken, source=source, label=card.model.label)
        expected, found = (
            (
                theirs(x_BCHW)
                if card.classes
                else theirs.forward_head(theirs.forward_features(x_BCHW))
            ),
            ours(x_BCHW),
        )
        apart = float((found - expected.flatten(1)).abs().max() / expected.abs().max())
        assert apart < 1e-4, f"its answers are {apart:.1e} of the largest apart"
    except (AttributeError, AssertionError, RuntimeError, LookupError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{source}: cannot be taken apart into features and a classifier ({reason}); name"
            " another model"
        ) from None
    return ours


def by_our_names(weights: dict[str, Tensor], spec: AnySpec) -> dict[str, Tensor]:
    """Those of a folder that was exported for plain timm; others as they are."""
    if not isinstance(spec, MixerSpec) or "stem.proj.weight" not in weights:
        return weights
    names = mixer_names(spec.depth)
    ours = {names.get(name, name): tensor for name, tensor in weights.items()}
    return ours | {"stem.weight": ours["stem.weight"].flatten(1)}
