"""Read a WebDataset shard of another program: gather members into samples, check every sample.

One pass over the headers gathers members by webdataset's rule: the key is the path up to the first
dot of the file name. A second pass gives every sample a row of the index, or a reason for
rejection. Images are decoded, labels are parsed, and other members are not opened (webdataset would
unpickle `.pyd`). Invariant: every key is in `rows` or in `rejected`.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.build.shards import Rejected
from data_prep.errors import UserError
from data_prep.images import Rejection, decode, naming, resize, size_of
from data_prep.images.channels import ChannelSums
from data_prep.images.rejection import MAX_FILE_BYTES, check_file_size
from data_prep.index.config import IndexSettings
from data_prep.manifest import PICTURES
from data_prep.settings import printable
from data_prep.tar import BLOCK, Member, TarError, members, read_member, runs

LIKELY = (
    "label",
    "class",
    "class_name",
    "label_name",
    "cls",
    "category",
    "target",
    "wnid",
    "synset",
    "class_id",
    "label_id",
    "y",
)
"""Usual keys of labels in JSON, most likely first."""
MAX_CLASSES = 1 << 20
UNLABELLED = -1
_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")
MAX_LABEL_BYTES = 1 << 24
NUM_FOR_STATISTICS = 256
"""Number of images per shard that check=header decodes."""
_META = re.compile(r"__[^/]*__($|/)")
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


@dataclass(frozen=True)
class IndexPlan:
    """Values that a worker needs to index a shard. Picklable."""

    settings: IndexSettings
    names: tuple[str, ...] | None
    """Class names, if classes_file is set."""
    hash: str
    """Hash of the config and the list of shards."""
    config: dict[str, Any]

    @cached_property
    def numbers(self) -> dict[str, int] | None:
        if self.names is None:
            return None
        return {name: number for number, name in enumerate(self.names)}

    @property
    def directory(self) -> Path:
        return self.settings.directory


@dataclass
class StockSample:
    key: str
    members: list[tuple[str, Member]] = field(default_factory=list)
    num_runs: int = 0
    """Number of groups of adjacent members. If above 1, webdataset reads the groups as several
    samples."""


class IndexRow(NamedTuple):
    key: str
    offset: int
    num_bytes: int
    label: int


@dataclass
class Contents:
    rows: list[IndexRow] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    num_without_key: int = 0
    goes_on_at: int | None = None
    """Offset of unread data after the tar's end mark."""
    names: dict[str, int] = field(default_factory=dict)
    """Labels that are words, numbered in the order of occurrence; `rows` has these numbers."""
    has_numbers: bool = False
    channels: ChannelSums = field(default_factory=ChannelSums)
    raw_size: int | None = None
    """Side of the images in pixels, if all are raw, have one size, and are placed as in shards of
    `build`."""

    def number(self, label: int | str) -> int:
        if isinstance(label, str):
            return self.names.setdefault(label, len(self.names))
        self.has_numbers = self.has_numbers or label >= 0
        return label


def read_shard(path: Path, plan: IndexPlan, *, name: str) -> Contents:
    """Return the rows, rejections and statistics of a shard. `name`: name of the shard in the paths
    of samples. Raise TarError if the tar is damaged."""
    found = Contents()
    samples = gather(path, found)
    chosen = _for_statistics(len(samples), plan, name)
    sizes: set[int | None] = set()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for number, sample in enumerate(samples):
            try:
                picture = _picture(sample, plan)
                data = _read(descriptor, picture)
                label = _label(descriptor, sample, plan)
                with naming(f"{name}/{printable(sample.key)}"):
                    size = _look(data, plan, found, decoded=number in chosen)
            except Rejection as bad:
                found.rejected.append(_rejected(descriptor, sample, plan, bad, name))
            else:
                sizes.add(size)
                found.rows.append(
                    IndexRow(sample.key, picture.offset, picture.num_bytes, found.number(label))
                )
    finally:
        os.close(descriptor)
    reasons = {each.reason for each in found.rejected}
    if not found.rows and plan.settings.max_reject_fraction < 1 and reasons == {"no_label"}:
        first = found.rejected[0]
        problem, _, fix = f"{first.path}: {first.detail}".rpartition("; ")
        raise UserError("label", problem, fix, code="missing-value")
    found.raw_size = _raw_size(found.rows, sizes)
    return found


def gather(path: Path, found: Contents) -> list[StockSample]:
    """Return the samples in the order of their first members. `found` gets the number of members
    without a key."""
    with open(path, "rb") as file:
        head = file.read(8)
    kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if kind is not None:
        problem = f"is compressed ({kind}), so single images cannot be read"
        raise TarError(problem, fix="decompress it to a plain .tar")
    samples: dict[str, StockSample] = {}

    def of_samples() -> Iterator[Member]:
        found.goes_on_at = yield from members(path)

    for key, run in runs(member for member in of_samples() if not _META.match(member.name)):
        if not key:
            found.num_without_key += 1
            continue
        sample = samples.setdefault(key, StockSample(key))
        sample.num_runs += 1
        sample.members += [(suffix.lower(), member) for suffix, member in run]
    return list(samples.values())


def _picture(sample: StockSample, plan: IndexPlan) -> Member:
    suffixes = [suffix for suffix, _ in sample.members]
    double = next((suffix for suffix in suffixes if suffixes.count(suffix) > 1), None)
    if double is not None:
        raise Rejection(
            "doubled_member",
            f"two members end in .{printable(double)}; the key may belong to two samples",
        )
    if sample.num_runs > 1:
        raise Rejection(
            "interleaved", f"the members of this sample are not adjacent ({sample.num_runs} groups)"
        )
    pictures = _pictures(sample, plan)
    listed = " ".join(f".{printable(suffix)}" for suffix in sorted(suffixes))
    if len(pictures) > 1:
        raise Rejection(
            "several_images", f"{len(pictures)} of the members {listed} are images"[:200]
        )
    if not pictures:
        raise Rejection("no_image", f"no image among {listed}"[:200])
    check_file_size(pictures[0].num_bytes)
    return pictures[0]


def _pictures(sample: StockSample, plan: IndexPlan) -> list[Member]:
    chosen = plan.settings.image_member
    wanted = PICTURES if chosen is None else ("." + chosen.lower().lstrip("."),)
    return [member for suffix, member in sample.members if f".{suffix}" in wanted]


def _label(descriptor: int, sample: StockSample, plan: IndexPlan) -> int | str:
    if plan.settings.label == "none":
        return UNLABELLED
    wanted = plan.settings.label.partition(":")[0]
    member = next((member for suffix, member in sample.members if suffix == wanted), None)
    if member is None:
        raise Rejection(
            "no_label", f"no member ends in .{wanted}; {_where_else(descriptor, sample)}"
        )
    if member.num_bytes > MAX_LABEL_BYTES:
        raise Rejection("bad_label", f"the label has {member.num_bytes:,} bytes")
    return label_of(_read(descriptor, member), plan.settings.label, classes=plan.numbers)


def _where_else(descriptor: int, sample: StockSample) -> str:
    """Return a hint: members that may contain the label, and the setting that reads it."""
    small = {
        suffix: _read(descriptor, member)
        for suffix, member in sample.members
        if member.num_bytes <= MAX_LABEL_BYTES
    }
    with suppress(ValueError, RecursionError):
        tree = json.loads(small.get("json", b"null"))
        fields = tree.items() if isinstance(tree, dict) else ()
        keys = [key for key, value in fields if isinstance(value, int | str)]
        usual = [key for name in LIKELY for key in keys if key.lower() == name]
        if usual or (keys and "txt" not in small):
            return f"found .json with keys {', '.join(keys)}; set label=json:{[*usual, *keys][0]}"
    if "txt" in small:
        return f"found .txt ({small['txt'][:40].decode(errors='replace').strip()}); set label=txt"
    suffixes = " ".join(f".{printable(suffix)}" for suffix, _ in sample.members)
    return f"found {suffixes}; set label=none to read images without labels"[:200]


def _look(data: bytes, plan: IndexPlan, found: Contents, *, decoded: bool) -> int | None:
    """Check an image. Return its side in pixels if it is raw and square, else None. Raise Rejection
    if it cannot be used. `decoded`: decode it, and add it to the channel statistics."""
    settings = plan.settings
    if decoded:
        image, _ = decode(data, max_pixels=settings.max_pixels)
        small = resize(
            image,
            size=settings.image_size,
            crop=settings.crop,
            interpolation=settings.interpolation,
        )
        found.channels.add(small)
    else:
        size_of(data, max_pixels=settings.max_pixels)
    header = re.match(rb"P6\n([0-9]{1,5}) ([0-9]{1,5})\n255\n", data)
    if header is None or header[1] != header[2]:
        return None
    return int(header[1]) if len(data) == len(header[0]) + 3 * int(header[1]) ** 2 else None


def _raw_size(rows: list[IndexRow], sizes: set[int | None]) -> int | None:
    """Return the size in pixels if all images have one size and equal distances in the tar, else
    None. The shard can then be read as an array."""
    if not rows or len(sizes) != 1 or None in sizes or len({row.num_bytes for row in rows}) != 1:
        return None
    stride = BLOCK * (3 + -(-rows[0].num_bytes // BLOCK))
    return sizes.pop() if all((row.offset - BLOCK) % stride == 0 for row in rows) else None


def _for_statistics(num_samples: int, plan: IndexPlan, name: str) -> frozenset[int] | range:
    if plan.settings.check == "decode" or num_samples <= NUM_FOR_STATISTICS:
        return range(num_samples)
    seed = np.random.SeedSequence([plan.settings.seed, zlib.crc32(name.encode())])
    chosen = np.random.Generator(np.random.Philox(seed)).choice(
        num_samples, NUM_FOR_STATISTICS, replace=False
    )
    return frozenset(chosen.tolist())


def _read(descriptor: int, member: Member) -> bytes:
    data = read_member(descriptor, member.offset, member.num_bytes)
    if len(data) != member.num_bytes:
        raise TarError("was shortened while it was read", fix="index it when it is complete")
    return data


def _rejected(
    descriptor: int, sample: StockSample, plan: IndexPlan, bad: Rejection, name: str
) -> Rejected:
    """Return the record of a rejected sample, with the hash of its image or first member."""
    member = (_pictures(sample, plan) or [sample.members[0][1]])[0]
    data = read_member(descriptor, member.offset, min(member.num_bytes, MAX_FILE_BYTES))
    key = printable(sample.key)
    digest = hashlib.sha256(data).hexdigest()
    path = f"{name}/{key}"
    return Rejected(key=key, path=path, reason=bad.reason, detail=bad.detail, sha256=digest)


# ---- labels: the digits of KEY.cls, an integer or a word in KEY.json or KEY.txt


def label_of(data: bytes, kind: str, *, classes: dict[str, int] | None) -> int | str:
    """Return the label as a number, or as a word if it is a word and `classes` is None. `kind` is
    cls, txt or json:FIELD.SUBFIELD. Raise Rejection if the label is not valid."""
    value: int | str
    if kind.startswith("json:"):
        value = _field(data, kind.partition(":")[2])
    elif _NUMBER.fullmatch(data):
        value = int(data)
    elif kind == "txt" and data.strip():
        value = printable(os.fsdecode(data.strip()))
    else:
        raise Rejection("bad_label", f"{data[:40]!r} is not an integer")
    if isinstance(value, str):
        name = value.encode(
            "utf-8", "backslashreplace"
        ).decode()  # JSON may contain half of a surrogate pair
        if classes is not None and name not in classes:
            raise Rejection("unknown_class", f"{name[:100]!r} is not in classes_file")
        return name if classes is None else classes[name]
    top = MAX_CLASSES if classes is None else len(classes)
    if not 0 <= value < top:
        raise Rejection(
            "label_out_of_range",
            f"{value if abs(value) < 10**18 else 'huge'} is not in 0..{top - 1}",
        )
    return value


def _field(data: bytes, path: str) -> int | str:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Rejection("bad_label", "the label is not JSON") from None
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            has = f", but {', '.join(value)}"[:200] if isinstance(value, dict) else ""
            raise Rejection("no_label", f"its JSON has no {path}{has}; set label=json:FIELD")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Rejection(
            "bad_label",
            f"{path} is {str(value)[:40]!r}, which is neither an integer nor a class name",
        )
    return value
