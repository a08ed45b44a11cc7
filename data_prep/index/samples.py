"""What a stock WebDataset shard holds: one pass over its headers gathers members into samples by
webdataset's rule, a second one looks at every sample and either gives its row of the index or says
why it has none.

The key is the name up to the first dot of its last part. Members are bytes to us: pictures are
decoded, labels are digits or JSON, and nothing else is opened (stock webdataset would unpickle
`.pyd`). Invariant: every key is a row or a line of `rejected`.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
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
from data_prep.index.config import IndexSettings
from data_prep.manifest import PICTURES
from data_prep.settings import printable
from data_prep.tar import BLOCK, Member, TarError, members, read_member, runs
from data_prep.workers import Tally

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
"""What the key of a label is called in the JSON of others, the likeliest first."""
MAX_CLASSES = 1 << 20
UNLABELLED = -1
_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")
MAX_PICTURE_BYTES, MAX_LABEL_BYTES = 1 << 30, 1 << 24
NUM_FOR_STATISTICS = 256
"""Of a shard, where not every picture is decoded."""
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
    """What a worker needs to know, but for the shard; picklable."""

    settings: IndexSettings
    names: tuple[str, ...] | None
    """Of the classes, where a file gives them."""
    hash: str = ""
    """Of the config and of the list of shards."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What decides the index, besides the shards."""

    @cached_property
    def numbers(self) -> dict[str, int] | None:
        return (
            None if self.names is None else {name: number for number, name in enumerate(self.names)}
        )

    @property
    def directory(self) -> Path:
        return self.settings.directory


@dataclass
class StockSample:
    key: str
    members: list[tuple[str, Member]] = field(default_factory=list)
    num_runs: int = 0
    """More than 1: other keys stand between its members, and a stock reader takes it for several
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
    """Where something stands behind the end mark that was not read."""
    names: dict[str, int] = field(default_factory=dict)
    """The labels that are words, numbered as they came; `rows` has these numbers."""
    has_numbers: bool = False
    channels: ChannelSums = field(default_factory=ChannelSums)
    raw_size: int | None = None
    """Where every picture is a raw one of this size, at the places that a shard of ours has."""

    def number(self, label: int | str) -> int:
        if isinstance(label, str):
            return self.names.setdefault(label, len(self.names))
        self.has_numbers = self.has_numbers or label >= 0
        return label


def read_shard(path: Path, plan: IndexPlan, *, name: str) -> Contents:
    """Everything that an index says of the shard; `name` stands for it in the paths. Raises
    TarError."""
    found = Contents()
    samples = gather(path, found, ignore_zeros=plan.settings.ignore_zeros)
    chosen = _for_statistics(len(samples), plan, name)
    sizes: set[int | None] = set()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for number, sample in enumerate(samples):
            Tally.add(1)
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
    all_may_go = plan.settings.max_reject_share == 1
    if (
        not found.rows
        and not all_may_go
        and {each.reason for each in found.rejected} == {"no_label"}
    ):
        first = found.rejected[0]
        raise UserError(f"label: {first.path}: {first.detail}")
    found.raw_size = _raw_size(found.rows, sizes)
    return found


def gather(path: Path, found: Contents, *, ignore_zeros: bool) -> list[StockSample]:
    """The samples in the order of their first members; `found` counts what belongs to none."""
    with open(path, "rb") as file:
        head = file.read(8)
    kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if kind is not None:
        problem = f"is compressed ({kind}), so its images cannot be reached one by one"
        raise TarError(problem, fix="decompress it to a plain .tar")
    samples: dict[str, StockSample] = {}

    def of_samples() -> Iterator[Member]:
        found.goes_on_at = yield from members(path, ignore_zeros=ignore_zeros)

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
            "doubled_member", f"two members end in .{printable(double)}: two samples of one key?"
        )
    if sample.num_runs > 1:
        raise Rejection(
            "interleaved", f"its members stand in {sample.num_runs} places with others between them"
        )
    pictures, listed = (
        _pictures(sample, plan),
        " ".join(f".{printable(suffix)}" for suffix in sorted(suffixes)),
    )
    if len(pictures) > 1:
        raise Rejection("several_images", f"{len(pictures)} members of {listed} are pictures"[:200])
    if not pictures:
        raise Rejection("no_image", f"no picture among {listed}"[:200])
    if pictures[0].num_bytes > MAX_PICTURE_BYTES:
        raise Rejection("too_large", f"{pictures[0].num_bytes:,} bytes")
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
        raise Rejection("bad_label", f"{member.num_bytes:,} bytes")
    return label_of(_read(descriptor, member), plan.settings.label, classes=plan.numbers)


def _where_else(descriptor: int, sample: StockSample) -> str:
    """What may hold the label, and the setting that takes it from there."""
    small = {
        suffix: _read(descriptor, member)
        for suffix, member in sample.members
        if member.num_bytes <= MAX_LABEL_BYTES
    }
    with suppress(ValueError, RecursionError):
        tree = json.loads(small.get("json", b"null"))
        keys = (
            [key for key, value in tree.items() if isinstance(value, int | str)]
            if isinstance(tree, dict)
            else []
        )
        likely = sorted(
            keys,
            key=lambda key: LIKELY.index(key.lower()) if key.lower() in LIKELY else len(LIKELY),
        )
        if likely and (likely[0].lower() in LIKELY or "txt" not in small):
            return f"found .json with keys {', '.join(keys)}: label=json:{likely[0]}"
    if "txt" in small:
        return f"found .txt ({small['txt'][:40].decode(errors='replace').strip()}): label=txt"
    suffixes = " ".join(f".{printable(suffix)}" for suffix, _ in sample.members)
    return f"found {suffixes}; label=none reads pictures without labels"[:200]


def _look(data: bytes, plan: IndexPlan, found: Contents, *, decoded: bool) -> int | None:
    """The size of the picture where it is a raw one; raises Rejection."""
    settings = plan.settings
    if decoded:
        image, _ = decode(data, max_pixels=settings.max_pixels)
        found.channels.add(
            resize(
                image,
                size=settings.image_size,
                crop=settings.crop,
                interpolation=settings.interpolation,
            )
        )
    else:
        size_of(data, max_pixels=settings.max_pixels)
    header = re.match(rb"P6\n([0-9]{1,5}) ([0-9]{1,5})\n255\n", data)
    if header is None or header[1] != header[2]:
        return None
    return int(header[1]) if len(data) == len(header[0]) + 3 * int(header[1]) ** 2 else None


def _raw_size(rows: list[IndexRow], sizes: set[int | None]) -> int | None:
    """A raw shard is an array: pictures of one size, at one distance from each other."""
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
        raise TarError("became shorter while it was read", fix="index it when it is complete")
    return data


def _rejected(
    descriptor: int, sample: StockSample, plan: IndexPlan, bad: Rejection, name: str
) -> Rejected:
    """The hash is that of the picture, or of the first member where there is none."""
    member = (_pictures(sample, plan) or [sample.members[0][1]])[0]
    data = read_member(descriptor, member.offset, min(member.num_bytes, MAX_PICTURE_BYTES))
    key = printable(sample.key)
    digest = hashlib.sha256(data).hexdigest()
    return Rejected(
        key=key, path=f"{name}/{key}", reason=bad.reason, detail=bad.detail, sha256=digest
    )


# ---- labels: the digits of KEY.cls, an integer or a word in KEY.json or KEY.txt
# --------------------------------------------


def label_of(data: bytes, kind: str, *, classes: dict[str, int] | None) -> int | str:
    """A number, or a word where `classes` does not number the words; `kind`: cls, txt or
    json:FIELD.SUBFIELD. Raises Rejection."""
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
        ).decode()  # JSON may hold halves of characters
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
        raise Rejection("bad_label", "is not JSON") from None
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            has = f"; it has {', '.join(value)}"[:200] if isinstance(value, dict) else ""
            raise Rejection("no_label", f"its JSON has no {path}{has}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Rejection(
            "bad_label",
            f"{path} is {str(value)[:40]!r}, which is neither an integer nor a class name",
        )
    return value
