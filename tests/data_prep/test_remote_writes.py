"""What is written to a store: whole, verified, never over somebody else's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import remote
from data_prep.remote import MissingError, join, names_under, read_bytes, upload, write_bytes
from data_prep.settings import UserError
from tests.data_prep.stock import forget_credentials, s3_server

pytestmark = pytest.mark.processes
URL = "s3://pictures/a b/out"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        forget_credentials(patch)
        with s3_server(tmp_path_factory.mktemp("empty")) as options:
            yield json.loads(options)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.remote.FIRST_PAUSE_S", 0.01)


def test_what_is_written_is_listed_read_and_removed(
    tmp_path: Path, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", 5 << 20)
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * (11 << 12))  # more than two parts, of which none is whole
    upload(large, join(URL, "deep", "large"), storage=storage)
    assert write_bytes(b"small", join(URL, "small"), storage=storage)
    assert write_bytes(b"", join(URL, "empty"), storage=storage)
    assert names_under(URL, storage=storage) == ["deep/large", "empty", "small"]
    assert read_bytes(join(URL, "deep", "large"), storage=storage) == large.read_bytes()
    remote.remove([join(URL, name) for name in ("deep/large", "empty", "small", "never")], storage=storage)
    assert names_under(URL, storage=storage) == []
    with pytest.raises(MissingError):
        read_bytes(join(URL, "small"), storage=storage)


def test_only_the_first_of_two_is_written(storage: dict[str, Any]) -> None:
    url = join(URL, "mark")
    assert write_bytes(b"first", url, storage=storage, only_if_new=True)
    assert write_bytes(b"first", url, storage=storage, only_if_new=True)  # an attempt whose answer was lost
    assert not write_bytes(b"second", url, storage=storage, only_if_new=True)
    assert read_bytes(url, storage=storage) == b"first"


def test_a_web_server_and_a_bucket_that_is_not_there_are_one_line_each(tmp_path: Path, storage: dict[str, Any]) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"x")
    with pytest.raises(UserError, match="read, not written"):
        upload(place, "https://example.invalid/x", storage={})
    with pytest.raises(MissingError, match="s3://nowhere/x: there is no such bucket; "):
        upload(place, "s3://nowhere/x", storage=storage)
