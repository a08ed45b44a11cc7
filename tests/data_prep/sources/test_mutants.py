"""Each of hundreds of damaged archives and files, of every published kind, is read or rejected with
a one-line error."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_prep.samples import files_of
from tests.data_prep.sources.layouts import mutants, survey
from tests.data_prep.sources.published import FORMS, LAYOUTS, TINY, pickled

LATER = {f"data_batch_{number}": pickled(protocol) for number, protocol in ((1, 0), (2, 4))}
"""Batches of CIFAR-10 in the oldest and a new protocol; the other batches use Python 2's."""
SMALL = {name: data[:40] for name, data in TINY.files.items() if name.endswith(".JPEG")}


def damaged(data: bytes, *, count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged copies, most with damage before or after the pixels."""
    yield from mutants(data, count=count, seed=seed)
    yield from (head + data[400:] for head in mutants(data[:400], count=count, seed=seed + 1))
    for length in (22, 200, 2000):
        yield from (
            data[:-length] + tail
            for tail in mutants(data[-length:], count=count // 2, seed=seed + length)
        )
    if data.startswith(b"\x1f\x8b"):  # with correct checksums
        plain = gzip.decompress(data)
        yield from (
            gzip.compress(head + plain[1536:], 1)
            for head in mutants(plain[:1536], count=count, seed=seed + 2)
        )


@pytest.mark.soak
@pytest.mark.parametrize(("name", "packed"), FORMS)
def test_a_mutant_is_read_or_refused_in_one_line_and_writes_nothing(
    tmp_path: Path, name: str, packed: bool
) -> None:
    layout, changes = LAYOUTS[name], {"cifar-10": LATER, "tinyimagenet": SMALL}.get(name, {})
    path = layout.place(tmp_path, packed=packed, **changes)
    before, num_read, num_refused = files_of(tmp_path), 0, 0
    files = (
        [path] if packed else sorted(each for each in path.iterdir() if each.is_file())[:4]
    )  # the other batches are similar
    for number, file in enumerate(files):
        original = file.read_bytes()
        for mutant in damaged(original, count=30 if packed else 10, seed=10_000 * number):
            file.write_bytes(mutant)
            num_inputs, _ = survey(lambda: layout.open(path))
            num_read, num_refused = num_read + bool(num_inputs), num_refused + (not num_inputs)
        file.write_bytes(original)
    assert num_refused > 30 and num_read > (-1 if packed else 5), (num_read, num_refused)
    assert files_of(tmp_path) == before
