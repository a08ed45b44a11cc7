"""The candidate chosen on held-out samples is evaluated and saved. Useless settings are errors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cluster.work import Work
from data_prep.errors import SettingsError
from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from data_prep.settings import validate
from finetune.cli import main
from finetune.probe import probe as probe_room
from finetune.probe.config import ProbeSettings
from finetune.probe.features import Table
from finetune.probe.heads import Candidate, Score
from finetune.probe.probe import (
    Judged,
    best_of,
    candidates_of,
    choose_and_test,
    edges,
    held_out,
    probe,
)
from finetune.probe.source import Cached
from finetune.split import check_apart
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.data.reader import open_split
from pretrain.record import Parent, read_record
from tests.conftest import Capture, Patch
from tests.errors import fails, printed_errors
from tests.finetune import tiny
from tests.finetune.tiny import (
    ALONE,
    CLASSES,
    CPU,
    PROBE,
    blobs,
    feature_settings,
    judge,
    maker_of,
    opened,
    probe_settings,
)
from tests.training import Run, finish


def noise(count: int, *, seed: int) -> Table:
    """Return more features than samples: a head memorizes the labels and cannot predict others."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return Table(torch.randn(count, 300, generator=generator), labels)


def verdict_of(train: Table, test: Table, **changes: Any) -> dict[str, Any]:
    source = Cached({"train": [train], "plain": [train], "test": [test]}, device=CPU)
    verdict = choose_and_test(
        source, settings=probe_settings(**changes), num_classes=CLASSES, world=ALONE
    )
    assert verdict is not None
    return verdict.result


def of_unequal_scales(count: int, *, seed: int) -> Table:
    """Return twelve overlapping classes. Feature scales differ by 10,000, and few samples
    decide."""
    means = torch.randn(12, 48, generator=torch.Generator().manual_seed(7))
    generator, scale_D = torch.Generator().manual_seed(seed), torch.logspace(-2, 2, 48)
    labels = torch.randint(0, 12, (count,), generator=generator)
    return Table(
        (means[labels] + 2.5 * torch.randn(count, 48, generator=generator) + 1) * scale_D, labels
    )


@pytest.mark.slow
def test_the_default_probe_is_as_good_as_scikit_learns_logistic_regression() -> None:
    """The reference has standardized features and chooses C by cross-validation. Means of three
    training sets."""
    test, accuracies = of_unequal_scales(4000, seed=100), list[tuple[float, float]]()
    for seed in (1, 2, 3):
        train = of_unequal_scales(240, seed=seed)
        source = Cached({"train": [train], "plain": [train], "test": [test]}, device=CPU)
        default = validate(ProbeSettings, {"run_dir": "r", "data": {"dataset": "d"}, "seed": seed})
        outcome = choose_and_test(source, settings=default, num_classes=12, world=ALONE)
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        grid = np.logspace(-4, 2, 7)
        peer = GridSearchCV(model, {"logisticregression__C": grid}, cv=4, scoring="neg_log_loss")
        peer.fit(train.values_ND.numpy(), train.labels_N.numpy())
        assert outcome is not None
        right = peer.predict(test.values_ND.numpy()) == test.labels_N.numpy()
        accuracies.append((outcome.result["test_top1"], float(right.mean())))
    ours, expected = np.mean(accuracies, axis=0)
    assert ours >= expected - 0.005 and expected > 0.6


@pytest.mark.parametrize("optimizer", ["lion", "sgd", "adamw", "lbfgs"])
def test_a_probe_learns_what_is_there_and_nothing_from_noise(optimizer: str) -> None:
    train, test = blobs(400, seed=1), blobs(300, seed=2)
    settings: dict[str, Any] = {"optimizer": optimizer, "lrs": (1e-2,), "epochs": (20,)}
    if optimizer == "lbfgs":
        settings |= {"lrs": (1.0,), "epochs": (100,)}
    assert verdict_of(train, test, **settings)["test_top1"] > 0.95
    found = verdict_of(noise(400, seed=3), noise(300, seed=4), **settings)
    for name, count in (("holdout_top1", 80), ("test_top1", 300)):
        low, high = binom.ppf([1e-4, 1 - 1e-4], count, 1 / CLASSES) / count
        assert low <= found[name] <= high, name


def test_the_choice_is_the_best_with_the_smallest_rate_and_never_a_diverged_cell() -> None:
    def judged(lr: float, decay: float, top1: float, loss: float = 1.0) -> Judged:
        return Judged(Candidate(lr, decay, 5), Score(top1, loss))

    grid = [
        judged(0.3, 0.0, 0.8),
        judged(0.1, 0.0, 0.8),
        judged(0.1, 0.5, 0.8),
        judged(0.01, 0.0, 0.7),
        judged(0.001, 0.0, 0.9, math.nan),
    ]
    assert best_of(grid, num_held=10**6).candidate == Candidate(0.1, 0.5, 5)
    with fails("not-finite", "lrs"):
        best_of(grid[-1:], num_held=10**6)
    lower = judged(0.3, 0.5, 0.8, 0.9)  # among equals the candidate with the smaller loss
    assert best_of([*grid, lower], num_held=10**6).candidate == lower.candidate
    surer = judged(0.01, 0.1, 0.79, 0.5)
    assert (
        best_of([*grid, surer], num_held=100).candidate == surer.candidate
    )  # the standard error is 4 points
    assert best_of([*grid, surer], num_held=10_000).candidate == Candidate(
        0.1, 0.5, 5
    )  # the standard error is 0.4 points
    row = [judged(0.1, 0.0, 0.7), judged(0.2, 0.0, 0.8), judged(0.3, 0.0, 0.9)]
    (hint,) = edges(row[2], row)
    assert hint.startswith("lrs: ") and "0.3" in hint
    assert edges(row[1], row[:2] + [judged(0.3, 0.0, 0.8)]) == []  # the inner candidate is as good


def test_held_out_samples_are_apart_and_the_test_split_is_never_chosen_on() -> None:
    kept, held = held_out(101, probe_settings(holdout_fraction=0.25))
    assert kept is not None and held is not None and len(held) == 25
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(101))
    train, test = blobs(200, seed=1, spread=0.3), blobs(100, seed=2, spread=0.3)
    grid = {"lrs": (1e-4, 1e-2, 1.0), "epochs": (4,)}
    one = verdict_of(train, test, **grid)
    other = verdict_of(train, Table(test.values_ND, (test.labels_N + 1) % CLASSES), **grid)
    assert one["grid"] == other["grid"] and one["chosen_lr"] == other["chosen_lr"]
    assert one["test_top1"] != other["test_top1"] and one["test_top5"] == 1.0


def test_splits_that_share_samples_are_refused(shapes: Path) -> None:
    manifest = load_manifest(shapes)
    train, val = manifest.splits["train"], manifest.splits["val"]
    both = train.model_copy(update={"shards": (*train.shards[:1], *val.shards)})
    mixed = manifest.model_copy(update={"splits": {**manifest.splits, "both": both}})
    check_apart(shapes, mixed, train="train", test="val", holdout=None)
    with fails("conflict", "data.test_split"):
        check_apart(shapes, mixed, train="both", test="val", holdout=None)
    with fails("conflict", "holdout_split"):
        check_apart(shapes, mixed, train="train", test="val", holdout="both")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_views": 3}, "num_views"),
        ({"augment": {}}, "augment"),
        ({"num_views": 2, "augment": {"mixup_alpha": 0.8}}, "augment.mixup_alpha"),
        ({"num_views": 2, "augment": {"cutmix_alpha": 1.0}}, "augment.cutmix_alpha"),
        ({"lrs": [0.1]}, "lrs"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"epochs": [5, 6]}, "epochs"),
        ({"num_views": 2, "augment": {}}, "num_views"),
        ({"features": "stream"}, "features"),
        ({"optimizer": "lamb"}, "optimizer"),
        ({"weight_decays": [-1.0]}, "weight_decays"),
        ({"epochs": [5, 5]}, "epochs"),
        ({"holdout_split": "val"}, "holdout_split"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as refused:
        validate(ProbeSettings, {"run_dir": "r", "data": {"dataset": "d"}} | changes)
    assert str(refused.value).startswith(f"{field}: ")


def test_what_is_left_out_fits_the_optimizer() -> None:
    tree = {"run_dir": "r", "data": {"dataset": "d"}}
    assert len(candidates_of(validate(ProbeSettings, tree | {"optimizer": "lion"}))) == 25
    lbfgs = validate(ProbeSettings, tree | {"weight_decays": 0.1})
    assert lbfgs.optimizer == "lbfgs" and lbfgs.lrs == (1.0,) and lbfgs.weight_decays == (0.1,)


@pytest.mark.usefixtures("without_pictures")
def test_evaluation_of_a_probe_is_the_probes_own_number(
    folder: Path, other_shapes: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    settings = feature_settings(other_shapes, tmp_path, folder, **PROBE)
    were_finished: list[bool] = []
    register = probe_room.register

    def told(*words: Any, **also: Any) -> None:
        were_finished.append((Path(settings.run_dir) / "result.json").exists())
        register(*words, **also)

    monkeypatch.setattr(probe_room, "register", told)
    result = probe(settings, ALONE, opened(settings))
    assert were_finished == [
        False
    ]  # a kill between both must not leave a finished run that is not registered
    assert (
        result is not None
        and len(result["grid"]) == 4
        and "held-out top-1" in capsys.readouterr().out
    )
    scores = judge(Path(settings.run_dir), other_shapes, None)
    assert scores["num_samples"] == 35
    assert scores["eval/top1"] == pytest.approx(result["test_top1"], abs=1e-9)
    assert scores["eval/top5"] == pytest.approx(result["test_top5"], abs=1e-9) == 1.0
    card = Checkpoint.open(settings.run_dir).card
    assert card.classes == load_manifest(other_shapes).classes and card.dataset == "shapes-b"
    assert card.step == result["steps"] == 6 * 4 and card.run_key and card.stored_size == 16
    words = ["--split=val", f"--out={tmp_path}/p.parquet"]
    assert main(["predict", settings.run_dir, str(other_shapes), *words]) == 0
    answered = pq.read_table(tmp_path / "p.parquet").to_pydict()["class"]
    labels = open_split(other_shapes, load_manifest(other_shapes), "val").labels.tolist()
    right = np.mean(
        [card.classes[label] == answer for label, answer in zip(labels, answered, strict=True)]
    )
    assert right == pytest.approx(result["test_top1"], abs=1e-9)


@pytest.mark.processes
def test_the_command_finds_the_features_of_a_killed_probe(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "probe",
        "probe.yaml",
        "tracking.enabled=false",
        "run_dir=runs/p",
        "optimizer=lbfgs",
        f"dataset={other_shapes}",
    ]
    first, later = (Path(f"runs/mine/checkpoints/step-000000{step}") for step in (11, 20))
    weights = tiny.write_folder(first, step=11)
    Path("probe.yaml").write_text("pretrained: runs/mine\n")
    maker_of(feature_settings(other_shapes, tmp_path / "runs", weights)).tables(
        "train", [None]
    )  # as if killed after this
    output = finish(Run(words, ranks=1, program="finetune"))
    assert (
        "train: features found in runs/features" in output and "val: features found" not in output
    )
    recorded = read_record(Path("runs/p"))
    assert recorded is not None and (recorded.task, recorded.seed) == ("probe", 0)
    assert recorded.parents == (
        Parent(str(first.resolve()), 11, sha256_of(first / "model.safetensors")),
    )
    result = json.loads(Path("runs/p/result.json").read_text())
    assert len(result["grid"]) == 13 and 1e-6 <= result["chosen_weight_decay"] <= 1
    assert result["weights_step"] == 11 and result["weights_sha256"] == sha256_of(
        first / "model.safetensors"
    )
    assert main(words) == 0 and "finished before" in capsys.readouterr().out
    tiny.write_folder(later, other_shapes, step=20)  # its run was made longer
    assert main(words) == 2
    assert printed_errors(capsys.readouterr().err) == [("pretrained", "changed")]
    with fails("changed", "pretrained"):
        Work("probe", "probe.yaml", tuple(words[2:])).is_finished()
