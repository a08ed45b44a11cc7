"""Write archives byte for byte in their published layouts, and read the results of `data_prep
build`.

This module does not use the package's readers: records and idx headers follow their specifications.
"""

import gzip
import io
import pickle
import random
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy.io import savemat

from data_prep.archives.inventory import Entries, Entry, Outline
from data_prep.cli import main
from data_prep.manifest import load_index, load_manifest, load_paths
from data_prep.sources import Source, SourceError, SourceSettings, open_source
from tests.data_prep.samples import encoded, picture, tar_of, write_files
from tests.soak import FACTOR, FIRST

Pixels = NDArray[np.uint8]


def pixels(*shape: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def ppm_of(picture_HWC: Pixels) -> bytes:
    height, width, _ = picture_HWC.shape
    return f"P6\n{width} {height}\n255\n".encode() + picture_HWC.tobytes()


def tar_gz_of(files: dict[str, bytes]) -> bytes:
    return gzip.compress(tar_of(files, folder=next(iter(files)).split("/")[0]), mtime=0)


def idx_of(array: Pixels) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


class _Python2(pickle._Pickler):
    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_text(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self.write(
            b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        )
        self.write(data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text


def python2_pickle(value: Any) -> bytes:
    """Return `cPickle.dump(value, file, 2)` of Python 2.7: strings are `str`, and arrays use
    numpy's old module."""
    file = io.BytesIO()
    pickler = _Python2(file, 2)
    pickler.memo[-1] = (0, None)  # Python 2 numbers its memo from 1
    pickler.dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def build(kind: str, out: Path, *overrides: str) -> int:
    """Run the real `build`. Return its exit code."""
    return main(["build", "--source", kind, "--out", str(out), "num_workers=1", *overrides])


class Written(NamedTuple):
    data: bytes
    label: int


def written(out: Path, split: str) -> dict[str, Written]:
    """Return the samples of a split by their path in the source."""
    found = {}
    for shard in load_manifest(out).splits[split].shards:
        content = (out / shard.file).read_bytes()
        rows = load_index(out, shard).tolist()
        for path, (offset, num_bytes, label) in zip(load_paths(out, shard), rows, strict=True):
            found[path] = Written(content[offset : offset + num_bytes], label)
    assert found, f"{split} is empty"
    return found


WORK = TemporaryDirectory()


def opened(kind: str, path: Path, **fields: object) -> Source:
    """Return an open source, by default without checking published checksums."""
    words = (
        {"kind": kind, "path": str(path)}
        | ({} if kind in ("tinyimagenet", "imagenet21k") else {"md5": "off"})
        | fields
    )
    settings: TypeAdapter[SourceSettings] = TypeAdapter(SourceSettings)
    return open_source(
        settings.validate_python(words), num_workers=1, work_directory=Path(WORK.name)
    )


def listed(source: Source) -> list[Entry]:
    """Return all inputs of a source in order, without a build."""
    outline: Outline = source.outline()
    found = []
    for container in sorted(outline.containers):
        entries: Entries = source.entries(container)
        columns = (
            entries.names,
            entries.offsets.tolist(),
            entries.sizes.tolist(),
            entries.labels.tolist(),
        )
        found += [Entry(container, *row) for row in sorted(zip(*columns, strict=True))]
    return found


def mutants(data: bytes, *, count: int, seed: int) -> Iterable[bytes]:
    """Yield copies of `data` with flipped, doubled, removed or overwritten bytes, or truncated.
    `make soak` yields more."""
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
                    mutant[place : place + length] = (
                        numbers.choice([b"\xff", b"\0", b"\x7f"]) * length
                    )
        if numbers.random() < 0.1:
            del mutant[numbers.randrange(len(mutant) + 1) :]
        yield bytes(mutant)


def survey(open_source: Callable[[], Source]) -> tuple[int, str]:
    """Return the number of readable inputs of a possibly damaged archive, or its SourceError. Other
    errors fail."""
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


# ---- ImageNet

SYNSETS = ("n01440764", "n01443537", "n02119789")
"""Synsets of these tests. The first two are also classes of ImageNet-1k."""


def jpeg(seed: int) -> bytes:
    return encoded(picture(seed=seed), quality=90)


def synset_files(wnid: str, count: int) -> dict[str, bytes]:
    """Return the files of a synset with ImageNet's names, whose numbers have gaps as in
    ImageNet."""
    return {
        f"{wnid}_{7 * number + 3}.JPEG": jpeg(int(wnid[1:]) + number) for number in range(count)
    }


def synset_folders(root: Path, counts: dict[str, int]) -> Path:
    for wnid, count in counts.items():
        write_files(root / wnid, synset_files(wnid, count))
    return root


def synset_tars(root: Path, counts: dict[str, int]) -> Path:
    return write_files(
        root, {f"{wnid}.tar": tar_of(synset_files(wnid, count)) for wnid, count in counts.items()}
    )


def whole_tar(
    path: Path, counts: dict[str, int], *, prefix: str = "", ending: str = ".tar"
) -> Path:
    """Write a tar of synset tars in reverse order."""
    inner = {
        f"{prefix}{wnid}{ending}": tar_of(synset_files(wnid, counts[wnid]))
        for wnid in reversed(list(counts))
    }
    write_files(path.parent, {path.name: tar_of(inner, folder=prefix.rstrip("/"))})
    return path


def devkit_files(numbers: dict[int, str], truth: list[int]) -> dict[str, bytes]:
    """Return meta.mat and the ground truth. The classes are in any order, with two ancestors, as in
    the real file."""
    fields = (
        "ILSVRC2012_ID",
        "WNID",
        "words",
        "gloss",
        "num_children",
        "children",
        "wordnet_height",
        "num_train_images",
    )
    synsets = np.zeros((len(numbers) + 2, 1), dtype=[(name, object) for name in fields])
    for row, (number, wnid) in enumerate(numbers.items()):
        synsets[row, 0] = (number, wnid, f"words of {wnid}", "a gloss", 0, np.zeros(0), 0, 1300)
    for row in range(len(numbers), len(synsets)):
        children = np.array(list(numbers)[:2], np.float64)
        synsets[row, 0] = (
            row + 1,
            f"n9999999{row % 10}",
            "an ancestor",
            "a gloss",
            2,
            children,
            1,
            0,
        )
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets})
    folder = "ILSVRC2012_devkit_t12"
    return {
        f"{folder}/COPYING": b"as it is",
        f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": (
            "".join(f"{number}\n" for number in truth).encode()
        ),
        f"{folder}/data/meta.mat": buffer.getvalue(),
    }


def devkit(root: Path, files: dict[str, bytes]) -> Path:
    return (
        write_files(root, {"ILSVRC2012_devkit_t12.tar.gz": tar_gz_of(files)})
        / "ILSVRC2012_devkit_t12.tar.gz"
    )


def val_files(count: int) -> dict[str, bytes]:
    return {
        f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(900 + number) for number in range(1, count + 1)
    }
