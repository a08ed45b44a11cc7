"""The directory of an evaluation, its end, and its early errors."""

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console

from data_prep.manifest import load_manifest
from data_prep.publish import write_json
from finetune.evaluate.command import print_result
from finetune.evaluate.config import Evaluation
from finetune.export.config import ExportSettings
from pretrain.checkpoints.card import MODEL
from pretrain.config import AugmentSettings
from pretrain.models.spec import MlpSpec
from pretrain.tracking.tracker import Tracker
from tests.conftest import Patch
from tests.data_prep.samples import change_manifest
from tests.errors import fails
from tests.finetune.tiny import evaluation_settings, judge, write_folder
from tests.records import write_record_of

pytestmark = pytest.mark.usefixtures("without_pictures")


def test_other_settings_have_another_directory(folder: Path, shapes: Path, tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"num_views": 2},
        {"num_views": 3},
        {"num_views": 2, "seed": 1},
        {"num_views": 2, "include_plain": True},
        {"num_views": 2, "augment": {"crop_scale": [0.5, 1.0]}},
        {"split": "train"},
        {"precision": "bf16"},
    ]
    places = {
        Evaluation.of(evaluation_settings(folder, shapes, None, **changes)).run_dir
        for changes in variants
    }
    assert len(places) == len(variants)
    same = Evaluation.of(
        evaluation_settings(folder, shapes, None, local_batch_size=3, seed=5)
    ).run_dir
    plain = Evaluation.of(evaluation_settings(folder, shapes, None))
    assert same == plain.run_dir
    moved = Path(shutil.copytree(shapes, tmp_path / "moved"))
    for changes, is_same in (
        ({"tool_version": "later", "source": {"kind": "index"}}, True),
        ({"crop": "squash"}, False),
    ):
        change_manifest(moved, lambda manifest, changes=changes: manifest.update(changes))
        assert (
            Evaluation.of(evaluation_settings(folder, moved, None)).identity == plain.identity
        ) is is_same


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": MlpSpec(kind="mlp", depth=1, width=12, activation="tanh")},
        {"spec": MlpSpec(kind="mlp", depth=1, width=12, norm_place="after")},
        {"classes": ("cat", "bee", "ant")},
        {"channel_mean": (0.5, 0.5, 0.5)},
        {"channel_std": (0.5, 0.5, 0.5)},
        {"fed_interpolation": "area"},
    ],
    ids=lambda changes: str(*changes),
)
def test_equal_weights_of_another_model_have_results_of_their_own(
    shapes: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    sources = write_folder(tmp_path / "one"), write_folder(tmp_path / "other", **changes)
    one, other = (
        Evaluation.of(evaluation_settings(each, shapes, tmp_path / "run")) for each in sources
    )
    assert one.checkpoint.sha256 == other.checkpoint.sha256
    records = {"run/evaluation.json": one.facts, "run/result.json": {}, "run/config.yaml": {}}
    exported = ExportSettings(pretrained="one", out=str(tmp_path / "out"))
    records["out/export.json"] = {"request": exported.identity(one.checkpoint)}
    for name, record in records.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_json(tmp_path / name, record)
    assert one.stored_result() == {} and exported.is_begun(one.checkpoint)
    with fails("exists", "run_dir"):
        other.stored_result()
    with fails("exists", "out"):
        exported.is_begun(other.checkpoint)
    with fails("exists", "run_dir"):
        replace(one, checkpoint=replace(one.checkpoint, hashes={MODEL: "0"})).stored_result()


@pytest.mark.parametrize("where", ["register", "save_result"])
def test_an_evaluation_that_is_killed_can_be_done_anew(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch, where: str
) -> None:
    """However it ends, an evaluation with a result.json is in MLflow."""
    ends: list[str] = []
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(Tracker, "close", lambda self, status: ends.append(status))
        patches.setattr(
            f"finetune.evaluate.report.{where}", Mock(side_effect=KeyboardInterrupt("SIGTERM"))
        )
        judge(folder, shapes, tmp_path / "run")
    assert ends == ["KILLED"] and not (tmp_path / "run" / "result.json").exists()
    assert judge(folder, shapes, tmp_path / "run")["num_samples"] == 72
    assert not list((tmp_path / "run").glob(".tmp-*"))


def run_of(
    folder: Path, place: Path, config: dict[str, Any], result: dict[str, Any] | None = None
) -> Path:
    """Return a run directory with these weights at step 6."""
    (place / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder, place / "checkpoints" / "step-00000006")
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    write_record_of(place, config)
    if result is not None:
        (place / "result.json").write_text(json.dumps(result))
    return place


def test_other_words_that_mean_the_same_begin_it_anew(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    run, place = run_of(folder, tmp_path / "x", {"augment": {"crop_scale": None}}), None
    monkeypatch.chdir(tmp_path)
    words: list[tuple[Path, Path, dict[str, Any]]] = [
        (Path("x"), shapes, {"num_views": 2}),
        (run / "checkpoints" / "step-00000006", shapes, {"num_views": 2, "local_batch_size": 7}),
        (run, Path(os.path.relpath(shapes)), {"num_views": 2, "ranks": {"timeout_s": 5}}),
    ]
    for pretrained, dataset, changes in words:
        with monkeypatch.context() as patches:
            patches.setattr(
                "finetune.evaluate.evaluate.answer", Mock(side_effect=KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                judge(pretrained, dataset, None, **changes)
        evaluation = Evaluation.of(evaluation_settings(pretrained, dataset, None, **changes))
        assert evaluation.stored_result() is None and place in (None, evaluation.run_dir.resolve())
        place = evaluation.run_dir.resolve()
        assert (
            yaml.safe_load((place / "config.yaml").read_text())["pretrained"] == "x"
        )  # the first spelling of the path, as in MLflow
    assert place is not None and place.parent == run / "evaluations"
    result = judge(run, shapes, None, num_views=2)
    with fails("exists", "run_dir") as caught:  # even if the other began after this check
        judge(run, shapes, place, num_views=3)
    assert "(num_views: 3, was 2)" in str(caught.value)
    assert Evaluation.of(
        evaluation_settings(Path("x"), shapes, None, num_views=2)
    ).stored_result() == json.loads(json.dumps(result))


def test_views_are_as_the_model_was_trained(folder: Path, tmp_path: Path, shapes: Path) -> None:
    """Only crops and flips of the training are used; without these, the public command's. Explicit
    settings take precedence."""
    trained = {
        "crop_scale": [0.75, 1.0],
        "flip_probability": 0.0,
        "mixup_alpha": 0.8,
        "auto_augment": "rand-m9",
    }
    runs = {
        "tuned": run_of(folder, tmp_path / "tuned", {"augment": trained}),
        "padded": run_of(
            folder, tmp_path / "padded", {"augment": {"crop_padding": 4, "padding_mode": "reflect"}}
        ),
        "bare": run_of(
            folder,
            tmp_path / "bare",
            {"augment": {"flip_probability": 0.0, "erase_probability": 0.5}},
        ),
        "probe": run_of(folder, tmp_path / "probe", {"augment": None}),
        "imported": folder,
    }
    public = AugmentSettings(crop_scale=(0.4, 1.0), crop_ratio=(1.0, 1.0), flip_probability=0.5)
    own = AugmentSettings(crop_scale=(0.75, 1.0), flip_probability=0.0)
    flipped = own.model_copy(update={"flip_probability": 0.5})
    padded = AugmentSettings(crop_padding=4, padding_mode="reflect")
    cropped = AugmentSettings(crop_scale=(0.5, 1.0), padding_mode="reflect")
    command = "from the public command of Scaling MLPs, because "
    cases: list[tuple[str, dict[str, Any], AugmentSettings, str]] = [
        ("tuned", {}, own, "from the training of tuned"),
        ("padded", {}, padded, "from the training of padded"),
        ("bare", {}, public, f"{command}bare used no crops or flips"),
        ("probe", {}, public, f"{command}the training is unknown"),
        ("imported", {}, public, f"{command}the training is unknown"),
        (
            "tuned",
            {"flip_probability": 0.5},
            flipped,
            "flip_probability from augment, the rest from the training of tuned",
        ),
        (
            "padded",
            {"crop_scale": (0.5, 1.0)},
            cropped,
            "crop_scale from augment, the rest from the training of padded",
        ),
    ]
    for name, asked, expected, source in cases:
        evaluation = Evaluation.of(
            evaluation_settings(runs[name], shapes, None, num_views=2, augment=asked)
        )
        assert (
            evaluation.settings.augment.model_dump()
            == expected.fed_as("bilinear", 1.0).model_dump()
        ), name
        assert evaluation.augment_from == source
    told = judge(runs["tuned"], shapes, None, num_views=2)
    assert (
        told["augment"]["flip_probability"] == 0.0
        and told["augment_from"] == "from the training of tuned"
    )
    whole = Evaluation.of(
        evaluation_settings(runs["tuned"], shapes, None, num_views=2, augment=own.model_dump())
    )
    assert str(whole.run_dir) == told["run_dir"]  # the same directory for the explicit setting


def test_views_that_cost_more_than_they_bring_are_told_of(shapes: Path, tmp_path: Path) -> None:
    data = {"dataset": str(shapes), "eval_split": "val"}
    known = write_folder(
        tmp_path / "known", shapes, pixels_hash=load_manifest(shapes).pixels_hash, step=6
    )
    run = run_of(known, tmp_path / "run", {"data": data}, {"eval/top1": 0.9, "step": 6})
    for changes, expected in (({}, 0.9), ({"split": "train"}, None)):
        assert (
            Evaluation.of(
                evaluation_settings(run, shapes, None, num_views=2, **changes)
            ).plain_top1()
            == expected
        )
    result = judge(run, shapes, None, num_views=2)
    for plain, top1, hinted in ((0.9, 0.87, True), (0.9, 0.89, False), (None, 0.1, False)):
        console = Console(width=120, file=io.StringIO())
        print_result(result | {"plain_top1": plain, "eval/top1": top1}, console)
        said = console.file.getvalue()
        assert ("Without views, top-1 is 90.00%" in said) is hinted
        assert (
            "crop_scale [0.4, 1.0], crop_ratio [1.0, 1.0], flip_probability 0.5, from the"
            " public command" in said
        )


@pytest.mark.parametrize(("split", "is_warned"), [("val", True), ("train", False)])
def test_a_probe_is_warned_of_the_pictures_that_it_learned_from(
    shapes: Path, tmp_path: Path, split: str, is_warned: bool
) -> None:
    known = write_folder(
        tmp_path / "known", shapes, content_hash=load_manifest(shapes).content_hash
    )
    probe = run_of(
        known,
        tmp_path / "probe",
        {"data": {"dataset": str(shapes), "train_split": "val", "test_split": "train"}},
    )
    assert (
        Evaluation.of(evaluation_settings(probe, shapes, None, split=split)).warning() is not None
    ) is is_warned
