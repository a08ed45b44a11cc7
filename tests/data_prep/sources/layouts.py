"""Writes archives byte for byte in their published layouts, and reads back what `data_prep build` made of them.

Nothing here uses the package's own readers: records, idx headers and Python-2 pickles are put together from their specifications.
"""

import gzip
import io
import random
import struct
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from data_prep.archives.inventory import Entries, Entry, Outline
from data_prep.cli import main
from data_prep.manifest import load_index, load_manifest, load_paths
from data_prep.sources import Source, SourceError, SourceSettings, open_source
from tests.soak import FACTOR, FIRST

Pixels = NDArray[np.uint8]


def pixels(*shape: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def ppm_of(picture_HWC: Pixels) -> bytes:
    height, width, _ = picture_HWC.shape
    return f"P6\n{width} {height}\n255\n".encode() + picture_HWC.tobytes()


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        folder = tarfile.TarInfo(next(iter(files)).split("/", 1)[0])
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_gz_of(files: dict[str, bytes]) -> bytes:
    return gzip.compress(tar_of(files), mtime=0)


def idx_of(array: Pixels) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def python2_pickle(value: Any) -> bytes:
    """What `cPickle.dump(value, file, 2)` of Python 2.7 wrote: strings are `str`, arrays go through numpy's old module."""
    parts: list[bytes] = []
    puts = iter(range(1, 1 << 30))

    def put() -> None:
        number = next(puts)
        parts.append(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))

    def write(item: Any) -> None:
        match item:
            case None:
                parts.append(b"N")
            case bool():
                parts.append(b"\x88" if item else b"\x89")
            case int():
                small = b"K" + bytes([item]) if 0 <= item < 256 else None
                parts.append(small or (b"M" + struct.pack("<H", item) if 0 <= item < 65536 else b"J" + struct.pack("<i", item)))
            case str() | bytes():
                data = item.encode() if isinstance(item, str) else item
                parts.append(b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data)))
                parts.append(data)
                put()
            case list() | dict():
                parts.append(b"]" if isinstance(item, list) else b"}")
                put()
                parts.append(b"(")
                for member in item if isinstance(item, list) else [x for pair in item.items() for x in pair]:
                    write(member)
                parts.append(b"e" if isinstance(item, list) else b"u")
            case tuple():
                parts.append(b"(")
                for member in item:
                    write(member)
                parts.append(b"t")
                put()
            case np.ndarray():
                parts.append(b"cnumpy.core.multiarray\n_reconstruct\n")
                put()
                parts.append(b"cnumpy\nndarray\n")
                put()
                parts.append(b"K\x00\x85U\x01b\x87R")
                put()
                parts.append(b"(K\x01")
                write(item.shape)
                parts.append(b"cnumpy\ndtype\n")
                put()
                write(item.dtype.str[1:])
                parts.append(b"K\x00K\x01\x87R")
                put()
                parts.append(b"(K\x03U\x01" + item.dtype.str[:1].encode() + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
                parts.append(b"\x89")
                write(item.tobytes())
                parts.append(b"tb")
            case _:
                raise AssertionError(item)

    write(value)
    return b"\x80\x02" + b"".join(parts) + b"."


def build(kind: str, out: Path, *overrides: str) -> int:
    """The exit code of the real command."""
    return main(["build", "--source", kind, "--out", str(out), "num_workers=1", *overrides])


class Written(NamedTuple):
    data: bytes
    label: int


def written(out: Path, split: str) -> dict[str, Written]:
    """The samples of a split, by the place in the source that they came from."""
    found = {}
    for shard in load_manifest(out).splits[split].shards:
        content = (out / shard.file).read_bytes()
        rows = load_index(out, shard).tolist()
        for path, (offset, num_bytes, label) in zip(load_paths(out, shard), rows, strict=True):
            found[path] = Written(content[offset : offset + num_bytes], label)
    assert found, f"{split} is empty"
    return found


def opened(kind: str, path: Path) -> Source:
    """Without its published sums."""
    words = {"kind": kind, "path": str(path)} | ({} if kind == "tinyimagenet" else {"md5": "off"})
    settings: TypeAdapter[SourceSettings] = TypeAdapter(SourceSettings)
    return open_source(settings.validate_python(words), num_workers=1)


def listed(source: Source) -> list[Entry]:
    """Every input of a source, in order, without a build."""
    outline: Outline = source.outline()
    found = []
    for container in sorted(outline.containers):
        entries: Entries = source.entries(container)
        columns = (entries.names, entries.offsets.tolist(), entries.sizes.tolist(), entries.labels.tolist())
        found += [Entry(container, *row) for row in sorted(zip(*columns, strict=True))]
    return found


def mutants(data: bytes, *, count: int, seed: int) -> Iterable[bytes]:
    """Copies of `data` with flipped, doubled, removed or overwritten bytes, or cut short; more of them under `make soak`."""
    numbers = random.Random(seed + FIRST)
    for _ in range(count * FACTOR):
        mutant = bytearray(data)
        for _ in range(numbers.choice([1, 1, 2, 4, 16])):
            place = numbers.randrange(max(1, len(mutant)))
            length = numbers.choice([1, 1, 2, 4, 8, 64])
            match numbers.randrange(5):
                case 0 if mutant:
                    mutant[place % len(mutant)] ^= 1 << numbers.randrange(8)
                case 1:
                    mutant[place : place + length] = numbers.randbytes(length)
                case 2:
                    del mutant[place : place + length]
                case 3:
                    mutant[place:place] = mutant[place : place + length]
                case _:
                    mutant[place : place + length] = numbers.choice([b"\xff", b"\0", b"\x7f"]) * length
        if numbers.random() < 0.1:
            del mutant[numbers.randrange(len(mutant) + 1) :]
        yield bytes(mutant)


def survey(open_source: Callable[[], Source]) -> tuple[int, str]:
    """How many inputs a possibly damaged archive still gives, or what it is refused for; anything else is a failure."""
    try:
        source = open_source()
        entries = listed(source)
        assert len({entry.locator for entry in entries}) == len(entries)
    except SourceError as error:
        assert "\n" not in str(error)
        return 0, str(error)
    for entry in entries:
        try:
            assert isinstance(source.read(entry), bytes)
        except SourceError as error:
            assert "\n" not in str(error)
    return len(entries), ""
