"""What an evaluation leaves of its table: files with a row for each picture, class or pair of
classes, pictures, the result, and its record in MLflow. Each file appears whole.

predictions.parquet   a row per picture that decodes, in the split's order
per_class.csv         a row per class of the dataset, the worst first
confusion.parquet     (label, answer, count), where the count is not 0
confusion.png         who is taken for whom
calibration.png       whether the confidence is earned
views.png             what more views bring
result.json           written last
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from data_prep.images.lettering import legible, short
from data_prep.publish import atomic_file, write_atomic
from finetune.evaluate.config import Evaluation
from finetune.evaluate.scoring import (
    OTHER,
    Answers,
    Calibration,
    Confusion,
    Moment,
    PerClass,
    calibration,
    moments,
    scores_of,
)
from finetune.looks import BLUE, GREY, RED, looks, save
from finetune.session import register
from pretrain.checkpoints.run import save_result
from pretrain.data.reader import ShardReader
from pretrain.data.real_labels import RealLabels
from pretrain.ranks.hangs import PROGRESS
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import Tracker

NUM_CONFUSED, NUM_EXTREME, NUM_NAMED = 30, 10, 20
"""In the result: pairs of classes, worst and best classes, pictures that do not decode."""
ROWS_PER_GROUP = 65_536
MOST_NAMED, MOST_COUNTED, MOST_SHOWN, NUM_BLOCKS = 40, 12, 200, 100
"""So many classes have their names written; have their shares written into the cells; have a cell
each. Else: so many blocks."""


def report(
    evaluation: Evaluation,
    answers: Answers,
    reader: ShardReader,
    tracker: Tracker,
    *,
    seconds: float,
) -> dict[str, Any]:
    """The result; all of it from the table."""
    (part,) = reader.parts
    run_dir, settings, manifest = evaluation.run_dir, evaluation.settings, part.manifest
    numbers = part.classes or range(len(manifest.classes))
    confusion = Confusion.of(answers, names=manifest.classes, numbers=numbers)
    per_class = PerClass.of(answers, confusion, numbers=numbers)
    facts = {"weights_sha256": evaluation.checkpoint.sha256, "content_hash": manifest.content_hash}
    facts |= {"dataset": manifest.name, "split": part.split}
    PROGRESS.mark("writing the results")
    predictions, classes, pairs = (
        run_dir / name for name in ("predictions.parquet", "per_class.csv", "confusion.parquet")
    )
    write_predictions(predictions, answers, reader, classes=evaluation.card.classes, facts=facts)
    write_per_class(classes, per_class, confusion, numbers=numbers)
    write_confusion(pairs, confusion)
    title, largest = (
        f"{evaluation.card.model.label} on {manifest.name}, {settings.data.split}",
        part.content.largest_class,
    )
    second = (
        f"\nclass mean {np.nanmean(per_class.top1_K):.1%}, largest class {largest:.1%} of the"
        " images"
        if largest
        else ""
    )
    pictures = draw(run_dir, answers, confusion, title=title, second_line=second)
    images_per_s = reader.num_samples / seconds
    result = _result(evaluation, answers, reader, confusion, per_class) | facts
    result |= {
        "seconds": seconds,
        "images_per_s": images_per_s,
        "views_per_s": images_per_s * len(settings.view_numbers),
    }
    scores = {name: value for name, value in result.items() if name.startswith("eval/")}
    tracker.metrics(scores, step=evaluation.card.step)
    for num_views, top1, loss in moments(answers):
        tracker.metrics({"views/top1": top1, "views/loss": loss}, step=num_views)
    for path in (predictions, classes, pairs, *pictures):  # a user may keep other files there
        tracker.artifact(path, folder="evaluation")
    views = f"_{settings.views}views" if settings.views else ""
    found = {f"evaluate/top1{views}": result["eval/top1"]}
    register(tracker, evaluation.checkpoint, found, target=f"{target_of(manifest)}-{part.split}")
    return save_result(run_dir, result)


def _result(
    evaluation: Evaluation,
    answers: Answers,
    reader: ShardReader,
    confusion: Confusion,
    per_class: PerClass,
) -> dict[str, Any]:
    settings = evaluation.settings
    scores = scores_of(answers) | {"class_top1": float(np.nanmean(per_class.top1_K))}
    real = RealLabels.of(
        reader.parts[0], num_answers=len(evaluation.card.classes), device=torch.device("cpu")
    )
    if real is not None:
        tops_N, everywhere = (
            torch.from_numpy(answers.answers_NA[:, 0].copy()),
            torch.ones(len(answers), dtype=torch.bool),
        )
        right, number = real.count(tops_N, answers.samples_N, everywhere).tolist()
        scores |= {"real": right / number} if number else {}
    order = per_class.order()
    ranked = [
        (confusion.names[number], float(per_class.top1_K[number])) for number in order.tolist()
    ]
    left_out = answers.left_out(num_samples=reader.num_samples)
    curve = [moment._asdict() for moment in moments(answers)]
    return {f"eval/{name}": value for name, value in scores.items()} | {
        "identity": evaluation.identity,
        "model": evaluation.card.model.label,
        "pretrained": evaluation.checkpoint.origin or str(evaluation.checkpoint.directory),
        "step": evaluation.card.step,
        "num_classes": len(confusion.names),
        "largest_class": reader.parts[0].content.largest_class,
        "run_dir": str(evaluation.run_dir),
        "num_samples": len(answers),
        "num_unreadable": len(left_out),
        "unreadable": ["/".join(name) for name in reader.names(left_out[:NUM_NAMED])],
        "views": settings.views,
        "num_views": len(settings.view_numbers),
        "augment": settings.augment.model_dump(mode="json") if settings.views else None,
        "augment_from": evaluation.augment_from,
        "plain_top1": curve[0]["top1"] if settings.include_plain else evaluation.plain_top1(),
        "curve": curve,
        "worst_classes": ranked[:NUM_EXTREME],
        "best_classes": ranked[::-1][:NUM_EXTREME],
        "most_confused": confusion.most_confused(NUM_CONFUSED),
    }


def write_predictions(
    path: Path,
    answers: Answers,
    reader: ShardReader,
    *,
    classes: Sequence[str],
    facts: Mapping[str, str],
) -> None:
    """`label` and `answers` are the model's numbers of the classes, `classes` its names of them,
    which the dataset shares. `facts` become the file's metadata."""
    names = pa.array(classes, pa.string())

    def table_of(rows: slice) -> pa.Table:
        labels, tops_NA = answers.labels_N[rows], answers.answers_NA[rows]
        tops, places = pa.array(tops_NA.ravel(), pa.int32()), reader.names(answers.samples_N[rows])
        ends = pa.array(np.arange(len(labels) + 1) * tops_NA.shape[1], pa.int32())
        columns = {
            "sample": pa.array(answers.samples_N[rows]),
            "shard": pa.array([shard for shard, _ in places], pa.string()).dictionary_encode(),
            "key": pa.array([key for _, key in places], pa.string()),
            "label": pa.array(labels, pa.int32()),
            "label_name": names.take(pa.array(labels)),
            "answers": pa.ListArray.from_arrays(ends, tops),
            "answer_names": pa.ListArray.from_arrays(ends, names.take(tops)),
            "probabilities": pa.ListArray.from_arrays(
                ends, pa.array(answers.probabilities_NA[rows].ravel(), pa.float32())
            ),
            "loss": pa.array(answers.losses_N[rows]),
            "entropy": pa.array(answers.entropies_N[rows]),
            "right": pa.array(tops_NA[:, 0] == labels),
        }
        return pa.table(columns, metadata=dict(facts))

    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, table_of(slice(0)).schema, compression="zstd") as writer,
    ):
        for start in range(0, len(answers), ROWS_PER_GROUP):
            PROGRESS.touch()
            writer.write_table(table_of(slice(start, start + ROWS_PER_GROUP)))


def write_per_class(
    path: Path, found: PerClass, confusion: Confusion, *, numbers: Sequence[int]
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["class", "name", "images", "top1", "top5", "precision", "loss", "most_taken_for"]
    )
    for row in [*found.order().tolist(), *np.flatnonzero(found.counts_K == 0).tolist()]:
        figures = [
            float(column[row])
            for column in (found.top1_K, found.top5_K, found.precision_K, found.loss_K)
        ]
        shown = ["" if math.isnan(value) else f"{value:.6f}" for value in figures]
        taken_for = int(found.taken_for_K[row])
        other = confusion.name(taken_for) if taken_for >= 0 else ""
        writer.writerow(
            [numbers[row], confusion.names[row], int(found.counts_K[row]), *shown, other]
        )
    write_atomic(path, text.getvalue().encode())


def write_confusion(path: Path, confusion: Confusion) -> None:
    labels, answers = (
        [confusion.name(number) for number in column.tolist()]
        for column in (confusion.labels, confusion.answers)
    )
    table = pa.table({"label": labels, "answer": answers, "count": pa.array(confusion.counts)})
    with atomic_file(path) as file:
        pq.write_table(table, file, compression="zstd")


def draw(
    run_dir: Path, answers: Answers, confusion: Confusion, *, title: str, second_line: str
) -> list[Path]:
    """The images' paths. `second_line`: of the confusion's title, if classes are unequal."""
    right_N = answers.answers_NA[:, 0] == answers.labels_N
    named = confusion.names if len(confusion.names) <= MOST_NAMED else ()
    with looks(title, *named):
        title = legible(title)
        figures = {
            "confusion": draw_confusion(
                confusion,
                title=f"{title}: top-1 {right_N.mean():.1%} of {len(answers):,}{second_line}",
            )
        }
        figures["calibration"] = draw_calibration(
            calibration(answers.probabilities_NA[:, 0], right_N), title=title
        )
        if len(answers.moments) > 1:
            figures["views"] = draw_views(
                moments(answers), title=f"{title}: mean softmax over views"
            )
        for name, figure in figures.items():
            save(figure, run_dir / f"{name}.png")
    return [run_dir / f"{name}.png" for name in figures]


def draw_confusion(confusion: Confusion, *, title: str) -> Figure:
    """Draw a row for each true class; color is the fraction of the row."""
    size = len(confusion.names)
    counts = confusion.matrix(num_blocks=None if size <= MOST_SHOWN else NUM_BLOCKS)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(3.2 + 0.24 * size, 4.5, 12)) if size <= MOST_NAMED else 8.0
    figure = Figure(figsize=(side + 1.0, side))
    axes = figure.add_subplot(title=title, xlabel="answer", ylabel="true class")
    # the square root shows what is rare; linear colours would show a white square with a diagonal
    image = axes.imshow(
        shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest", aspect="equal"
    )
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, aspect=30, format="{x:.0%}")
    bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1])
    bar.outline.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if size <= MOST_NAMED:
        names = [legible(short(name, length=20)) for name in confusion.names]
        axes.set_yticks(range(size), names)
        columns = [*names, OTHER][: counts.shape[1]]
        axes.set_xticks(range(len(columns)), columns, rotation=90)
    elif confusion.has_others:
        axes.axvline(counts.shape[0] - 0.5, color=GREY, linewidth=0.5)
        axes.set_xlabel(f"answer (the last column: {OTHER.strip('()')} classes of the model)")
    if size > MOST_SHOWN:
        axes.set_ylabel(f"true class ({size:,} classes in {NUM_BLOCKS} blocks of neighbours)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(
                FuncFormatter(lambda place, _: f"{max(0, round(place * size / NUM_BLOCKS)):,}")
            )
    bar.set_label("fraction of the class's images")
    if max(shares.shape) <= MOST_COUNTED:
        for (row, column), share in np.ndenumerate(shares):
            color = "white" if share > 0.35 else "black"
            words = f"{share:.0%}" if share else ""
            axes.text(column, row, words, ha="center", va="center", fontsize=7, color=color)
    return figure


def draw_calibration(bins: Calibration, *, title: str) -> Figure:
    figure = Figure(figsize=(5.2, 5.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    edges = np.linspace(0, 1, len(bins.counts) + 1)
    style: dict[str, Any] = {"width": edges[1], "align": "edge", "edgecolor": "white"}
    above.bar(edges[:-1], np.nan_to_num(bins.accuracies), color=BLUE, label="accuracy", **style)
    above.plot(bins.confidences, bins.accuracies, "o", color=RED, label="mean confidence")
    above.plot([0, 1], [0, 1], color="black", linestyle=":", label="confidence = accuracy")
    facts = f"ECE {bins.expected_error:.2%}, largest gap {bins.max_error:.1%}"
    above.set(title=f"{title}\n{facts}", ylabel="accuracy", ylim=(0, 1))
    above.legend(loc="upper left")
    below.bar(edges[:-1], bins.counts, color=GREY, **style)
    below.set(ylabel="images", xlabel="confidence: the probability of the prediction", xlim=(0, 1))
    return figure


def draw_views(curve: Sequence[Moment], *, title: str) -> Figure:
    figure = Figure(figsize=(6.4, 3.0))
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    counts = [moment.num_views for moment in curve]
    for axes, name, color in zip(figure.subplots(1, 2), ("top1", "loss"), (BLUE, RED), strict=True):
        axes.plot(counts, [getattr(moment, name) for moment in curve], marker="o", color=color)
        axes.set(title=name.replace("1", "-1"), xlabel="views", xscale="log")
    return figure
