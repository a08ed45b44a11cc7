"""Does a GPU compute what the CPU computes, and does every command run on one?

make gpu-tests                              on the first GPU; without one the tests skip
CUDA_TESTS_DEVICE=cpu make gpu-tests        a dry run, in which the CPU is compared with itself
"""

import copy
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.probe.knn import neighbors_of, unit_rows
from pretrain.augment.augmentation import Augmentation, Normalization, Prepared
from pretrain.augment.feed import Feed, finish_for
from pretrain.config import AugmentSettings, OptimizerSettings
from pretrain.data.loader import Batch, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split
from pretrain.engine.step import compile_blocks, loss_of
from pretrain.models.build import build_model
from pretrain.models.presets import preset, spec_of
from pretrain.models.spec import SparseMlpSpec
from pretrain.optim import Lion, build_optimizer
from tests.ranks import REPOSITORY

DEVICE = torch.device(os.environ.get("CUDA_TESTS_DEVICE", "cuda"))
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.processes,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(),
        reason="no GPU, or not run with -m cuda",
    ),
]

# ---- operations: the same numbers as on the CPU

PAPER_B = {"crop_scale": (0.4, 1.0), "mixup_alpha": 0.8}
TIMM = {
    "crop_scale": (0.08, 1.0), "crop_interpolation": "random", "auto_augment": "rand-m9-mstd0.5-inc1", "erase_probability": 0.25,
    "mixup_alpha": 0.8, "cutmix_alpha": 1.0,
}  # fmt: skip
ERASE = {"crop_scale": (0.4, 1.0), "erase_probability": 0.5, "erase_mode": "rand", "erase_count": 3}
# settings, stored size and input size in pixels
RECIPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "Scaling MLPs 64": (PAPER_B, 64, 64),
    "Scaling MLPs 72 to 64": (PAPER_B, 72, 64),
    "crop 256 to 224": ({"crop_scale": (0.08, 1.0)}, 256, 224),
    "timm 72 to 64": (TIMM, 72, 64),
    "erase": (ERASE, 64, 64),
    "padding": ({"crop_padding": 4, "auto_augment": "original", "cutmix_alpha": 1.0}, 32, 32),
    "reflect": ({"crop_padding": 4, "padding_mode": "reflect", "auto_augment": "v0"}, 32, 32),
}


def stored(count: int, size: int) -> Batch:
    """Return smooth noise as the loader delivers images."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.integers(0, 256, (count, 3, 8, 8)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    noise = torch.from_numpy(rng.normal(0, 12, (count, 3, size, size)).astype(np.float32))
    images = (smooth + noise).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    labels = torch.from_numpy(rng.integers(0, 48, count))
    ids = np.arange(count, dtype=np.int64)
    return Batch(images, labels, np.zeros(count, np.int64), ids * 7, ids // 2)


def augmentation(
    settings: dict[str, Any], device: torch.device, *, size: int, dtype: torch.dtype = torch.float32
) -> Augmentation:
    normal = Normalization((0.48, 0.45, 0.41), (0.27, 0.26, 0.27))
    words = {"seed": 3, "image_size": size, "normalization": normal}
    return Augmentation(AugmentSettings(**settings), device=device, dtype=dtype, **words)


@pytest.mark.parametrize("name", RECIPES)
def test_pictures(name: str) -> None:
    settings, stored_px, fed_px = RECIPES[name]
    batch = stored(32 if fed_px > 100 else 128, stored_px)
    gpu = augmentation(settings, DEVICE, size=fed_px).prepare(batch)
    cpu = augmentation(settings, CPU, size=fed_px).prepare(batch)
    # 0.02: another order of rounding before a color becomes an integer
    torch.testing.assert_close(gpu.images_BCHW.cpu(), cpu.images_BCHW, atol=0.02, rtol=0)
    assert torch.equal(gpu.labels_B.cpu(), cpu.labels_B)
    if cpu.weight_B is not None and gpu.weight_B is not None:
        torch.testing.assert_close(gpu.weight_B.cpu(), cpu.weight_B.float(), atol=1e-6, rtol=0)


def test_loss() -> None:
    logits = torch.randn(64, 501, generator=torch.Generator().manual_seed(0))
    labels, others, weight = torch.arange(64) * 3, torch.arange(64) * 5, torch.linspace(0, 1, 64)

    def gradient(device: torch.device) -> Tensor:
        inputs = logits.to(device).requires_grad_()
        batch = Prepared(inputs, labels.to(device), others.to(device), weight.to(device))
        loss_of(inputs, batch, label_smoothing=0.3).backward()
        assert inputs.grad is not None
        return inputs.grad.cpu()

    torch.testing.assert_close(gradient(DEVICE), gradient(CPU), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["lion", "adamw", "sgd"])
def test_ten_updates(name: Any) -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(
        torch.nn.Linear(300, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 10)
    )

    def weights(device: torch.device) -> Tensor:
        model, generator = copy.deepcopy(first).to(device), torch.Generator().manual_seed(0)
        optimizer = build_optimizer(model, OptimizerSettings(name=name, lr=1e-3, weight_decay=0.1))
        for _ in range(10):
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator).to(device)
            optimizer.step()
        return torch.cat([weight.detach().cpu().flatten() for weight in model.parameters()])

    torch.testing.assert_close(weights(DEVICE), weights(CPU), atol=1e-4, rtol=0)


def test_lion_updates_a_shard_and_skips_a_step_whose_norm_is_not_finite() -> None:
    def updated(device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        shard = torch.randn(100_003, generator=generator).to(device)  # the last 3 are padding
        rounded = torch.zeros(100_003, dtype=torch.bfloat16, device=device)
        optimizer = Lion([shard], lr=1e-3, weight_decay=0.1)
        for share in (1.0, float("nan"), 0.25, float("inf"), 0.5):
            gradients = [
                torch.randn(size, generator=generator).to(device, torch.bfloat16)
                for size in (70_000, 30_000)
            ]
            before = shard.clone()
            optimizer.step_shards([gradients], [rounded], torch.tensor(share, device=device))
            assert torch.equal(before, shard) == (not math.isfinite(share))
        assert torch.equal(rounded[:100_000], shard[:100_000].bfloat16())
        return torch.cat([shard, optimizer.state[shard]["exp_avg"]]).cpu()

    torch.testing.assert_close(updated(DEVICE), updated(CPU), atol=1e-6, rtol=0)


MODELS: dict[str, tuple[Any, int]] = {
    **{name: (spec_of(name), preset(name).image_size) for name in ("mlp_b6_wi256", "smixer_c32", "rp_mixer_ss_w", "mixer_ss_8")},
    "sw_mlp": (spec_of("sw_mlp_540"), 32),
    "sw_mlp sparse": (SparseMlpSpec(kind="sw_mlp", width=1619, density=0.02), 32),
    "monarch": (spec_of("monarch_mnist", grayscale=False), 28),
    "kronecker": (spec_of("kronecker_mnist", grayscale=False), 28),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch compiles with deprecated calls of its own
@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [
        *((name, False) for name in MODELS),
        *((name, True) for name in ("mlp_b6_wi256", "rp_mixer_ss_w", "sw_mlp sparse")),
    ],
)
def test_gradients_of_a_model(name: str, is_compiled: bool) -> None:
    spec, size = MODELS[name]
    images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(1))

    def computed(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        model = build_model(spec, num_classes=11, image_size=size, seed=0).to(device, dtype).train()
        if is_compiled and dtype == torch.bfloat16:
            compile_blocks(model)
        logits = model(images.to(device, dtype))
        (logits.float() ** 2).mean().backward()
        gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
        return logits.detach().double().cpu(), torch.cat(gradients).double().cpu()

    expected = computed(CPU, torch.float64)
    for dtype, logits_off, gradients_off in (
        (torch.float32, 1e-3, 1e-3),
        (torch.bfloat16, 0.05, 0.2),  # S-Mixers differ by 0.1 on a CPU, too
    ):
        found = computed(DEVICE, dtype)
        for one, other, off in zip(found, expected, (logits_off, gradients_off), strict=True):
            assert float((one - other).norm() / other.norm()) < off, dtype


def test_nearest_neighbors() -> None:
    rng = torch.Generator().manual_seed(0)
    train, test = torch.randn(5000, 96, generator=rng), torch.randn(300, 96, generator=rng)

    def rows(device: torch.device) -> Tensor:
        (queries,) = unit_rows([test], device=device)
        return neighbors_of(queries, unit_rows(train.split(700), device=device), count=20)[1].cpu()

    assert torch.equal(rows(DEVICE), rows(CPU))


def test_the_feed_hands_over_what_is_complete(shapes: Path) -> None:
    """The side stream prepares batches while the model's stream is busy: a race would show."""
    reader = open_split(shapes, load_manifest(shapes), "train")
    make = partial(augmentation, PAPER_B, DEVICE, size=16, dtype=torch.bfloat16)

    def open_batches(finish: Callable[[Batch], Any]) -> Any:
        plan = BatchPlan(64, 64, 1)
        words = {"rank": 0, "consumed": 0, "num_threads": 4, "prefetch": 4}
        order, pin = Order(reader.num_samples, 1), DEVICE.type == "cuda"
        return training_batches(reader, order, plan, **words, pin=pin, finish=finish)

    with open_batches(lambda batch: batch) as batches:
        expected = [make().prepare(next(batches)).images_BCHW.clone() for _ in range(60)]
    load = torch.randn(2048, 2048, device=DEVICE)
    with Feed(open_batches(finish_for(make())), make()) as feed:
        for number, images in enumerate(expected):
            given = next(feed).prepared.images_BCHW
            for _ in range(number % 5):
                load = torch.tanh(load @ load)
            assert torch.equal(given, images), number
            scratch = [torch.empty_like(given).fill_(7) for _ in range(3)]  # reuses freed memory
            del scratch, given


# ---- commands: every setting of the engine, each kind of model, each command

STEPS = 24
RECIPE = f"augment={json.dumps(TIMM)}"
BF16 = "engine.precision=bf16"
SAME_LOSS: dict[str, tuple[str, ...]] = {
    **{f"z{stage} {precision}": (f"engine.zero_stage={stage}", f"engine.precision={precision}")
       for stage in range(4) for precision in ("fp32", "bf16", "fp16")},
    **{f"z{stage} compiled": (f"engine.zero_stage={stage}", BF16, "engine.compile=true") for stage in range(3)},
    **{f"z{stage} accumulated": (f"engine.zero_stage={stage}", BF16, "train.local_batch_size=32") for stage in range(4)},
    "tf32": ("engine.zero_stage=1", "engine.precision=tf32"),
    "z2 offload": ("engine.zero_stage=2", BF16, "engine.offload=optimizer"),
    "z3 offload": ("engine.zero_stage=3", BF16, "engine.offload=all"),
    "auto": ("engine.zero_stage=1", BF16, "train.local_batch_size=auto"),
    "recompute": ("engine.zero_stage=1", BF16, "engine.activation_checkpointing=true"),
}  # fmt: skip
"""Settings that change the computation of a step, but not its result."""
OTHERS: dict[str, tuple[str, ...]] = {
    "adamw, average": (BF16, "optimizer.name=adamw", "train.ema_decay=0.9"),
    "sgd": (BF16, "optimizer.name=sgd", "optimizer.lr=0.01"),
    "recipe": (BF16, RECIPE),
    "recipe compiled": (BF16, RECIPE, "engine.compile=true"),
    "rp_mixer": (BF16, "model={preset: rp_mixer_ss_w, num_channels: 67}"),
    "sw_mlp masked": (BF16, "model={preset: sw_mlp_540}"),
    "sw_mlp sparse": (BF16, "model={kind: sw_mlp, width: 1619, density: 0.02}"),
    "two ranks": ("--ranks", "2"),
}
TUNE = ("-m", "finetune", "tune", "configs/finetune/demo.yaml", f"train.duration={STEPS} steps")
PROBE = ("-m", "finetune", "probe", "configs/probe/demo.yaml")
VERBS: dict[str, tuple[str, ...]] = {
    **{f"probe {name}": (*PROBE, f"optimizer={name}", "lrs=null") for name in ("sgd", "adamw", "lbfgs")},
    "probe views": (*PROBE, "optimizer=lion", "num_views=4", "augment={crop_scale: [0.4, 1.0]}", "feature_dtype=float16"),
    "knn": ("-m", "finetune", "knn", "configs/knn/demo.yaml"),
    "tune": TUNE,
    "tune compiled": (*TUNE, BF16, "engine.compile=true"),
    "tune auto": (*TUNE, BF16, "train.local_batch_size=auto"),
    "accelerate": ("-m", "accelerate.commands.launch", "--num_processes", "1", *TUNE),
    "evaluate": ("-m", "finetune", "evaluate"),
    "evaluate views": ("-m", "finetune", "evaluate", "num_views=10", "precision=bf16"),
}  # fmt: skip


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    variables = os.environ | environment | ({"CUDA_VISIBLE_DEVICES": ""} if DEVICE == CPU else {})
    return subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )


class Trainings:
    """Training runs of the demo's MLP with `STEPS` steps, six at a time, shared by all tests."""

    def __init__(self, dataset: Path, place: Path):
        self.dataset, self.place = dataset, place
        with ThreadPoolExecutor(6 if DEVICE.type == "cuda" else 1) as pool:
            found = [pool.submit(self.train, *item) for item in (SAME_LOSS | OTHERS).items()]
            self.of_cpu = self.train("cpu", ("engine.precision=fp32",), CUDA_VISIBLE_DEVICES="")
            names = (*SAME_LOSS, *OTHERS)
            self.done = dict(zip(names, [each.result() for each in found], strict=True))

    def train(self, name: str, settings: tuple[str, ...], **environment: str) -> Any:
        return run("-m", "pretrain", "train", *self.words(name), *settings, **environment)

    def words(self, name: str) -> list[str]:
        lengths = {"train.duration": STEPS, "schedule.warmup": STEPS // 2, "train.eval_every": STEPS,
                   "checkpoint.every": STEPS // 6}  # fmt: skip
        return [
            "configs/pretrain/demo_mlp.yaml", f"run_dir={self.place / name}", f"data.dataset={self.dataset}",
            "train.global_batch_size=128", "engine.zero_stage=1", *(f"{key}={count} steps" for key, count in lengths.items()),
            "tracking.enabled=false",
        ]  # fmt: skip

    def loss(self, name: str) -> float:
        return float(json.loads((self.place / name / "result.json").read_text())["eval/loss"])


@pytest.fixture(scope="session")
def trainings(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    made = Trainings(shapes, tmp_path_factory.mktemp("cuda"))
    assert made.of_cpu.returncode == 0, made.of_cpu.stderr
    return made


@pytest.mark.parametrize("name", SAME_LOSS)
def test_training_reaches_the_loss_of_the_cpu(trainings: Trainings, name: str) -> None:
    done = trainings.done[name]
    assert done.returncode == 0, done.stderr
    tolerance = 0.01 if "fp32" in name else 0.05
    assert trainings.loss(name) == pytest.approx(trainings.loss("cpu"), abs=tolerance)


@pytest.mark.parametrize("name", OTHERS)
def test_training_ends(trainings: Trainings, name: str) -> None:
    done = trainings.done[name]
    if name == "two ranks" and DEVICE.type == "cuda" and torch.cuda.device_count() == 1:
        assert "[missing-device]" in done.stderr
    else:
        assert done.returncode == 0 and math.isfinite(trainings.loss(name)), done.stderr


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_ends(trainings: Trainings, other_shapes: Path, name: str) -> None:
    place = trainings.place / name
    settings = [f"pretrained={trainings.place / 'z1 bf16'}", f"run_dir={place}"]
    dataset = trainings.dataset if "evaluate" in name else other_shapes
    settings += [f"data.dataset={dataset}", "tracking.enabled=false"]
    done = run(*VERBS[name], *settings)
    assert done.returncode == 0 and (place / "result.json").exists(), done.stderr


def test_torchrun_and_preflight_run(trainings: Trainings, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "pretrain", "train")
    done = run(*launcher, *trainings.words("torchrun"))
    assert done.returncode == 0, done.stderr
    done = run("-m", "cluster.preflight", str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stage", range(4))
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(
    trainings: Trainings, stage: int
) -> None:
    settings = (f"engine.zero_stage={stage}", BF16, "augment.mixup_alpha=0.8")
    whole, broken = (trainings.place / f"{kind} {stage}" for kind in ("whole", "broken"))
    assert trainings.train(whole.name, settings).returncode == 0
    words = [sys.executable, "-m", "pretrain", "train", *trainings.words(broken.name), *settings]
    process = subprocess.Popen(words, cwd=REPOSITORY)
    while process.poll() is None and not [*broken.glob("checkpoints/step-*")]:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0 and not (broken / "result.json").exists(), "it was not stopped"
    assert trainings.train(broken.name, settings).returncode == 0

    def digests(folder: Path) -> list[str]:
        last = folder / "checkpoints" / f"step-{STEPS:08d}"
        files = ("model.safetensors", "optimizer.safetensors")
        return [hashlib.sha256((last / name).read_bytes()).hexdigest() for name in files]

    assert digests(whole) == digests(broken)
