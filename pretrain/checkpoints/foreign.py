"""Weights of other projects in the terms of ours: recognised by their names and shapes alone, and
equal in what they compute.

| family | names | model |
|---|---|---|
| scaling_mlps BottleneckMLP | linear_in, blocks.I.block.{0,2}, layernorms.I, linear_out | z + Wc act(We norm(z)) |
| scaling_mlps MLP | linear_in, layers.I, layernorms.I, linear_out | W act(norm(z)) |
| timm MlpMixer (mixer_*) | stem.proj, blocks.I.{norm1, mlp_tokens, norm2, mlp_channels}, norm, head | LayerNorm with eps 1e-6 |

The last of them is a two-way street: `to_timm` gives a Mixer of ours timm's names. What names and
shapes do not show is given: how an image was made a vector, and the activation.
"""  # noqa: E501 (a table)

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from data_prep.errors import UserError
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.weights import (
    Shapes,
    check_finite,
    check_fit,
    first,
    load_strictly,
    shapes,
)
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import TIMM_NORM_EPS, Activation, AnySpec, MixerSpec, MlpSpec

Flattening = Literal["chw", "hwc"]
"""chw: all red, all green, all blue, as scaling_mlps has it; hwc: pixel by pixel."""
Family = Literal["scaling_mlps", "timm"]


@dataclass(frozen=True)
class Layout:
    """What names and shapes show."""

    family: Family
    spec: AnySpec
    image_size: int
    names: Mapping[str, str]
    """Our name for each of theirs."""


@dataclass(frozen=True)
class Foreign:
    family: Family
    spec: AnySpec
    image_size: int
    num_classes: int
    weights: dict[str, Tensor]
    """By our names, float32 and each with a memory of its own."""


def convert(
    weights: Mapping[str, Tensor],
    *,
    source: object,
    flattening: Flattening = "chw",
    activation: Activation = "gelu",
) -> Foreign:
    """Raises `UserError` for what is not known or not whole."""
    # a head that the public finetune.py put in is a module with a Linear in it
    renamed = {
        name.replace("linear_out.linear.", "linear_out."): tensor
        for name, tensor in weights.items()
    }
    layout = recognise(shapes(renamed), source=source, activation=activation)
    head = "head.weight" if layout.family == "timm" else "linear_out.weight"
    num_classes, _ = _sizes(shapes(renamed), head, "outputs", "inputs")
    if layout.family == "timm":
        renamed["stem.proj.weight"] = renamed["stem.proj.weight"].flatten(1)
    with torch.device("meta"):
        needed = build_model(
            layout.spec, num_classes=num_classes, image_size=layout.image_size
        ).state_dict()
    needed_here = {theirs: tuple(needed[ours].shape) for theirs, ours in layout.names.items()}
    check_fit(shapes(renamed), needed_here, source=source, label=layout.spec.label)
    whole = [
        f"{theirs}: {str(renamed[theirs].dtype).removeprefix('torch.')}"
        for theirs, ours in layout.names.items()
        if needed[ours].is_floating_point() and not renamed[theirs].is_floating_point()
    ]
    if whole:
        raise UserError(
            f"weights of {source} are no floating-point numbers in {len(whole)} of {len(renamed)}"
            f" tensors ({first(whole)}); undo the quantisation before they are saved"
        )
    check_finite(renamed, source=source)
    floats = {ours: renamed[theirs].detach() for theirs, ours in layout.names.items()}
    ours = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in floats.items()
    }
    if layout.family == "scaling_mlps" and flattening == "hwc":
        side = layout.image_size
        ours["stem.weight"] = (
            ours["stem.weight"].view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1).contiguous()
        )
    return Foreign(layout.family, layout.spec, layout.image_size, num_classes, ours)


def recognise(found: Shapes, *, source: object, activation: Activation) -> Layout:
    if "linear_in.weight" in found and any(
        name.startswith(("blocks.0.block.", "layers.")) for name in found
    ):
        return _scaling_mlp(found, activation)
    if "stem.proj.weight" in found and any(
        name.startswith("blocks.0.mlp_tokens.") for name in found
    ):
        return _mixer(found, activation)
    if "stem.weight" in found and "head.weight" in found:
        raise UserError(
            f"{source}: holds weights of this project; give the directory with its config.json as"
            " it is"
        )
    raise UserError(
        f"{source}: its names ({first(list(found))}) are of no family that is known here; known are"
        " scaling_mlps' BottleneckMLP and MLP (linear_in.weight, ...) and timm's mixer_*"
        " (stem.proj.weight, blocks.0.mlp_tokens.fc1.weight, ...)"
    )


def _sizes(found: Shapes, name: str, *axes: str) -> Sequence[int]:
    """The shape of a tensor that has as many axes as it must."""
    shape = found.get(name)
    if shape is None or len(shape) != len(axes) or not all(shape):
        given = "missing" if shape is None else "x".join(map(str, shape)) or "a single number"
        raise UserError(f"{name}: is {given}, needed {' x '.join(axes)}")
    return shape


def _num(kind: str, found: Shapes) -> int:
    numbers = [int(match[1]) for name in found if (match := re.match(rf"{kind}\.(\d+)\.", name))]
    return 1 + max(numbers, default=-1)


def _pairs(theirs: str, ours: str, parts: tuple[str, ...] = ("weight", "bias")) -> dict[str, str]:
    return {f"{theirs}.{part}": f"{ours}.{part}" for part in parts}


def _scaling_mlp(found: Shapes, activation: Activation) -> Layout:
    width, num_inputs = _sizes(found, "linear_in.weight", "width", "inputs")
    side, depth = math.isqrt(num_inputs // 3), _num("blocks", found)
    if 3 * side * side != num_inputs:
        raise UserError(
            f"linear_in.weight: {num_inputs} columns are not the pixels of a square RGB image"
        )
    names = _pairs("linear_in", "stem")
    if depth:
        hidden, _ = _sizes(found, "blocks.0.block.0.weight", "hidden", "width")
        parts: tuple[str, ...] = ("weight", "bias") if _num("layernorms", found) else ()
        norm: Literal["layer", "batch", "none"] = "layer" if parts else "none"
        if "layernorms.0.running_mean" in found:
            norm, parts = "batch", (*parts, "running_mean", "running_var", "num_batches_tracked")
        for i in range(depth):
            names |= _pairs(f"layernorms.{i}", f"blocks.{i}.norm", parts)
            names |= _pairs(f"blocks.{i}.block.0", f"blocks.{i}.expand") | _pairs(
                f"blocks.{i}.block.2", f"blocks.{i}.contract"
            )
        spec = MlpSpec(
            kind="mlp",
            depth=depth,
            width=width,
            expansion=hidden / width,
            norm=norm,
            activation=activation,
        )
    else:
        depth = _num("layers", found)
        for i in range(depth):
            names |= _pairs(f"layernorms.{i}", f"blocks.{i}.norm") | _pairs(
                f"layers.{i}", f"blocks.{i}.linear"
            )
        spec = MlpSpec(
            kind="mlp",
            depth=depth,
            width=width,
            bottleneck="none",
            activation_first=True,
            activation=activation,
        )
    return Layout("scaling_mlps", spec, side, names | _pairs("linear_out", "head"))


def _mixer(found: Shapes, activation: Activation) -> Layout:
    """A gmixer has the names of a Mixer; its halved fc2 does not fit one."""
    channels, colours, patch, width = _sizes(
        found, "stem.proj.weight", "channels", "colours", "height", "width"
    )
    token_hidden, tokens = _sizes(found, "blocks.0.mlp_tokens.fc1.weight", "hidden", "tokens")
    channel_hidden, _ = _sizes(found, "blocks.0.mlp_channels.fc1.weight", "hidden", "channels")
    side = math.isqrt(tokens)
    if (colours, patch, side**2) != (3, width, tokens):
        raise UserError(
            f"stem.proj.weight: {colours} channels in patches of {patch} x {width}, {tokens} of"
            " them; these models take square RGB images in square patches"
        )
    spec = MixerSpec(
        kind="mixer",
        patch_size=patch,
        num_channels=channels,
        depth=_num("blocks", found),
        token_hidden=token_hidden,
        channel_hidden=channel_hidden,
        activation=activation,
        norm_eps=TIMM_NORM_EPS,
    )
    return Layout("timm", spec, patch * side, mixer_names(spec.depth))


def mixer_names(depth: int) -> dict[str, str]:
    """timm's name of each weight of a Mixer -> ours."""
    table = _pairs("stem.proj", "stem")
    for i in range(depth):
        for theirs, ours in (("tokens", "token"), ("channels", "channel")):
            table |= _pairs(
                f"blocks.{i}.norm{1 if ours == 'token' else 2}", f"blocks.{i}.{ours}_norm"
            )
            table |= _pairs(f"blocks.{i}.mlp_{theirs}.fc1", f"blocks.{i}.{ours}_mixing.inner")
            table |= _pairs(f"blocks.{i}.mlp_{theirs}.fc2", f"blocks.{i}.{ours}_mixing.outer")
    return table | _pairs("norm", "norm") | _pairs("head", "head")


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
