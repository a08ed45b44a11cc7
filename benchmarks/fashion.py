"""Test accuracy on Fashion-MNIST: an MLP and a Mixer of ours, and three peers on the same images.

    .venv/bin/python benchmarks/fashion.py [--draw]

Build the dataset, train the unfinished models, write RESULTS, print the table of README and draw
its figure. You can interrupt the command and rerun it. --draw only prints and draws RESULTS.

The peers are scikit-learn's logistic regression and gradient boosting (on means of 2 x 2 pixels),
and a small convolutional network with the epochs, batches and augmentation of ours. Minutes are
CPU time of a peer, and for ours the images divided by the fastest rate of ten steps on one core.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from frame import HERE, commit, machine, markdown
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad

from data_prep.manifest import load_manifest
from data_prep.publish import write_atomic
from finetune.looks import BLUE, GREY, PAGE, looks, save
from finetune.runs import Run, card_of, runs_below
from pretrain.data.reader import open_split
from pretrain.models.cost import cost_of

PLAN, RUNS = "configs/plan/fashion_mnist.yaml", Path("runs/plans/fashion_mnist")
RESULTS = HERE.parent / "tests/analysis/points/fashion_mnist.csv"
PEERS = {"logistic regression": 1, "gradient boosting": 1, "CNN": 5}
"""Number of seeds."""
EPOCHS, BATCH, LR = 10, 128, 1e-2
COLUMNS = ("model", "seed", "top1", "parameters", "minutes")
Split = tuple[Tensor, Tensor]


def facts_of(run: Run) -> tuple[Any, ...]:
    card, ((_, rates),) = card_of(run.directory), run.curves("usage/images_per_s")
    assert card is not None
    name = f"{run.name.partition('-')[0]} ({card.model.label})"
    size = cost_of(card.model, num_classes=10, image_size=32).num_parameters
    minutes = run.result["step"] * BATCH / max(rates) / 60
    return name, run.settings["train"]["seed"], run.top1, size, minutes


def read_split(split: str, dataset: str = "data/fashion-mnist") -> Split:
    """Return images (one of their three equal channels) and labels."""
    reader = open_split(dataset, load_manifest(Path(dataset)), split)
    images = reader.images(np.arange(reader.num_samples))[:, None, :, :, 0]
    return images.float() / 255, torch.from_numpy(reader.labels).long()


def augment(images: Tensor) -> Tensor:
    """Crop from two pixels of padding, and flip half of the images."""
    count, size = len(images), images.shape[-1]
    down, right = torch.randint(5, (2, count, 1)) + torch.arange(size)
    right = torch.where(torch.rand(count, 1) < 0.5, right, right.flip(1))
    rows = torch.arange(count)[:, None, None]
    return pad(images, (2, 2, 2, 2))[rows, 0, down[:, :, None], right[:, None]][:, None]


def fit_cnn(train: Split, test: Split, seed: int) -> tuple[float, int]:
    """Return the accuracy and the number of parameters."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for inputs, channels in ((1, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
        parts += [convolution, nn.MaxPool2d(2), nn.BatchNorm2d(channels), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    batches = [b for _ in range(EPOCHS) for b in torch.split(torch.randperm(len(train[0])), BATCH)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, len(batches), pct_start=0.05)
    for chosen in batches:
        optimizer.zero_grad()
        scores = model(augment(train[0][chosen]))
        torch.autograd.backward(cross_entropy(scores, train[1][chosen], label_smoothing=0.1))
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        scores = torch.cat([model.eval()(batch) for batch in torch.split(test[0], 500)])
    num_parameters = sum(each.numel() for each in model.parameters())
    return (scores.argmax(1) == test[1]).float().mean().item(), num_parameters


def fit(name: str, train: Split, test: Split, seed: int) -> tuple[float, int | None]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    if name == "CNN":
        return fit_cnn(train, test, seed)
    is_linear = name == "logistic regression"
    x, x_test = (avg_pool2d(each[0], 2 - is_linear).flatten(1).numpy() for each in (train, test))
    model = LogisticRegression(max_iter=200) if is_linear else HistGradientBoostingClassifier()
    model.fit(x, train[1].numpy())
    return model.score(x_test, test[1].numpy()), model.coef_.size + 10 if is_linear else None


def train() -> None:
    """Train what has no result, and write RESULTS."""
    torch.set_num_threads(1)
    words = [sys.executable, "-m", "cluster", "run", PLAN]
    subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    kept, splits = RUNS / "peers.csv", (read_split("train"), read_split("test"))
    found = [*pd.read_csv(kept).itertuples(index=False)] if kept.exists() else []
    for name, seed in [(name, seed) for name, count in PEERS.items() for seed in range(count)]:
        if all(row[:2] != (name, seed) for row in found):
            began_s = time.process_time()
            top1, size = fit(name, *splits, seed)
            found.append((name, seed, top1, size, (time.process_time() - began_s) / 60))
            write(found, kept)
    ours = [facts_of(run) for run in runs_below(RUNS, deepest=1)]
    write(ours + found, RESULTS, machine=machine(), commit=commit())


def write(rows: list[tuple[Any, ...]], path: Path, **facts: str) -> None:
    table = pd.DataFrame(rows, columns=COLUMNS).assign(**facts)
    write_atomic(path, table.to_csv(index=False).encode())


def lines_of(results: pd.DataFrame) -> list[str]:
    """Return the table of README, best model first: means and standard deviations over seeds."""
    lines = []
    for name in results.groupby("model")["top1"].mean().sort_values(ascending=False).index:
        rows = results[results["model"] == name]
        top1, size = 100 * rows["top1"], rows["parameters"].iloc[0]
        spread = f" ± {top1.std():.2f}" if len(rows) > 1 else ""
        facts = (f"{len(rows)}", "-" if np.isnan(size) else f"{size:,.0f}")
        lines.append((name, f"{top1.mean():.2f}{spread}", *facts, f"{rows['minutes'].mean():.1f}"))
    return markdown(("model", "test accuracy, %", "seeds", "parameters", "minutes"), lines)


def draw(results: pd.DataFrame, path: Path) -> None:
    """Draw a row for each model, and a dot for each seed."""
    from matplotlib.figure import Figure

    means = 100 * results.groupby("model")["top1"].mean().sort_values()
    with looks():
        axes = (figure := Figure(figsize=(PAGE, 1.9))).subplots()
        for height, (name, mean) in enumerate(means.items()):
            top1 = 100 * results.loc[results["model"] == name, "top1"]
            color = BLUE if "(" in str(name) else GREY
            axes.plot(top1, [height] * len(top1), "o", color=color, alpha=0.6)
            end = (top1.max(), height)
            axes.annotate(f"{mean:.1f} %", end, (6, -3), textcoords="offset points")
        axes.set(yticks=range(len(means)), yticklabels=means.index, xlabel="test accuracy, %")
        axes.margins(x=0.1, y=0.15)
        save(figure, path)


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        train()
    results = pd.read_csv(RESULTS)
    print(*lines_of(results), sep="\n")
    draw(results, HERE.parent / "docs/fashion_mnist.png")
