"""Settings of `data_prep index`: which shards, what is their label, and what a reader makes of
their pictures."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from data_prep.build.destination import Destination
from data_prep.errors import SettingsError
from data_prep.images.decoding import MAX_PIXELS, PIXEL_BUDGET
from data_prep.manifest import CropPolicy, Filter
from data_prep.remote import NUM_ATTEMPTS
from data_prep.settings import NumWorkers, read_lines


def _several(value: object) -> object:
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_several, json_schema_input_type=str | list[str]),
    Field(min_length=1),
]


class IndexSettings(Destination):
    of_verb = "data_prep index"
    splits: dict[str, Patterns] = Field(min_length=1, examples=[{"train": "shards/{000..146}.tar"}])
    """Of each split: local paths, http(s):// or s3:// URLs, with {000..146}, {a,b} and (but for
    http) *."""
    out: str = Field(examples=["data/theirs"])
    """The dataset directory, or the URL of one in a store (with `work`). The shards stay where they
    are."""
    name: str | None = Field(None, examples=["their-pictures"])
    """What the dataset is called in manifests and reports; by default the last part of `out`."""
    storage: dict[str, Any] = Field(default_factory=dict, examples=[{"anon": True}])
    """Options for fsspec, such as {anon: true} or {endpoint_url: ...} for s3, {params: {key: ...}}
    for http; written nowhere."""
    num_attempts: int = Field(NUM_ATTEMPTS, ge=1)
    """Of reading from a server, with growing pauses."""
    image_size: int = Field(64, ge=8, le=1024)
    """To what pictures are resized when they are read, unless the reader asks for another size."""
    crop: CropPolicy = "center"
    """center: the central square, resized; both ends of the longer side are lost. squash: the
    complete image, resized to a square.
    longer_side: as in `build`. Transparent pixels become white."""
    interpolation: Filter = "bicubic"
    """area: OpenCV's INTER_AREA."""
    label: str = "cls"
    """cls: the integer in KEY.cls; txt: an integer or a class name in KEY.txt; json:FIELD.SUBFIELD:
    in KEY.json; none: no label."""
    classes_file: str | None = Field(None, examples=["classes.txt"])
    """A text file with the name of class 0, 1, ... on each line; by default "0".."max", or the
    names of the labels, sorted."""
    image_member: str | None = Field(None, examples=["rgb.png"])
    """The ending of the picture's member, where a sample holds several; by default the one that is
    of a picture format."""
    ignore_zeros: bool = False
    """Read on behind the end mark of a tar: shards that were put together with cat hold a tar
    behind it. webdataset stops there."""
    check: Literal["decode", "header"] = "decode"
    """decode: every picture is decoded; header: it is only opened, and the channel statistics are
    those of a seeded sample."""
    max_pixels: int = Field(PIXEL_BUDGET, ge=1, le=MAX_PIXELS)
    """A picture of more is rejected. Up to 16 bytes of a worker's memory for each."""
    seed: int = Field(0, ge=0)
    """Of the sample that check=header decodes."""
    max_reject_share: float = Field(0.01, ge=0, le=1)
    """An index that leaves out a larger share of the samples keeps them listed in rejected.jsonl,
    and fails."""
    num_workers: NumWorkers = 0
    """Worker processes; 0 means one per core."""

    @field_validator("splits")
    @classmethod
    def _names_are_words(cls, value: dict[str, Patterns]) -> dict[str, Patterns]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_]+", name):
                raise ValueError(
                    f"splits: {name!r} will not do; a split is called with letters, digits and _"
                )
        return value

    @field_validator("label")
    @classmethod
    def _label_is_known(cls, value: str) -> str:
        if value not in ("cls", "txt", "none") and not re.fullmatch(r"json:[^.]+(\.[^.]+)*", value):
            raise ValueError(
                f"label: {value!r} will not do; write cls, txt, none, or json:FIELD such as"
                " json:meta.class"
            )
        return value

    @property
    def dataset_name(self) -> str:
        return self.name or self.last_name

    def class_names(self) -> tuple[str, ...] | None:
        if self.classes_file is None:
            return None
        names = tuple(read_lines("classes_file", self.classes_file))
        doubles = (
            sorted({name for name in names if names.count(name) > 1})
            if len(set(names)) < len(names)
            else []
        )
        if doubles or not names:
            what = f"names {doubles[0]!r} twice" if doubles else "names no class"
            raise SettingsError(
                f"classes_file: {self.classes_file} {what}; write every class once, one on each"
                " line"
            )
        return names
