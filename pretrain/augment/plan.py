"""Draw the operations of a policy, their strengths and interpolation filters for each image of a
batch, with numpy only.

The strengths are timm's functions of the magnitude (torchvision's for the policy `cifar10`).
Magnitudes are constant, normal around the policy's magnitude, or uniform from 0 to it, and then
clipped.

L operations per image, B batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pretrain.augment.draws import Draws, Floats, Purpose
from pretrain.auto_augment import FULL_MAGNITUDE, Policy


class Operation(IntEnum):
    """Operations. Each comment explains the strength of its operation."""

    NONE = 0
    AUTOCONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    POSTERIZE = 4  # number of kept bits
    SOLARIZE = 5  # lowest inverted level
    SOLARIZE_ADD = 6  # number added to levels below 128
    BRIGHTNESS = 7  # 1 does not change the image (also for the next three operations)
    CONTRAST = 8
    COLOR = 9
    SHARPNESS = 10
    ROTATE = 11  # degrees, counter-clockwise
    SHEAR_X = 12  # pixels per pixel
    SHEAR_Y = 13
    TRANSLATE_X = 14  # fraction of the side
    TRANSLATE_Y = 15
    SHIFT_X = 16  # fraction of the side, truncated to pixels
    SHIFT_Y = 17


@dataclass(frozen=True)
class OperationPlan:
    """Operations of a batch: one column for each image, with its operations from top to bottom."""

    operations_LB: NDArray[np.int64]
    strengths_LB: Floats
    cubic_LB: NDArray[np.bool_]
    """True if a geometric operation interpolates bicubically, False for bilinear."""
    nearest: bool = False
    """True if geometric operations take the nearest pixel."""


def draw_plan(policy: Policy, draws: Draws) -> OperationPlan:
    layers = np.arange(policy.num_layers)
    steps_LB = _choose(policy, draws)
    probability = np.array([step.probability for step in policy.steps])
    applied_LB = probability[steps_LB] > draws.uniform(Purpose.POLICY_APPLIED, layers).T
    level_LB = _magnitudes(policy, draws, steps_LB) / FULL_MAGNITUDE
    negative_LB = draws.uniform(Purpose.POLICY_SIGN, layers).T < 0.5
    sign_LB = np.where(negative_LB, -1.0, 1.0)
    operations_LB, strengths_LB = np.zeros(steps_LB.shape, np.int64), np.zeros(steps_LB.shape)
    names = sorted({step.name for step in policy.steps})
    name_of_step = np.array([names.index(step.name) for step in policy.steps])
    for number, name in enumerate(names):
        here_LB = applied_LB & (name_of_step[steps_LB] == number)
        operation, strength = _STRENGTHS[name]
        operations_LB[here_LB] = operation
        strengths_LB[here_LB] = strength(level_LB[here_LB], sign_LB[here_LB])
    return OperationPlan(
        operations_LB,
        strengths_LB,
        draws.uniform(Purpose.POLICY_KERNEL, layers).T < 0.5,
        policy.nearest,
    )


def _choose(policy: Policy, draws: Draws) -> NDArray[np.int64]:
    count, layers = len(policy.steps), np.arange(policy.num_layers)
    if policy.chained:
        chain_B = draws.integer(Purpose.POLICY_STEP, count // policy.num_layers)
        return np.asarray(chain_B[None, :] * policy.num_layers + layers[:, None])
    if policy.weights is None:
        return draws.integer(Purpose.POLICY_STEP, count, layers).T
    # the lowest (exponential random numbers / weights) are a weighted choice without repetition
    time = -np.log1p(-draws.uniform(Purpose.POLICY_STEP, np.arange(count))) / np.array(
        policy.weights
    )
    order: NDArray[np.int64] = np.argsort(time, axis=1, kind="stable")
    return order[:, : policy.num_layers].T


def _magnitudes(policy: Policy, draws: Draws, steps_LB: NDArray[np.int64]) -> Floats:
    magnitude_LB = np.array([step.magnitude for step in policy.steps])[steps_LB]
    layers = np.arange(policy.num_layers)
    if math.isinf(policy.magnitude_std):
        magnitude_LB = magnitude_LB * draws.uniform(Purpose.POLICY_MAGNITUDE, layers).T
    elif policy.magnitude_std > 0:
        magnitude_LB = (
            magnitude_LB + policy.magnitude_std * draws.normal(Purpose.POLICY_MAGNITUDE, layers).T
        )
    return np.asarray(np.clip(magnitude_LB, 0.0, policy.magnitude_max))


Strength = Callable[[Floats, Floats], Floats]
"""Function of level (magnitude / 10) and sign that returns a strength."""


def _signed(most: float) -> Strength:
    return lambda level, sign: level * most * sign


def _blend(level: Floats, _: Floats) -> Floats:
    return level * 1.8 + 0.1


def _blend_increasing(level: Floats, sign: Floats) -> Floats:
    return np.maximum(0.1, 1.0 + sign * (level * 0.9))


def _whole(most: float, below: float) -> Strength:
    return lambda level, _: np.minimum(below, np.trunc(level * most))


_bits, _none = _whole(4, math.inf), _whole(0, 0)
_STRENGTHS: dict[str, tuple[Operation, Strength]] = {
    "AutoContrast": (Operation.AUTOCONTRAST, _none),
    "Equalize": (Operation.EQUALIZE, _none),
    "Invert": (Operation.INVERT, _none),
    "Posterize": (Operation.POSTERIZE, _bits),
    "PosterizeIncreasing": (Operation.POSTERIZE, lambda level, sign: 4 - _bits(level, sign)),
    "PosterizeOriginal": (Operation.POSTERIZE, lambda level, sign: 4 + _bits(level, sign)),
    "Solarize": (Operation.SOLARIZE, _whole(256, 256)),
    "SolarizeIncreasing": (
        Operation.SOLARIZE,
        lambda level, sign: 256 - _whole(256, 256)(level, sign),
    ),
    "PosterizeRounded": (Operation.POSTERIZE, lambda level, _: 8 - np.round(level * 4)),
    "SolarizeFraction": (Operation.SOLARIZE, lambda level, _: 255 - 255 * level),
    "SolarizeAdd": (Operation.SOLARIZE_ADD, _whole(110, 128)),
    "Brightness": (Operation.BRIGHTNESS, _blend),
    "BrightnessIncreasing": (Operation.BRIGHTNESS, _blend_increasing),
    "Contrast": (Operation.CONTRAST, _blend),
    "ContrastIncreasing": (Operation.CONTRAST, _blend_increasing),
    "Color": (Operation.COLOR, _blend),
    "ColorIncreasing": (Operation.COLOR, _blend_increasing),
    "Sharpness": (Operation.SHARPNESS, _blend),
    "SharpnessIncreasing": (Operation.SHARPNESS, _blend_increasing),
    "Rotate": (Operation.ROTATE, _signed(30.0)),
    "ShearX": (Operation.SHEAR_X, _signed(0.3)),
    "ShearY": (Operation.SHEAR_Y, _signed(0.3)),
    "TranslateXRel": (Operation.TRANSLATE_X, _signed(0.45)),
    "TranslateYRel": (Operation.TRANSLATE_Y, _signed(0.45)),
    "ShiftX": (Operation.SHIFT_X, _signed(150 / 331)),
    "ShiftY": (Operation.SHIFT_Y, _signed(150 / 331)),
}
