"""Features on disk equal a forward pass, are computed once (on three ranks: test_probe_ranks.py),
and are reused only for the same key."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest, save_manifest
from finetune.probe import features
from finetune.probe.cache import check_room
from finetune.probe.features import FACTS
from pretrain.augment.augmentation import Augmentation
from pretrain.data.loader import Batch
from pretrain.data.reader import open_split
from pretrain.models.build import pooled_features
from tests.conftest import Capture, Patch
from tests.errors import fails
from tests.finetune.tiny import (
    CPU,
    CROPS,
    feature_settings,
    maker_of,
    model_of,
    normalized,
    opened,
    spoil,
    whole,
)


@torch.no_grad()
def independent_features(folder: Path, dataset: Path) -> torch.Tensor:
    return pooled_features(model_of(folder), normalized(folder, dataset)[0])


def test_a_table_is_a_forward_pass_and_the_second_time_is_found(
    folder: Path, other_shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = feature_settings(other_shapes, tmp_path, folder)
    counted = Mock(side_effect=maker_of(settings).backbone.extract)
    first = maker_of(settings, extract=counted).tables("val", [None])[0]
    assert len(first) == 35 and first.num_features == 24
    torch.testing.assert_close(whole(first), independent_features(folder, other_shapes))
    assert np.bincount(first.labels_N).tolist() == [7] * 5
    assert (
        first.labels_N.tolist()
        == open_split(other_shapes, load_manifest(other_shapes), "val").labels.tolist()
    )
    sizes = [len(call.args[0]) for call in counted.call_args_list]
    assert sizes == [1, 8, 8, 8, 8, 8]  # one to learn the width; the last of five batches is padded
    again = maker_of(settings, extract=counted).tables("val", [None])[0]
    assert counted.call_count == len(sizes) and torch.equal(whole(first), whole(again))
    assert "val: features found in" in capsys.readouterr().out
    assert [
        path.name for path in (tmp_path / "features").iterdir() if path.name.startswith(".tmp")
    ] == []


def test_features_in_bf16_are_those_in_fp32_to_its_digits(
    folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    exact, rounded = (
        whole(
            maker_of(
                feature_settings(other_shapes, tmp_path, folder, feature_precision=precision)
            ).tables("val", [None])[0]
        )
        for precision in ("auto", "bf16")
    )
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.01


def test_a_key_changes_with_what_the_numbers_depend_on_alone(
    folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    settings = feature_settings(
        other_shapes, tmp_path, folder, optimizer="lion", num_views=2, augment=CROPS
    )

    def path(split: str = "val", view: int | None = None, **changes: Any) -> Path:
        names = ("checkpoint", "image_size", "normalization", "interpolation")
        backbone = {key: changes.pop(key) for key in names if key in changes}
        return maker_of(settings.model_copy(update=changes), **backbone).cache.place_of(split, view)

    checkpoint = maker_of(settings).backbone.checkpoint
    assert checkpoint is not None
    other = replace(checkpoint, hashes={"model.safetensors": "other"})
    tanh = checkpoint.card.model.model_copy(update={"activation": "tanh"})
    saturating = replace(checkpoint, card=checkpoint.card.model_copy(update={"model": tanh}))
    plain, viewed = path(), path(view=0)
    same = {
        "run_dir": "elsewhere",
        "feature_batch_size": 3,
        "weight_decays": (1.0,),
        "batch_size": 7,
        "standardize": False,
    }
    assert path(**same) == plain and path(seed=5) == plain and path(view=0, **same) == viewed
    others = [
        path("train"),
        path(checkpoint=other),
        path(checkpoint=saturating),
        path(image_size=20),
        path(interpolation="area"),
        path(normalization=(maker_of(settings).backbone.normalization[0], (1.0, 1.0, 1.0))),
        path(channel_stats="target"),
        path(feature_dtype="float16"),
        path(feature_precision="bf16"),
        viewed,
        path(view=1),
        path(view=0, seed=5),
        path(view=0, augment=CROPS.model_copy(update={"flip_probability": 0.0})),
        path(augment=CROPS.model_copy(update={"crop_interpolation": "bicubic"})),
    ]
    for change in (
        {"channel_mean": (0.5,) * 3},
        {"crop": "squash"},
        {"seed": 99, "tool_version": "later"},
    ):
        rebuilt = Path(shutil.copytree(other_shapes, tmp_path / "-".join(change)))
        save_manifest(rebuilt, load_manifest(rebuilt).model_copy(update=change))
        others.append(path(data=settings.data.model_copy(update={"dataset": str(rebuilt)})))
    assert others.pop() == plain  # the same images
    assert len({plain, *others}) == 1 + len(others)


def test_damaged_features_are_computed_again(
    folder: Path, other_shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    maker = maker_of(feature_settings(other_shapes, tmp_path, folder))
    good = whole(maker.tables("val", [None])[0]).clone()
    (place,) = (tmp_path / "features").iterdir()
    file = place / "features.npy"
    content = file.read_bytes()
    assert np.load(file).shape == (35, 24)
    for harm in (
        lambda: file.write_bytes(content[:-4]),
        lambda: file.write_bytes(content[:-4] + b"\0\0\0\1"),
        file.unlink,
        (place / FACTS).unlink,
        *(
            lambda text=text: (place / FACTS).write_text(text)
            for text in ("null", "[]", '{"sha256": {}}')
        ),
    ):
        harm()
        assert torch.equal(whole(maker.tables("val", [None])[0]), good)
        assert str(place) in capsys.readouterr().err
        assert file.read_bytes() == content


def test_a_kill_leaves_nothing_and_two_jobs_may_compute_the_same(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    settings = feature_settings(other_shapes, tmp_path, folder)
    maker, publish = maker_of(settings), features._publish
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(features, "_publish", Mock(side_effect=SystemExit))
            maker.tables("val", [None])
        assert [path.name[:5] for path in (tmp_path / "features").iterdir()] == [".tmp-"]
    other = maker_of(settings.model_copy(update={"run_dir": "another job's"}))

    def late(*words: Any) -> None:
        """Begin the other job after this job, and end it before."""
        monkeypatch.setattr(features, "_publish", publish)
        other.tables("val", [None])
        publish(*words)

    monkeypatch.setattr(features, "_publish", late)
    table = maker.tables("val", [None])[0]
    assert [path.name[:3] for path in (tmp_path / "features").iterdir()] == ["sha"]
    torch.testing.assert_close(whole(table), independent_features(folder, other_shapes))


def test_a_full_disk_is_one_message_and_leaves_nothing(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(features.shutil, "disk_usage", lambda place: Mock(free=35 * 24 * 4 - 1))
    with fails("no-space", "features_dir"):
        maker_of(feature_settings(other_shapes, tmp_path, folder)).tables("val", [None])
    assert list((tmp_path / "features").iterdir()) == []


def test_what_a_cache_would_take_is_what_it_takes_and_what_does_not_fit_is_refused(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    settings = feature_settings(
        other_shapes,
        tmp_path,
        folder,
        optimizer="lion",
        num_views=2,
        augment=CROPS,
        features="cache",
        feature_dtype="float16",
    )
    tables, row_gb = [("val", None), ("train", 0), ("train", 1), ("train", None)], 24 * 2 / 1e9
    sizes = {"train": 60, "val": 35}
    maker = maker_of(settings)
    for number, (split, view) in enumerate(tables):
        left_gb = sum(sizes[name] for name, _ in tables[number:]) * row_gb
        assert maker_of(settings).cache.missing_gb == pytest.approx(left_gb, rel=1e-9)
        manifest, checkpoint = maker.manifest, opened(settings)
        check_room(settings.model_copy(update={"cache_gb": left_gb * 1.001}), manifest, checkpoint)
        check_room(
            settings.model_copy(update={"cache_gb": 0.0, "features": "auto"}), manifest, checkpoint
        )  # features=auto streams
        small = settings.model_copy(update={"cache_gb": left_gb * 0.999})
        with fails("no-space", "features") as lack:
            check_room(small, manifest, checkpoint)
        assert "raise cache_gb" in lack.value.fix
        with fails("no-space", "features") as lack:
            check_room(
                small.model_copy(update={"features": "auto", "optimizer": "lbfgs"}),
                manifest,
                checkpoint,
            )
        assert "features=stream optimizer=lion" in lack.value.fix
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", Mock(return_value=Mock(free=left_gb * 0.999e9)))
            with fails("no-space", "features"):
                check_room(settings, manifest, checkpoint)
            left = maker.cache.temporary_of(maker.cache.place_of(split, view))
            left.mkdir(parents=True)
            # left by a killed attempt of this run
            (left / "features.npy").write_bytes(bytes(10_000))
            check_room(settings, manifest, checkpoint)
            shutil.rmtree(left)
        maker.tables(split, [view])
    assert maker_of(settings).cache.missing_gb == 0


def test_a_picture_that_does_not_decode_is_named(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    ((shard, key),) = open_split(other_shapes, load_manifest(other_shapes), "val").names(
        np.array([34])
    )
    spoil(monkeypatch, 34)  # a sample of the last batch, which is padded
    with fails("damaged", shard) as damaged:
        maker_of(feature_settings(other_shapes, tmp_path, folder)).tables("val", [None])
    assert key in damaged.value.problem
    assert list((tmp_path / "features").iterdir()) == []


def test_a_view_is_what_training_shows_in_that_epoch(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    settings = feature_settings(
        other_shapes, tmp_path, folder, optimizer="lion", num_views=2, augment=CROPS, seed=3
    )
    maker = maker_of(settings)
    tables = maker.tables("train", [0, 1])
    reader = open_split(other_shapes, load_manifest(other_shapes), "train")
    ids = np.array([7, 20, 59])
    augmentation: Augmentation = maker.backbone.augmentation(CROPS, seed=3, device=CPU)
    for view, table in enumerate(tables):
        labels = torch.from_numpy(reader.labels[ids])
        batch = Batch(
            reader.images(ids), labels, epochs=np.full(3, view), samples=ids, mix_keys=ids // 2
        )
        with torch.no_grad():
            expected = maker.backbone.extract(augmentation.prepare(batch).images_BCHW)
        torch.testing.assert_close(table.gather(torch.from_numpy(ids)), expected)
    assert not torch.equal(*map(whole, tables))
    made = Mock(side_effect=features.view_of)
    monkeypatch.setattr(features, "view_of", made)
    maker.tables("train", [0, 1, 2])
    assert {call.args[1] for call in made.call_args_list} == {2}
    facts = [
        json.loads((path / FACTS).read_text())["key"]["view"]
        for path in (tmp_path / "features").iterdir()
    ]
    assert sorted(facts) == [0, 1, 2]


def test_half_precision_and_pixels(other_shapes: Path, tmp_path: Path) -> None:
    settings = feature_settings(other_shapes, tmp_path, None, feature_dtype="float16")
    table = maker_of(settings).tables("val", [None])[0]
    half = whole(table)
    full = whole(
        maker_of(settings.model_copy(update={"feature_dtype": "float32"})).tables("val", [None])[0]
    )
    assert half.dtype == torch.float16 and half.shape == (35, 3 * 16 * 16)
    torch.testing.assert_close(half.float(), full, rtol=1e-3, atol=1e-3)
    with fails("not-finite", "feature_dtype"):
        maker_of(settings, extract=lambda images: images.flatten(1) * 1e6, image_size=20).tables(
            "val", [None]
        )
