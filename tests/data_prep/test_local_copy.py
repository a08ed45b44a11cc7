"""Every command reads a dataset from a URL like the directory itself."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import local_copy
from data_prep.cli import main
from data_prep.local_copy import _address
from data_prep.manifest import DatasetError, load_manifest
from data_prep.remote import write_bytes
from pretrain.config import DataSettings
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.reader import reading
from tests import hub
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import files_of
from tests.data_prep.stock import Web, forget_credentials, index, web
from tests.data_prep.test_index_remote import every_verb
from tests.errors import fails
from tests.stores import EACH, Store, started

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_credentials(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("data_prep.remote.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("data_prep.local_copy._OPENED", {})


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    """Return a copy of the dataset, to damage it."""
    return Path(shutil.copytree(shapes, tmp_path / "there" / "shapes"))


@pytest.fixture
def there(dataset: Path) -> Iterator[tuple[str, Web]]:
    """Yield the URL of the dataset, and the server."""
    with web(dataset.parent) as (address, server):
        yield f"{address}/shapes", server


def pictures(data: TrainingData) -> np.ndarray[Any, Any]:
    with reading(data.parts, data.settings) as reader:
        return reader.images(np.arange(reader.num_samples)).numpy()


@pytest.fixture(params=EACH)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with started(request.param, tmp_path) as found:
        yield found


def test_every_verb_and_a_training_read_a_url_as_the_directory_whatever_the_network_does(
    shapes: Path,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pretrain.data.store.SILENCE_S", 1)
    before, url, storage = files_of(shapes), store.url("some", "deep"), json.dumps(store.storage)
    for path in sorted(shapes.iterdir()):
        write_bytes(path.read_bytes(), f"{url}/{path.name}", storage=store.storage)
    for kind, name in (
        ("cut", "manifest.json"),
        (500, "train-000001.npy"),
        ("wrong", "train-000002.npy"),
        ("cut", "val-000000.tar"),
    ):
        store.fail(kind, method="GET", path=name)
    assert set(every_verb(url, storage, tmp_path).values()) == {0}
    words = [f"--out={tmp_path}/half", "--fraction=0.5", f"--storage={storage}"]
    assert main(["subset", url, *words]) == 0
    said = capsys.readouterr()
    assert f"{url}: 312 samples match the manifest" in said.out
    assert (
        main(["subset", str(shapes), "--out", str(tmp_path / "x" / "half"), "--fraction", "0.5"])
        == 0
    )
    halves = [load_manifest(tmp_path / place).content_hash for place in ("half", "x/half")]
    assert halves[0] == halves[1]
    far = load_training_data(
        DataSettings(dataset=url, storage=store.storage, cache_dir=str(tmp_path / "shards"))
    )
    near = load_training_data(DataSettings(dataset=str(shapes)))
    assert far.content_hash == near.content_hash and far.parts[0].directory != shapes
    for number, kind in enumerate(("cut", 503, "wrong", "stall")):
        store.fail(kind, method="GET", path=f"train-00000{number}.tar")
    assert (pictures(far) == pictures(near)).all()
    assert all(not fault.count for fault in store.faults)
    assert files_of(shapes) == before
    secret = next(reversed(store.storage.values()))
    assert secret not in said.out + said.err
    assert not any(secret.encode() in data for data in files_of(tmp_path / "cache").values())


def test_patterns_list_a_store_and_versions_tell_contents_apart(
    shapes: Path, store: Store, tmp_path: Path, refused: Refused
) -> None:
    tars = sorted(shapes.glob("train-*.tar"))[:2]
    for path in tars:
        write_bytes(path.read_bytes(), store.url("some", path.name), storage=store.storage)
    how = [f"storage={json.dumps(store.storage)}"]
    assert index(tmp_path / "far", store.url("some", "train-*.tar"), *how) == 0
    assert index(tmp_path / "near", list(tars)) == 0
    far, near = load_manifest(tmp_path / "far"), load_manifest(tmp_path / "near")
    assert far.content_hash == near.content_hash
    assert [shard.file for shard in far.splits["train"].shards] == [
        store.url("some", path.name) for path in tars
    ]
    store.requests.clear()
    assert index(tmp_path / "far", store.url("some", "train-*.tar"), *how) == 0
    write_bytes(tars[0].read_bytes(), store.url("some", tars[1].name), storage=store.storage)
    refused(
        index(tmp_path / "far", store.url("some", "train-*.tar"), *how),
        f"{tars[1].name}: ",
        "[changed]",
    )
    refused(
        index(tmp_path / "new", store.url("some", "gone.tar"), *how),
        "/gone.tar: ",
        "[missing-path]",
    )
    refused(index(tmp_path / "new", store.url("some"), *how), "/some: ", "[missing-path]")
    nothing = store.url("some", "other-*.tar")
    refused(index(tmp_path / "new", nothing, *how), f"{nothing}: ", "[missing-path]")


def test_the_hub_is_read_in_ranges_by_revision_and_with_a_token(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("data_prep.remote.RANGE_BYTES", 20_000)
    files, url = (
        {path.name: path.read_bytes() for path in shapes.iterdir()},
        "hf://datasets/me/mine",
    )
    with hub.serving() as server:
        server.put("me/mine", files, private=True)
        server.put("me/mine", {"manifest.json": b"{}"}, branch="other")
        storage = {"endpoint": server.url, "token": hub.TOKEN}
        far = load_training_data(
            DataSettings(dataset=url, storage=storage, cache_dir=str(tmp_path / "shards"))
        )
        assert (
            pictures(far) == pictures(load_training_data(DataSettings(dataset=str(shapes))))
        ).all()
        how = f"storage={json.dumps(storage)}"
        assert index(tmp_path / "far", f"{url}@main/train-*.tar", how) == 0
        assert index(tmp_path / "far", f"{url}@main/train-*.tar", how) == 0
        first = min(files.keys() & {"train-000000.tar", "train-000001.tar"})
        server.put("me/mine", {**files, first: files[first][:-512]})
        refused(index(tmp_path / "far", f"{url}@main/train-*.tar", how), f"{first}: ", "[changed]")
        options = ["--storage", json.dumps(storage)]
        refused(main(["verify", f"{url}@other", *options]), f"{url}@other/manifest.json: ")
        refused(main(["verify", f"{url}@gone", *options]), f"{url}@gone: ", "[missing-path]")
        refused(
            main(
                ["verify", url, "--storage", json.dumps({"endpoint": server.url, "token": False})]
            ),
            "[missing-path]",
        )
        refused(
            main(["verify", "hf://datasets/me", *options]), "hf://datasets/me: ", "[missing-path]"
        )


def test_a_copy_is_made_once_and_mended_and_another_manifest_makes_another(
    dataset: Path, there: tuple[str, Web], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = there
    server.faults = {"shapes/train-000000.npy": ["wrong", "cut", 500]}

    def opened() -> Path:
        monkeypatch.setattr("data_prep.local_copy._OPENED", {})
        return local_copy.local_copy(url, storage={})

    first = opened()
    assert local_copy.local_copy(url, storage=None) == first  # opened before: no request is needed
    assert server.gets["shapes/train-000000.npy"] == 4 and server.gets["shapes/manifest.json"] == 1
    whole, seen = files_of(first), dict(server.gets)
    (first / "train-000000.npy").write_bytes(b"x")
    (first / "train-000000.paths").unlink()
    assert opened() == first and files_of(first) == whole
    fetched = {name for name, count in server.gets.items() if count > seen[name]}
    assert fetched == {
        f"shapes/{name}" for name in ("manifest.json", "train-000000.npy", "train-000000.paths")
    }
    assert (
        main(["subset", str(dataset), "--out", str(dataset.parent / "new"), "--fraction", "0.5"])
        == 0
    )
    for path in (dataset.parent / "new").iterdir():
        shutil.copy(path, dataset)
    assert opened() != first and files_of(first) == whole


def test_what_is_no_dataset_or_holds_a_secret_is_one_line(
    dataset: Path, there: tuple[str, Web], tmp_path: Path, refused: Refused
) -> None:
    url, server = there
    refused(main(["verify", f"{url}x"]), f"{url}x: ", "[missing-path]")
    refused(main(["verify", f"{url}?key=word"]), f"{url}: ", "[bad-value]")
    server.faults = {"shapes/val-000000.npy": ["wrong"] * 9}
    refused(main(["verify", url]), f"{url}: val-000000.npy", "[damaged]")
    (tmp_path / "cache").rename(tmp_path / "gone")
    (tmp_path / "cache").write_text("a file")
    refused(main(["verify", url]), "data.cache_dir: ", "[unreadable]")


def test_a_shard_stays_in_the_bucket_of_its_dataset() -> None:
    assert _address("gs://bucket/a/b", "train-0.tar") == "gs://bucket/a/b/train-0.tar"
    assert _address("s3://bucket", "../../a b.tar") == "s3://bucket/a b.tar"
    assert _address("http://host", "../a b.tar") == "http://host/a%20b.tar"
    assert _address("hf://datasets/me/mine@v1", "x/../y.tar") == "hf://datasets/me/mine@v1/y.tar"
    assert (
        _address("az://c@account.dfs.core.windows.net/d", "s3://other/y.tar") == "s3://other/y.tar"
    )
    with fails("unsupported", "s3://bucket/a", kind=DatasetError):
        _address("s3://bucket/a", "/etc/passwd")
    with fails("bad-value"):
        local_copy.local_copy("s3://me:word@bucket/a", storage={})
