"""All runs in a folder: a table on the console, and a figure of samples, curves and accuracies."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis.output import Result, draw_legend, mark
from data_prep.errors import UserError
from data_prep.images import decode
from data_prep.images.lettering import legible
from data_prep.manifest import Manifest, Shard, load_index
from finetune.looks import looks
from finetune.runs import CLASS_MEAN, NOT_STATED, TASKS, Run, runs_below

COLORS = {
    "probe": "#66aa77",
    "knn": "#88ccee",
    "tune": "#cc6677",
    "scratch": "#bbbbbb",
    "evaluate": "#8877bb",
}
NUM_SAMPLES = 24
NUMBERS = ["top1", "top1_std", "class_mean", "largest_class", "chance", "images_per_s"]


def report(root: Path) -> Result:
    runs = collect(root)
    rows = rows_of(runs)
    with looks(*rows.run, *(run.dataset.name for run in runs)):
        figure = draw(runs, rows)
    shown = rows.copy()
    accuracies = pd.Series([accuracy_words(row) for row in rows.itertuples()])
    shown["top1"] = accuracies.where(accuracies != "", rows.state)
    for name in ("class_mean", "largest_class", "chance"):
        percent = (100 * rows[name]).map("{:.3g}%".format)
        shown[name] = percent.where(rows[name].notna(), "")
    are_unequal = rows.largest_class.notna().any()
    unequal = ["class_mean", "largest_class"] if are_unequal else []
    columns = ["run", "training", "model", "dataset", "top1", *unequal, "chance", "images_per_s"]
    return Result(rows.drop(columns="task"), {}, {"": figure}, printed=[shown[columns]])


def collect(root: Path) -> list[Run]:
    """Return the runs below `root`, sorted by task and name. A group of repetitions replaces its
    runs. Raise UserError if there are no runs."""
    runs = runs_below(root)
    if not runs:
        fix = "give a folder of runs"
        raise UserError(str(root), "the folder has no runs", fix, code="empty")
    groups = {run.directory for run in runs if run.is_group}
    runs = [run for run in runs if run.directory.parent not in groups]
    return sorted(runs, key=lambda run: (list(TASKS).index(run.task), run.name))


def rows_of(runs: Sequence[Run]) -> pd.DataFrame:
    rows = []
    for run in runs:
        is_pixels = (run.model_name, run.task) == ("pixels", "probe")
        state = "finished" if run.result else "unfinished"
        if run.last_top1 and not run.result:
            state += f", {run.last_top1[1]:.1%} at step {run.last_top1[0]:,}"
        rows.append(
            {
                "run": run.name,
                "task": run.task,
                "training": "linear on pixels" if is_pixels else TASKS[run.task],
                "model": run.model_name,
                "dataset": run.dataset.name,
                "split": run.split,
                "state": state,
                "top1": run.top1,
                "top1_std": run.top1_std,
                "class_mean": run.accuracies.get(CLASS_MEAN),
                "largest_class": run.largest_class,
                "chance": run.chance,
                "images_per_s": run.result.get("images_per_s"),
            }
        )
    return pd.DataFrame(rows).astype(dict.fromkeys(NUMBERS, float))


def accuracy_words(row: Any) -> str:
    """Return the accuracy as text, with the deviation over repetitions; empty if unknown."""
    if math.isnan(row.top1):
        return ""
    spread = "" if math.isnan(row.top1_std) else f" ± {100 * row.top1_std:.1f}"
    return f"{row.top1:.1%}{spread}"


def draw(runs: Sequence[Run], rows: pd.DataFrame) -> Figure:
    """Draw images of every local dataset, then curves of pretraining runs and accuracies of other
    runs. Evaluations have bars only if all runs are evaluations."""
    known = {run.dataset: run.manifest for run in runs if run.manifest}
    datasets = sorted(
        path for path, manifest in known.items() if not first_shard(manifest).is_remote
    )
    trained = [run for run in runs if run.task == "pretrain"]
    bars = rows[rows.top1.notna() & ~rows.task.isin(["pretrain", "evaluate"])]
    if (rows.task == "evaluate").all():
        bars = rows[rows.top1.notna()]
    widths = [1.0, 1.0] * bool(trained) + [1.5] * (len(bars) > 0)
    heights = [0.9] * len(datasets) + [max(3.0, 0.8 + 0.36 * len(bars))] * bool(widths)
    figure = Figure(figsize=(11, max(1.0, sum(heights))))
    strips = figure.subfigures(
        max(1, len(heights)), 1, height_ratios=heights or None, squeeze=False
    )
    for strip, dataset in zip(strips[:, 0], datasets, strict=False):
        axes = strip.subplots()
        axes.imshow(first_images(dataset, known[dataset], count=NUM_SAMPLES))
        axes.set_axis_off()
        classes = len(known[dataset].classes)
        axes.set_title(f"{legible(dataset.name)}: {classes} classes", pad=2)
    if widths:
        panels = strips[-1, 0].subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        if trained:
            draw_curves(trained, *panels[:2])
            draw_legend(figure, panels[1:2])
        if len(bars):
            draw_accuracies(bars, panels[-1])
    return figure


def draw_curves(runs: Sequence[Run], loss: Axes, accuracy: Axes) -> None:
    """Draw the curves, and dotted lines for the loss and accuracy of random guesses. If classes
    differ in size, also draw the mean accuracy over classes, and the fraction of the largest class.
    """
    for number, run in enumerate(runs):
        style = mark(number) | {"label": legible(run.name)}
        color = style["color"]
        losses, accuracies, class_means = run.curves("train/loss", "eval/top1", "eval/class_top1")
        loss.plot(*losses, markevery=0.2, **style)
        accuracy.plot(*accuracies, **style)
        if run.chance:
            loss.axhline(-math.log(run.chance), color=color, linestyle=":", linewidth=1)
            accuracy.axhline(run.chance, color=color, linestyle=":", linewidth=1)
        if run.largest_class:
            accuracy.plot(*class_means, color=color, linewidth=0.7)
            accuracy.axhline(run.largest_class, color=color, linestyle="--", linewidth=1)
    loss.set(title="pretraining: training loss (dotted: chance)", xlabel="step")
    legend = _legend({run.split for run in runs}, any(run.largest_class for run in runs), "thin")
    accuracy.set(title=f"pretraining: top-1 on {legend}", xlabel="step")
    accuracy.yaxis.set_major_formatter("{x:.0%}")


def draw_accuracies(rows: pd.DataFrame, axes: Axes) -> None:
    rows = rows.assign(is_model=rows.model != "pixels")
    rows = rows.sort_values(["is_model", "model", "top1"], kind="stable")
    heights, colors = np.arange(len(rows)), rows.task.map(COLORS).fillna("#bbbbbb")
    axes.barh(heights, rows.top1, color=colors.where(rows.is_model, "#ddaa44"))
    known = rows.top1_std.notna().to_numpy()
    if known.any():
        bars = {"xerr": rows.top1_std[known], "fmt": "none", "ecolor": "black", "capsize": 2}
        axes.errorbar(rows.top1[known], heights[known], **bars)
    for name, line in (("chance", ":"), ("largest_class", "--")):
        ends = (rows[name], heights - 0.5, heights + 0.5)
        axes.vlines(*ends, color="black", linewidth=1, linestyle=line)
    has_mean = (rows.class_mean.notna() & rows.largest_class.notna()).to_numpy()
    axes.plot(rows.class_mean[has_mean], heights[has_mean], "D", color="black", markersize=4)
    has_splits, has_datasets = rows.split.nunique() > 1, rows.dataset.nunique() > 1
    labels = []
    for height, row in enumerate(rows.itertuples()):
        words = accuracy_words(row) + f" on {row.split}" * has_splits
        axes.text(row.top1 + 0.01, height, words, va="center")
        about = f"{row.model}, {row.training}" if row.is_model else row.training
        labels.append(f"{legible(row.run)}\n{legible(about + f', {row.dataset}' * has_datasets)}")
    axes.set_yticks(heights, labels)
    legend = _legend({*rows.split}, rows.largest_class.notna().any(), "diamond")
    axes.set(title=f"transfer: top-1 on {legend}", xlim=(0, 1.12))
    axes.xaxis.set_major_formatter("{x:.0%}")


def _legend(splits: set[str], are_unequal: bool, mean: str) -> str:
    """Return the splits and an explanation of the marks. `mean`: the mark of the class mean."""
    words = " or ".join(sorted(splits - {NOT_STATED} or splits)) or "held-out images"
    if are_unequal:
        return f"{words}\n(dotted: chance, dashed: largest class, {mean}: class mean)"
    return f"{words} (dotted: chance)"


def first_shard(manifest: Manifest) -> Shard:
    split = manifest.splits.get("train") or next(iter(manifest.splits.values()))
    return split.shards[0]


def first_images(directory: Path, manifest: Manifest, *, count: int) -> NDArray[np.uint8]:
    """Return the first images of the first training shard side by side, resized to the dataset's
    image size."""
    shard, size = first_shard(manifest), manifest.image_size
    images = []
    with open(directory / shard.file, "rb") as file:
        for offset, length, _ in load_index(directory, shard)[:count].tolist():
            file.seek(offset)
            images.append(np.asarray(decode(file.read(length))[0].resize((size, size))))
    return np.concatenate(images, axis=1)
