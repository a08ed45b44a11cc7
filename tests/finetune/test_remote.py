"""Evaluations and probes of remote shards give the results of local shards, and share the cache of
training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.manifest import load_manifest, save_manifest
from finetune.probe.config import KnnSettings
from finetune.probe.knn import knn
from finetune.probe.probe import probe
from pretrain.cli import main as pretrain
from tests.conftest import Patch
from tests.data_prep.samples import files_of
from tests.data_prep.stock import forget_credentials, s3_server, web
from tests.finetune.tiny import (
    ALONE,
    PROBE,
    feature_settings,
    judge,
    opened,
    predictions,
    write_tuning,
)
from tests.training import final_state, finish, start_tuning, write_config

pytestmark = pytest.mark.usefixtures("without_pictures")

OF_THE_PLACE = {"seconds", "images_per_s", "views_per_s", "run_dir"}


def elsewhere(dataset: Path, out: Path, address: str) -> Path:
    """Return the dataset with its shards only at `address`."""
    shutil.copytree(dataset, out, ignore=shutil.ignore_patterns("*.tar"))
    manifest = load_manifest(dataset)
    splits = {}
    for name, split in manifest.splits.items():
        shards = tuple(
            each.model_copy(update={"file": f"{address}/{each.file}"}) for each in split.shards
        )
        splits[name] = split.model_copy(update={"shards": shards})
    save_manifest(out, manifest.model_copy(update={"splits": splits}))
    return out


def findings(dataset: Path, place: Path, weights: Path, **more: Any) -> dict[str, Any]:
    """Return the results of every command, without paths and times."""
    judged = judge(weights, dataset, place / "judged", num_views=2, include_plain=True, **more)
    settings = feature_settings(dataset, place, weights, **PROBE, **more)
    found = {
        "evaluate": judged,
        "predictions": predictions(place / "judged"),
        "probe": probe(settings, ALONE, opened(settings)),
    }
    tree = settings.model_dump(include=set(KnnSettings.model_fields)) | {"neighbors": (5, 3)}
    nearest = KnnSettings.model_validate(
        tree | {"run_dir": str(place / "knn"), "features_dir": None}, strict=False
    )
    found["knn"] = knn(nearest, ALONE, opened(settings))
    features = files_of(place / "features")
    found["features"] = {path: data for path, data in features.items() if path.endswith(".npy")}
    assert all(found.values())
    return found | {
        "evaluate": {name: value for name, value in judged.items() if name not in OF_THE_PLACE}
    }


def test_every_verb_over_http_gives_bit_for_bit_what_the_disk_gives(
    shapes: Path, folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    forget_credentials(monkeypatch)
    local = findings(shapes, tmp_path / "local", folder)
    with web(shapes) as (address, server):
        server.faults = {"train-000001.tar": [500, "cut"], "val-000000.tar": ["cut", "wrong"]}
        cache = tmp_path / "cache"
        found = findings(
            shapes, tmp_path / "remote", folder, data={"dataset": address, "cache_dir": str(cache)}
        )
    shards = [each for split in load_manifest(shapes).splits.values() for each in split.shards]
    assert found == local
    assert set(server.gets) == {
        path.name for path in shapes.iterdir() if path.suffix != ".json"
    } - {".lock"} | {"manifest.json"}
    assert sum(server.gets.values()) == len(server.gets) + 4, "each came once, but for the faults"
    assert {path.stem for path in cache.glob("*.tar")} == {each.sha256 for each in shards}
    assert not list(cache.glob("*.user"))


@pytest.mark.processes
def test_tuning_over_http_is_that_of_the_disk_and_its_preview_reads_there_too(
    shapes: Path, folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    forget_credentials(monkeypatch)
    cache = tmp_path / "cache"
    with web(shapes) as (address, _):
        dataset = elsewhere(shapes, tmp_path / "far", address)
        words = [f"data.cache_dir={cache}", "train.global_batch_size=16", "tracking.enabled=false"]
        config = write_tuning(tmp_path, folder, dataset)
        places = {tmp_path / "run": dataset, tmp_path / "local": shapes}
        for run in [
            start_tuning(config, place, *words, f"data.dataset={data}")
            for place, data in places.items()
        ]:
            finish(run)
        words = [
            str(write_config(tmp_path, dataset=dataset)),
            f"data.cache_dir={cache}",
            "run_dir=x",
            "--count",
            "8",
        ]
        assert pretrain(["preview", *words, "--out", str(tmp_path / "sheet.png")]) == 0
    shards = [each for split in load_manifest(shapes).splits.values() for each in split.shards]
    assert {path.stem for path in cache.glob("*.tar")} == {each.sha256 for each in shards}
    found, local = map(final_state, places)
    assert found.keys() == local.keys() and all(
        torch.equal(found[name], local[name]) for name in local
    )
    scores = [json.loads((place / "result.json").read_text())["eval/loss"] for place in places]
    assert scores[0] == scores[1] and (tmp_path / "sheet.png").stat().st_size


def test_s3_takes_its_options_from_the_settings_and_no_file_holds_them(
    shapes: Path, folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    forget_credentials(monkeypatch)
    with s3_server(shapes) as storage:
        dataset = elsewhere(shapes, tmp_path / "far", "s3://pictures/some")
        options = {"storage": json.loads(storage), "cache_dir": str(tmp_path / "cache")}
        ours = judge(folder, dataset, tmp_path / "run", data=options)
    assert ours["eval/top1"] == judge(folder, shapes, tmp_path / "local")["eval/top1"]
    files = files_of(tmp_path / "run")
    assert "config.yaml" in files and not any(b"secret-word" in data for data in files.values())
