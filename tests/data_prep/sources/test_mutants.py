"""Hundreds of damaged archives and files of every published kind: each is read or refused in one
line, and nothing else ever."""

import gzip
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data_prep.samples import files_of, write_files
from tests.data_prep.sources import test_cifar, test_mnist, test_stl10, test_tinyimagenet
from tests.data_prep.sources.layouts import mutants, opened, survey


def pickles(root: Path) -> Path:
    """Of Python 2, and of the oldest and a new protocol."""
    folder = test_cifar.archive(root, "cifar-10-python", unpacked=True)
    for name, protocol in (("data_batch_1", 0), ("data_batch_2", 4)):
        fields = {
            "labels": test_cifar.TEN_LABELS[name],
            "data": test_cifar.TEN_PIXELS[name].reshape(-1, 3072),
        }
        (folder / name).write_bytes(pickle.dumps(fields, protocol=protocol))
    return folder


SMALL = {
    name: data[:40] if name.endswith(".JPEG") else data
    for name, data in test_tinyimagenet.WHOLE.items()
}
CASES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "mnist": (
        "mnist",
        lambda root: write_files(root / "mnist", test_mnist.files(compressed=False)),
    ),
    "mnist.gz": ("mnist", lambda root: write_files(root / "mnist", test_mnist.files())),
    "cifar": ("cifar", pickles),
    "cifar-10-python.tar.gz": ("cifar", lambda root: test_cifar.archive(root, "cifar-10-python")),
    "cifar-100-python.tar.gz": ("cifar", lambda root: test_cifar.archive(root, "cifar-100-python")),
    "stl10": ("stl10", lambda root: test_stl10.place(root, test_stl10.WHOLE, unpacked=True)),
    "stl10.tar.gz": (
        "stl10",
        lambda root: test_stl10.place(root, test_stl10.WHOLE, unpacked=False),
    ),
    "tiny.zip": ("tinyimagenet", lambda root: test_tinyimagenet.place(root, SMALL, unpacked=False)),
}


def damaged(data: bytes, *, count: int, seed: int) -> Iterator[bytes]:
    """Most bytes are pixels: those before and after them matter most."""
    yield from mutants(data, count=count, seed=seed)
    yield from (head + data[400:] for head in mutants(data[:400], count=count, seed=seed + 1))
    for length in (22, 200, 2000):
        yield from (
            data[:-length] + tail
            for tail in mutants(data[-length:], count=count // 2, seed=seed + length)
        )
    if data.startswith(b"\x1f\x8b"):  # with right checksums around them
        plain = gzip.decompress(data)
        yield from (
            gzip.compress(head + plain[1536:], 1)
            for head in mutants(plain[:1536], count=count, seed=seed + 2)
        )


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_mutant_is_read_or_refused_in_one_line_and_writes_nothing(
    tmp_path: Path, name: str
) -> None:
    kind, make = CASES[name]
    path = make(tmp_path)
    before, num_read, num_refused = files_of(tmp_path), 0, 0
    files = [path] if path.is_file() else sorted(path.iterdir())[:4]  # the others are like these
    for number, file in enumerate(files):
        original = file.read_bytes()
        for mutant in damaged(original, count=10 if path.is_dir() else 30, seed=10_000 * number):
            file.write_bytes(mutant)
            num_inputs, _ = survey(lambda: opened(kind, path))
            num_read, num_refused = num_read + bool(num_inputs), num_refused + (not num_inputs)
        file.write_bytes(original)
    assert num_refused > 30 and num_read > (5 if "." not in name else -1), (num_read, num_refused)
    assert files_of(tmp_path) == before
