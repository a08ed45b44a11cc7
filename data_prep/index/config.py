"""Settings of `data_prep index`: the shards, their labels, and how readers resize the images."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from data_prep.build.parts import LocalDirectory
from data_prep.errors import SettingsError, UserError
from data_prep.images.decoding import MAX_PIXELS, PIXEL_BUDGET
from data_prep.manifest import Filter
from data_prep.remote import NUM_ATTEMPTS
from data_prep.settings import NumWorkers, Settings, read_lines


def _several(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_several, json_schema_input_type=str | list[str]),
    Field(min_length=1),
]


class IndexSettings(Settings):
    of_verb = "data_prep index"
    splits: dict[str, Patterns] = Field(min_length=1, examples=[{"train": "shards/{000..146}.tar"}])
    """Shards of each split, as local paths or URLs (http, s3 and others). Ranges {000..146} and
    choices {a,b} are expanded; the wildcard * works except for http."""
    out: LocalDirectory = Field(examples=["data/theirs"])
    """The dataset directory (a path, not a URL). The shards are not copied."""
    name: str | None = Field(None, examples=["their-pictures"])
    """Dataset name in manifests and reports (default: the last part of `out`)."""
    storage: dict[str, Any] = Field(default_factory=dict, exclude=True, examples=[{"anon": True}])
    """Options for fsspec, for example {anon: true} or {endpoint_url: ...} for s3, {params: {key:
    ...}} for http. Options are never written to disk."""
    num_attempts: int = Field(NUM_ATTEMPTS, ge=1)
    """Number of attempts to read from a server. The pauses between them grow."""
    image_size: int = Field(64, ge=8, le=1024)
    """Default width and height, in pixels, to which images are resized when they are read."""
    crop: Literal["center", "squash", "longer_side"] = "center"
    """Crop before resizing. center: the central square; both ends of the longer side are lost.
    squash: the complete image, resized to a square. longer_side: as in `build`. Transparent pixels
    become white."""
    interpolation: Filter = "bicubic"
    """Filter for resizing; area is OpenCV's INTER_AREA."""
    label: str = "cls"
    """Tar member with the label. `cls`: integer in KEY.cls. `txt`: integer or class name in
    KEY.txt. `json:FIELD.SUBFIELD`: integer or class name in this field of KEY.json. `none`: no
    label."""
    classes_file: str | None = Field(None, examples=["classes.txt"])
    """Text file with one class name per line, class 0 first. Default: the sorted names that occur
    as labels; numbers, if labels are numbers."""
    image_member: str | None = Field(None, examples=["rgb.png"])
    """File extension of the image's tar member, if a sample has several images."""
    check: Literal["decode", "header"] = "decode"
    """Check of each image. decode: decode it completely. header: read only its header, and compute
    the channel statistics from a random sample."""
    max_pixels: int = Field(PIXEL_BUDGET, ge=1, le=MAX_PIXELS)
    """Largest number of pixels; larger images are rejected. Each pixel takes up to 16 bytes of
    memory."""
    seed: int = Field(0, ge=0)
    """Seed of the random sample that check=header decodes."""
    max_reject_fraction: float = Field(0.01, ge=0, le=1)
    """Largest accepted fraction of rejected samples. The command fails above it; rejected.jsonl
    lists the rejected samples."""
    num_workers: NumWorkers = 0
    """Number of worker processes; 0 means one per core."""

    @field_validator("splits")
    @classmethod
    def _names_are_words(cls, value: dict[str, Patterns]) -> dict[str, Patterns]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_]+", name):
                raise UserError(
                    "splits",
                    f"{name!r} is not a valid split name",
                    "use letters, digits and _",
                    code="bad-value",
                )
        return value

    @field_validator("label")
    @classmethod
    def _label_is_known(cls, value: str) -> str:
        if value not in ("cls", "txt", "none") and not re.fullmatch(r"json:[^.]+(\.[^.]+)*", value):
            raise UserError(
                "label",
                f"{value!r} is not valid",
                "use cls, txt, none, or json:FIELD, for example json:meta.class",
                code="bad-value",
            )
        return value

    @property
    def directory(self) -> Path:
        return Path(self.out)

    @property
    def dataset_name(self) -> str:
        return self.name or self.directory.resolve().name

    def class_names(self) -> tuple[str, ...] | None:
        if self.classes_file is None:
            return None
        names = tuple(read_lines("classes_file", self.classes_file))
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None or not names:
            what = "has no class names" if twice is None else f"contains {twice!r} twice"
            raise SettingsError(
                "classes_file",
                f"{self.classes_file} {what}",
                "write every class once, one on each line",
                code="empty" if twice is None else "bad-value",
            )
        return names
