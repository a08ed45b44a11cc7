"""`data_prep fetch` leaves a correct file or none, and a failure is a one-line error."""

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import remote
from data_prep.build.config import BuildSettings
from data_prep.catalog import CATALOG
from data_prep.cli import main
from data_prep.settings import load_settings
from tests.conftest import Capture, Patch
from tests.data_prep.sources.published import MNIST_GZ, zip_of
from tests.data_prep.stock import Web, read, web
from tests.data_prep.test_build_faults import tiny_disk  # noqa: F401 (a fixture)
from tests.errors import printed_errors

NAME, FILES = "cifar-10-python.tar.gz", dict(MNIST_GZ.files)
DATA, OTHER = (np.random.default_rng(seed).bytes(400_000) for seed in (0, 1))
HALF = len(DATA) // 2
REST = f"Range: bytes={HALF}-"
PAGE = b"\n<!DOCTYPE html>"
Server = tuple[str, Web]


def publish(monkeypatch: Patch, name: str, files: dict[str, bytes], **more: Any) -> None:
    sums = {key: hashlib.md5(data).hexdigest() for key, data in files.items()}
    monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], files=sums, **more))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: Patch) -> Iterator[Server]:
    publish(monkeypatch, "cifar10", {NAME: DATA})
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    with web(folder) as (address, state):
        state.ranges = True
        yield address, state


def fetch(*words: object) -> int:
    return main(["fetch", *map(str, words)])


def files_in(folder: str | Path = "archives") -> dict[str, bytes]:
    files = (path for path in Path(folder).rglob("[!.]*") if path.is_file())
    return {path.name: path.read_bytes() for path in files}


FAULTS = [
    # faults of the first replies, are ranges served, exit code, error
    ([], True, 0, None),
    (["cut"], True, 0, None),
    (["cut"], False, 0, None),
    ([503, "cut", 429], True, 0, None),
    (["cut", None, "wrong"], True, 0, None),  # a resumed download starts again
    ([404], True, 2, "missing-path"),
    (["wrong"], True, 2, "damaged"),
    ([500] * 9, True, 1, "unreachable"),
]


@pytest.mark.parametrize(("faults", "ranges", "code", "error"), FAULTS)
def test_a_download_is_right_or_absent(
    server: Server, capsys: Capture, faults: list[Any], ranges: bool, code: int, error: str
) -> None:
    address, state = server
    state.faults[NAME], state.ranges = [*faults], ranges
    assert fetch("cifar10", "--mirror", address) == code
    said = capsys.readouterr()
    assert files_in() == ({} if error else {NAME: DATA})
    assert (REST in "".join(state.headers)) == ("cut" in faults)
    if error:
        assert printed_errors(said.err) == [(f"{address}/{NAME}", error)]
        assert f"{CATALOG['cifar10'].files[NAME]}, from" in said.err and "--from FILE" in said.err
    else:
        assert "next: data_prep build" in said.out
        num_gets = state.gets[NAME]
        assert fetch("cifar10", "--mirror", address) == 0  # the file is kept
        assert state.gets[NAME] == num_gets


@pytest.mark.parametrize("change", ["none", "part", "version"])
def test_the_command_resumes_its_download(server: Server, monkeypatch: Patch, change: str) -> None:
    address, state = server
    state.faults[NAME] = ["cut", 500, 500, 500]
    assert fetch("cifar10", "--mirror", address) == 1
    [(part, data)] = files_in().items()
    assert part.endswith(".part") and data == DATA[:HALF]
    expected = OTHER if change == "version" else DATA
    if change == "part":
        Path("archives", part).write_bytes(bytes(HALF))
    (state.folder / NAME).write_bytes(expected)
    publish(monkeypatch, "cifar10", {NAME: expected})
    state.headers.clear()
    assert fetch("cifar10", "--mirror", address) == 0
    assert files_in() == {NAME: expected}
    assert (REST in "".join(state.headers)) == (change != "version")


def test_redirects_are_followed_and_web_pages_named(server: Server, capsys: Capture) -> None:
    address, state = server
    with web(state.folder) as (moved, other):
        other.moved_to = address
        assert fetch("cifar10", "--mirror", moved, "--out", "a") == 0
    assert files_in("a") == {NAME: DATA}
    (state.folder / NAME).write_bytes(PAGE)
    assert fetch("cifar10", "--mirror", address) == 2
    said = capsys.readouterr().err
    assert printed_errors(said) == [(f"{address}/{NAME}", "damaged")] and "web page" in said


def test_a_full_disk_keeps_the_part(server: Server, tiny_disk: Path, capsys: Capture) -> None:  # noqa: F811
    assert fetch("cifar10", "--mirror", server[0], "--out", tiny_disk) == 2
    assert printed_errors(capsys.readouterr().err) == [(str(tiny_disk), "no-space")]
    [data] = files_in(tiny_disk).values()
    assert data and DATA.startswith(data)


def test_files_copied_by_hand_are_checked(server: Server, capsys: Capture) -> None:
    by_hand, zipped = server[1].folder, zip_of({"tiny-imagenet-200/words.txt": b"x" * 99})
    for name, data in {"cut": DATA[:-1], "cut.zip": zipped[:-9]}.items():
        (by_hand / name).write_bytes(data)
        dataset = "tinyimagenet" if name == "cut.zip" else "cifar10"
        assert fetch(dataset, "--from", by_hand / name) == 2
        said = capsys.readouterr().err
        assert printed_errors(said) == [(str(by_hand / name), "damaged")] and "Repeat" not in said
    assert files_in() == {}
    (by_hand / "mine.zip").write_bytes(zipped)
    assert fetch("tinyimagenet", "--from", by_hand / "mine.zip") == 0
    assert fetch("cifar10", "--from", by_hand) == 0
    assert files_in() == {NAME: DATA, "tiny-imagenet-200.zip": zipped}
    Path("archives", NAME).write_bytes(OTHER)
    assert fetch("cifar10", "--from", by_hand) == 2
    assert files_in()[NAME] == OTHER  # a wrong file stays


def test_several_files_and_addresses(
    server: Server, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    address, state = server
    installed = MNIST_GZ.place(state.folder, packed=False)
    addresses = (f"{address}/none", f"{address}/mnist")
    publish(monkeypatch, "fashion-mnist", FILES, installed=installed, addresses=addresses)
    for place in (str(installed), "archives/fashion-mnist"):
        assert fetch("fashion-mnist") == 0
        assert f"source.path={place}" in capsys.readouterr().out
        publish(monkeypatch, "fashion-mnist", FILES, installed=None)
    assert files_in("archives/fashion-mnist") == FILES
    assert fetch("imagenet1k") == fetch("imagenet21k") == 0
    assert capsys.readouterr().out.count("image-net.org") == 2  # instructions for both


def test_the_catalog_is_torchvisions() -> None:
    folder = Path(str(find_spec("torchvision").origin)).with_name("datasets")
    text = "".join((folder / f"{name}.py").read_text() for name in ("cifar", "mnist", "stl10"))
    for name, each in CATALOG.items():
        for url in each.addresses:
            assert re.fullmatch(r"https?://[\w.-]+(/[\w~-]+)*", url)
            assert f"{url}/" in text or name == "tinyimagenet"
        for file, md5 in each.files.items():
            assert not md5 or re.search(rf'{file}"[,\s\w=]+"{md5}"', text)


@pytest.mark.parametrize("name", CATALOG)
def test_configs_read_where_fetch_writes(name: str) -> None:
    settings = replace(CATALOG[name], installed=None).build_settings()
    words = [f"{key}={value}" for key, value in settings.items()]
    config = f"configs/data_prep/{name.replace('-', '_')}.yaml"
    debian = ["source.path=archives/fashion-mnist", "samples_per_shard=8192"]
    found = load_settings(BuildSettings, path=config, overrides=debian * (name == "fashion-mnist"))
    assert found == load_settings(BuildSettings, path=None, overrides=[*words, f"out={found.out}"])


@pytest.mark.slow
def test_digits_have_a_fixed_split(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    from sklearn.datasets import load_digits

    words = ["build", "--source", "digits", "image_size=8", "num_workers=1", "--out"]
    assert main([*words, str(tmp_path / "digits")]) == 0
    images, labels = read(tmp_path / "digits", "test")
    expected = np.round(load_digits().images[898:] * 255 / 16).astype(np.uint8)
    for channel in range(3):
        assert {*map(bytes, images[..., channel].copy())} == {*map(bytes, expected)}
    assert min(np.bincount(labels)) >= 80
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main([*words, str(tmp_path / "other")]) == 2
    assert printed_errors(capsys.readouterr().err) == [("source.kind", "missing-library")]
