"""A procedural archive: draws JPEG files into a folder of classes, which `FolderSource` reads.

Image number i of a class is a function of (seed, class, split, i), so a smaller dataset is a prefix
of a larger one. The sets "a" and "b" share no class, but each has all attributes. "a" has the
combinations of shape, color and quadrant with even parity, "b" those with odd parity.

`begun.json` (the settings) is written first. A class folder is drawn under a temporary name and
then renamed, so an interrupted run resumes with the missing classes. Images are not synced: after a
power cut, delete the folder.
"""

import colorsys
import io
import itertools
import json
import shutil
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from data_prep.archives.guard import SourceError
from data_prep.archives.inventory import Outline
from data_prep.publish import LOCK, TEMPORARY_PREFIX, remove_leftovers, sole_writer, write_json
from data_prep.settings import Settings
from data_prep.sources.folder import FolderSettings, FolderSource
from data_prep.workers import sweep

JPEG_QUALITY = 90
BEGUN_NAME = "begun.json"
SPLIT_NUMBERS = {"train": 0, "val": 1}
SHAPES = ("disc", "square", "triangle", "ring", "cross", "bar")
COLORS = {"red-cyan": 0.0, "orange-azure": 0.125, "lime-violet": 0.25, "green-rose": 0.375}
QUADRANTS = {"nw": (-0.5, -0.5), "ne": (0.5, -0.5), "sw": (-0.5, 0.5), "se": (0.5, 0.5)}

Pixels = NDArray[np.float64]


class Look(NamedTuple):
    shape: str
    color: str
    quadrant: str

    @property
    def name(self) -> str:
        return "-".join(self)


def class_set(name: str, *, num_classes: int) -> tuple[Look, ...]:
    """Return the first classes of a set, in a fixed mixed order, so that even a few classes differ
    in all attributes."""
    combinations = itertools.product(enumerate(SHAPES), enumerate(COLORS), enumerate(QUADRANTS))
    parity = {"a": 0, "b": 1}[name]
    looks = [Look(s, c, q) for (i, s), (j, c), (k, q) in combinations if (i + j + k) % 2 == parity]
    order = np.random.Generator(np.random.Philox(20240)).permutation(len(looks))
    return tuple(looks[row] for row in order[:num_classes])


def picture_bytes(look: Look, *, split: str, number: int, size: int, seed: int) -> bytes:
    identity = [
        seed,
        SHAPES.index(look.shape),
        list(COLORS).index(look.color),
        list(QUADRANTS).index(look.quadrant),
    ]
    sequence = np.random.SeedSequence([*identity, SPLIT_NUMBERS[split], number])
    pixels = draw(look, size=size, generator=np.random.Generator(np.random.Philox(sequence)))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


class SyntheticSettings(Settings):
    """Procedural images: class = shape x color x position."""

    kind: Literal["synthetic"]
    class_set: Literal["a", "b"] = "a"
    """Set of classes: a for pretraining, b for transfer. The sets share no class."""
    num_classes: int = Field(48, ge=2, le=48)
    """Number of classes of the set."""
    num_train_per_class: int = Field(100, ge=1)
    """Number of images of each class in the split `train`."""
    num_val_per_class: int = Field(20, ge=0)
    """Number of images of each class in the split `val`."""
    image_size: int = Field(48, ge=16, le=512)
    """Width and height of the images, in pixels."""
    seed: int = Field(0, ge=0)
    """Seed of all images."""
    images_dir: str | None = Field(None, examples=["data/drawn"])
    """Folder of the JPEG files (default: `OUT-images` next to the dataset)."""


class SyntheticSource(FolderSource, of=SyntheticSettings):
    def __init__(self, settings: SyntheticSettings):
        assert settings.images_dir is not None, "build resolves the default"
        super().__init__(FolderSettings(kind="folder", path=settings.images_dir))
        self.drawn = settings

    def describe(self) -> dict[str, Any]:
        return self.drawn.model_dump(mode="json", exclude={"images_dir"})

    def outline(self) -> Outline:
        with sole_writer(self.path, wait=True):
            self._write_images()
        return super().outline()

    def _write_images(self) -> None:
        begun = self.path / BEGUN_NAME
        names = {path.name for path in self.path.iterdir()} - {LOCK}
        strangers = {
            name
            for name in names
            if not (name.startswith(TEMPORARY_PREFIX) and name.endswith(BEGUN_NAME))
        }
        problem = ""
        if strangers and not begun.exists():
            problem = f"{self.path} contains {min(strangers)}, but no images of data_prep"
        elif begun.exists() and json.loads(begun.read_text()) != self.describe():
            problem = f"{self.path} contains images from other settings"
        if problem:
            fix = "choose another folder"
            raise SourceError("source.images_dir", problem, fix, code="exists")
        write_json(begun, self.describe())
        remove_leftovers(self.path)
        looks = class_set(self.drawn.class_set, num_classes=self.drawn.num_classes)
        counts = {"train": self.drawn.num_train_per_class, "val": self.drawn.num_val_per_class}
        jobs = [(look, split, count) for look in looks for split, count in counts.items() if count]
        jobs = [job for job in jobs if not (self.path / job[1] / job[0].name).exists()]
        drawn = sweep(
            self._write_class,
            jobs,
            title="drawing images",
            unit="images",
            sizes=[job[2] for job in jobs],
            workers=self.num_workers,
        )
        list(drawn)

    def _write_class(self, job: tuple[Look, str, int]) -> None:
        look, split, count = job
        folder = self.path / split / look.name
        if folder.exists():  # a worker died after this rename, and the job is repeated
            return
        temporary = folder.with_name(TEMPORARY_PREFIX + folder.name)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for number in range(count):
            data = picture_bytes(
                look, split=split, number=number, size=self.drawn.image_size, seed=self.drawn.seed
            )
            (temporary / f"{number:06d}.jpg").write_bytes(data)
        temporary.rename(folder)


# ---- one image
# Shape, color and quadrant of the main object define the class. Random: clouds in the background,
# smaller objects, a soft shadow, pixel noise, and the object's size, rotation, exact place and
# brightness. No single attribute defines a class, and the contrast between object and background
# changes its sign, so no linear function of the pixels can do well.


def draw(look: Look, *, size: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return a (size, size, 3) image of the class `look`. Everything else is drawn from
    `generator`."""
    x, y = _axes(size)
    canvas = _clouds(x, y, generator)
    for _ in range(generator.integers(1, 3)):
        shape = SHAPES[generator.integers(len(SHAPES))]
        hue = float(generator.uniform())
        center = generator.uniform(-0.9, 0.9, 2)
        _paint(canvas, shape, hue, center, float(generator.uniform(0.10, 0.16)), generator)
    center = np.array(QUADRANTS[look.quadrant]) + generator.uniform(-0.12, 0.12, 2)
    hue = COLORS[look.color] + 0.5 * int(generator.integers(2)) + float(generator.normal(0, 0.012))
    _paint(canvas, look.shape, hue, center, float(generator.uniform(0.40, 0.55)), generator)
    light = 1 + generator.uniform(-0.25, 0.25) * x + generator.uniform(-0.25, 0.25) * y
    noise = generator.normal(0, generator.uniform(0.01, 0.06), canvas.shape)
    image = canvas * light[..., None] + noise
    return (image.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _axes(size: int) -> list[Pixels]:
    axis = (np.arange(size) + 0.5) / size * 2 - 1
    return list(np.meshgrid(axis, axis))


def _clouds(x: Pixels, y: Pixels, generator: np.random.Generator) -> Pixels:
    """Return soft random clouds: a 3 x 3 grid of colors, blended between its points."""
    knots = np.array([-1.0, 0.0, 1.0])
    along_x = (1 - np.abs(x[0][:, None] - knots)).clip(min=0)
    along_y = (1 - np.abs(y[:, 0][:, None] - knots)).clip(min=0)
    colors = generator.uniform(0.0, 1.0, (3, 3, 3))
    canvas: Pixels = np.einsum("ya,xb,abc->yxc", along_y, along_x, colors)
    return canvas


def _paint(
    canvas: Pixels,
    shape: str,
    hue: float,
    center: Pixels,
    radius: float,
    generator: np.random.Generator,
) -> None:
    x, y = _axes(len(canvas))
    angle = generator.uniform(0, 2 * np.pi)
    value, saturation = generator.uniform(0.45, 1.0), generator.uniform(0.7, 1.0)
    color = np.array(colorsys.hsv_to_rgb(hue % 1.0, saturation, value))
    dx, dy = x - center[0], y - center[1]
    u, v = np.cos(angle) * dx + np.sin(angle) * dy, np.cos(angle) * dy - np.sin(angle) * dx
    pixel = 2 / len(canvas)
    cover = (0.5 - _distance(shape, u / radius, v / radius) * radius / pixel).clip(0, 1)[..., None]
    canvas += cover * (color - canvas)


def _distance(shape: str, u: Pixels, v: Pixels) -> Pixels:
    """Return the approximate signed distance (negative inside) from the edge of the unit shape."""
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
