"""`finetune evaluate` is exact on any number of ranks, equals plain computations for single images,
and never overwrites results."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor

from analysis.report import collect, draw, rows_of
from data_prep.build.merge import write_annotation
from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from finetune.cli import main
from finetune.evaluate.config import Evaluation
from finetune.evaluate.evaluate import evaluate_checkpoint
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batch
from pretrain.data.reader import Places, ShardReader, Unreadable, open_split
from pretrain.loop.evaluate import evaluate
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from tests.conftest import Capture, Command, Patch
from tests.data_prep.samples import change_manifest
from tests.finetune.tiny import (
    ALONE,
    MEAN,
    STD,
    evaluation_settings,
    judge,
    model_of,
    plain_logits,
    predictions,
    spoil,
    write_folder,
)
from tests.ranks import run_ranks
from tests.training import finish, start, write_config

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def mixed(shapes: Path, other_shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on both datasets."""
    place = tmp_path_factory.mktemp("mixed")
    config = write_config(place, dataset=other_shapes)
    also = f"data.extra_datasets=[{{dataset: {shapes}}}]"
    finish(
        start(
            config,
            place / "run",
            "train.duration=6 steps",
            "train.eval_every=6 steps",
            also,
            ranks=1,
        )
    )
    return place / "run"


def test_scores_and_rows_are_those_of_a_plain_computation_and_of_training(
    folder: Path, shapes: Path, tmp_path: Path
) -> None:
    logits, labels = plain_logits(folder, shapes)
    chances = logits.double().softmax(dim=1).numpy()
    result = judge(folder, shapes, tmp_path / "run", local_batch_size=7)
    assert result["num_samples"] == 72 and result["num_unreadable"] == 0
    assert result["eval/top1"] == pytest.approx(
        sk.accuracy_score(labels, chances.argmax(1)), abs=1e-9
    )
    assert result["eval/top5"] == pytest.approx(
        sk.top_k_accuracy_score(labels, chances, k=5), abs=1e-9
    )
    assert result["eval/loss"] == pytest.approx(sk.log_loss(labels, chances), rel=1e-5)
    assert result["eval/class_top1"] == pytest.approx(
        sk.balanced_accuracy_score(labels, chances.argmax(1))
    )

    reader = open_split(shapes, load_manifest(shapes), "val")
    augmentation = views_of(AugmentSettings(), seed=0)
    with torch.no_grad():
        trained = evaluate(
            model_of(folder),
            reader,
            augmentation,
            local_batch_size=20,
            world=ALONE,
            stop=StopFlag(),
        )
    assert (result["eval/top1"], result["eval/top5"]) == (trained.top1, trained.top5)
    assert result["eval/loss"] == pytest.approx(trained.loss, rel=1e-6)

    file = pq.ParquetFile(tmp_path / "run" / "predictions.parquet")
    names = [
        "sample",
        "shard",
        "key",
        "label",
        "label_name",
        "answers",
        "answer_names",
        "probabilities",
        "loss",
    ]
    assert file.schema_arrow.names == [*names, "entropy", "right"]
    assert (
        file.schema_arrow.metadata[b"content_hash"].decode() == load_manifest(shapes).content_hash
    )
    assert len(file.schema_arrow.metadata[b"weights_sha256"]) == 64
    rows, classes = predictions(tmp_path / "run"), load_manifest(shapes).classes
    assert rows["sample"] == list(range(72)) and rows["label"] == labels.tolist()
    assert list(zip(rows["shard"], rows["key"], strict=True)) == reader.names(np.arange(72))
    top = logits.softmax(dim=1).topk(5, dim=1)
    assert rows["answers"] == top.indices.tolist() and len(set(map(tuple, rows["answers"]))) > 5
    np.testing.assert_allclose(rows["probabilities"], top.values, rtol=1e-4)
    assert rows["label_name"] == [classes[label] for label in labels]
    assert rows["answer_names"] == [[classes[number] for number in row] for row in rows["answers"]]
    assert rows["right"] == [
        row[0] == label for row, label in zip(rows["answers"], labels, strict=True)
    ]


def views_of(settings: AugmentSettings, *, seed: int) -> Augmentation:
    normalization, cpu = Normalization(MEAN, STD), torch.device("cpu")
    return Augmentation(
        settings,
        seed=seed,
        image_size=16,
        normalization=normalization,
        device=cpu,
        dtype=torch.float32,
    )


@torch.no_grad()
def mean_over_views(folder: Path, dataset: Path, *, views: int, seed: int) -> list[Tensor]:
    """Return the mean softmax of the plain image and of 0 to `views` views, computed for single
    images; (N, K) after each."""
    model = model_of(folder)
    augmentation = views_of(
        AugmentSettings(crop_scale=(0.4, 1.0), crop_ratio=(1.0, 1.0)), seed=seed
    )
    reader = open_split(dataset, load_manifest(dataset), "val")
    sums, means = torch.zeros(reader.num_samples, 8, dtype=torch.float64), []
    for view in range(-1, views):
        for sample in range(reader.num_samples):
            ids = np.array([sample])
            batch = Batch(
                reader.images(ids), torch.zeros(1, dtype=torch.long), np.array([view]), ids, ids
            )
            pictures = (
                augmentation.plain(batch) if view < 0 else augmentation.prepare(batch)
            ).images_BCHW
            sums[sample] += model(pictures)[0].double().softmax(dim=0)
        means.append(sums / (view + 2))
    return means


def test_views_are_averaged_as_by_hand_and_pictures_read_once(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    means = mean_over_views(folder, shapes, views=5, seed=3)
    labels = torch.from_numpy(plain_logits(folder, shapes)[1])
    seen: list[int] = []
    read = ShardReader.read

    def counting(self: ShardReader, places: Places, batch_BHWC: Tensor) -> list[Unreadable]:
        seen.extend(places.ids.tolist())
        return read(self, places, batch_BHWC)

    monkeypatch.setattr(ShardReader, "read", counting)
    for size in (7, 24):
        seen.clear()
        result = judge(
            folder,
            shapes,
            tmp_path / str(size),
            num_views=5,
            include_plain=True,
            seed=3,
            local_batch_size=size,
        )
        assert size == 7 or sorted(seen) == list(range(72))  # the last batch is padded
        top, rows = means[-1].topk(5, dim=1), predictions(tmp_path / str(size))
        assert rows["answers"] == top.indices.tolist()
        np.testing.assert_allclose(rows["probabilities"], top.values, rtol=1e-3)
        chosen = means[-1].gather(1, labels.unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(rows["loss"], -chosen.log(), rtol=1e-3)
        curve = {moment["num_views"]: moment["top1"] for moment in result["curve"]}
        right = {
            count: float((means[count - 1].argmax(1) == labels).double().mean())
            for count in (1, 2, 5, 6)
        }
        assert curve == pytest.approx(right) and len(set(curve.values())) > 1
        assert result["eval/top1"] == curve[6]


def on_ranks(world: World, pretrained: str, dataset: str, run_dir: str) -> float | None:
    settings = evaluation_settings(
        Path(pretrained), Path(dataset), Path(run_dir), num_views=2, local_batch_size=5
    )
    result = evaluate_checkpoint(Evaluation.of(settings), world)
    return None if result is None else result["eval/top1"]


@pytest.mark.processes
def test_three_ranks_give_the_table_of_one(folder: Path, shapes: Path, tmp_path: Path) -> None:
    """72 images in batches of 5 on 3 ranks: in the last round the ranks have 5, 5 and 2 images."""
    one = judge(folder, shapes, tmp_path / "one", num_views=2)
    found = run_ranks(on_ranks, str(folder), str(shapes), str(tmp_path / "three"), num_ranks=3)
    assert found == [one["eval/top1"], None, None]
    figures = {path.stem for path in (tmp_path / "three").glob("*.png")}
    assert figures == {"calibration", "confusion"}
    alone, together = predictions(tmp_path / "one"), predictions(tmp_path / "three")
    assert together["sample"] == list(range(72))
    for name, column in alone.items():
        if name in ("probabilities", "loss", "entropy"):
            np.testing.assert_allclose(together[name], column, rtol=1e-4)
        else:
            assert together[name] == column, name


@pytest.mark.processes
def test_the_command_prints_its_result_and_then_the_stored_one(
    command: Command, folder: Path, shapes: Path, capsys: Capture
) -> None:
    place = Path(shutil.copytree(folder, folder.parent / "copy"))
    words = ["evaluate", f"pretrained={place}", f"dataset={shapes}", "tracking.enabled=false"]
    first = command("finetune", *words, "local_batch_size=7", "--json", "--ranks", "2")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    expected = float(
        (
            plain_logits(folder, shapes)[0].argmax(1).numpy() == plain_logits(folder, shapes)[1]
        ).mean()
    )
    assert result["num_samples"] == 72 and result["eval/top1"] == pytest.approx(expected, abs=1e-9)
    run_dir = Path(result["run_dir"])
    assert run_dir.parent == place.parent / "copy-evaluations" and run_dir.name.startswith(
        "shapes-a-val-"
    )
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    assert main(words) == 0  # another batch size is the same evaluation
    said = capsys.readouterr().out
    assert "This result is from an earlier run" in said and f"{expected:.2%}" in said
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before


def test_real_labels_are_counted_by_hand(folder: Path, shapes: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(shapes, tmp_path / "shapes"))
    tops = plain_logits(folder, shapes)[0].argmax(dim=1).numpy()
    bits = np.zeros((72, 8), np.bool_)
    bits[0, tops[0]] = bits[1, (tops[1] + 1) % 8] = bits[71, tops[71]] = True
    bits[2, :] = True
    bits[3, (tops[3] + 1) % 8] = bits[3, (tops[3] + 2) % 8] = (
        True  # correct: 0, 2, 71; wrong: 1, 3; the other 67 have no label
    )
    fact = write_annotation(directory, "val-real", bits).model_dump()
    change_manifest(
        directory, lambda manifest: manifest["splits"]["val"]["annotations"].update(real=fact)
    )
    assert judge(folder, directory, tmp_path / "run", local_batch_size=50)[
        "eval/real"
    ] == pytest.approx(3 / 5)


def test_what_does_not_decode_is_left_out_and_named(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patches:
        spoil(patches, 11)
        result = judge(folder, shapes, tmp_path / "run", local_batch_size=7)
    logits, labels = plain_logits(folder, shapes)
    kept = np.arange(72) != 11
    right = logits.argmax(dim=1).numpy() == labels
    assert (result["num_samples"], result["num_unreadable"]) == (71, 1)
    assert result["eval/top1"] == pytest.approx(right[kept].mean(), abs=1e-9)
    shard, key = open_split(shapes, load_manifest(shapes), "val").names(np.array([11]))[0]
    assert result["unreadable"] == [f"{shard}/{key}"]
    assert predictions(tmp_path / "run")["sample"] == np.arange(72)[kept].tolist()


@pytest.mark.processes
def test_a_mixture_is_judged_on_each_of_its_datasets(
    mixed: Path, shapes: Path, other_shapes: Path, tmp_path: Path
) -> None:
    card = Checkpoint.open(mixed).card
    assert len(card.classes) == 13 and card.classes[5:] == load_manifest(shapes).classes
    trained = json.loads((mixed / "result.json").read_text())
    for dataset in (other_shapes, shapes):
        result = judge(mixed, dataset, None)
        logits, labels = plain_logits(mixed, dataset)
        answers = [card.classes[number] for number in logits.argmax(dim=1).tolist()]
        names = [load_manifest(dataset).classes[label] for label in labels.tolist()]
        expected = np.mean([answer == name for answer, name in zip(answers, names, strict=True)])
        assert result["eval/top1"] == pytest.approx(expected, abs=1e-9)
        assert Path(result["run_dir"]).parent == mixed / "evaluations"
        rows = predictions(Path(result["run_dir"]))
        assert rows["label_name"] == names and [row[0] for row in rows["answer_names"]] == answers
        counts = pq.read_table(Path(result["run_dir"]) / "confusion.parquet").to_pydict()
        strangers = sum(answer not in load_manifest(dataset).classes for answer in answers)
        pairs = zip(counts["answer"], counts["count"], strict=True)
        assert strangers == sum(count for answer, count in pairs if answer == "(other)")
        if dataset == other_shapes:  # training evaluates on the first of the mixture
            assert trained["eval/top1"] == pytest.approx(expected, abs=1e-9)
    runs = collect(mixed.parent)
    assert [run.task for run in runs] == ["pretrain", "evaluate", "evaluate"]
    assert {run.dataset for run in runs[1:]} == {shapes, other_shapes}
    assert all(run.model_name == "B-2/Wi-32" and run.top1 is not None for run in runs[1:])
    for some, bars in ((runs, 0), (runs[1:], 2)):
        figure = draw(some, rows_of(some))
        assert sum(len(axes.patches) for part in figure.subfigs for axes in part.axes) == bars


def test_pixels_are_fed_as_the_card_says_and_other_squares_reported(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    """INTER_AREA doubles each pixel at half the model's size."""
    source = {
        "stored_crop": "longer_side",
        "stored_interpolation": "area",
        "fed_interpolation": "area",
    }
    area, plain = (
        write_folder(tmp_path / name, shapes, **facts) for name, facts in (("a", source), ("b", {}))
    )
    small = tmp_path / "small"
    words = ["build", "--source=folder", f"--out={small}", f"source.path={shapes}-images"]
    assert data_prep([*words, "image_size=8", "num_workers=1"]) == 0
    reader = open_split(small, load_manifest(small), "val")
    doubled = (
        reader.images(np.arange(reader.num_samples))
        .repeat_interleave(2, dim=1)
        .repeat_interleave(2, dim=2)
    )
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        logits = model_of(area)((doubled.permute(0, 3, 1, 2).float() / 255 - mean) / std)
    loss = float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(reader.labels)))
    result, other = (judge(each, small, None) for each in (area, plain))
    assert result["eval/loss"] == pytest.approx(loss, rel=1e-4) != other["eval/loss"]
    assert result["identity"] != other["identity"]  # although the weights are equal
    viewed = judge(area, small, None, num_views=1)
    assert viewed["augment"]["crop_interpolation"] == "area"
    for folder_, told in ((area, True), (plain, False)):
        assert (
            main(
                ["evaluate", f"pretrained={folder_}", f"dataset={small}", "tracking.enabled=false"]
            )
            == 0
        )
        said = capsys.readouterr().err
        assert ("center" in said and "longer_side" in said) == told


@pytest.mark.processes
def test_training_pictures_are_warned_of(
    mixed: Path, folder: Path, shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    judge(mixed, shapes, tmp_path / "run", split="train")
    words = [
        "evaluate",
        f"pretrained={mixed}",
        f"dataset={shapes}",
        f"run_dir={tmp_path}/run",
        "tracking.enabled=false",
    ]
    assert main([*words, "split=train"]) == 0
    assert "trained on these images" in capsys.readouterr().err
    before = (tmp_path / "run" / "result.json").read_bytes()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "split" in said and "trained on" not in said
    assert (tmp_path / "run" / "result.json").read_bytes() == before
    assert Evaluation.of(evaluation_settings(folder, shapes, None, split="train")).warning() is None
