"""Images that belong to no dataset: files, folders and plain tars.

A folder yields everything that ends or begins like an image, sorted. A tar yields every member that
ends like one. Nothing is decoded, and a folder is walked lazily: it may hold any number of images.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from data_prep.archives.files import ENDINGS, NOWHERE, walk_images
from data_prep.errors import UserError
from data_prep.images import Rejection
from data_prep.limits import limit_remedy
from data_prep.tar import TarError, members

MAX_BYTES: Final = 1 << 30
_MEMBER: Final = re.compile(
    rf"(^|/)[^./][^/]*({'|'.join(map(re.escape, ENDINGS))})$", re.IGNORECASE
)
COMPRESSED: Final = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


class Picture(NamedTuple):
    name: str
    """Path of the file, or TAR/MEMBER."""
    path: str
    offset: int = 0
    num_bytes: int | None = None
    """None: the complete file."""

    def read(self) -> bytes:
        """Raises `Rejection`."""
        try:
            with open(self.path, "rb") as file:
                num_bytes = (
                    os.fstat(file.fileno()).st_size if self.num_bytes is None else self.num_bytes
                )
                if num_bytes > MAX_BYTES:
                    raise Rejection("too_large", f"{num_bytes:,} bytes")
                file.seek(self.offset)
                return file.read(num_bytes)
        except OSError as error:
            if limit_remedy(error):
                raise  # of this process, not of the file
            raise Rejection("not_a_file", error.strerror or str(error)) from None


def is_tar(path: Path) -> bool:
    if path.name.lower().endswith(COMPRESSED):
        raise UserError(
            str(path),
            "the file is compressed, so its images cannot be reached one by one",
            "unpack it, or make a plain .tar of it",
            code="unsupported",
        )
    return path.suffix.lower() == ".tar"


def in_folder(folder: Path) -> Iterator[Picture]:
    for name, _, num_bytes in walk_images(folder):
        if num_bytes >= 0 or (num_bytes == NOWHERE and name.lower().endswith(ENDINGS)):
            yield Picture(str(folder / name), str(folder / name))


def in_tar(path: Path) -> list[Picture]:
    try:
        found = [each for each in members(path, ignore_zeros=True) if _MEMBER.search(each.name)]
    except (TarError, OSError) as error:
        raise UserError(
            str(path), str(error), "copy it again, or leave it out", code="damaged"
        ) from None
    return [
        Picture(f"{path}/{name}", str(path), offset, num_bytes) for name, offset, num_bytes in found
    ]
