"""Writes small archives in the layouts in which ImageNet is published, with tarfile and scipy, independently of our readers."""

import io
import tarfile
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.data_prep.samples import encoded, picture

FIRST = ("n01440764", "n01443537", "n02119789")
"""Synsets of these tests; the first two are real classes of ImageNet-1k, too."""


def jpeg(seed: int) -> bytes:
    return encoded(picture(seed=seed), quality=90)


def synset_files(wnid: str, count: int) -> dict[str, bytes]:
    """The files of a synset as ImageNet names them; numbers are not consecutive there, either."""
    return {f"{wnid}_{7 * number + 3}.JPEG": jpeg(int(wnid[1:]) + number) for number in range(count)}


def tar_of(files: dict[str, bytes], *, kind: int = tarfile.GNU_FORMAT, folders: bool = False) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, data in files.items():
            if folders and "/" in name:
                folder = tarfile.TarInfo(name.rpartition("/")[0])
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(data), 1300000000, "imagenet"
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_synset_folders(root: Path, counts: dict[str, int]) -> Path:
    for wnid, count in counts.items():
        (root / wnid).mkdir(parents=True)
        for name, data in synset_files(wnid, count).items():
            (root / wnid / name).write_bytes(data)
    return root


def write_synset_tars(root: Path, counts: dict[str, int]) -> Path:
    root.mkdir(parents=True)
    for wnid, count in counts.items():
        (root / f"{wnid}.tar").write_bytes(tar_of(synset_files(wnid, count)))
    return root


def write_whole_tar(path: Path, counts: dict[str, int], *, prefix: str = "") -> Path:
    """A tar of synset tars, in no particular order."""
    inner = {f"{prefix}{wnid}.tar": tar_of(synset_files(wnid, counts[wnid])) for wnid in reversed(list(counts))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(inner, folders=True))
    return path


def devkit_files(numbers: dict[int, str], truth: list[int], *, parents: int = 2) -> dict[str, bytes]:
    """meta.mat with the classes in any order and their ancestors, as in the real one, and the ground truth."""
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height", "num_train_images")
    synsets = np.zeros((len(numbers) + parents, 1), dtype=[(name, object) for name in fields])
    for row, (number, wnid) in enumerate(numbers.items()):
        synsets[row, 0] = (number, wnid, f"words of {wnid}", "a gloss", 0, np.zeros(0), 0, 1300)
    for row in range(len(numbers), len(synsets)):
        children = np.array(list(numbers)[:2], np.float64)
        synsets[row, 0] = (row + 1, f"n9999999{row % 10}", "an ancestor", "a gloss", 2, children, 1, 0)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets})
    folder = "ILSVRC2012_devkit_t12"
    return {
        f"{folder}/COPYING": b"as it is",
        f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{number}\n" for number in truth).encode(),
        f"{folder}/data/meta.mat": buffer.getvalue(),
    }


def write_devkit(root: Path, files: dict[str, bytes]) -> Path:
    path = root / "ILSVRC2012_devkit_t12.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def val_files(count: int) -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(900 + number) for number in range(1, count + 1)}
