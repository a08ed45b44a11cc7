"""What a folder of runs has shown: a table on the console and one picture (samples, curves,
accuracies beside chance)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from analysis.tables.pages import for_console
from data_prep.images import decode
from data_prep.images.lettering import legible
from data_prep.manifest import load_index, load_manifest
from finetune.looks import looks, save
from finetune.runs import CLASS_MEAN, NOT_STATED, TASKS, Run, runs_below

COLOURS = {
    "probe": "#66aa77",
    "knn": "#88ccee",
    "tune": "#cc6677",
    "scratch": "#bbbbbb",
    "evaluate": "#8877bb",
}
_NUM_PICTURES = 24


def collect(root: Path) -> list[Run]:
    """Every run below `root`, sorted by task and name; repetitions are in the figures of their
    group."""
    runs = runs_below(root)
    if not runs:
        raise ValueError(
            f"{root}: holds no runs (folders with a config.yaml and a journal); name the folder"
            " that they lie in"
        )
    groups = {run.directory for run in runs if run.is_group}
    runs = [run for run in runs if run.directory.parent not in groups]
    return sorted(runs, key=lambda run: (list(TASKS).index(run.task), run.name))


def print_table(runs: list[Run], console: Console) -> None:
    rows, are_unequal = [], any(run.largest_class for run in runs)
    for run in runs:
        chance, rate = (
            f"{100 * run.chance:.3g}%" if run.chance else "?",
            run.result.get("images_per_s"),
        )
        means = (
            f"{value:.1%}" if value else ""
            for value in (run.accuracies.get(CLASS_MEAN), run.largest_class)
        )
        row = (
            run.name,
            _task(run),
            run.model_name,
            run.dataset.name,
            _top1(run),
            *(means if are_unequal else ()),
        )
        rows.append((*row, chance, f"{rate:,.0f}" if rate else ""))
    unequal = ("class mean", "largest class") if are_unequal else ()
    header = ("run", "task", "model", "data", "top-1", *unequal, "chance", "images/s")
    console.print(for_console(header, rows, title="what was trained", num_words=4))


def _top1(run: Run) -> str:
    """Return the accuracy in words, for an unfinished run the accuracy of its last evaluation."""
    if run.top1 is not None:
        return f"{run.top1:.1%}{spread_of(run)}"
    if run.result:
        return "not evaluated"
    return (
        f"unfinished, {run.last_top1[1]:.1%} at step {run.last_top1[0]:,}"
        if run.last_top1
        else "unfinished"
    )


def _task(run: Run) -> str:
    return (
        "linear on pixels" if (run.model_name, run.task) == ("pixels", "probe") else TASKS[run.task]
    )


def spread_of(run: Run) -> str:
    """In percent points, of a run that is the mean of several."""
    return "" if run.top1_std is None else f" ± {100 * run.top1_std:.1f}"


def draw(runs: list[Run], path: Path) -> None:
    with looks(*(name for run in runs for name in (run.name, run.dataset.name))):
        save(drawn(runs), path)


def drawn(runs: list[Run]) -> Figure:
    """Pictures of every dataset; below them curves of the pretraining runs and accuracies by
    dataset, where there are any."""
    # an evaluation is a figure of a run that has a bar of its own; the table has it
    runs = [run for run in runs if run.task != "evaluate"] or runs
    datasets, trained = (
        sorted({run.dataset for run in runs if run.manifest}),
        [run for run in runs if run.task == "pretrain"],
    )
    bars = [run for run in runs if run.task != "pretrain" and run.top1 is not None]
    heights = [0.9] * len(datasets) + [max(3.0, 0.8 + 0.36 * len(bars))] * bool(trained or bars)
    figure = Figure(figsize=(11, max(1.0, sum(heights))))
    rows = figure.subfigures(max(1, len(heights)), 1, height_ratios=heights or None, squeeze=False)[
        :, 0
    ]
    for row, dataset in zip(rows, datasets, strict=False):
        axes = row.subplots()
        axes.imshow(contact_sheet(dataset, count=_NUM_PICTURES))
        axes.set_axis_off()
        axes.set_title(
            f"{legible(dataset.name)}: {len(load_manifest(dataset).classes)} classes", pad=2
        )
    widths = [1.0, 1.0] * bool(trained) + [1.5] * bool(bars)
    panels = (
        rows[-1].subplots(1, len(widths), width_ratios=widths, squeeze=False)[0] if widths else []
    )
    if trained:
        draw_curves(trained, *panels[:2])
    if bars:
        draw_accuracies(bars, panels[-1])
    return figure


def draw_curves(runs: list[Run], loss: Axes, accuracy: Axes) -> None:
    """Draw the curves, and dotted the loss and accuracy of guessing. Unequal classes add the class
    mean and the largest class."""
    for number, run in enumerate(runs):
        style: dict[str, Any] = {"color": f"C{number}", "label": legible(run.name)}
        losses, accuracies, class_means = run.curves("train/loss", "eval/top1", "eval/class_top1")
        loss.plot(*losses, **style)
        accuracy.plot(*accuracies, marker="o", markersize=3, **style)
        if run.chance:
            loss.axhline(-math.log(run.chance), color=style["color"], linestyle=":", linewidth=1)
            accuracy.axhline(run.chance, color=style["color"], linestyle=":", linewidth=1)
        if run.largest_class:
            accuracy.plot(*class_means, color=style["color"], linewidth=0.7)
            accuracy.axhline(run.largest_class, color=style["color"], linestyle="--", linewidth=1)
    loss.set(title="pretraining: training loss (dotted: chance)", xlabel="step")
    accuracy.set(
        title=f"pretraining: top-1 on {_splits(runs)}{_guesses(runs, mean='thin')}", xlabel="step"
    )
    for axes in (loss, accuracy):
        axes.legend()
    accuracy.yaxis.set_major_formatter("{x:.0%}")


def draw_accuracies(runs: list[Run], axes: Axes) -> None:
    """A bar for each run, with its name; below that, what it is of."""
    runs = sorted(
        runs, key=lambda run: (run.model_name != "pixels", run.model_name, run.top1 or 0.0)
    )
    for row, run in enumerate(runs):
        top1, several = run.top1 or 0.0, len({each.split for each in runs}) > 1
        axes.barh(row, top1, color="#ddaa44" if run.model_name == "pixels" else COLOURS[run.task])
        axes.text(
            top1 + 0.01,
            row,
            f"{top1:.1%}{spread_of(run)}" + (f" on {run.split}" if several else ""),
            va="center",
        )
        if run.top1_std is not None:
            axes.errorbar(top1, row, xerr=run.top1_std, color="black", capsize=2, linewidth=1)
        if run.chance:
            axes.vlines(run.chance, row - 0.5, row + 0.5, color="black", linestyle=":", linewidth=1)
        if run.largest_class:
            axes.plot(
                run.accuracies.get(CLASS_MEAN, math.nan), row, "D", color="black", markersize=4
            )
            axes.vlines(
                run.largest_class, row - 0.5, row + 0.5, color="black", linestyle="--", linewidth=1
            )
    names = [
        _task(run) if run.model_name == "pixels" else f"{run.model_name}, {_task(run)}"
        for run in runs
    ]
    if len({run.dataset for run in runs}) > 1:
        names = [f"{name}, {run.dataset.name}" for name, run in zip(names, runs, strict=True)]
    axes.set_yticks(
        range(len(runs)),
        [f"{legible(run.name)}\n{legible(name)}" for run, name in zip(runs, names, strict=True)],
    )
    axes.set(
        title=f"transfer: top-1 on {_splits(runs)}{_guesses(runs, mean='diamond')}", xlim=(0, 1.12)
    )
    axes.xaxis.set_major_formatter("{x:.0%}")


def _guesses(runs: list[Run], *, mean: str) -> str:
    """Return a legend of the marks in words. `mean`: the mark of the class mean."""
    are_unequal = any(run.largest_class for run in runs)
    return (
        f"\n(dotted: chance, dashed: largest class, {mean}: class mean)"
        if are_unequal
        else " (dotted: chance)"
    )


def _splits(runs: list[Run]) -> str:
    found = {run.split for run in runs}
    return " or ".join(sorted(found - {NOT_STATED} or found)) or "held-out pictures"


def contact_sheet(directory: Path, *, count: int) -> NDArray[np.uint8]:
    """The first pictures of a dataset's first training shard, side by side, as the model gets
    them."""
    manifest = load_manifest(directory)
    split = manifest.splits.get("train") or next(iter(manifest.splits.values()))
    shard, size = split.shards[0], manifest.image_size
    pictures = []
    with open(directory / shard.file, "rb") as file:
        for offset, length, _ in load_index(directory, shard)[:count].tolist():
            file.seek(offset)
            pictures.append(np.asarray(decode(file.read(length))[0].resize((size, size))))
    return np.concatenate(pictures, axis=1)
