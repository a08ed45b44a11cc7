"""Throughput of `finetune evaluate`, compared with its limits, in one process.

    .venv/bin/python benchmarks/transfer_evaluate.py [--quick]

Matrix products limit the first case, a large model with raw images. The other cases are a small
model with raw images, and with JPEGs (decoded by threads of the loader). Contestants use the
complete split. The unit is a forward pass of one image.
  evaluate             loader, normalization, forward pass, softmax and a row per image, as in `finetune evaluate`
  loader, normalized   only the loader and normalization
  forward only         the forward pass of one prepared batch
  V views, one pass    test-time augmentation, as in `finetune evaluate num_views=V`: each image is read once
  V passes             the same views, each with its own pass over the disk
GPUs use bf16. On a CPU, loader and model share the cores, so the common limit is the harmonic sum
of both limits. The benchmark prints this sum.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from frame import arguments, keep, rates, ratio, repeated, report, sized
from images import shapes_dataset
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.evaluate.config import ViewSettings
from finetune.evaluate.evaluate import answer
from finetune.split import batches_of
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.data.reader import open_split
from pretrain.models.build import build_model
from pretrain.models.presets import spec_of
from pretrain.models.spec import MlpSpec
from pretrain.ranks.world import World, read_world

IMAGE_SIZE = 64


@dataclass(frozen=True)
class Case:
    encoding: str
    spec: MlpSpec
    per_class: int
    batch: int
    views: int


def cases(*, on_gpu: bool, quick: bool, is_dry: bool) -> list[Case]:
    small = MlpSpec(kind="mlp", depth=1, width=64)
    if is_dry:
        large, shape = small, {"per_class": 4, "batch": 64, "views": 2}
    elif on_gpu:
        large = spec_of("mlp_b12_wi1024")
        shape = {"per_class": 400 if quick else 1000, "batch": 2048, "views": 20}
    else:
        large = (
            MlpSpec(kind="mlp", depth=4, width=256)
            if quick
            else MlpSpec(kind="mlp", depth=6, width=512)
        )
        shape = {"per_class": 60 if quick else 200, "batch": 512, "views": 3 if quick else 10}
    return [Case("raw", large, **shape), Case("raw", small, **shape), Case("jpeg", small, **shape)]


class Bench:
    def __init__(self, case: Case, world: World, device: torch.device):
        directory = shapes_dataset(IMAGE_SIZE, case.per_class, encoding=case.encoding)
        manifest = load_manifest(directory)
        self.case, self.world, self.device = case, world, device
        sizes = {"num_classes": len(manifest.classes), "image_size": IMAGE_SIZE}
        self.model = build_model(case.spec, **sizes).to(device).eval()
        self.reader = open_split(directory, manifest, "train")
        self.augmentation = Augmentation(
            ViewSettings(),
            seed=0,
            image_size=IMAGE_SIZE,
            normalization=Normalization(manifest.channel_mean, manifest.channel_std),
            device=device,
            dtype=torch.float32,
        )
        batch = next(iter(self._batches()))
        self.resident = self.augmentation.plain(batch).images_BCHW.clone()

    def _batches(self):
        return batches_of(
            self.reader,
            title="",
            local_batch_size=self.case.batch,
            world=self.world,
            device=self.device,
        )

    def logits(self, images_BCHW: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(images_BCHW)

    def evaluate(self, views: Sequence[int | None]) -> float:
        found = answer(
            self.logits,
            self.reader,
            self.augmentation,
            views=views,
            local_batch_size=self.case.batch,
            world=self.world,
        )
        assert len(found) == self.reader.num_samples
        return float(self.reader.num_samples * len(views))

    def load(self) -> None:
        for batch in self._batches():
            self.augmentation.plain(batch)

    @torch.no_grad()
    def forward(self) -> None:
        self.logits(self.resident)

    def passes(self) -> float:
        return sum(self.evaluate([0]) for _ in range(self.case.views))


def run(case: Case, world: World, device: torch.device, *, rounds: int) -> None:
    bench = Bench(case, world, device)
    num_samples = bench.reader.num_samples
    one_pass, many = f"{case.views} views, one pass", f"{case.views} passes"
    contestants: dict[str, Callable[[], float]] = {
        "evaluate": lambda: bench.evaluate([None]),
        "loader, normalized": repeated(bench.load, units=num_samples),
        "forward only": repeated(
            bench.forward, times=-(-num_samples // case.batch), units=case.batch
        ),
        one_pass: lambda: bench.evaluate(range(case.views)),
        many: bench.passes,
    }
    found = rates(contestants, rounds=rounds)
    both = [
        ours * (1 / loader + 1 / forward)
        for ours, loader, forward in zip(
            found["evaluate"], found["loader, normalized"], found["forward only"], strict=True
        )
    ]
    where = f"{case.encoding} images of {IMAGE_SIZE} px, {num_samples:,}, batch {case.batch:,}"
    keep(
        {
            f"{case.encoding}, {case.spec.label}: evaluate of forward": ratio(
                found, "evaluate", "forward only"
            )
        }
    )
    report(
        f"{case.spec.label}, {where}, {'bf16' if device.type == 'cuda' else 'fp32'}",
        found,
        unit="passes/s",
        against="evaluate",
        headline=(
            f"evaluate: {ratio(found, 'evaluate', 'forward only'):.1%} of the forward pass,"
            f" {statistics.median(both):.1%} of loader and forward pass on the same cores;"
            f" {case.views} views in one pass: {ratio(found, one_pass, 'evaluate'):.1%} of the"
            f" throughput of evaluate, {ratio(found, one_pass, many):.2f} x {case.views} passes"
        ),
    )


def main() -> None:
    options = arguments(__doc__ or "")
    world = read_world()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for case in cases(on_gpu=device.type == "cuda", quick=options.quick, is_dry=options.dry_run):
        run(case, world, device, rounds=sized(options, full=5, quick=3, dry=1))


if __name__ == "__main__":
    main()
