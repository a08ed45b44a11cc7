"""Cost of a linear probe compared with the public protocol, and of 25 grid cells compared with one.

    .venv/bin/python benchmarks/transfer_probe.py [--quick]

All contestants run in turn in one process. The backbone has random weights: B-12/Wi-1024 on a GPU,
B-6/Wi-256 on a CPU. Images are synthetic, 64 px. Heads train with LION, batches of 256, 50 epochs.

  (a) the public way    normalizes images in memory, runs the backbone, and trains one nn.Linear with autograd, in every epoch
      ours              computes features once, from shards to a synced and hashed file, then trains heads (one cell)
      Order, schedule and head are equal. The table shows both accuracies.
  (b) one cell, 25      5 learning rates x 5 decays, heads of 10 and of 100 classes. The cost includes features of plain images,
                        or of 50 augmented views (the paper's protocol; 50 times the time of plain features)
  (c) features          throughput as a fraction of the forward pass of one batch in memory

Features and the forward pass of (c) have the default precision: fp32 on a CPU, bf16 on a GPU. The
public way always uses fp32.
"""

import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from frame import arguments, keep, print_table, rates, ratio, repeated, report, sized
from images import shapes_dataset
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.probe.config import FeatureDataSettings, ProbeSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.heads import Candidate, judge, order_of, train_heads
from finetune.probe.probe import candidates_of
from finetune.probe.rows import Standard, TableRows, filled_width
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

    def compute_features(self) -> Table:
        shutil.rmtree(self.settings.features_place, ignore_errors=True)
        return self.features()

    def rows(self, table: Table, *, num_classes: int) -> TableRows:
        table = replace(table, labels_N=table.labels_N % num_classes)
        return TableRows([table], standard=Standard.none(table.num_features), device=DEVICE)

    def heads(self, table: Table, candidates: list[Candidate], *, num_classes: int) -> Tensor:
        return train_heads(
            self.rows(table, num_classes=num_classes),
            candidates,
            settings=self.settings,
            num_classes=num_classes,
        )


def prepare(place: Path, *, per_class: int) -> Bench:
    dataset = shapes_dataset(64, per_class, num_val=10)
    manifest = load_manifest(dataset)
    spec = MlpSpec(kind="mlp", depth=12 if ON_GPU else 6, width=1024 if ON_GPU else 256)
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
    """Linear probing as *Scaling MLPs* describes it, with images in memory."""

    def __init__(self, bench: Bench):
        manifest, backbone = bench.maker.manifest, bench.maker.backbone
        self.model, self.settings = backbone.model, bench.settings
        reader = open_split(bench.settings.data.dataset, manifest, "train")
        self.images = reader.images(np.arange(reader.num_samples)).to(DEVICE)
        self.labels = torch.from_numpy(reader.labels).to(DEVICE)
        self.mean, self.std = (
            torch.tensor(values, device=DEVICE).view(1, 3, 1, 1) * 255
            for values in backbone.normalization
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


def against_the_public_way(bench: Bench, *, rounds: int) -> float:
    """Return the seconds for features."""
    cell, public, table = Candidate(LR, 0.0, EPOCHS), PublicWay(bench), bench.features()
    per_round = EPOCHS // (rounds + 1)  # with the warm-up, EPOCHS at most
    found = rates(
        {
            "features": repeated(bench.compute_features),
            "ours": repeated(
                lambda: bench.heads(bench.compute_features(), [cell], num_classes=CLASSES),
                units=EPOCHS,
            ),
            "public way": repeated(public.run_epoch, times=per_round),
        },
        rounds=rounds,
    )
    while public.epoch < EPOCHS:
        public.run_epoch()
    test = bench.rows(bench.features("val"), num_classes=CLASSES)
    heads = {
        "public way": public.as_heads(),
        "ours": bench.heads(table, [cell], num_classes=CLASSES),
    }
    scores = {name: judge(test, head)[0] for name, head in heads.items()}
    speedup = ratio(found, "ours", "public way")
    keep({"an epoch of the public way's": speedup})
    print_table(
        f"(a) {len(table.labels_N):,} images, {EPOCHS} epochs, {CLASSES} classes, {rounds} rounds",
        ("", "seconds an epoch", "test top-1", "test loss"),
        [
            (
                name,
                f"{1 / statistics.median(found[name]):.4f}",
                f"{score.top1:.2%}",
                f"{score.loss:.4f}",
            )
            for name, score in scores.items()
        ],
    )
    print(f"our epoch, including features, is {speedup:.1f} x as fast as the public way")
    return 1 / statistics.median(found["features"])


def features_against_forward(bench: Bench, *, rounds: int) -> None:
    size, count = bench.maker.backbone.image_size, bench.maker.batch_size
    images, num = torch.randn(count, 3, size, size, device=DEVICE), len(bench.features().labels_N)
    with torch.no_grad():
        found = rates(
            {
                "forward pass": repeated(
                    lambda: bench.maker.backbone.extract(images),
                    times=max(1, num // count),
                    units=count,
                ),
                "features": repeated(bench.compute_features, units=num),
            },
            rounds=rounds,
        )
    fraction = ratio(found, "features", "forward pass")
    keep({"features of forward": fraction})
    report(
        f"(c) features, from shards to a file; {count} images at once",
        found,
        unit="images/s",
        against="forward pass",
        headline=f"features: {fraction:.0%} of the throughput of the forward pass",
    )


def grid_against_one(bench: Bench, features_s: float, *, rounds: int) -> None:
    table, grid, rows = bench.features(), candidates_of(bench.settings), []
    assert len(grid) == 25

    def heads(size: int, num_classes: int) -> Callable[[], float]:
        return repeated(lambda: bench.heads(table, grid[:size], num_classes=num_classes))

    for num_classes in (10, 100):
        cells = {"one": heads(1, num_classes), "25": heads(25, num_classes)}
        found = rates(cells, rounds=rounds, warm_ups=0)
        one_s, many_s = (1 / statistics.median(found[name]) for name in cells)
        prices = ((each + many_s) / (each + one_s) for each in (features_s, VIEWS * features_s))
        rows.append(
            (
                str(num_classes),
                f"{one_s:.2f}",
                f"{many_s:.2f}",
                *(f"{price:.2f} x" for price in prices),
            )
        )
    print_table(
        f"(b) features {features_s:.2f} s, of 50 views {VIEWS * features_s:.0f} s",
        (
            "classes",
            "1 cell: heads s",
            "25 cells: heads s",
            "25 : 1, with features",
            "with 50 views",
        ),
        rows,
    )


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as place:
        per_class = sized(options, full=320, quick=80, dry=4)
        scale = 16 if ON_GPU and not options.dry_run else 1
        bench = prepare(Path(place), per_class=per_class * scale)
        features_s = against_the_public_way(bench, rounds=sized(options, full=5, quick=2, dry=2))
        features_against_forward(bench, rounds=3)
        grid_against_one(bench, features_s, rounds=sized(options, full=3, quick=1, dry=1))


if __name__ == "__main__":
    main()
