"""Storage options are secrets: only the host that a user named for a dataset receives them."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.clients import host_of
from data_prep.manifest import load_manifest, save_manifest
from pretrain.config import DataSettings
from pretrain.data.datasets import load_training_data
from pretrain.data.reader import reading
from tests.data_prep.conftest import Refused
from tests.data_prep.stock import Web, forget_credentials, web
from tests.errors import fails

pytestmark = pytest.mark.processes
SECRET = "hush-word"
OPTIONS: dict[str, dict[str, Any]] = {
    "a header": {"headers": {"X-Api-Key": SECRET}},
    "a token": {"headers": {"Authorization": f"Bearer {SECRET}"}},
    "the client's header": {"client_kwargs": {"headers": {"X-Api-Key": SECRET}}},
    "a cookie": {"client_kwargs": {"cookies": {"session": SECRET}}},
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_credentials(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("data_prep.local_copy._OPENED", {})


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shapes, tmp_path / "there" / "shapes"))


@pytest.fixture
def servers(dataset: Path) -> Iterator[list[tuple[str, Web]]]:
    """Yield two hosts of the same folder: the dataset's own host, and another."""
    with ExitStack() as stack:
        yield [stack.enter_context(web(dataset.parent)) for _ in range(2)]


def name_hosts(dataset: Path, *addresses: str) -> None:
    """Name the shards by these addresses in turn. "" means a file in the dataset's directory."""
    manifest, splits = load_manifest(dataset), {}
    for name, split in manifest.splits.items():
        shards = [
            shard.model_copy(
                update={"file": f"{address}/shapes/{shard.file}" if address else shard.file}
            )
            for number, shard in enumerate(split.shards)
            for address in [addresses[number % len(addresses)]]
        ]
        splits[name] = split.model_copy(update={"shards": tuple(shards)})
    save_manifest(dataset, manifest.model_copy(update={"splits": splits}))


def train_on(dataset: str, storage: dict[str, Any], cache: Path) -> None:
    data = load_training_data(DataSettings(dataset=dataset, storage=storage, cache_dir=str(cache)))
    with reading(data.parts, data.settings) as reader:
        reader.images(np.arange(reader.num_samples))


@pytest.mark.parametrize("storage", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "way", ["the manifest names another host", "the own host redirects to another"]
)
def test_a_host_that_nobody_chose_receives_no_option(
    dataset: Path, servers: list[tuple[str, Web]], way: str, storage: dict[str, Any], tmp_path: Path
) -> None:
    (own, own_server), (other, other_server) = servers
    if "redirects" in way:
        own_server.moved_to = other
    else:
        name_hosts(dataset, "", other)
    assert (
        main(["verify", f"{own}/shapes", "--storage", json.dumps(storage), "--workers", "1"]) == 0
    )
    train_on(f"{own}/shapes", storage, tmp_path / "shards")
    assert all(SECRET in headers for headers in own_server.headers)
    assert other_server.headers and not any(SECRET in headers for headers in other_server.headers)


def test_a_local_dataset_sends_its_options_to_the_one_host_of_its_shards(
    dataset: Path, servers: list[tuple[str, Web]], tmp_path: Path, refused: Refused
) -> None:
    (own, own_server), (other, other_server) = servers
    storage = OPTIONS["a token"]
    name_hosts(dataset, own)
    words = ["stats", str(dataset), "--recompute", "--storage", json.dumps(storage)]
    assert main([*words, "--workers", "1"]) == 0
    train_on(str(dataset), storage, tmp_path / "shards")
    assert own_server.headers and all(SECRET in headers for headers in own_server.headers)
    name_hosts(dataset, own, other)
    refused(main([*words, "--workers", "1"]), "storage: ", "[conflict]")
    with fails("conflict", "storage"):
        train_on(str(dataset), storage, tmp_path / "shards")
    assert not other_server.headers
    train_on(str(dataset), {}, tmp_path / "shards")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("https://h/a", "https://h/b/c", True),
        ("https://h/a", "https://H:443/a", True),
        ("https://h/a", "http://h/a", False),
        ("https://h/a", "https://h:8443/a", False),
        ("https://h/a", "https://h.evil/a", False),
        ("https://h/a", "s3://h/a", False),
        ("s3://mine/a", "s3://theirs/a", True),
        (
            "az://box@mine.blob.core.windows.net/a",
            "abfs://other@mine.blob.core.windows.net/a",
            True,
        ),
        ("az://box@mine.blob.core.windows.net/a", "az://box@theirs.blob.core.windows.net/a", False),
        ("az://box/a", "az://box@theirs.blob.core.windows.net/a", False),
    ],
)
def test_what_is_the_same_host(one: str, other: str, is_same: bool) -> None:
    assert (host_of(one) == host_of(other)) is is_same
