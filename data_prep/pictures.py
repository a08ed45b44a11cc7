"""Images outside any dataset: files, folders and plain tars.

A folder yields every file with the ending or first bytes of an image, sorted. A tar yields every
member with the ending of an image. Nothing is decoded, and a folder is read lazily.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data_prep.archives.files import ENDINGS, NOWHERE, walk_images
from data_prep.errors import UserError
from data_prep.images.rejection import Rejection, check_file_size
from data_prep.limits import limit_remedy
from data_prep.tar import Member, TarError, members

_MEMBER = re.compile(rf"(^|/)[^./][^/]*({'|'.join(map(re.escape, ENDINGS))})$", re.IGNORECASE)
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


class Picture(NamedTuple):
    name: str
    """Path of the file, or TAR/MEMBER."""
    path: str
    offset: int = 0
    num_bytes: int | None = None
    """Number of bytes of a member of a tar; None for a complete file."""

    def read(self) -> bytes:
        """Return the image file's bytes; raise Rejection if it is too large or unreadable."""
        try:
            with open(self.path, "rb") as file:
                num_bytes = (
                    os.fstat(file.fileno()).st_size if self.num_bytes is None else self.num_bytes
                )
                check_file_size(num_bytes)
                file.seek(self.offset)
                return file.read(num_bytes)
        except OSError as error:
            if limit_remedy(error):
                raise  # a limit of this process, not a fault of the file
            raise Rejection("not_a_file", error.strerror or str(error)) from None


def is_tar(path: Path) -> bool:
    if path.name.lower().endswith(COMPRESSED):
        problem = "the file is compressed, so single images cannot be read"
        raise UserError(str(path), problem, "unpack it, or make a plain .tar", code="unsupported")
    return path.suffix.lower() == ".tar"


def in_folder(folder: Path) -> Iterator[Picture]:
    for name, _, num_bytes in walk_images(folder):
        if num_bytes >= 0 or (num_bytes == NOWHERE and name.lower().endswith(ENDINGS)):
            yield Picture(str(folder / name), str(folder / name))


def in_tar(path: Path) -> list[Picture]:
    try:
        found = [member for member in _all_members(path) if _MEMBER.search(member.name)]
    except (TarError, OSError) as error:
        fix = "copy it again, or remove it"
        raise UserError(str(path), str(error), fix, code="damaged") from None
    return [Picture(f"{path}/{name}", str(path), *place) for name, *place in found]


def _all_members(path: Path) -> Iterator[Member]:
    rest = yield from members(path)
    if rest is not None:
        raise TarError(f"has data after its end mark (byte {rest:,}); pack all files into one tar")
