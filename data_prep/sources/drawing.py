"""Draws one synthetic picture: a main object whose shape, colour and quadrant name its class, among nuisance.

Nuisance: the background's colour and gradient, the object's size, rotation, exact place and brightness, smaller objects of any
shape and colour anywhere, a soft shadow of light across the picture, pixel noise. No single attribute names a class, and the
contrast of object against background changes sign, so that no linear function of the pixels can do well.
"""

import colorsys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHAPES = ("disc", "square", "triangle", "ring", "cross", "bar")
COLOURS = {"red-cyan": 0.0, "orange-azure": 0.125, "lime-violet": 0.25, "green-rose": 0.375}
QUADRANTS = {"nw": (-0.5, -0.5), "ne": (0.5, -0.5), "sw": (-0.5, 0.5), "se": (0.5, 0.5)}

Pixels = NDArray[np.float64]


class Look(NamedTuple):
    """The three attributes that together name a class."""

    shape: str
    colour: str
    quadrant: str

    @property
    def name(self) -> str:
        return "-".join(self)


def draw(look: Look, *, size: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """A (size, size, 3) picture of `look`; all nuisance comes from `generator`."""
    axis = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = np.meshgrid(axis, axis)
    canvas = _background(x, y, generator)
    for _ in range(generator.integers(1, 3)):
        shape = SHAPES[generator.integers(len(SHAPES))]
        hue = float(generator.uniform())
        centre = generator.uniform(-0.9, 0.9, 2)
        _paint(canvas, x, y, shape, hue, centre, float(generator.uniform(0.10, 0.16)), generator)
    centre = np.array(QUADRANTS[look.quadrant]) + generator.uniform(-0.12, 0.12, 2)
    hue = COLOURS[look.colour] + 0.5 * int(generator.integers(2)) + float(generator.normal(0, 0.012))
    _paint(canvas, x, y, look.shape, hue, centre, float(generator.uniform(0.40, 0.55)), generator)
    light = 1 + generator.uniform(-0.25, 0.25) * x + generator.uniform(-0.25, 0.25) * y
    noise = generator.normal(0, generator.uniform(0.01, 0.06), canvas.shape)
    picture = canvas * light[..., None] + noise
    return (picture.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _background(x: Pixels, y: Pixels, generator: np.random.Generator) -> Pixels:
    """Soft random clouds: a 3 x 3 grid of colours, blended between its points."""
    knots = np.array([-1.0, 0.0, 1.0])
    along_x = (1 - np.abs(x[0][:, None] - knots)).clip(min=0)
    along_y = (1 - np.abs(y[:, 0][:, None] - knots)).clip(min=0)
    colours = generator.uniform(0.0, 1.0, (3, 3, 3))
    canvas: Pixels = np.einsum("ya,xb,abc->yxc", along_y, along_x, colours)
    return canvas


def _paint(
    canvas: Pixels,
    x: Pixels,
    y: Pixels,
    shape: str,
    hue: float,
    centre: Pixels,
    radius: float,
    generator: np.random.Generator,
) -> None:
    """Lays one object over the canvas, with edges one pixel soft."""
    angle = generator.uniform(0, 2 * np.pi)
    value, saturation = generator.uniform(0.45, 1.0), generator.uniform(0.7, 1.0)
    colour = np.array(colorsys.hsv_to_rgb(hue % 1.0, saturation, value))
    dx, dy = x - centre[0], y - centre[1]
    u, v = np.cos(angle) * dx + np.sin(angle) * dy, np.cos(angle) * dy - np.sin(angle) * dx
    pixel = 2 / canvas.shape[0]
    cover = (0.5 - _distance(shape, u / radius, v / radius) * radius / pixel).clip(0, 1)[..., None]
    canvas += cover * (colour - canvas)


def _distance(shape: str, u: Pixels, v: Pixels) -> Pixels:
    """Signed distance (negative inside) of the unit shape; close enough near its edge to soften it."""
    a, b = np.abs(u), np.abs(v)
    match shape:
        case "disc":
            return np.hypot(u, v) - 0.9
        case "square":
            return np.maximum(a, b) - 0.8
        case "triangle":
            return np.maximum(0.866 * a + 0.5 * v, -v) - 0.55
        case "ring":
            return np.abs(np.hypot(u, v) - 0.75) - 0.22
        case "cross":
            return np.minimum(np.maximum(a - 0.28, b - 1.0), np.maximum(b - 0.28, a - 1.0))
        case "bar":
            return np.maximum(a - 1.1, b - 0.3)
    raise AssertionError(shape)
