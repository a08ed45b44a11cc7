"""Conversion of weights of other projects, recognized by names and shapes.

| family | names | model |
|---|---|---|
| scaling_mlps BottleneckMLP | linear_in, blocks.I.block.{0,2}, layernorms.I, linear_out | MLP |
| scaling_mlps MLP | linear_in, layers.I, layernorms.I, linear_out | MLP |
| timm MlpMixer (mixer_*) | stem.proj, blocks.I.{norm1, mlp_tokens, norm2, mlp_channels} | Mixer |

A BottleneckMLP block computes z + Wc act(We norm(z)), an MLP block W act(norm(z)). Norms of a
MlpMixer have an epsilon of 1e-6. Names and shapes show neither the order of pixels nor the
activation.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from data_prep.errors import UserError
from pretrain.checkpoints.timm_weights import mixer_names, pairs
from pretrain.checkpoints.weights import Shapes, check_finite, check_fit, first, shapes
from pretrain.models.build import build_model
from pretrain.models.spec import TIMM_NORM_EPS, Activation, AnySpec, MixerSpec, MlpSpec

Flattening = Literal["chw", "hwc"]
"""Order of pixels. chw: all red, all green, all blue, as in scaling_mlps. hwc: pixel by pixel."""
Family = Literal["scaling_mlps", "timm"]


@dataclass(frozen=True)
class Layout:
    """Model that the names and shapes of the weights describe."""

    family: Family
    spec: AnySpec
    image_size: int
    names: Mapping[str, str]
    """Name of each tensor in wide-mlps, by its name in the file."""


@dataclass(frozen=True)
class Foreign:
    family: Family
    spec: AnySpec
    image_size: int
    num_classes: int
    weights: dict[str, Tensor]
    """Tensors by their names in wide-mlps, in float32, without shared memory."""


def convert(
    weights: Mapping[str, Tensor],
    *,
    source: object,
    flattening: Flattening = "chw",
    activation: Activation = "gelu",
) -> Foreign:
    """Convert the weights. Fail if they are unknown or incomplete."""
    # finetune.py of scaling_mlps wraps the head
    renamed = {
        name.replace("linear_out.linear.", "linear_out."): tensor
        for name, tensor in weights.items()
    }
    layout = recognize(shapes(renamed), source=source, activation=activation)
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
            str(source),
            f"{len(whole)} of {len(renamed)} tensors are not floating-point ({first(whole)})",
            "Save the weights without quantization",
            code="unsupported",
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


def recognize(found: Shapes, *, source: object, activation: Activation) -> Layout:
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
            str(source),
            "the weights already have the format of wide-mlps",
            "Give the folder with its config.json to the other commands",
            code="wrong-command",
        )
    raise UserError(
        str(source),
        f"the tensor names ({first(list(found))}) belong to no supported model",
        "Give scaling_mlps' BottleneckMLP or MLP (linear_in.weight, ...) or timm's mixer_*"
        " (stem.proj.weight, blocks.0.mlp_tokens.fc1.weight, ...)",
        code="unknown-format",
    )


def _sizes(found: Shapes, name: str, *axes: str) -> Sequence[int]:
    """Return the shape of tensor `name`. Fail if the tensor does not have these axes."""
    shape = found.get(name)
    if shape is None or len(shape) != len(axes) or not all(shape):
        problem = "this tensor is missing"
        if shape is not None:
            given = "x".join(map(str, shape)) or "a single number"
            problem = f"the shape is {given}, but must be {' x '.join(axes)}"
        raise UserError(name, problem, "give the weights of a supported model", code="mismatch")
    return shape


def _num(kind: str, found: Shapes) -> int:
    numbers = [int(match[1]) for name in found if (match := re.match(rf"{kind}\.(\d+)\.", name))]
    return 1 + max(numbers, default=-1)


def _scaling_mlp(found: Shapes, activation: Activation) -> Layout:
    width, num_inputs = _sizes(found, "linear_in.weight", "width", "inputs")
    side, depth = math.isqrt(num_inputs // 3), _num("blocks", found)
    if 3 * side * side != num_inputs:
        problem = f"{num_inputs} columns are not the pixels of a square RGB image"
        fix = "give weights for square RGB images"
        raise UserError("linear_in.weight", problem, fix, code="unsupported")
    names = pairs("linear_in", "stem")
    if depth:
        hidden, _ = _sizes(found, "blocks.0.block.0.weight", "hidden", "width")
        parts: tuple[str, ...] = ("weight", "bias") if _num("layernorms", found) else ()
        norm: Literal["layer", "batch", "none"] = "layer" if parts else "none"
        if "layernorms.0.running_mean" in found:
            norm, parts = "batch", (*parts, "running_mean", "running_var", "num_batches_tracked")
        for i in range(depth):
            names |= pairs(f"layernorms.{i}", f"blocks.{i}.norm", parts)
            names |= pairs(f"blocks.{i}.block.0", f"blocks.{i}.expand") | pairs(
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
            names |= pairs(f"layernorms.{i}", f"blocks.{i}.norm") | pairs(
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
    return Layout("scaling_mlps", spec, side, names | pairs("linear_out", "head"))


def _mixer(found: Shapes, activation: Activation) -> Layout:
    """Return a Mixer's layout. (timm's gmixer has equal names, but `convert` rejects its fc2.)"""
    channels, colors, patch, width = _sizes(
        found, "stem.proj.weight", "channels", "colors", "height", "width"
    )
    token_hidden, tokens = _sizes(found, "blocks.0.mlp_tokens.fc1.weight", "hidden", "tokens")
    channel_hidden, _ = _sizes(found, "blocks.0.mlp_channels.fc1.weight", "hidden", "channels")
    side = math.isqrt(tokens)
    if (colors, patch, side**2) != (3, width, tokens):
        raise UserError(
            "stem.proj.weight",
            f"the model has {colors} channels and {tokens} patches of {patch} x {width}",
            "Give weights for square RGB images and square patches",
            code="unsupported",
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
