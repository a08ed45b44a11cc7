"""Download or copy the files of datasets in `catalog.py`. A file appears when it is complete.

1. An existing file is checked and kept. A wrong file is an error, and is not deleted.
2. A download is written to FILE.MARK.part. MARK is a hash of URL, size and the server's version of
   the file (ETag or date), so bytes of two versions are never joined.
3. If FILE.MARK.part exists, only the rest is requested (Range, If-Range). If a server sends the
   complete file instead, the part is written again.
4. The complete part is checked, synced to disk and renamed to FILE. After any interruption the same
   command resumes.
"""

import errno
import gzip
import hashlib
import os
import shutil
import ssl
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from data_prep import __version__
from data_prep.archives.guard import md5_of
from data_prep.catalog import CATALOG, Published
from data_prep.clients import READ_TIMEOUT_S, shown, without_secrets
from data_prep.errors import Code, UserError
from data_prep.limits import error_of_system
from data_prep.progress import ProgressLine, doing
from data_prep.publish import atomic_file, sole_writer, sync
from data_prep.remote import RemoteError, join, tried
from data_prep.sources.imagenet1k import DEVKIT, DEVKIT_MD5, PUBLISHED_MD5
from data_prep.sources.mnist import MNIST_FILES

_BLOCK_BYTES = 1 << 18
_PASSING = {408, 425, 429}
"""HTTP statuses below 500 after which another attempt may succeed."""


def files_by_hand(name: str) -> list[str]:
    """Return a line for each file of a dataset in `BY_HAND`: its name and MD5."""
    if name == "imagenet1k":
        sums = PUBLISHED_MD5 | {f"{DEVKIT}.tar.gz": DEVKIT_MD5}
        return [f"{file} (MD5 {md5}, from torchvision 0.26)" for file, md5 in sums.items()]
    return ["the synset tars in winter21_whole.tar.gz (tar xzf unpacks them; no MD5 is known)"]


def fetch_dataset(
    name: str, archives: Path, *, mirror: str | None, copy_from: Path | None
) -> Iterator[str]:
    """Download or copy the files of a dataset; yield a line about each."""
    published = CATALOG[name]
    if published.path(archives) == published.installed and mirror is None and copy_from is None:
        yield f"{published.installed}: installed by a Debian package; nothing to download"
        return
    without_secrets(mirror or "", remedy="Give an address without secrets", field="--mirror")
    folder = archives / published.folder
    with sole_writer(folder, wait=True):
        for file, md5 in published.files.items():
            yield _File(name, published, file, md5, folder / file).fetch(mirror, copy_from)


@dataclass(frozen=True)
class _File:
    dataset: str
    published: Published
    name: str
    md5: str
    path: Path

    def fetch(self, mirror: str | None, copy_from: Path | None) -> str:
        how = "kept"
        if self.path.exists():
            found = self._check(self.path, self.path, fix="Remove it, then repeat the command")
        elif copy_from is not None:
            how, found = "copied", self._copy(copy_from)
        else:
            how, found = "downloaded", self._download(mirror)
        if not self.md5:
            return f"{self.path}: {how}; its MD5 is {found}, and no MD5 is published"
        if self.md5 != found:
            return f"{self.path}: {how}; it has the published content in another compression"
        return f"{self.path}: {how}; its MD5 is the published one ({self.published.sums_from})"

    def _error(self, field: str, problem: str, *, code: Code) -> UserError:
        """Return an error whose fix names the other ways to get the file."""
        known = f"MD5 {self.md5}, from {self.published.sums_from}" if self.md5 else "no known MD5"
        place = "FOLDER" if self.published.folder else "FILE"
        fix = f"Repeat the command, give a --mirror URL, or get {self.name} by hand"
        fix = f"{fix} ({known}): data_prep fetch {self.dataset} --from {place}"
        kind = RemoteError if code == "unreachable" else UserError
        return kind(field, problem, fix, code=code)

    def _check(self, path: Path, field: Path | str, *, fix: str = "") -> str:
        """Return the MD5 of the file. Raise UserError if the content is not the published one."""
        with doing(f"checking {self.name}"), open(path, "rb") as file:
            start = file.read(512).lstrip().lower()
            file.seek(0)
            found, problem = md5_of(file), ""
        if start.startswith((b"<!", b"<html")):
            problem = "it is a web page, not the file"
        elif not self.md5 and not zipfile.is_zipfile(path):
            problem = "it is not a complete zip archive"
        elif self.md5 not in ("", found) and not self._has_content(path):
            problem = f"its MD5 is {found}, not {self.md5}: it is cut, damaged or another version"
        if problem:
            error = self._error(str(field), problem, code="damaged")
            error.fix = fix or error.fix
            raise error
        return found

    def _has_content(self, path: Path) -> bool:
        """Return True if the file has the published content, compressed with other settings (as in
        Debian's package)."""
        variant = self.published.settings.get("source.variant", self.dataset)
        content = MNIST_FILES.get(variant, {}).get(self.name.removesuffix(".gz"))
        with suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
            return md5_of(file) == content
        return False

    def _copy(self, place: Path) -> str:
        source = place / self.name if place.is_dir() or self.published.folder else place
        fix = f"give the folder of a complete {self.name}, or omit --from to download it"
        if not source.is_file():
            raise UserError("--from", f"{source} is not a file", fix, code="missing-path")
        found = self._check(source, source, fix=fix)
        with atomic_file(self.path) as target, open(source, "rb") as file:
            shutil.copyfileobj(file, target)
        return found

    def _download(self, mirror: str | None) -> str:
        """Download the file from the first server that has it, and return its MD5."""
        addresses = [mirror] if mirror else self.published.addresses
        for url in (join(address, self.name) for address in addresses):
            try:
                return tried(url, partial(self._attempt, url), report=lambda _: None)
            except UserError as error:
                failure = error
        if isinstance(failure, RemoteError):
            problem = failure.problem + ("" if mirror else "; this address is untested")
            failure = self._error(failure.field, problem, code="unreachable")
        raise failure

    def _attempt(self, url: str) -> str:
        reply = self._open(url, {})
        size, mark = int(reply.headers["Content-Length"] or 0), reply.headers["ETag"] or "W/"
        if mark.startswith("W/"):  # If-Range needs a strong ETag
            mark = reply.headers["Last-Modified"]
        digest = hashlib.sha256(f"{url} {size} {mark}".encode()).hexdigest()
        part = self.path.with_name(f"{self.name}.{digest[:12]}.part")
        held = part.stat().st_size if size and mark and part.exists() else 0
        if 0 < held < size:
            reply.close()
            condition = {"If-Range": mark} if mark else {}
            reply = self._open(url, {"Range": f"bytes={held}-", **condition})
            if reply.status != 206:
                held = 0
            elif reply.headers["Content-Range"] != f"bytes {held}-{size - 1}/{size}":
                reply.close()
                part.unlink()
                raise OSError("the server sent other bytes than requested")
        with reply:
            if not size or held < size:
                self._receive(reply, part, held, size)
        if size and part.stat().st_size < size:
            raise OSError(f"only {part.stat().st_size:,} of {size:,} bytes arrived")
        try:
            found = self._check(part, shown(url))
        except UserError as error:
            part.unlink()
            if held:  # an earlier attempt may have written the wrong bytes
                raise OSError(error.problem) from None
            raise
        sync(part)
        os.replace(part, self.path)
        sync(self.path.parent)
        for other in self.path.parent.glob(f"{self.name}.*.part"):
            other.unlink()
        return found

    def _open(self, url: str, headers: dict[str, str]) -> HTTPResponse:
        request = Request(url, headers={"User-Agent": f"wide-mlps/{__version__}", **headers})
        try:
            reply: HTTPResponse = urlopen(request, timeout=READ_TIMEOUT_S)
            return reply
        except HTTPError as error:
            error.close()
            words, status = f"HTTP {error.code} {error.reason}", error.code
        except URLError as error:
            is_certain = isinstance(error.reason, ssl.SSLCertVerificationError)
            words, status = str(error.reason), 495 if is_certain else 0
        if status in _PASSING or not 400 <= status < 500:
            raise OSError(words)
        code: Code = "missing-path" if status in (404, 410) else "no-access"
        raise self._error(shown(url), words, code=code)

    def _receive(self, reply: HTTPResponse, part: Path, held: int, size: int) -> None:
        with (
            open(part, "ab" if held else "wb") as file,
            ProgressLine(self.name, total=size >> 20, unit="MiB", start=held >> 20) as line,
        ):
            try:
                while block := reply.read(_BLOCK_BYTES):
                    file.write(block)
                    held += len(block)
                    line.advance((held >> 20) - line.done)
                file.flush()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                error.filename = str(part.parent)
                raise error_of_system(error) from None
