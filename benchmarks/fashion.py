"""Test accuracy on Fashion-MNIST: our MLP and Mixer, and three peers on the same images.

    .venv/bin/python benchmarks/fashion.py         trains, writes RESULTS, and prints README's table
    .venv/bin/python benchmarks/fashion.py --show  only prints the table of RESULTS

The peers are scikit-learn's logistic regression and gradient boosting (on means of 2 x 2 pixels).
The third peer is a small convolutional network with our epochs, batches and augmentation. Two
trainings run at a time, each in a process with one thread. Minutes are CPU time of the complete
process. You can interrupt the command and rerun it. Unfinished trainings start from the beginning.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from frame import HERE, commit, machine, markdown
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad

from cluster.plan_file import load_checked
from data_prep.manifest import load_manifest
from data_prep.publish import write_atomic
from finetune.runs import Run, card_of, runs_below
from pretrain.data.reader import open_split
from pretrain.models.cost import cost_of

PLAN, RUNS = "configs/plan/fashion_mnist.yaml", Path("runs/plans/fashion_mnist")
BUILD = "configs/data_prep/fashion_mnist.yaml"
DATASET = "data/fashion-mnist"
RESULTS = HERE.parent / "tests/analysis/points/fashion_mnist.csv"
BEST = {"logistic regression": 0.3, "gradient boosting": 0.1, "CNN": 0.003}
"""C of logistic regression (0.03 to 3 were tried), and learning rates of boosting (0.05 to 0.2) and
of the CNN (0.001 to 0.01). Each is the best on a tenth of the training split."""
NUM_SEEDS = {"CNN": 5}
EPOCHS, BATCH = 10, 128
COLUMNS = ("model", "seed", "top1", "parameters", "minutes")
Split = tuple[Tensor, Tensor]


def read_split(split: str, dataset: str) -> Split:
    """Return images and labels. Gray images have one channel."""
    reader = open_split(dataset, load_manifest(Path(dataset)), split)
    images = reader.images(np.arange(reader.num_samples)).permute(0, 3, 1, 2)
    if (images == images[:, :1]).all():
        images = images[:, :1]
    return images.float() / 255, torch.from_numpy(reader.labels).long()


def augment(images: Tensor) -> Tensor:
    """Crop randomly after padding by two pixels, and flip half of the images."""
    count, size = len(images), images.shape[-1]
    down, right = torch.randint(5, (2, count, 1)) + torch.arange(size)
    right = torch.where(torch.rand(count, 1) < 0.5, right, right.flip(1))
    rows = torch.arange(count)[:, None, None]
    return pad(images, (2, 2, 2, 2))[rows, 0, down[:, :, None], right[:, None]][:, None]


def fit_cnn(train: Split, test: Split, lr: float, seed: int) -> tuple[float, int]:
    """Train the convolutional network; return its accuracy and number of parameters."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for inputs, channels in ((1, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
        parts += [convolution, nn.MaxPool2d(2), nn.BatchNorm2d(channels), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
    model.to(memory_format=torch.channels_last)  # faster
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    batches = [b for _ in range(EPOCHS) for b in torch.split(torch.randperm(len(train[0])), BATCH)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, len(batches), pct_start=0.05)
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


def fit(name: str, setting: float, seed: int, dataset: str, split: str) -> Mapping[str, Any]:
    """Fit a peer, and return its accuracy and number of parameters."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    train, test = read_split("train", dataset), read_split(split, dataset)
    if name == "CNN":
        top1, size = fit_cnn(train, test, setting, seed)
        return {"top1": top1, "parameters": size}
    is_linear = name == "logistic regression"
    x, x_test = (avg_pool2d(each[0], 2 - is_linear).flatten(1).numpy() for each in (train, test))
    model = (
        LogisticRegression(C=setting, max_iter=1000, tol=1e-3)
        if is_linear
        else HistGradientBoostingClassifier(learning_rate=setting, random_state=seed)
    )
    with threadpool_limits(1):  # more threads are slower at this size
        model.fit(x, train[1].numpy())
    size = model.coef_.size + 10 if is_linear else None
    return {"top1": model.score(x_test, test[1].numpy()), "parameters": size}


def run_all(commands: Mapping[str, Sequence[str]], kept: Path) -> dict[str, dict[str, Any]]:
    """Run, two at a time, the commands that have no row in the file `kept` or whose run is gone.
    Return CPU minutes of each command, and the output of peers."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {row["name"]: row for row in rows if "top1" in row or (RUNS / row["name"]).exists()}
    left = [name for name in commands if name not in done]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running: dict[int, tuple[str, subprocess.Popen[str]]] = {}
    while left or running:
        if left and len(running) < 2:
            name = left.pop(0)
            # a resumed run would have too few minutes
            shutil.rmtree(RUNS / name, ignore_errors=True)
            output = subprocess.PIPE if commands[name][0] == __file__ else None
            words = [sys.executable, *commands[name]]
            child = subprocess.Popen(words, env=environment, stdout=output, text=True)
            running[child.pid] = (name, child)
            continue
        pid, status, usage = os.wait4(-1, 0)
        name, child = running.pop(pid)
        if status != 0:
            for _, other in running.values():
                other.terminate()
            sys.exit(f"{name}: training failed. Read the error above.")
        row = {"name": name, "minutes": (usage.ru_utime + usage.ru_stime) / 60}
        row |= json.load(child.stdout) if child.stdout else {}
        print(json.dumps(row), flush=True)
        done[name] = row
        write_atomic(kept, "".join(f"{json.dumps(each)}\n" for each in done.values()).encode())
    return done


def train() -> None:
    """Train all models that have no result yet, and write RESULTS."""
    subprocess.run([sys.executable, "-m", "data_prep", "build", BUILD], check=True)
    (members,) = (stage.members for stage in load_checked(PLAN).stages if stage.name == "pretrain")
    ours = {
        Path(each.work.writes).name: ["-m", *each.work.words, "--ranks", "1"] for each in members
    }
    peers = {
        f"{name}, seed {seed}": (name, seed)
        for name in BEST
        for seed in range(NUM_SEEDS.get(name, 1))
    }
    commands = {
        title: [__file__, "--fit", name, str(seed)] for title, (name, seed) in peers.items()
    }
    done = run_all(ours | commands, RUNS / "done.jsonl")
    rows = [(*facts_of(run), done[run.name]["minutes"]) for run in runs_below(RUNS, deepest=1)]
    for title, (name, seed) in peers.items():
        rows.append((name, seed, *(done[title][column] for column in COLUMNS[2:])))
    table = pd.DataFrame(rows, columns=COLUMNS).assign(machine=machine(), commit=commit())
    write_atomic(RESULTS, table.to_csv(index=False).encode())


def facts_of(run: Run) -> tuple[Any, ...]:
    card = card_of(run.directory)
    name = f"{run.name.partition('-')[0]} ({card.model.label.removeprefix('Mixer ')})"
    size = cost_of(card.model, num_classes=10, image_size=32).num_parameters
    return name, run.settings["train"]["seed"], run.top1, size


def lines_of(results: pd.DataFrame) -> list[str]:
    """Return README's table, best model first: means and standard deviations over seeds."""
    lines = []
    for name in results.groupby("model")["top1"].mean().sort_values(ascending=False).index:
        rows = results[results["model"] == name]
        top1, size = 100 * rows["top1"], rows["parameters"].iloc[0]
        spread = f" ± {top1.std():.1f}" if len(rows) > 1 else ""
        parameters = "-" if np.isnan(size) else f"{size:,.0f}"
        minutes = f"{rows['minutes'].mean():.1f}"
        lines.append((name, f"{top1.mean():.1f}{spread}", parameters, minutes))
    return markdown(("model", "test accuracy, %", "parameters", "minutes"), lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:
        name, seed = sys.argv[2:]
        print(json.dumps(fit(name, BEST[name], int(seed), DATASET, "test")))
        sys.exit()
    if "--show" not in sys.argv:
        train()
    print(*lines_of(pd.read_csv(RESULTS)), sep="\n")
