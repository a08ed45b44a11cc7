"""What does a linear probe cost, against the public way, and a grid of 25 cells against one? All in
one process, in turn.

    .venv/bin/python benchmarks/transfer_probe.py [--quick]

On a GPU if there is one (B-12/Wi-1024), else on the CPU (B-6/Wi-256), with random weights, on
synthetic pictures of 64 px; LION, batches of 256, 50 epochs, as many threads as
OMP_NUM_THREADS says (all cores; 1 is fairer where others use them, too).
  (a) the public way    every epoch: normalise the pictures (in memory: no loader), backbone forward, one nn.Linear with autograd
      ours              features once, from shards through a file that is synced and hashed; then heads (one cell)
      Same order, schedule and head: both accuracies are printed.
  (b) one cell, 25      5 learning rates x 5 decays, heads of 10 and of 100 classes; the price has the features in it, of the plain
      pictures or of 50 augmented views (the paper's protocol; computed: 50 times the time of the
      plain ones)
  (c) matrix products   what the steps of (b) reach of the rate of their two products alone, on tensors made beforehand
  (d) features          what they reach of the rate of the forward pass alone, on a resident batch
Our features are made as by default: in fp32 on a CPU, in bf16 on a GPU, where the public way stays
in fp32; the forward pass of (d) is in the same precision as they are.
"""

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from frame import DATA, arguments, commit, keep, machine
from rich.console import Console
from rich.table import Table as Shown
from torch import Tensor

from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from finetune.probe.config import FeatureDataSettings, ProbeSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.heads import Candidate, judge, order_of, train_heads
from finetune.probe.probe import candidates_of
from finetune.probe.rows import Rows, Standard, filled_width
from finetune.session import open_backbone
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.config import ScheduleSettings
from pretrain.data.reader import open_split
from pretrain.models.build import build_model, pooled_features
from pretrain.models.spec import MlpSpec
from pretrain.optim.lion import Lion
from pretrain.optim.schedule import Schedule
from pretrain.ranks.world import World

EPOCHS, BATCH, LR, VIEWS, CLASSES = 50, 256, 1e-3, 50, 48
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@dataclass(frozen=True)
class Bench:
    settings: ProbeSettings
    maker: FeatureMaker

    def features(self, split: str = "train") -> Table:
        return self.maker.tables(split, [None])[0]

    def features_anew(self) -> Table:
        shutil.rmtree(self.settings.features_place, ignore_errors=True)
        return self.features()

    def rows(self, table: Table, *, num_classes: int) -> Rows:
        table = replace(table, labels_N=table.labels_N % num_classes)
        return Rows([table], standard=Standard.none(table.num_features), device=DEVICE)

    def heads(self, table: Table, candidates: list[Candidate], *, num_classes: int) -> Tensor:
        return train_heads(
            self.rows(table, num_classes=num_classes),
            candidates,
            settings=self.settings,
            num_classes=num_classes,
        )


def prepare(place: Path, *, per_class: int) -> Bench:
    dataset = DATA / f"probe-{per_class}"
    if not (dataset / "manifest.json").exists():
        source = [
            f"num_classes={CLASSES}",
            "class_set=a",
            f"num_train_per_class={per_class}",
            "num_val_per_class=10",
            "image_size=64",
        ]
        words = [
            "build",
            "--source",
            "synthetic",
            "--out",
            str(dataset),
            "image_size=64",
            *(f"source.{w}" for w in source),
        ]
        assert data_prep(words) == 0
    manifest, spec = (
        load_manifest(dataset),
        MlpSpec(kind="mlp", depth=12 if ON_GPU else 6, width=1024 if ON_GPU else 256),
    )
    card = ModelCard(
        model=spec,
        image_size=64,
        classes=manifest.classes,
        channel_mean=manifest.channel_mean,
        channel_std=manifest.channel_std,
        dataset=manifest.name,
    )
    folder = place / "backbone"
    save_folder(
        folder,
        card=card,
        weights=build_model(spec, num_classes=CLASSES, image_size=64, seed=0).state_dict(),
    )
    settings = ProbeSettings(
        run_dir=str(place / "run"),
        pretrained=str(folder),
        data=FeatureDataSettings(dataset=str(dataset)),
        optimizer="lion",
        batch_size=BATCH,
        epochs=(EPOCHS,),
        standardize=False,
    )
    world = World(rank=0, local_rank=0, num_ranks=1, num_cores=len(os.sched_getaffinity(0)))
    backbone = open_backbone(
        Checkpoint.open(folder), manifest, device=DEVICE, precision=settings.feature_precision
    )
    return Bench(settings, FeatureMaker(settings, manifest, backbone, world, DEVICE))


class PublicWay:
    """Paper B's protocol as its paper tells it, with pictures that lie in memory already."""

    def __init__(self, bench: Bench):
        manifest, backbone = bench.maker.manifest, bench.maker.backbone
        assert backbone.model is not None
        self.model, self.settings = backbone.model, bench.settings
        reader = open_split(bench.settings.data.dataset, manifest, "train")
        self.images, self.labels = (
            reader.images(np.arange(reader.num_samples)),
            torch.from_numpy(reader.labels).to(DEVICE),
        )
        self.images = self.images.to(DEVICE)
        self.mean, self.std = (
            torch.tensor(values, device=DEVICE).view(1, 3, 1, 1) * 255
            for values in backbone.normalisation
        )
        self.head = torch.nn.Linear(self.model.num_features, len(manifest.classes), device=DEVICE)
        for parameter in self.head.parameters():
            torch.nn.init.zeros_(parameter)
        self.optimizer = Lion(self.head.parameters(), lr=LR, betas=(0.9, 0.99))
        self.steps_per_epoch, self.epoch = math.ceil(len(self.labels) / BATCH), 0
        self.schedule = Schedule(ScheduleSettings(), LR, num_steps=EPOCHS * self.steps_per_epoch)

    def run_epoch(self) -> None:
        order = torch.from_numpy(
            order_of(len(self.labels), seed=self.settings.seed, epoch=self.epoch)
        ).to(DEVICE)
        for number, chosen in enumerate(torch.split(order, BATCH)):
            images = (self.images[chosen].permute(0, 3, 1, 2).float() - self.mean) / self.std
            with torch.no_grad():
                features = pooled_features(self.model, images)
            self.optimizer.param_groups[0]["lr"] = self.schedule.lr(
                self.epoch * self.steps_per_epoch + number
            )
            self.optimizer.zero_grad()
            torch.autograd.backward(
                torch.nn.functional.cross_entropy(self.head(features), self.labels[chosen])
            )
            self.optimizer.step()
        self.epoch += 1

    def as_heads(self) -> Tensor:
        head = torch.zeros(
            1, filled_width(self.head.in_features), self.head.out_features, device=DEVICE
        )
        head[0, : self.head.in_features] = self.head.weight.detach().T
        head[0, self.head.in_features] = self.head.bias.detach()
        return head


def finish() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - began_s


def against_the_public_way(bench: Bench, *, rounds: int) -> float:
    """(a); returns the seconds of the features."""
    cell, public = Candidate(LR, 0.0, EPOCHS), PublicWay(bench)
    table, found = bench.features_anew(), {"features": [], "heads": [], "public": []}
    bench.heads(table, [Candidate(LR, 0.0, 1)], num_classes=CLASSES)
    for _ in range(rounds):
        found["features"].append(seconds(bench.features_anew))
        found["heads"].append(seconds(lambda: bench.heads(table, [cell], num_classes=CLASSES)))
        found["public"].append(
            statistics.mean(seconds(public.run_epoch) for _ in range(EPOCHS // rounds))
        )
    while public.epoch < EPOCHS:
        public.run_epoch()
    ratios = [
        epoch / ((features + heads) / EPOCHS)
        for features, heads, epoch in zip(
            found["features"], found["heads"], found["public"], strict=True
        )
    ]
    middle = {name: statistics.median(values) for name, values in found.items()}
    test = bench.rows(bench.features("val"), num_classes=CLASSES)
    scores = [
        judge(test, head)[0]
        for head in (public.as_heads(), bench.heads(table, [cell], num_classes=CLASSES))
    ]
    print(
        f"\n(a) {len(table.labels_N):,} pictures, {EPOCHS} epochs, {CLASSES} classes, seconds"
        f" (medians of {rounds} rounds)"
    )
    print(
        f"    public way: {middle['public']:.3f} an epoch; test top-1 {scores[0].top1:.2%}, loss"
        f" {scores[0].loss:.4f}"
    )
    ours = (middle["features"] + middle["heads"]) / EPOCHS
    print(
        f"    ours: {ours:.4f} an epoch, all in; test top-1 {scores[1].top1:.2%}, loss"
        f" {scores[1].loss:.4f}"
    )
    print(
        f"    of it features once {middle['features']:.2f}, heads {middle['heads']:.2f} for all"
        " epochs"
    )
    keep({"an epoch of the public way's": statistics.median(ratios)})
    print(
        f"    ours is {statistics.median(ratios):.1f} x as fast per epoch (rounds"
        f" {', '.join(f'{r:.1f}' for r in ratios)})"
    )
    return middle["features"]


def product_rate(rows: int, inputs: int, outputs: int) -> float:
    """FLOP/s of a head's two products."""
    x_BE, weights_EC, errors_BC = (
        torch.randn(*shape, device=DEVICE)
        for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )
    logits_BC, gradient_EC = torch.empty_like(errors_BC), torch.empty_like(weights_EC)
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < 0.5:
        torch.mm(x_BE, weights_EC, out=logits_BC)
        torch.mm(x_BE.T, errors_BC, out=gradient_EC)
        count += 1
    finish()
    return count * 4 * rows * inputs * outputs / (time.perf_counter() - began_s)


def features_against_forward(bench: Bench, *, rounds: int) -> None:
    """(d)"""
    size, count = bench.maker.backbone.image_size, bench.maker.batch_size
    images, num = torch.randn(count, 3, size, size, device=DEVICE), len(bench.features().labels_N)
    times = max(1, num // count)

    def forward() -> None:
        for _ in range(times):
            bench.maker.backbone.extract(images)

    shares = []
    with torch.no_grad():
        forward()
        for _ in range(rounds + 1):
            shares.append(seconds(forward) / (times * count) * num / seconds(bench.features_anew))
    share = statistics.median(shares[1:])
    keep({"features of forward": share})
    print(
        f"\n(d) features, from shards to a file, at {share:.0%} of the rate of the forward pass"
        f" alone ({count} pictures at once)"
    )


def grid_against_one(bench: Bench, features_s: float, *, rounds: int) -> None:
    """(b) and (c)."""
    table, grid = bench.features(), candidates_of(bench.settings)
    assert len(grid) == 25
    columns = (
        "classes",
        "1 cell: heads s",
        "25 cells: heads s",
        "25 : 1, all in",
        "with 50 views",
        "of products, 1",
        "of products, 25",
    )
    shown = Shown(
        title=f"(b), (c): features {features_s:.2f} s, of 50 views {VIEWS * features_s:.0f} s",
        title_justify="left",
        box=None,
    )
    for column in columns:
        shown.add_column(column, justify="right")
    width, num_rows = filled_width(table.num_features), len(table.labels_N)
    for num_classes in (10, 100):
        times: dict[int, list[float]] = {1: [], 25: []}
        shares: dict[int, list[float]] = {1: [], 25: []}
        for _ in range(rounds):
            for size in (1, 25):
                took = seconds(
                    lambda n=size, k=num_classes: bench.heads(table, grid[:n], num_classes=k)
                )
                flops = EPOCHS * num_rows * 4 * width * size * num_classes
                times[size].append(took)
                shares[size].append(flops / took / product_rate(BATCH, width, size * num_classes))

        def price(features: float, taken: dict[int, list[float]] = times) -> str:
            both = zip(taken[1], taken[25], strict=True)
            return (
                f"{statistics.median((features + many) / (features + one) for one, many in both):.2f} "
                ""
                "x"
            )

        shown.add_row(
            str(num_classes),
            *(f"{statistics.median(times[size]):.2f}" for size in (1, 25)),
            price(features_s),
            price(VIEWS * features_s),
            *(f"{statistics.median(shares[size]):.0%}" for size in (1, 25)),
        )
    print()
    Console(width=130).print(shown)


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as place:
        per_class = 4 if options.dry_run else (80 if options.quick else 320) * (16 if ON_GPU else 1)
        bench, is_short = (
            prepare(Path(place), per_class=per_class),
            options.quick or options.dry_run,
        )
        features_s = against_the_public_way(bench, rounds=2 if is_short else 5)
        features_against_forward(bench, rounds=3)
        grid_against_one(bench, features_s, rounds=1 if is_short else 3)
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
