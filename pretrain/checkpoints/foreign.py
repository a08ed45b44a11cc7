"""Weights of other projects in the terms of ours: recognised by their names and shapes alone, and equal in what they compute.

| family | names | model |
|---|---|---|
| scaling_mlps BottleneckMLP | linear_in, blocks.I.block.{0,2}, layernorms.I, linear_out | z + Wc act(We norm(z)) |
| scaling_mlps MLP | linear_in, layers.I, layernorms.I, linear_out | W act(norm(z)) |
| timm MlpMixer (mixer_*) | stem.proj, blocks.I.{norm1, mlp_tokens, norm2, mlp_channels}, norm, head | LayerNorm with eps 1e-6 |

The last of them is a two-way street: `to_timm` gives a Mixer of ours timm's names.

What names and shapes cannot tell is in `Reading`: how an image was made a vector, and the activation.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from data_prep.settings import UserError
from pretrain.checkpoints.weights import Shapes, check_finite, check_fit, first, shapes
from pretrain.models.build import build_model
from pretrain.models.spec import TIMM_NORM_EPS, Activation, AnySpec, MixerSpec, MlpSpec

Flattening = Literal["chw", "hwc"]
Family = Literal["scaling_mlps", "timm"]
SMOOTHER = 0.7
"""Weights without any order differ by a few per cent between two readings; those of a trained layer by far more."""


@dataclass(frozen=True)
class Reading:
    flattening: Flattening = "chw"
    """chw: all red, all green, all blue, as scaling_mlps has it; hwc: pixel by pixel."""
    check_flattening: bool = True
    activation: Activation = "gelu"


@dataclass(frozen=True)
class Foreign:
    family: Family
    spec: AnySpec
    image_size: int
    num_classes: int
    weights: dict[str, Tensor]
    """By our names, float32 and each with a memory of its own."""


@dataclass(frozen=True)
class Layout:
    """What the names say: how many blocks there are, and our name for each of theirs."""

    family: Family
    names: Mapping[str, str]
    head: str
    label: str
    describe: Callable[[Shapes, Reading], tuple[AnySpec, int]]
    """(spec, image size) of complete names."""


def convert(weights: Mapping[str, Tensor], *, source: object, reading: Reading = Reading()) -> Foreign:
    """Raises `UserError` for what is not known, not whole, or read in the wrong order."""
    # a head that the public finetune.py put in is a module with a Linear in it
    renamed = {name.replace("linear_out.linear.", "linear_out."): tensor for name, tensor in weights.items()}
    layout = recognise(list(renamed), source=source)
    found = shapes(renamed)
    check_fit(found, {name: found.get(name, ()) for name in layout.names}, source=source, label=layout.label)
    spec, image_size = layout.describe(found, reading)
    if layout.family == "timm":
        renamed["stem.proj.weight"] = renamed["stem.proj.weight"].flatten(1)
    num_classes, _ = sizes(found, layout.head, "outputs", "inputs")
    with torch.device("meta"):
        needed = build_model(spec, num_classes=num_classes, image_size=image_size).state_dict()
    check_fit(
        shapes(renamed),
        {theirs: tuple(needed[ours].shape) for theirs, ours in layout.names.items()},
        source=source,
        label=spec.label,
    )
    whole = [
        f"{theirs}: {str(renamed[theirs].dtype).removeprefix('torch.')}"
        for theirs, ours in layout.names.items()
        if needed[ours].is_floating_point() and not renamed[theirs].is_floating_point()
    ]
    if whole:
        raise UserError(
            f"weights of {source} are no floating-point numbers in {len(whole)} of {len(renamed)} tensors ({first(whole)}); "
            "undo the quantisation before they are saved"
        )
    check_finite(renamed, source=source)
    ours = {ours: _own(renamed[theirs]) for theirs, ours in layout.names.items()}
    if layout.family == "scaling_mlps":
        ours["stem.weight"] = _as_chw(ours["stem.weight"], reading, source=source)
    return Foreign(layout.family, spec, image_size, num_classes, ours)


def _own(tensor: Tensor) -> Tensor:
    """Safetensors refuses tensors that share memory, such as tied weights."""
    plain = tensor.detach().to(torch.float32) if tensor.is_floating_point() else tensor.detach()
    return plain.contiguous().clone()


def recognise(names: list[str], *, source: object) -> Layout:
    for marks, what in OTHERS_OF_TIMM.items():
        if any(name.endswith(marks) for name in names):
            raise UserError(f"{source}: holds weights of {what}, which this project has no model for; mixer_* it takes")
    if "linear_in.weight" in names and any(name.startswith("blocks.0.block.") for name in names):
        return _bottleneck(names)
    if "linear_in.weight" in names and any(name.startswith("layers.") for name in names):
        return _standard(names)
    if "stem.proj.weight" in names and any(name.startswith("blocks.0.mlp_tokens.") for name in names):
        return _mixer(names)
    if "stem.weight" in names and "head.weight" in names:
        raise UserError(f"{source}: holds weights of this project; give the directory with its config.json as it is")
    raise UserError(
        f"{source}: its names ({first(names)}) are of no family that is known here; known are scaling_mlps' BottleneckMLP and MLP "
        f"(linear_in.weight, ...) and timm's mixer_* (stem.proj.weight, blocks.0.mlp_tokens.fc1.weight, ...)"
    )


def sizes(found: Shapes, name: str, *axes: str) -> Sequence[int]:
    """The shape of a tensor that has as many axes as it must."""
    shape = found[name]
    if len(shape) != len(axes) or not all(shape):
        raise UserError(f"{name}: is {'x'.join(map(str, shape)) or 'a single number'}, needed {' x '.join(axes)}")
    return shape


def _num(kind: str, names: list[str]) -> int:
    numbers = [int(match[1]) for name in names if (match := re.match(rf"{kind}\.(\d+)\.", name))]
    return 1 + max(numbers, default=-1)


def _pairs(theirs: str, ours: str, parts: tuple[str, ...] = ("weight", "bias")) -> dict[str, str]:
    return {f"{theirs}.{part}": f"{ours}.{part}" for part in parts}


BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _bottleneck(names: list[str]) -> Layout:
    kind: Literal["layer", "batch", "none"] = (
        "batch" if "layernorms.0.running_mean" in names else "layer" if _num("layernorms", names) else "none"
    )
    parts = {"layer": ("weight", "bias"), "batch": BATCH_NORM, "none": ()}[kind]
    depth, table = _num("blocks", names), _pairs("linear_in", "stem")
    for i in range(depth):
        table |= _pairs(f"layernorms.{i}", f"blocks.{i}.norm", parts)
        table |= _pairs(f"blocks.{i}.block.0", f"blocks.{i}.expand")
        table |= _pairs(f"blocks.{i}.block.2", f"blocks.{i}.contract")

    def describe(found: Shapes, reading: Reading) -> tuple[AnySpec, int]:
        width, num_inputs = sizes(found, "linear_in.weight", "width", "inputs")
        hidden, _ = sizes(found, "blocks.0.block.0.weight", "hidden", "width")
        spec = MlpSpec(
            kind="mlp", depth=depth, width=width, expansion=hidden / width, norm=kind, activation=reading.activation
        )
        return spec, image_size_of(num_inputs)

    label = f"a BottleneckMLP of {depth} blocks"
    return Layout("scaling_mlps", table | _pairs("linear_out", "head"), "linear_out.weight", label, describe)


def _standard(names: list[str]) -> Layout:
    depth, table = _num("layers", names), _pairs("linear_in", "stem")
    for i in range(depth):
        table |= _pairs(f"layernorms.{i}", f"blocks.{i}.norm") | _pairs(f"layers.{i}", f"blocks.{i}.linear")

    def describe(found: Shapes, reading: Reading) -> tuple[AnySpec, int]:
        width, num_inputs = sizes(found, "linear_in.weight", "width", "inputs")
        act = reading.activation
        spec = MlpSpec(kind="mlp", depth=depth, width=width, bottleneck="none", activation_first=True, activation=act)
        return spec, image_size_of(num_inputs)

    label = f"an MLP of {depth} layers"
    return Layout("scaling_mlps", table | _pairs("linear_out", "head"), "linear_out.weight", label, describe)


OTHERS_OF_TIMM = {
    (".mlp_channels.gate.proj.weight",): "a gMLP (its blocks have gates)",
    (".norm1.alpha", ".ls1", ".gamma_1"): "a ResMLP (its norms are affine, and its branches are scaled)",
}
"""By endings of names that a Mixer has not. A gmixer has a Mixer's names, and is known by its shapes."""


def _mixer(names: list[str]) -> Layout:
    table = mixer_names(_num("blocks", names))

    def describe(found: Shapes, reading: Reading) -> tuple[AnySpec, int]:
        channels, colours, patch, width = sizes(found, "stem.proj.weight", "channels", "colours", "height", "width")
        token_hidden, tokens = sizes(found, "blocks.0.mlp_tokens.fc1.weight", "hidden", "tokens")
        channel_hidden, _ = sizes(found, "blocks.0.mlp_channels.fc1.weight", "hidden", "channels")
        _, gated_hidden = sizes(found, "blocks.0.mlp_channels.fc2.weight", "channels", "hidden")
        if 2 * gated_hidden == channel_hidden:
            raise UserError(
                "blocks.0.mlp_channels.fc2.weight takes half of what fc1 gives (the rest are gates): the weights of a gmixer, "
                "which this project has no model for; mixer_* it takes"
            )
        if (colours, patch, math.isqrt(tokens) ** 2) != (3, width, tokens):
            raise UserError(
                f"stem.proj.weight: {colours} channels in patches of {patch} x {width}, {tokens} of them; these models take "
                "square RGB images in square patches"
            )
        spec = MixerSpec(
            kind="mixer",
            patch_size=patch,
            num_channels=channels,
            depth=_num("blocks", names),
            token_hidden=token_hidden,
            channel_hidden=channel_hidden,
            activation=reading.activation,
            norm_eps=TIMM_NORM_EPS,
        )
        return spec, patch * math.isqrt(tokens)

    return Layout("timm", table, "head.weight", f"a timm MlpMixer of {_num('blocks', names)} blocks", describe)


def mixer_names(depth: int) -> dict[str, str]:
    """timm's name of each weight of a Mixer -> ours."""
    table = _pairs("stem.proj", "stem")
    for i in range(depth):
        for theirs, ours in (("tokens", "token"), ("channels", "channel")):
            table |= _pairs(f"blocks.{i}.norm{1 if ours == 'token' else 2}", f"blocks.{i}.{ours}_norm")
            table |= _pairs(f"blocks.{i}.mlp_{theirs}.fc1", f"blocks.{i}.{ours}_mixing.inner")
            table |= _pairs(f"blocks.{i}.mlp_{theirs}.fc2", f"blocks.{i}.{ours}_mixing.outer")
    return table | _pairs("norm", "norm") | _pairs("head", "head")


def to_timm(weights: Mapping[str, Tensor], spec: MixerSpec) -> dict[str, Tensor]:
    """A Mixer's weights by timm's names, for a model that computes the same with timm's epsilon in its norms.

    (s x) / sqrt(s^2 var + eps) = x / sqrt(var + eps / s^2): where the epsilons differ, all that is added to the residual stream is
    scaled by s, which no norm lets through.
    """
    scale = math.sqrt(TIMM_NORM_EPS / spec.norm_eps)
    added = re.compile(r"stem\.|blocks\.\d+\.\w+_mixing\.outer\.")
    theirs = {
        name: weights[ours].detach() * scale if added.match(ours) else weights[ours].detach()
        for name, ours in mixer_names(spec.depth).items()
    }
    patches = (spec.num_channels, 3, spec.patch_size, spec.patch_size)
    return theirs | {"stem.proj.weight": theirs["stem.proj.weight"].reshape(patches)}


def by_our_names(weights: dict[str, Tensor], spec: AnySpec) -> dict[str, Tensor]:
    """Those of a folder that was exported for plain timm; others as they are."""
    if not isinstance(spec, MixerSpec) or "stem.proj.weight" not in weights:
        return weights
    names = mixer_names(spec.depth)
    ours = {names.get(name, name): tensor for name, tensor in weights.items()}
    return ours | {"stem.weight": ours["stem.weight"].flatten(1)}


def image_size_of(num_inputs: int) -> int:
    """The side of the RGB images whose pixels a first layer takes."""
    side = math.isqrt(num_inputs // 3)
    if 3 * side * side != num_inputs:
        raise UserError(f"linear_in.weight: {num_inputs} columns are not the pixels of a square RGB image")
    return side


def _as_chw(stem_MD: Tensor, reading: Reading, *, source: object) -> Tensor:
    if reading.check_flattening:
        other: Flattening = "hwc" if reading.flattening == "chw" else "chw"
        here, there = (roughness(as_pictures(stem_MD, flattening)) for flattening in (reading.flattening, other))
        if there < SMOOTHER * here:
            raise UserError(
                f"flattening: the first layer of {source} is smooth as {other} (neighbouring pixels differ by {there:.2f}, where "
                f"1 is no order at all) and not as {reading.flattening} ({here:.2f}); give --flattening {other}, or "
                "--force-flattening"
            )
    return as_pictures(stem_MD, reading.flattening).flatten(1).contiguous()


def as_pictures(stem_MD: Tensor, flattening: Flattening) -> Tensor:
    """(neurons, 3, height, width)"""
    side = image_size_of(stem_MD.shape[1])
    if flattening == "chw":
        return stem_MD.view(-1, 3, side, side)
    return stem_MD.view(-1, side, side, 3).permute(0, 3, 1, 2)


def roughness(pictures_MCHW: Tensor) -> float:
    """How much neighbouring pixels differ (mean square, along the worse axis) as a share of what independent pixels would.

    Along the worse axis, because neighbours in the wrong order may be the colours of one pixel, which are alike, too.
    """
    if pictures_MCHW.shape[-1] < 2:
        return 1.0
    squares = [pictures_MCHW.diff(dim=axis).square().mean() for axis in (2, 3)]
    spread = pictures_MCHW.var(correction=0).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.stack(squares).max() / (2 * spread))
