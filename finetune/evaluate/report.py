"""Files of an evaluation. Each file is written atomically.

predictions.parquet   one row for each image that decodes, in the order of the split
per_class.csv         one row for each class, the lowest accuracy first
confusion.parquet     label, prediction and count of each pair that occurs
confusion.png, calibration.png
result.json           written last
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from data_prep.images.lettering import legible, short
from data_prep.publish import atomic_file, write_atomic
from finetune.evaluate.config import Evaluation
from finetune.evaluate.scoring import (
    NUM_BINS,
    OTHER,
    Answers,
    calibration,
    classes_of,
    confusion_matrix,
    confusion_of,
    curve_of,
    predictions_by_class,
    scores_of,
)
from finetune.looks import BLUE, GRAY, RED, looks, save
from finetune.session import register
from pretrain.checkpoints.run import save_result
from pretrain.data.reader import ShardReader
from pretrain.data.real_labels import RealLabels
from pretrain.ranks.hangs import PROGRESS
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import Tracker

NUM_CONFUSED, NUM_EXTREME, NUM_NAMED = 30, 10, 20
"""Largest numbers of entries in result.json: confused class pairs, worst (and best) classes,
undecodable images."""
ROWS_PER_GROUP = 65_536
MOST_NAMED, MOST_SHOWN, NUM_BLOCKS = 40, 200, 100
"""Largest numbers of classes that the confusion figure shows with names, and with one cell each.
More classes are merged into NUM_BLOCKS blocks."""


def report(
    evaluation: Evaluation,
    answers: Answers,
    reader: ShardReader,
    tracker: Tracker,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Write all files, record them in MLflow, and return the result."""
    PROGRESS.mark("writing the results")
    (part,) = reader.parts
    run_dir, settings, manifest = evaluation.run_dir, evaluation.settings, part.manifest
    names, numbers = manifest.classes, part.classes or range(len(manifest.classes))
    rows = predictions_by_class(answers, names=names, numbers=numbers)
    confusion, classes = confusion_of(rows), classes_of(rows, names=names, numbers=numbers)
    facts = {
        "weights_sha256": evaluation.checkpoint.sha256,
        "content_hash": manifest.content_hash,
        "dataset": manifest.name,
        "split": part.split,
    }
    paths = [
        run_dir / name for name in ("predictions.parquet", "per_class.csv", "confusion.parquet")
    ]
    write_predictions(paths[0], answers, reader, classes=evaluation.card.classes, facts=facts)
    write_atomic(paths[1], classes.to_csv(float_format="%.6f", lineterminator="\n").encode())
    _write_parquet(paths[2], pa.Table.from_pandas(confusion, preserve_index=False))
    title = f"{evaluation.card.model.label} on {manifest.name}, {part.split}"
    if largest := part.content.largest_class:
        title += f"\nclass mean {classes['top1'].mean():.1%}, largest class {largest:.1%}"
    paths += draw(run_dir, answers, confusion, names=names, title=title)

    images_per_s = reader.num_samples / seconds
    result = _result(evaluation, answers, reader, confusion, classes) | facts
    result |= {
        "seconds": seconds,
        "images_per_s": images_per_s,
        "views_per_s": images_per_s * len(settings.view_numbers),
    }
    scores = {name: value for name, value in result.items() if name.startswith("eval/")}
    tracker.metrics(scores, step=evaluation.card.step)
    for moment in result["curve"]:
        metrics = {f"views/{name}": moment[name] for name in ("top1", "loss")}
        tracker.metrics(metrics, step=moment["num_views"])
    for path in paths:  # only our files: a user may keep others in the directory
        tracker.artifact(path, folder="evaluation")
    name = f"evaluate/top1_{settings.num_views}views" if settings.num_views else "evaluate/top1"
    target = f"{target_of(manifest)}-{part.split}"
    register(tracker, evaluation.checkpoint, {name: result["eval/top1"]}, target=target)
    return save_result(run_dir, result)


def _result(
    evaluation: Evaluation,
    answers: Answers,
    reader: ShardReader,
    confusion: pd.DataFrame,
    classes: pd.DataFrame,
) -> dict[str, Any]:
    settings, (part,), curve = evaluation.settings, reader.parts, curve_of(answers)
    scores = scores_of(answers) | {"class_top1": float(classes["top1"].mean())}
    num_answers = len(evaluation.card.classes)
    real = RealLabels.of(part, num_answers=num_answers, device=torch.device("cpu"))
    if real is not None:
        tops_N = torch.from_numpy(answers.answers_NA[:, 0].copy())
        is_counted_N = torch.ones(len(answers), dtype=torch.bool)
        right, number = real.count(tops_N, answers.samples_N, is_counted_N).tolist()
        scores |= {"real": right / number} if number else {}
    ranked = [(name, top1) for name, top1 in classes["top1"].dropna().items()]
    wrong = confusion[confusion["label"] != confusion["answer"]]
    unread = np.setdiff1d(np.arange(reader.num_samples), answers.samples_N, assume_unique=True)
    return {f"eval/{name}": value for name, value in scores.items()} | {
        "identity": evaluation.identity,
        "model": evaluation.card.model.label,
        "pretrained": evaluation.checkpoint.origin or str(evaluation.checkpoint.directory),
        "step": evaluation.card.step,
        "num_classes": len(classes),
        "largest_class": part.content.largest_class,
        "run_dir": str(evaluation.run_dir),
        "num_samples": len(answers),
        "num_unreadable": len(unread),
        "unreadable": ["/".join(name) for name in reader.names(unread[:NUM_NAMED])],
        "num_views": settings.num_views,
        "num_averaged": len(settings.view_numbers),
        "augment": settings.augment.model_dump(mode="json") if settings.num_views else None,
        "augment_from": evaluation.augment_from,
        "plain_top1": curve[0]["top1"] if settings.include_plain else evaluation.plain_top1(),
        "curve": curve,
        "worst_classes": ranked[:NUM_EXTREME],
        "best_classes": ranked[::-1][:NUM_EXTREME],
        "most_confused": wrong[:NUM_CONFUSED].to_numpy().tolist(),
    }


def write_predictions(
    path: Path,
    answers: Answers,
    reader: ShardReader,
    *,
    classes: Sequence[str],
    facts: Mapping[str, str],
) -> None:
    """Write predictions.parquet. `classes`: class names of the model. `facts`: metadata of the
    file."""
    names, tops_NA = pa.array(classes, pa.string()), answers.answers_NA
    tops, places = pa.array(tops_NA.ravel(), pa.int32()), reader.names(answers.samples_N)
    ends = pa.array(np.arange(len(answers) + 1) * tops_NA.shape[1], pa.int32())
    probabilities = pa.array(answers.probabilities_NA.ravel(), pa.float32())
    columns = {
        "sample": pa.array(answers.samples_N),
        "shard": pa.array([shard for shard, _ in places], pa.string()).dictionary_encode(),
        "key": pa.array([key for _, key in places], pa.string()),
        "label": pa.array(answers.labels_N, pa.int32()),
        "label_name": names.take(pa.array(answers.labels_N)),
        "answers": pa.ListArray.from_arrays(ends, tops),
        "answer_names": pa.ListArray.from_arrays(ends, names.take(tops)),
        "probabilities": pa.ListArray.from_arrays(ends, probabilities),
        "loss": pa.array(answers.losses_N),
        "entropy": pa.array(answers.entropies_N),
        "right": pa.array(answers.is_right),
    }
    _write_parquet(path, pa.table(columns, metadata=dict(facts)))


def _write_parquet(path: Path, table: pa.Table) -> None:
    with atomic_file(path) as file:
        pq.write_table(table, file, row_group_size=ROWS_PER_GROUP, compression="zstd")


def draw(
    run_dir: Path, answers: Answers, confusion: pd.DataFrame, *, names: Sequence[str], title: str
) -> list[Path]:
    with looks(title, *(names if len(names) <= MOST_NAMED else ())):
        title, right_N = legible(title), answers.is_right
        subtitle = f"{title}\ntop-1 {right_N.mean():.1%} of {len(answers):,} images"
        bins = calibration(answers.probabilities_NA[:, 0], right_N)
        figures = {
            "confusion": draw_confusion(confusion, names, title=subtitle),
            "calibration": draw_calibration(bins, title=title),
        }
        for name, figure in figures.items():
            save(figure, run_dir / f"{name}.png")
    return [run_dir / f"{name}.png" for name in figures]


def draw_confusion(confusion: pd.DataFrame, names: Sequence[str], *, title: str) -> Figure:
    """Draw one row for each true class. Colors show fractions of the class's images."""
    size = len(names)
    num_blocks = size if size <= MOST_SHOWN else NUM_BLOCKS
    counts = confusion_matrix(confusion, names, size=num_blocks)
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    is_named = size <= MOST_NAMED
    side = float(np.clip(3.2 + 0.24 * size, 4.5, 12)) if is_named else 8.0
    figure = Figure(figsize=(side + 1.0, side))
    axes = figure.add_subplot(title=title, xlabel="prediction", ylabel="true class")
    right = size * counts.shape[1] / num_blocks
    # a square-root scale shows rare pairs
    image = axes.imshow(
        fractions, cmap="Blues", norm=PowerNorm(0.5, 0, 1), extent=(0, right, size, 0)
    )
    figure.colorbar(image, ax=axes, shrink=0.8, format="{x:.0%}", label="fraction of the class")
    if is_named:
        labels = [legible(short(name, length=20)) for name in names]
        columns = [*labels, OTHER][: counts.shape[1]]
        axes.set_yticks(np.arange(size) + 0.5, labels)
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90)
    elif counts.shape[1] > num_blocks:
        axes.set_xlabel("prediction (last column: other classes of the model)")
    return figure


def draw_calibration(bins: pd.DataFrame, *, title: str) -> Figure:
    figure = Figure(figsize=(5.2, 5.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    edges, width = bins.index / NUM_BINS, 1 / NUM_BINS
    above.bar(edges, bins["accuracy"].fillna(0), width, align="edge", color=BLUE, label="accuracy")
    above.plot(
        bins["confidence"], bins["accuracy"], "o", color=RED, label="mean confidence of a bin"
    )
    above.plot([0, 1], [0, 1], color="black", linestyle=":", label="confidence = accuracy")
    above.set(title=title, ylabel="accuracy", ylim=(0, 1))
    above.legend(loc="upper left")
    below.bar(edges, bins["count"], width, align="edge", color=GRAY)
    below.set(ylabel="images", xlabel="confidence: probability of the prediction", xlim=(0, 1))
    return figure
