"""Parse timm's names of augmentation policies, without torch.

RandAugment names are sections joined by dashes: `rand`, then any of these:

- m: magnitude, 0-10;
- n: operations per image;
- p: probability of each operation;
- mstd: standard deviation of the magnitude; above 100, the magnitude is uniform from 0 to m;
- mmax: upper bound of the magnitude;
- inc: 1 if the strength grows with the magnitude, otherwise 0;
- tweights: weighted choice of operations without repetition.

AutoAugment names are `original`, `originalr`, `v0`, `v0r`, optionally with mstd. `cifar10` is
torchvision's policy.
"""

import math
import re
from dataclasses import dataclass

from data_prep.errors import SettingsError
from data_prep.settings import nearest

FULL_MAGNITUDE = 10.0
"""Magnitude at which an operation has its full strength."""


@dataclass(frozen=True)
class PolicyStep:
    name: str
    """Name of the operation in timm, for example PosterizeIncreasing or TranslateXRel."""
    probability: float
    magnitude: float


@dataclass(frozen=True)
class Policy:
    """The steps from which the operations of each image are drawn."""

    steps: tuple[PolicyStep, ...]
    num_layers: int
    """Number of operations per image."""
    chained: bool = False
    """True: draw one chain of `num_layers` consecutive steps. False: draw each operation
    separately."""
    weights: tuple[float, ...] | None = None
    """Weights for drawing steps without repetition in an image. None: draw steps uniformly, with
    repetition."""
    magnitude_std: float = 0.0
    """Standard deviation of the magnitude. inf: magnitudes are uniform from 0 to the step's
    magnitude.
    """
    magnitude_max: float = FULL_MAGNITUDE
    nearest: bool = False
    """True if geometric operations use nearest-neighbor interpolation."""


def parse_policy(text: str) -> Policy:
    head, *sections = text.split("-")
    if head == "rand":
        return _rand_augment(
            text, _sections(text, sections, known=("m", "n", "p", "mstd", "mmax", "inc", "t"))
        )
    if head in _SEARCHED:
        of_cifar = head == "cifar10"
        given = _sections(text, sections, known=() if of_cifar else ("mstd",))
        words = [word.split() for word in re.split(r"[,|\n]", _SEARCHED[head].strip())]
        full = 9 if of_cifar else FULL_MAGNITUDE  # torchvision's full magnitude is 9
        steps = tuple(
            PolicyStep(name, float(p), float(magnitude) * FULL_MAGNITUDE / full)
            for name, p, magnitude in words
        )
        return Policy(
            steps, num_layers=2, chained=True, magnitude_std=_spread(given), nearest=of_cifar
        )
    known = ["rand-m9-mstd0.5-inc1", *_SEARCHED]
    raise SettingsError(
        "augment.auto_augment",
        f"{text!r} is not a policy",
        nearest(text, known),
        code="unknown-name",
    )


def _rand_augment(text: str, given: dict[str, str]) -> Policy:
    for key in ("m", "n", "mmax", "inc"):
        if "." in given.get(key, ""):
            raise _wrong(text, f"{key}{given[key]}", "write a whole number")
    magnitude, num_layers = int(given.get("m", "10")), int(given.get("n", "2"))
    probability, highest = float(given.get("p", "0.5")), int(given.get("mmax", "10"))
    names = _INCREASING if given.get("inc") == "1" else _PLAIN
    weights = None
    if given.get("t") == "weights":
        names, weights = tuple(_WEIGHTED), tuple(_WEIGHTED.values())
    for key, is_right, remedy in (
        (
            "t",
            given.get("t") in (None, "weights"),
            "write tweights, the only set of operations in timm that does not blur",
        ),
        ("inc", given.get("inc", "0") in ("0", "1"), "write inc0 or inc1"),
        ("p", 0 <= probability <= 1, "write a probability between 0 and 1"),
        ("mmax", highest >= 1, "write 1 or more"),
        ("n", 1 <= num_layers <= len(names), f"write a number from 1 to {len(names)}"),
    ):
        if not is_right:
            raise _wrong(text, f"{key}{given[key]}", remedy)
    steps = tuple(PolicyStep(name, probability, magnitude) for name in names)
    return Policy(
        steps,
        num_layers,
        weights=weights,
        magnitude_std=_spread(given),
        magnitude_max=float(highest),
    )


def _sections(text: str, sections: list[str], *, known: tuple[str, ...]) -> dict[str, str]:
    given: dict[str, str] = {}
    for section in sections:
        match = re.fullmatch(r"t([a-z0-9]+)|([a-z]+)(\d+(?:\.\d+)?)", section)
        key, value = (
            ("t", match[1]) if match and match[1] else (match[2], match[3]) if match else ("", "")
        )
        if key not in known:
            remedy = (
                f"use only {', '.join(known)}, each with its value, e.g. {known[0]}9"
                if known
                else "remove it"
            )
            raise _wrong(text, section, remedy)
        if key in given:
            raise _wrong(text, section, f"write {key} only once")
        given[key] = value
    return given


def _wrong(text: str, section: str, fix: str) -> SettingsError:
    problem = f"{section!r} in {text!r} is not valid"
    return SettingsError("augment.auto_augment", problem, fix, code="bad-value")


def _spread(given: dict[str, str]) -> float:
    spread = float(given.get("mstd", "0"))
    return math.inf if spread > 100 else spread


_PLAIN = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateXRel",
    "TranslateYRel",
)
_HAS_INCREASING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_INCREASING = tuple(f"{name}Increasing" if name in _HAS_INCREASING else name for name in _PLAIN)
_WEIGHTED = {
    "Rotate": 3.0,
    "ShearX": 2.0,
    "ShearY": 2.0,
    "TranslateXRel": 1.0,
    "TranslateYRel": 1.0,
    "ColorIncreasing": 0.25,
    "SharpnessIncreasing": 0.25,
    "AutoContrast": 0.25,
    "SolarizeIncreasing": 0.05,
    "SolarizeAdd": 0.05,
    "ContrastIncreasing": 0.05,
    "BrightnessIncreasing": 0.05,
    "Equalize": 0.05,
    "PosterizeIncreasing": 0.05,
    "Invert": 0.05,
}

_ORIGINAL = """
PosterizeOriginal 0.4 8, Rotate 0.6 9 | Solarize 0.6 5, AutoContrast 0.6 5 | Equalize 0.8 8, Equalize 0.6 3
PosterizeOriginal 0.6 7, PosterizeOriginal 0.6 6 | Equalize 0.4 7, Solarize 0.2 4 | Equalize 0.4 4, Rotate 0.8 8
Solarize 0.6 3, Equalize 0.6 7 | PosterizeOriginal 0.8 5, Equalize 1.0 2 | Rotate 0.2 3, Solarize 0.6 8
Equalize 0.6 8, PosterizeOriginal 0.4 6 | Rotate 0.8 8, Color 0.4 0 | Rotate 0.4 9, Equalize 0.6 2
Equalize 0.0 7, Equalize 0.8 8 | Invert 0.6 4, Equalize 1.0 8 | Color 0.6 4, Contrast 1.0 8 | Rotate 0.8 8, Color 1.0 2
Color 0.8 8, Solarize 0.8 7 | Sharpness 0.4 7, Invert 0.6 8 | ShearX 0.6 5, Equalize 1.0 9 | Color 0.4 0, Equalize 0.6 3
Equalize 0.4 7, Solarize 0.2 4 | Solarize 0.6 5, AutoContrast 0.6 5 | Invert 0.6 4, Equalize 1.0 8 | Color 0.6 4, Contrast 1.0 8
Equalize 0.8 8, Equalize 0.6 3
"""  # noqa: E501 (a table)
_V0 = """
Equalize 0.8 1, ShearY 0.8 4 | Color 0.4 9, Equalize 0.6 3 | Color 0.4 1, Rotate 0.6 8 | Solarize 0.8 3, Equalize 0.4 7
Solarize 0.4 2, Solarize 0.6 2 | Color 0.2 0, Equalize 0.8 8 | Equalize 0.4 8, SolarizeAdd 0.8 3 | ShearX 0.2 9, Rotate 0.6 8
Color 0.6 1, Equalize 1.0 2 | Invert 0.4 9, Rotate 0.6 0 | Equalize 1.0 9, ShearY 0.6 3 | Color 0.4 7, Equalize 0.6 0
Posterize 0.4 6, AutoContrast 0.4 7 | Solarize 0.6 8, Color 0.6 9 | Solarize 0.2 4, Rotate 0.8 9
Rotate 1.0 7, TranslateYRel 0.8 9 | ShearX 0.0 0, Solarize 0.8 4 | ShearY 0.8 0, Color 0.6 4 | Color 1.0 0, Rotate 0.6 2
Equalize 0.8 4, Equalize 0.0 8 | Equalize 1.0 4, AutoContrast 0.6 2 | ShearY 0.4 7, SolarizeAdd 0.6 7
Posterize 0.8 2, Solarize 0.6 10 | Solarize 0.6 8, Equalize 0.6 1 | Color 0.8 6, Rotate 0.4 5
"""  # noqa: E501 (a table)
_CIFAR10 = """
Invert 0.1 0, ContrastIncreasing 0.2 6 | Rotate 0.7 2, ShiftX 0.3 9 | SharpnessIncreasing 0.8 1, SharpnessIncreasing 0.9 3
ShearY 0.5 8, ShiftY 0.7 9 | AutoContrast 0.5 0, Equalize 0.9 0 | ShearY 0.2 7, PosterizeRounded 0.3 7
ColorIncreasing 0.4 3, BrightnessIncreasing 0.6 7 | SharpnessIncreasing 0.3 9, BrightnessIncreasing 0.7 9
Equalize 0.6 0, Equalize 0.5 0 | ContrastIncreasing 0.6 7, SharpnessIncreasing 0.6 5 | ColorIncreasing 0.7 7, ShiftX 0.5 8
Equalize 0.3 0, AutoContrast 0.4 0 | ShiftY 0.4 3, SharpnessIncreasing 0.2 6 | BrightnessIncreasing 0.9 6, ColorIncreasing 0.2 8
SolarizeFraction 0.5 2, Invert 0.0 0 | Equalize 0.2 0, AutoContrast 0.6 0 | Equalize 0.2 0, Equalize 0.6 0
ColorIncreasing 0.9 9, Equalize 0.6 0 | AutoContrast 0.8 0, SolarizeFraction 0.2 8
BrightnessIncreasing 0.1 3, ColorIncreasing 0.7 0
SolarizeFraction 0.4 5, AutoContrast 0.9 0 | ShiftY 0.9 9, ShiftY 0.7 9 | AutoContrast 0.9 0, SolarizeFraction 0.8 3
Equalize 0.8 0, Invert 0.1 0 | ShiftY 0.7 9, AutoContrast 0.9 0
"""  # noqa: E501 (a table)
_SEARCHED = {
    "cifar10": _CIFAR10,
    "original": _ORIGINAL,
    "originalr": _ORIGINAL.replace("PosterizeOriginal", "PosterizeIncreasing"),
    "v0": _V0,
    "v0r": _V0.replace("Posterize", "PosterizeIncreasing"),
}
"""AutoAugment policies (Cubuk et al.): chains of two operations, each with a probability and a
magnitude."""
