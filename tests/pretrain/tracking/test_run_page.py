"""The run page and event log of a real run at ZeRO 3, where weights are sharded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from data_prep.manifest import load_manifest
from pretrain.checkpoints.run import list_checkpoints
from pretrain.config import DataSettings
from pretrain.data.datasets import load_training_data
from pretrain.tracking.pictures import draw_filters, strongest_filters
from pretrain.tracking.run_tags import datasets_of, shown_command, slurm_tags, target_of, with_note
from tests.training import finish, start, write_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run of six steps on two ranks."""
    folder = tmp_path_factory.mktemp("page")
    words = [
        "engine.zero_stage=3",
        "train.duration=6 steps",
        "train.eval_every=3 steps",
        "train.log_every_steps=2",
    ]
    tracking = "tracking={enabled: true, peak_teraflops: 0.5}"
    finish(
        start(
            write_config(folder, dataset=shapes),
            folder / "tiny",
            *words,
            tracking,
            journal_only=True,
        ),
        timeout_s=170,
    )
    return folder / "tiny"


def events(run_dir: Path, kind: str) -> list[dict[str, object]]:
    lines = (run_dir / "tracking" / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.processes
def test_the_journal_has_what_a_researcher_looks_for(run_dir: Path) -> None:
    (begun,) = events(run_dir, "start")
    params, tags = begun["params"], begun["tags"]
    assert isinstance(params, dict) and isinstance(tags, dict)
    assert params["optimizer.lr"] == 1e-3 and params["num_ranks"] == 2
    assert (
        tags["mlflow.source.git.commit"]
        and tags["hardware"]
        and "The same command resumes" in tags["mlflow.note.content"]
    )
    assert [event["path"] for event in events(run_dir, "artifact")] == [
        str(run_dir / "config.yaml")
    ]
    assert events(run_dir, "params")[0]["params"] == {
        "peak_teraflops": "0.5 per rank (tracking.peak_teraflops)",
        "num_cpu_threads": 1,
    }
    told: dict[str, list[object]] = {}
    for event in events(run_dir, "metrics"):
        assert isinstance(event["values"], dict)
        for name in event["values"]:
            told.setdefault(name, []).append(event["step"])
    for name in ("loss", "gradient_norm", "lr", "samples", "bad_samples"):
        assert told[f"train/{name}"] == [2, 4, 6], name
    for name in (
        "usage/images_per_s",
        "usage/mfu",
        "usage/data_wait_fraction",
        "usage/peak_rss_gb",
    ):
        assert told[name] == [2, 4, 6], name
    assert told["eval/top1"] == told["eval/top5"] == told["eval/loss"] == [3, 6]
    assert [event["status"] for event in events(run_dir, "end")] == ["FINISHED"]


@pytest.mark.processes
def test_pictures_are_those_of_the_batch_and_of_the_weights(run_dir: Path) -> None:
    told = sorted((str(event["key"]), event["step"]) for event in events(run_dir, "image"))
    assert told == [("fed", 0), *(("first_layer", step) for step in (0, 3, 6))]
    (last,) = [event for event in events(run_dir, "image") if event["step"] == 6]
    stem = load_file(list_checkpoints(run_dir)[-1] / "model.safetensors")["stem.weight"]
    expected = draw_filters(
        strongest_filters(stem, side=16, count=25),
        columns=5,
        title="tiny, step 6: the strongest filters of the first layer",
    )
    with Image.open(str(last["path"])) as drawn:
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(expected))


def test_the_strongest_filters_come_first() -> None:
    weight = torch.zeros(3, 3 * 2 * 2)
    weight[0, 0] = -1.0  # a color at the upper left; the other colors have 0 there
    weight[1, :] = 2.0
    weight[2, [3, 11]] = torch.tensor([1.0, -3.0])  # two colors at the lower right
    filters = strongest_filters(weight, side=2, count=2)
    np.testing.assert_array_equal(filters, [[[2, 2], [2, 2]], [[0, 0], [0, -3]]])


SNAPSHOT = "/home/me/wm/jobs/snapshots/0a1b"


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("train.duration=2 epochs", "'train.duration=2 epochs'"),
        ("data.storage={key: secret}", "data.storage=..."),
        (f"{SNAPSHOT}/configs/pretrain/x.yaml", "configs/pretrain/x.yaml"),
        (f"{SNAPSHOT}/given/home/me/wm/mine.yaml", "mine.yaml"),
        (f"{SNAPSHOT}/given/home/me/other.yaml", "/home/me/other.yaml"),
        (f"note={SNAPSHOT}/given/a.yaml", f"note={SNAPSHOT}/given/a.yaml"),
    ],
)
def test_a_command_is_shown_as_it_was_typed_without_secrets(word: str, shown: str) -> None:
    command = ["/somewhere/pretrain/__main__.py", "train", word]
    assert shown_command(command) == f"pretrain train {shown}"


def test_a_start_on_slurm_says_its_job_and_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert slurm_tags() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert slurm_tags() == {"slurm.job_id": "17", "slurm.nodes": "n[1-2]"}
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    tags = {
        "mlflow.source.name": "pretrain train x",
        "mlflow.source.git.commit": "abc",
    } | slurm_tags()
    note = with_note(tags, title="T", run_dir=Path("/r"))["mlflow.note.content"]
    assert note == "T\n\nIn `/r`, by `pretrain train x`, code abc; on SLURM: job 15_3 on n[1-2]"


def test_fashion_mnist_is_not_called_mnist(shapes: Path) -> None:
    source = {"kind": "mnist", "variant": "fashion"}
    manifest = load_manifest(shapes).model_copy(update={"source": source})
    assert target_of(manifest) == manifest.name


def test_datasets_are_named_with_their_digest_and_a_summary(shapes: Path) -> None:
    train, val = datasets_of(load_training_data(DataSettings(dataset=str(shapes))))
    whole = load_manifest(shapes).content_hash
    assert (train["context"], val["context"]) == ("training", "evaluation")
    assert train["digest"] == whole[:32] and len(train["digest"]) <= 36
    assert json.loads(train["source"]) == {"uri": str(shapes)}
    profile = json.loads(train["profile"])
    assert (profile["num_samples"], profile["num_classes"], profile["fewest_per_class"]) == (
        240,
        8,
        30,
    )
    assert profile["content_hash"] == whole
