"""The development kit of ILSVRC 2012: which synset each of the 1,000 numbers means, and the numbers of the validation pictures.

Read from `ILSVRC2012_devkit_t12.tar.gz` or the folder it unpacks to. `meta.mat` numbers 1,860 synsets; the first thousand are
those without children, the classes.
"""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.sources.base import SourceError
from data_prep.sources.guard import check_md5

NAME = "ILSVRC2012_devkit_t12"
MD5 = "fa75699e90414af021442c21a62c3abf"  # as published on image-net.org and checked by torchvision
_META, _TRUTH = f"{NAME}/data/meta.mat", f"{NAME}/data/ILSVRC2012_validation_ground_truth.txt"


@dataclass(frozen=True)
class Devkit:
    wnids: tuple[str, ...]
    """The classes, sorted: the place is the label that everyone uses."""
    val_labels: tuple[int, ...]
    """Of ILSVRC2012_val_00000001.JPEG and so on."""


def load_devkit(path: Path, *, must_be_published: bool) -> Devkit:
    """From the archive or the folder at `path`."""
    files = _from_folder(path) if path.is_dir() else _from_archive(path, must_be_published=must_be_published)
    wnid_of_number = _wnids(files[_META], path)
    wnids = tuple(sorted(wnid_of_number.values()))
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    try:
        numbers = [int(line) for line in files[_TRUTH].split()]
        return Devkit(wnids=wnids, val_labels=tuple(labels[wnid_of_number[number]] for number in numbers))
    except (ValueError, KeyError) as error:
        raise SourceError(f"source.path: {path}: its ground truth is damaged ({error}); download it again") from None


def files_of(path: Path) -> tuple[Path, ...]:
    """What is read of the development kit at `path`."""
    return tuple(path / Path(name).relative_to(NAME) for name in (_META, _TRUTH)) if path.is_dir() else (path,)


def _from_folder(path: Path) -> dict[str, bytes]:
    try:
        return {name: file.read_bytes() for name, file in zip((_META, _TRUTH), files_of(path), strict=True)}
    except FileNotFoundError as error:
        raise SourceError(f"source.path: {error.filename} is missing; unpack {NAME}.tar.gz whole") from None


def _from_archive(path: Path, *, must_be_published: bool) -> dict[str, bytes]:
    if must_be_published:
        check_md5(path, MD5)
    data = path.read_bytes()
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for name in (_META, _TRUTH):
                member = archive.extractfile(name)
                assert member is not None, name
                files[name] = member.read()
    except (tarfile.TarError, OSError, EOFError, KeyError, AssertionError) as error:
        raise SourceError(f"source.path: {path} is not the development kit ({error}); download it again") from None
    return files


def _wnids(meta: bytes, path: Path) -> dict[int, str]:
    """The wnid of each number whose synset has no children."""
    from scipy.io import loadmat  # half a second that no other source should pay

    try:
        synsets: Any = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        rows = [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), int(row["num_children"])) for row in synsets]
    except Exception as error:  # noqa: BLE001 (a damaged .mat makes its reader raise anything)
        raise SourceError(f"source.path: {path}: its meta.mat cannot be read ({error}); download it again") from None
    return {number: wnid for number, wnid, num_children in rows if num_children == 0}
