"""Fixtures that several test files share."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.data_prep.stock import Web, forget_credentials, web
from tests.stores import EACH, Store, started


class Refused(Protocol):
    def __call__(self, found: int, *words: str, code: int = 2) -> None: ...


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that checks the exit code of the last command, and that its error is one
    line with these words."""

    def check(found: int, *words: str, code: int = 2) -> None:
        lines = [
            line for line in capsys.readouterr().err.splitlines() if "/s " not in line
        ]  # without a slow machine's progress lines
        assert found == code, lines
        assert all(line.startswith("data_prep: ") for line in lines), lines
        assert all(each.rstrip("\n") in lines[-1] for each in words), lines

    capsys.readouterr()
    return check


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    """Return a copy of the dataset, to damage it."""
    return shutil.copytree(shapes, tmp_path / "shapes")


@pytest.fixture
def server(shards: Path) -> Iterator[tuple[str, Web]]:
    """Yield the address and the faults of a web server for the test file's `shards`."""
    with web(shards) as found:
        yield found


@pytest.fixture(scope="module", params=EACH)
def store_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        forget_credentials(patch)
        with started(request.param, tmp_path_factory.mktemp("empty")) as store:
            yield store
