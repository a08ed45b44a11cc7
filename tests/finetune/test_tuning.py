"""Fine-tuning from a real checkpoint is exact on any number of ranks, and resumes exactly. Seeds
and folds are separate runs with their own samples, mean and standard deviation, and a place in
MLflow.
"""

import json
import shutil
import statistics
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from data_prep.build.merge import write_annotation
from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from data_prep.settings import dump, load_settings
from finetune.cli import main as finetune
from finetune.runs import read_run
from finetune.tune.config import TuneSettings, check_resume_of, repeats_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_weights
from pretrain.checkpoints.run import list_checkpoints
from pretrain.config import DataSettings, OptimizerSettings
from pretrain.data.datasets import load_training_data
from pretrain.data.reader import open_split
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.optim import parameter_groups
from pretrain.ranks.starts import hold_run
from pretrain.tracking.delivery import sync
from pretrain.tracking.run_tags import summary
from tests.conftest import Capture
from tests.data_prep.samples import change_manifest
from tests.errors import fails, printed_errors
from tests.finetune.tiny import write_folder, write_tuning
from tests.training import (
    final_state,
    finish,
    start,
    start_tuning,
    stop_while_it_waits,
    write_config,
)

pytestmark = pytest.mark.processes

UNTRACKED = "tracking.enabled=false"


@pytest.fixture(scope="module")
def pretrained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    overrides = ["train.duration=6 steps", "schedule.warmup=0 steps", "tracking.enabled=true"]
    finish(
        start(
            write_config(folder, dataset=shapes),
            folder / "maker",
            *overrides,
            ranks=1,
            journal_only=True,
        )
    )
    return folder / "maker"


@pytest.fixture(scope="module")
def folded(other_shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A dataset whose 60 training images are in three overlapping folds, like STL-10's; some images
    are in no fold."""
    directory = shutil.copytree(other_shapes, tmp_path_factory.mktemp("folds") / "shapes")
    bits = np.random.default_rng(0).random((60, 3)) < 0.4
    fact = write_annotation(directory, "train-folds", bits).model_dump()
    change_manifest(
        directory, lambda manifest: manifest["splits"]["train"]["annotations"].update(folds=fact)
    )
    return directory, bits


def result_of(run_dir: Path) -> dict[str, float]:
    return dict(json.loads((run_dir / "result.json").read_text()))


def test_two_ranks_tune_as_one_and_resumed_is_uninterrupted(
    pretrained: Path, other_shapes: Path, tmp_path: Path
) -> None:
    config, alone = write_tuning(tmp_path, pretrained, other_shapes), tmp_path / "alone"
    words = [
        UNTRACKED,
        "train.duration=24 steps",
        "train.local_batch_size=4",
        "train.eval_every=12 steps",
        "optimizer.name=adamw",
    ]
    finish(start_tuning(config, alone, *words))
    finish(start_tuning(config, tmp_path / "two", *words, ranks=2))
    one, two = final_state(alone), final_state(tmp_path / "two")
    (alone / "result.json").unlink()  # as if killed after the second-last checkpoint
    for file in list_checkpoints(alone)[-1].iterdir():
        file.unlink()
    assert "resuming from step-00000018" in finish(start_tuning(config, alone, *words))
    resumed = final_state(alone)
    assert one.keys() == two.keys() == resumed.keys() and one["head.weight"].shape == (5, 32)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
        assert torch.equal(resumed[name], tensor), name


def test_tuning_starts_from_the_checkpoint_and_scratch_does_not(
    pretrained: Path, other_shapes: Path, tmp_path: Path
) -> None:
    """One step at a tiny learning rate does not change the body."""
    config = write_tuning(tmp_path, pretrained, other_shapes)
    body = load_weights(Checkpoint.open(pretrained))["stem.weight"]
    words = [UNTRACKED, "optimizer.lr=1e-12", "train.duration=1 steps", "train.seed=9"]
    for init in ("pretrained", "scratch"):
        finish(start_tuning(config, tmp_path / init, f"init={init}", *words))
    near, far = (final_state(tmp_path / init)["stem.weight"] for init in ("pretrained", "scratch"))
    torch.testing.assert_close(near, body, rtol=0, atol=1e-6)
    assert (far - body).abs().max() > 1e-2


def test_a_dataset_of_another_size_is_fed_at_the_checkpoints_and_as_asked_with_its_own_colors(
    pretrained: Path, other_shapes: Path, tmp_path: Path
) -> None:
    public = ["channel_stats=target", "head_init=torch", "optimizer.lr=1e-12"]
    for name, encoding, recipe in (
        ("raw", ["encoding=raw", "image_size=24"], []),
        ("keep", ["encoding=keep"], public),
    ):
        words = [
            "--out",
            str(tmp_path / name),
            f"source.path={other_shapes}-images",
            "num_workers=1",
            *encoding,
        ]
        assert data_prep(["build", "--source", "folder", *words]) == 0
        config = write_tuning(tmp_path, pretrained, tmp_path / name)
        run_dir = tmp_path / f"{name}-run"
        finish(start_tuning(config, run_dir, UNTRACKED, "train.duration=2 steps", *recipe))
        card = Checkpoint.open(run_dir).card
        begun = Checkpoint.open(pretrained).card
        target = load_manifest(tmp_path / name)
        stats, head = (card.channel_mean, card.channel_std), final_state(run_dir)["head.weight"]
        assert stats == (
            (target.channel_mean, target.channel_std)
            if recipe
            else (begun.channel_mean, begun.channel_std)
        )
        if recipe:  # uniform within 1 / sqrt(inputs), with 32 inputs
            assert head.abs().max() <= 32**-0.5 and head.std() == pytest.approx(
                (3 * 32) ** -0.5, rel=0.15
            )
        assert (card.image_size, card.stored_crop, card.stored_interpolation) == (
            16,
            "center",
            "bicubic",
        )
        assert card.stored_size == (24 if name == "raw" else 16)


def test_seeds_are_runs_of_their_own_and_the_summary_is_theirs(
    pretrained: Path, other_shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    config, group = write_tuning(tmp_path, pretrained, other_shapes), tmp_path / "group"
    output = finish(start_tuning(config, group, "seeds=[0,5]", journal_only=True))
    for run_dir in (pretrained, group, group / "seed-0", group / "seed-5"):
        sync(run_dir)
    alone = tmp_path / "alone"
    finish(start_tuning(config, alone, "train.seed=5", UNTRACKED))
    one, two, by_itself = (
        final_state(path) for path in (group / "seed-0", group / "seed-5", alone)
    )
    assert all(torch.equal(two[name], by_itself[name]) for name in by_itself)
    assert not torch.equal(one["head.weight"], two["head.weight"])
    # a third seed is added and one is lost: two ranks train only these
    times = {
        path: path.stat().st_mtime_ns
        for path in group.glob("seed-*/checkpoints/*/model.safetensors")
    }
    assert len(times) == 2
    check_books(pretrained, other_shapes, group)
    shutil.rmtree(group / "seed-5")
    finish(start_tuning(config, group, "seeds=[0,5,6]", UNTRACKED, ranks=2))
    assert {path.parts[-4] for path in times if path.stat().st_mtime_ns == times[path]} == {
        "seed-0"
    }
    again = final_state(group / "seed-5")
    for name, tensor in by_itself.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-3, atol=1e-5)
    top1 = [result_of(group / f"seed-{seed}")["eval/top1"] for seed in (0, 5, 6)]
    result = result_of(group)
    assert result["num_runs"] == 3 and result["eval/top1"] == pytest.approx(statistics.fmean(top1))
    assert result["eval/top1_std"] == pytest.approx(float(np.std(top1, ddof=1)))
    assert "over 2 runs" in output
    made_of = {
        "weights_sha256": sha256_of(list_checkpoints(pretrained)[-1] / "model.safetensors"),
        "weights_step": 6,
    }
    assert all(each.items() >= made_of.items() for each in (result, *result["runs"].values()))
    # the source is trained further: new or lost seeds still begin from the first seed's weights
    later = write_folder(pretrained / "checkpoints" / "step-00000009", step=9)
    capsys.readouterr()
    for seeds in ("seeds=[0,5,6]", "seeds=[0,5,6,7]"):
        assert finetune(["tune", str(config), f"run_dir={group}", seeds, UNTRACKED]) == 2
        assert capsys.readouterr().err.startswith("finetune: pretrained: ")
    shutil.rmtree(later)


def check_books(pretrained: Path, dataset: Path, group: Path) -> None:
    """Check MLflow: the run of the weights, the group below it, the seeds below the group, and the
    model version."""
    client = MlflowClient(tracking_uri=f"sqlite:///{pretrained.parent}/mlflow.db")
    runs = {
        run.info.run_name: run
        for run in client.search_runs([client.search_experiments()[0].experiment_id])
    }
    runs = {name: run for name, run in runs.items() if not name.endswith(" pictures")}
    assert sorted(runs) == ["group", "maker", "seed-0", "seed-5"]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in runs.items()}
    maker, group_id = runs["maker"].info.run_id, runs["group"].info.run_id
    assert parents == {"maker": None, "group": maker} | dict.fromkeys(
        ("seed-0", "seed-5"), group_id
    )
    (version,) = client.search_model_versions("name = 'maker'")
    assert float(version.tags["tune/top1/shapes-b"]) == pytest.approx(
        result_of(group)["eval/top1"], abs=1e-4
    )
    assert (
        runs["group"].data.tags["task"] == "tune_seeds"
        and runs["seed-0"].data.tags["target"] == "shapes-b"
    )
    assert runs["seed-0"].data.tags["dataset"] == load_manifest(dataset).name


def test_folds_are_trained_on_alone(
    pretrained: Path, folded: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    dataset, bits = folded
    config, store = write_tuning(tmp_path, pretrained, dataset), tmp_path / "store"
    words = [
        "folds=true",
        UNTRACKED,
        "train.duration=1 steps",
        "seeds=[1]",
        f"checkpoint.remote=file://{store}",
    ]
    finish(start_tuning(config, tmp_path / "run", *words))
    with fails("empty", str(tmp_path / "run")):
        Checkpoint.open(tmp_path / "run")
    names = sorted(path.parent.name for path in (tmp_path / "run").glob("*/result.json"))
    assert names == [f"fold-{fold}-seed-1" for fold in range(3)]
    for fold in range(3):
        data = load_training_data(DataSettings(dataset=str(dataset), fold=fold))
        members = np.flatnonzero(bits[:, fold])
        assert data.num_samples == len(members) > 9
        profile = summary(data.parts[0])
        labels = open_split(dataset, data.parts[0].manifest, "train").labels[members]
        counts = [(labels == label).sum() for label in set(labels.tolist())]
        assert profile["num_samples"] == len(members)
        assert (profile["fewest_per_class"], profile["most_per_class"]) == (
            min(counts),
            max(counts),
        )
        assert read_run(tmp_path / "run" / f"fold-{fold}-seed-1").num_images == len(members)
        epochs, samples = data.order(seed=0, global_batch_size=8).locate(
            np.arange(2 * len(members))
        )
        for epoch in range(2):
            np.testing.assert_array_equal(np.sort(samples[epochs == epoch]), members)
    # on another disk; the remote lacks one run
    (store / "result.json").unlink()
    shutil.rmtree(store / "fold-1-seed-1")
    finish(start_tuning(config, tmp_path / "other", *words))
    assert result_of(tmp_path / "other")["eval/top1"] == result_of(tmp_path / "run")["eval/top1"]
    for name in names:
        one, two = (final_state(tmp_path / place / name) for place in ("run", "other"))
        assert one and all(torch.equal(two[each], one[each]) for each in one)


def test_folds_and_seeds_that_will_not_do(
    pretrained: Path,
    other_shapes: Path,
    folded: tuple[Path, np.ndarray],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    again = f"[{{dataset: {other_shapes}, split: val}}]"
    for dataset, words, *error in (
        (other_shapes, ["folds=true"], "folds", "conflict"),
        (folded[0], ["data.fold=3"], "data.fold", "unknown-name"),
        (folded[0], ["data.fold=1", "folds=true"], "folds", "conflict"),
        (other_shapes, ["seeds=[1,1]"], "seeds", "bad-value"),
        (other_shapes, ["data.eval_split=train"], "data.eval_split", "conflict"),
        (other_shapes, [f"data.extra_datasets={again}"], "data.eval_split", "conflict"),
    ):
        config = write_tuning(tmp_path, pretrained, dataset)
        assert (
            finetune(["tune", str(config), f"run_dir={tmp_path}/run", "--ranks", "2", *words]) == 2
        )
        said = capsys.readouterr().err
        assert printed_errors(said) == [tuple(error)] and len(said.splitlines()) == 1, said


def test_a_run_and_a_group_keep_their_places(
    pretrained: Path, other_shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = write_tuning(tmp_path, pretrained, other_shapes)
    kinds = permutations(([], ["seeds=[0,1]"], ["folds=true"]), 2)
    for number, (begun, asked) in enumerate(kinds):
        run_dir = tmp_path / f"run-{number}"
        run_dir.mkdir()
        settings = load_settings(
            TuneSettings, path=config, overrides=[f"run_dir={run_dir}", *begun]
        )
        (run_dir / "config.yaml").write_text(dump(settings))
        (run_dir / "result.json").write_text('{"eval/top1": 0.5, "step": 6}')
        assert finetune(["tune", str(config), f"run_dir={run_dir}", *asked]) == 2
        assert printed_errors(capsys.readouterr().err) == [("run_dir", "exists")]


def test_ranks_that_wait_for_another_start_end_well(
    pretrained: Path, other_shapes: Path, tmp_path: Path
) -> None:
    config, run_dir = write_tuning(tmp_path, pretrained, other_shapes), tmp_path / "run"
    with hold_run(run_dir, lock_wait_s=0):
        waiting = start_tuning(config, run_dir, "seeds=[0,1]", ranks=2)
        stop_while_it_waits(waiting, ": interrupted")
    assert not (run_dir / "checkpoints").exists() and not (run_dir / "tracking").exists()


def test_a_group_goes_on_wherever_it_was_interrupted(
    pretrained: Path, other_shapes: Path, tmp_path: Path
) -> None:
    """Seed 0 is finished, seed 1 has a checkpoint, and seed 2 has not begun."""
    config, group = write_tuning(tmp_path, pretrained, other_shapes), tmp_path / "group"
    (group / "seed-0").mkdir(parents=True)

    def asked(resume: str) -> TuneSettings:
        return load_settings(
            TuneSettings,
            path=config,
            overrides=[f"run_dir={group}", "seeds=[0,1,2]", f"resume={resume}"],
        )

    with fails("conflict", "resume"):
        check_resume_of(asked("must"), repeats_of(asked("must")))
    check_resume_of(asked("never"), repeats_of(asked("never")))
    (group / "seed-0" / "result.json").write_text("{}")
    check_resume_of(asked("must"), repeats_of(asked("must")))
    assert {each.resume for each in repeats_of(asked("must"))} == {"auto"}
    check_resume_of(asked("never"), repeats_of(asked("never")))
    (group / "seed-1" / "checkpoints" / "step-00000001").mkdir(parents=True)
    with fails("exists", "resume") as caught:
        check_resume_of(asked("never"), repeats_of(asked("never")))
    assert "seed-1" in str(caught.value)


def test_pictures_are_fed_as_to_the_checkpoint_unless_another_filter_is_asked_for(
    pretrained: Path,
) -> None:
    card = Checkpoint.open(pretrained).card.model_copy(update={"fed_interpolation": "area"})
    words = [
        f"pretrained={pretrained}",
        "run_dir=x",
        "data.dataset=y",
        "train={duration: 1 step, global_batch_size: 2}",
    ]
    for more, expected in (([], "area"), (["augment.crop_interpolation=bicubic"], "bicubic")):
        training = load_settings(TuneSettings, path=None, overrides=[*words, *more]).as_training(
            card
        )
        assert training.augment.crop_interpolation == training.augment.plain_filter == expected


def test_layers_further_from_the_head_learn_slower() -> None:
    model = build_model(MlpSpec(kind="mlp", depth=3, width=4), num_classes=3, image_size=8)
    settings = OptimizerSettings(lr=1.0, layer_decay=0.5, head_lr_scale=10.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, settings)
    scales = {
        names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]
    }
    assert scales.keys() == set(names.values()) and {"stem.weight", "head.weight"} <= scales.keys()
    expected = {"stem": 0.125, "blocks.0": 0.25, "blocks.1": 0.5, "blocks.2": 1.0, "head": 10.0}
    for name, scale in scales.items():
        assert scale == next(
            value for prefix, value in expected.items() if name.startswith(prefix)
        ), name
