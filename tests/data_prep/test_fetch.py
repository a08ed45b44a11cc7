"""`data_prep fetch`: whatever a server does, a file is right or absent, and a failure is one line with
another way."""

import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import catalog, remote
from data_prep.build.config import BuildSettings
from data_prep.catalog import CATALOG
from data_prep.cli import main
from data_prep.manifest import load_manifest
from data_prep.settings import load_settings
from tests.conftest import Capture, Patch
from tests.data_prep.sources.published import CIFAR_10, MNIST_GZ, TINY, zip_of
from tests.data_prep.stock import Web, read, web
from tests.data_prep.test_build_faults import tiny_disk  # noqa: F401 (a fixture)
from tests.errors import printed_errors

NAME, OTHER = "cifar-10-python.tar.gz", np.random.default_rng(1).bytes(400_000)
DATA = np.random.default_rng(0).bytes(400_000)
HALF = len(DATA) // 2
PAGE = b"\n<!DOCTYPE html><p>Please log in</p>"


def publish(monkeypatch: Patch, name: str, files: dict[str, bytes], **more: Any) -> None:
    sums = {key: hashlib.md5(data).hexdigest() for key, data in files.items()}
    monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], files=sums, **more))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: Patch) -> Iterator[tuple[str, Web]]:
    publish(monkeypatch, "cifar10", {NAME: DATA})
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    with web(folder) as (address, state):
        state.ranges = True
        yield address, state


def files_in(folder: str | Path = "archives") -> dict[str, bytes]:
    paths = Path(folder).rglob("*")
    return {
        path.name: path.read_bytes() for path in paths if path.is_file() and path.name != ".lock"
    }


FAULTS = [
    # faults of the first replies, serves ranges, exit code, error
    ([], True, 0, None),
    (["cut"], True, 0, None),
    (["cut"], False, 0, None),
    ([503, "cut", 429], True, 0, None),
    ([404], True, 2, "missing-path"),
    ([403], True, 2, "no-access"),
    (["wrong"], True, 2, "damaged"),
    (["cut", None, "wrong"], True, 0, None),  # a resumed download starts again
    ([500] * 9, True, 1, "unreachable"),
]


@pytest.mark.parametrize(("faults", "ranges", "code", "error"), FAULTS)
def test_a_download_is_right_or_absent(
    server: tuple[str, Web], capsys: Capture, faults: list[Any], ranges: bool, code: int, error: str
) -> None:
    address, state = server
    state.faults[NAME], state.ranges = [*faults], ranges
    assert main(["fetch", "cifar10", "--mirror", address]) == code
    said = capsys.readouterr()
    assert files_in() == ({NAME: DATA} if code == 0 else {})
    asked = any(f"Range: bytes={HALF}-" in headers for headers in state.headers)
    assert asked == ("cut" in faults)
    if error:
        assert printed_errors(said.err) == [(f"{address}/{NAME}", error)]
        line = said.err.splitlines()[-1]
        assert "--from FILE" in line and hashlib.md5(DATA).hexdigest() in line
    else:
        assert said.out.splitlines()[-1].startswith("next: data_prep build ")
        num_gets = state.gets[NAME]
        assert main(["fetch", "cifar10", "--mirror", address]) == 0  # the file is kept
        assert state.gets[NAME] == num_gets


@pytest.mark.parametrize("change", ["none", "part", "version"])
def test_the_command_resumes_what_an_earlier_one_received(
    server: tuple[str, Web], monkeypatch: Patch, change: str
) -> None:
    address, state = server
    state.faults[NAME] = ["cut", 500, 500, 500]
    assert main(["fetch", "cifar10", "--mirror", address]) == 1
    [(part, data)] = files_in().items()
    assert part.endswith(".part") and data == DATA[:HALF]
    expected = DATA
    if change == "part":
        Path("archives", part).write_bytes(bytes(HALF))
    elif change == "version":
        (state.folder / NAME).write_bytes(expected := OTHER)
        publish(monkeypatch, "cifar10", {NAME: OTHER})
    state.headers.clear()
    assert main(["fetch", "cifar10", "--mirror", address]) == 0
    assert files_in() == {NAME: expected}
    assert any(f"Range: bytes={HALF}-" in each for each in state.headers) == (change != "version")


def test_redirects_are_followed_and_web_pages_named(
    server: tuple[str, Web], capsys: Capture
) -> None:
    address, state = server
    with web(state.folder) as (moved, other):
        other.moved_to = address
        assert main(["fetch", "cifar10", "--mirror", moved, "--out", "a"]) == 0
    assert files_in("a") == {NAME: DATA}
    (state.folder / NAME).write_bytes(PAGE)
    capsys.readouterr()
    assert main(["fetch", "cifar10", "--mirror", address]) == 2
    said = capsys.readouterr().err
    assert printed_errors(said) == [(f"{address}/{NAME}", "damaged")] and "web page" in said
    assert main(["fetch", "cifar10", "--mirror", "https://me:word@host/x"]) == 2
    said = capsys.readouterr().err
    assert printed_errors(said) == [("--mirror", "bad-value")] and "word@" not in said


def test_a_full_disk_keeps_what_came(
    server: tuple[str, Web],
    tiny_disk: Path,  # noqa: F811
    capsys: Capture,
) -> None:
    assert main(["fetch", "cifar10", "--mirror", server[0], "--out", str(tiny_disk)]) == 2
    assert printed_errors(capsys.readouterr().err) == [(str(tiny_disk), "no-space")]
    [(part, data)] = files_in(tiny_disk).items()
    assert part.endswith(".part") and DATA.startswith(data)


def test_several_addresses_are_asked_in_turn(
    server: tuple[str, Web], monkeypatch: Patch, capsys: Capture
) -> None:
    address, state = server
    files = {f"{name}": data for name, data in MNIST_GZ.files.items()}
    publish(monkeypatch, "mnist", files, addresses=(f"{address}/none", address))
    for name, data in files.items():
        (state.folder / name).write_bytes(data)
    assert main(["fetch", "mnist"]) == 0
    assert files_in() == files and Path("archives/mnist").is_dir()
    publish(monkeypatch, "mnist", files, addresses=("http://127.0.0.1:1",))
    capsys.readouterr()
    assert main(["fetch", "mnist", "--out", "b"]) == 1
    said = capsys.readouterr().err
    assert [code for _, code in printed_errors(said)] == ["unreachable"]
    assert "untried" in said and "--from FOLDER" in said


def test_files_copied_by_hand_are_checked(
    server: tuple[str, Web], monkeypatch: Patch, capsys: Capture
) -> None:
    by_hand, zipped = server[1].folder, zip_of({"tiny-imagenet-200/words.txt": b"x" * 99})
    bad = {"page": PAGE, "cut": DATA[:-1], "page.zip": PAGE, "cut.zip": zipped[:-9]}
    for name, data in bad.items():
        (by_hand / name).write_bytes(data)
        dataset = "tinyimagenet" if name.endswith(".zip") else "cifar10"
        assert main(["fetch", dataset, "--from", str(by_hand / name)]) == 2
        assert printed_errors(capsys.readouterr().err) == [(str(by_hand / name), "damaged")]
    assert main(["fetch", "cifar10", "--from", "nowhere"]) == 2
    assert printed_errors(capsys.readouterr().err) == [("--from", "missing-path")]
    assert files_in() == {}
    (by_hand / "mine.zip").write_bytes(zipped)
    assert main(["fetch", "tinyimagenet", "--from", str(by_hand / "mine.zip")]) == 0
    assert hashlib.md5(zipped).hexdigest() in capsys.readouterr().out  # none is published
    for place in (by_hand, by_hand / NAME):
        assert main(["fetch", "cifar10", "--from", str(place)]) == 0
    assert files_in() == {NAME: DATA, TINY.archive: zipped}
    Path("archives", NAME).write_bytes(OTHER)  # stays, as it may be dear to its owner
    assert main(["fetch", "cifar10", "--mirror", server[0]]) == 2
    assert printed_errors(capsys.readouterr().err) == [(f"archives/{NAME}", "damaged")]
    assert files_in()[NAME] == OTHER


def test_the_printed_command_builds_what_was_fetched(
    server: tuple[str, Web], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    data = CIFAR_10.place(tmp_path / "whole", packed=True).read_bytes()
    publish(monkeypatch, "cifar10", {NAME: data})
    (server[1].folder / NAME).write_bytes(data)
    assert main(["fetch", "cifar10", "--mirror", server[0]]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: data_prep ")
    assert main([*shlex.split(command), "source.md5=off", "num_workers=1"]) == 0
    assert load_manifest(Path("data/cifar10")).classes == CIFAR_10.classes


def test_an_installed_dataset_is_read_in_its_place(
    server: tuple[str, Web], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    installed = MNIST_GZ.place(tmp_path / "usr", packed=False)
    publish(monkeypatch, "fashion-mnist", dict(MNIST_GZ.files), installed=installed)
    assert main(["fetch", "fashion-mnist"]) == 0
    assert f"source.path={installed}" in capsys.readouterr().out
    assert main(["fetch", "fashion-mnist", "--from", str(installed)]) == 0
    assert files_in() == MNIST_GZ.files
    assert "source.path=archives/fashion-mnist" in capsys.readouterr().out


@pytest.mark.parametrize("name", catalog.BY_HAND)
def test_imagenet_is_explained(name: str, capsys: Capture) -> None:
    assert main(["fetch", name]) == 0
    said = capsys.readouterr().out
    assert f"source.path=archives/{catalog.BY_HAND[name]}" in said and "image-net.org" in said


# ---- the catalog


def test_addresses_and_sums_are_those_of_torchvision() -> None:
    from torchvision.datasets import CIFAR10, CIFAR100, MNIST, STL10, FashionMNIST

    for name, theirs in {"cifar10": CIFAR10, "cifar100": CIFAR100, "stl10": STL10}.items():
        [(file, md5)] = CATALOG[name].files.items()
        assert (f"{CATALOG[name].addresses[0]}/{file}", md5) == (theirs.url, theirs.tgz_md5)
    for name, theirs in {"mnist": MNIST, "fashion-mnist": FashionMNIST}.items():
        assert list(CATALOG[name].files.items()) == theirs.resources
        assert {f"{each}/" for each in CATALOG[name].addresses} == set(theirs.mirrors)
    for published in CATALOG.values():
        assert all(
            re.fullmatch(r"https?://[\w.-]+(/[\w~-]+)*", each) for each in published.addresses
        )
        assert all(re.fullmatch("([0-9a-f]{32})?", md5) for md5 in published.files.values())


@pytest.mark.parametrize("name", CATALOG)
def test_configs_read_where_fetch_writes(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], installed=None))
    words = [f"{key}={value}" for key, value in CATALOG[name].build_settings().items()]
    config = f"configs/data_prep/{name.replace('-', '_')}.yaml"
    debian = ["source.path=archives/fashion-mnist", "samples_per_shard=8192"]
    found = load_settings(BuildSettings, path=config, overrides=debian * (name == "fashion-mnist"))
    assert found == load_settings(BuildSettings, path=None, overrides=[*words, f"out={found.out}"])


# ---- digits


@pytest.mark.slow
def test_digits_have_a_fixed_split(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    from sklearn.datasets import load_digits

    words = ["build", "--source", "digits", "image_size=8", "num_workers=1"]
    assert main([*words, "--out", str(tmp_path / "digits")]) == 0
    digits = load_digits()
    expected = [
        (np.repeat(np.round(image * 255 / 16).astype(np.uint8)[..., None], 3, -1).tobytes(), label)
        for image, label in zip(digits.images, digits.target.tolist(), strict=True)
    ]
    for split, part in {"train": expected[:898], "test": expected[898:]}.items():
        images, labels = read(tmp_path / "digits", split)
        found = [(image.tobytes(), label) for image, label in zip(images, labels, strict=True)]
        assert sorted(found) == sorted(part)
        assert min(np.bincount(labels)) >= 80
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main([*words, "--out", str(tmp_path / "other")]) == 2
    assert printed_errors(capsys.readouterr().err) == [("source.kind", "missing-library")]


@pytest.mark.processes
def test_start_takes_a_name(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pretrain", "start", *words, "--untimed"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    started = start("digits", "--name", "mine")
    assert started.returncode == 0, started.stderr
    assert "next: pretrain train runs/mine.yaml" in started.stdout
    assert load_manifest(Path("data/mine")).splits["test"].num_samples == 899
    started = start("cifar10")
    assert started.returncode == 1
    assert [code for _, code in printed_errors(started.stderr)] == ["unreachable"]
