"""Features on disk: what a forward pass gives, made once (on three ranks: test_probe.py), found again only under the same key."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli import main as data_prep
from data_prep.manifest import DatasetError, load_manifest, save_manifest
from data_prep.settings import UserError
from finetune.probe import cache, features
from finetune.probe.cache import FACTS, FEATURES, Writing
from pretrain.augment.augmentation import Augmentation
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.data.loader import Batch
from pretrain.data.reader import open_split
from pretrain.models.build import pooled_features
from tests.finetune.conftest import CPU, CROPS, feature_settings, maker_of


def independent_features(folder: Path, dataset: Path, split: str) -> torch.Tensor:
    """All pictures at once, normalised by hand."""
    from pretrain.checkpoints.files import load_model

    checkpoint = Checkpoint.open(folder)

    card, model = checkpoint.card, load_model(checkpoint)
    reader = open_split(dataset, load_manifest(dataset), split)
    images = reader.images(np.arange(reader.num_samples)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (card.channel_mean, card.channel_std))
    with torch.no_grad():
        return pooled_features(model.eval(), (images - mean) / std)


def test_a_table_is_a_forward_pass_and_the_second_time_is_found(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = feature_settings(other_shapes, tmp_path, backbone_folder)
    seen: list[int] = []
    maker = maker_of(settings)
    extract = maker.backbone.extract

    def counted(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return extract(images)

    first = maker_of(settings, extract=counted).tables("val", [None])[0]
    assert first.features_ND.shape == (35, 24) and first.features_ND.dtype == torch.float32
    torch.testing.assert_close(first.features_ND, independent_features(backbone_folder, other_shapes, "val"))
    assert np.bincount(first.labels_N).tolist() == [7] * 5
    assert first.labels_N.tolist() == open_split(other_shapes, load_manifest(other_shapes), "val").labels.tolist()
    assert sum(seen) == 1 + 40  # one to learn the width; five batches of eight, of which the last is padded
    again = maker_of(settings, extract=counted).tables("val", [None])[0]
    assert sum(seen) == 1 + 40 + 1 and torch.equal(first.features_ND, again.features_ND)
    assert "val: features found in" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "features").iterdir() if path.name.startswith(".tmp")] == []


def test_a_key_changes_with_what_the_numbers_depend_on_and_with_nothing_else(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    settings = feature_settings(other_shapes, tmp_path, backbone_folder, views=2, augment=CROPS)

    def path(split: str = "val", view: int | None = None, width: int = 24, **changes: Any) -> Path:
        backbone = {
            key: changes.pop(key)
            for key in ("weights", "image_size", "normalisation", "interpolation")
            if key in changes
        }
        maker = maker_of(settings.model_copy(update=changes), **backbone)
        return maker.entry(split, view, num_features=width).path

    weights = maker_of(settings).backbone.weights
    assert weights is not None
    other_weights = replace(weights, sha256="other")
    plain, viewed = path(), path(view=0)
    same = {"run_dir": "elsewhere", "feature_batch_size": 3, "lrs": (1.0,), "batch_size": 7, "standardise": False}
    assert path(**same) == plain and path(seed=5) == plain and path(view=0, **same) == viewed
    others = [
        path("train"),
        path(weights=other_weights),
        path(image_size=20),
        path(interpolation="area"),
        path(normalisation=maker_of(settings).backbone.normalisation._replace(std=(1.0, 1.0, 1.0))),
        path(feature_dtype="float16"),
        viewed,
        path(view=1),
        path(view=0, seed=5),
        path(view=0, augment=CROPS.model_copy(update={"flip_probability": 0.0})),
        path(augment=CROPS.model_copy(update={"crop_interpolation": "bicubic"})),
    ]
    for change in ({"channel_mean": (0.5,) * 3}, {"crop": "squash"}, {"seed": 99, "tool_version": "later"}):
        rebuilt = Path(shutil.copytree(other_shapes, tmp_path / "-".join(change)))
        save_manifest(rebuilt, load_manifest(rebuilt).model_copy(update=change))
        others.append(path(dataset=str(rebuilt)))
    assert others.pop() == plain  # the same pictures
    assert len({plain, *others}) == 1 + len(others)


@pytest.mark.parametrize("damage", ["cut", "altered", "no facts"])
def test_a_damaged_table_is_computed_again(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = maker_of(feature_settings(other_shapes, tmp_path, backbone_folder))
    good = maker.tables("val", [None])[0].features_ND.clone()
    (entry,) = (tmp_path / "features").iterdir()
    content = (entry / FEATURES).read_bytes()
    if damage == "no facts":
        (entry / FACTS).unlink()
    else:
        (entry / FEATURES).write_bytes(content[:-4] if damage == "cut" else content[:-4] + b"\0\0\0\1")
    words = {
        "cut": "features.npy was cut",
        "altered": "features.npy has changed (from row 32 on)",
        "no facts": "No such file",
    }
    assert torch.equal(maker.tables("val", [None])[0].features_ND, good)
    said = capsys.readouterr().err
    assert words[damage] in said and "its features are computed again" in said
    assert (entry / FEATURES).read_bytes() == content


def test_readers_of_parts_see_all_of_a_table_and_nobody_more_than_its_own(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    maker = maker_of(
        feature_settings(other_shapes, tmp_path, backbone_folder)
    )  # of 35 rows: blocks of 8, 8, 8, 8 and 3
    maker.tables("val", [None])
    entry = maker.entry("val", None, num_features=24)
    content = (entry.path / FEATURES).read_bytes()
    finders = []
    for row in range(35):
        place = len(entry.header) + row * entry.bytes_per_row + row
        (entry.path / FEATURES).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        faults = [entry.fault(part=part, num_parts=3) for part in range(3)]
        finders.append([part for part, fault in enumerate(faults) if fault])
    assert finders == [[0]] * 8 + [[1]] * 16 + [[2]] * 11


def test_a_kill_leaves_nothing_that_counts_and_nothing_that_grows(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = maker_of(feature_settings(other_shapes, tmp_path, backbone_folder))

    def killed(*unused: object, **also: object) -> None:
        raise SystemExit

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(Writing, "publish", killed)
            maker.tables("val", [None])
        assert [path.name[:5] for path in (tmp_path / "features").iterdir()] == [".tmp-"]
    maker.tables("val", [None])
    assert [path.name[:3] for path in (tmp_path / "features").iterdir()] == ["sha"]


def test_two_jobs_that_compute_the_same_end_well(backbone_folder: Path, other_shapes: Path, tmp_path: Path) -> None:
    maker = maker_of(feature_settings(other_shapes, tmp_path, backbone_folder))
    entry = maker.entry("val", None, num_features=24)
    rows, labels = np.ones((35, 24), np.float32), np.zeros(35, np.int64)
    jobs = [Writing(entry, run_dir=tmp_path / name, rows_per_block=35) for name in ("one", "two")]
    for job in jobs:
        job.lay_out()
        job.open()
    for job in jobs:
        job.write(rows, start=0)
        job.close(is_good=True)
        job.publish(labels, job.digests)
    assert entry.fault() is None and [path.name for path in entry.root.iterdir()] == [entry.path.name]
    features_file = np.load(entry.path / FEATURES)
    assert features_file.shape == (35, 24) and (features_file == 1).all()


def test_a_full_disk_is_one_message_and_leaves_nothing(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda place: Mock(free=35 * 24 * 4))  # without room for the header
    with pytest.raises(
        UserError, match=r"features_dir: .* has no room for .* GB of features .No space left on device.; make"
    ):
        maker_of(feature_settings(other_shapes, tmp_path, backbone_folder)).tables("val", [None])
    assert list((tmp_path / "features").iterdir()) == []


def test_a_picture_that_does_not_decode_is_named(backbone_folder: Path, shapes: Path, tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / "pictures" / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
    out = tmp_path / "data"
    words = [f"source.path={tmp_path}/pictures", "encoding=keep", "num_workers=1", "image_size=16"]
    assert data_prep(["build", "--source", "folder", "--out", str(out), *words]) == 0
    manifest = load_manifest(out)
    reader = open_split(out, manifest, "train", image_size=16)
    ((shard, key),) = reader.names(np.array([2]))
    place = reader.locate(np.array([2]))
    tar = bytearray((out / manifest.splits["train"].shards[0].file).read_bytes())
    tar[int(place.offsets[0]) : int(place.offsets[0]) + 40] = bytes(40)
    (out / manifest.splits["train"].shards[0].file).write_bytes(tar)
    with pytest.raises(DatasetError, match=f"{shard}: .*{Path(key).name} does not decode.*data_prep subset"):
        maker_of(feature_settings(out, tmp_path, backbone_folder)).tables("train", [None])
    assert list((tmp_path / "features").iterdir()) == []


def test_a_view_is_what_training_shows_in_that_epoch_and_more_views_add(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = feature_settings(other_shapes, tmp_path, backbone_folder, views=2, augment=CROPS, seed=3)
    maker = maker_of(settings)
    tables = maker.tables("train", [0, 1])
    reader, ids = open_split(other_shapes, load_manifest(other_shapes), "train"), np.array([7, 20, 59])
    augmentation: Augmentation = maker.backbone.augmentation(CROPS, seed=3, device=CPU)
    for view, table in enumerate(tables):
        labels = torch.from_numpy(reader.labels[ids])
        batch = Batch(reader.images(ids), labels, epochs=np.full(3, view), samples=ids, pairs=ids // 2)
        with torch.no_grad():
            expected = maker.backbone.extract(augmentation.prepare(batch).images_BCHW)
        torch.testing.assert_close(table.features_ND[ids], expected)
    assert not torch.equal(tables[0].features_ND, tables[1].features_ND)
    made: list[int] = []
    start = features.FeatureMaker._write_all

    def counted(self: Any, reader: Any, works: Any, views: Any, *, title: str) -> int:
        made.extend(views)
        return start(self, reader, works, views, title=title)

    monkeypatch.setattr(features.FeatureMaker, "_write_all", counted)
    maker.tables("train", [0, 1, 2])
    assert made == [2]
    facts = [json.loads((path / FACTS).read_text())["key"]["view"] for path in (tmp_path / "features").iterdir()]
    assert sorted(facts) == [0, 1, 2]


def test_half_precision_and_pixels(other_shapes: Path, tmp_path: Path) -> None:
    settings = feature_settings(other_shapes, tmp_path, None, feature_dtype="float16")
    table = maker_of(settings).tables("val", [None])[0]
    whole = maker_of(settings.model_copy(update={"feature_dtype": "float32"})).tables("val", [None])[0]
    assert table.features_ND.dtype == torch.float16 and table.features_ND.shape == (35, 3 * 16 * 16)
    torch.testing.assert_close(table.features_ND.float(), whole.features_ND, rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match="beyond what float16 holds; set feature_dtype=float32"):
        maker_of(settings, extract=lambda images: images.flatten(1) * 1e6, image_size=20).tables("val", [None])
