"""A written tar has the bytes of tarfile, its offsets and its hash are true, and limits are errors."""

import hashlib
import io
import tarfile

import numpy as np
import pytest

from data_prep.tar import TarWriter
from tests.data_prep.samples import tar_of


@pytest.mark.parametrize("count", [0, 1, 7, 8, 60])  # around the filling of a record, and beyond
def test_archives_are_as_tarfile_writes_them_with_true_offsets_and_hash(count: int) -> None:
    generator, members = np.random.default_rng(count), [("train-000001-000123.ppm", b"x" * 512)]
    for number in range(count):
        name = "/".join("x" * int(size) for size in generator.integers(1, 45, 4))
        members.append((f"{name}-{number}", generator.bytes(int(generator.integers(0, 3000)))))
    buffer = io.BytesIO()
    writer = TarWriter(buffer)
    offsets = [writer.add(name, data) for name, data in members]
    writer.finish()
    written = buffer.getvalue()
    assert written == tar_of(members, kind=tarfile.USTAR_FORMAT)
    assert (writer.sha256, writer.num_bytes) == (hashlib.sha256(written).hexdigest(), len(written))
    for at, (_, data) in zip(offsets, members, strict=True):
        assert written[at : at + len(data)] == data


def test_the_bytes_do_not_depend_on_the_version_of_python() -> None:
    buffer = io.BytesIO()
    writer = TarWriter(buffer)
    writer.add("train-000001-000123.ppm", b"x" * 700)
    writer.finish()
    assert writer.sha256 == "3d0c1a473b19020530cee622b864a978f524d3a10dd2775f4b7cc26ceae26505"


def test_a_name_that_ustar_cannot_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match="too long"):
        TarWriter(io.BytesIO()).add("n" * 101, b"")
