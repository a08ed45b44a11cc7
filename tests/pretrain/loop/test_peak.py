"""The peak of a device: from its data sheet by its exact name, otherwise measured or set by the
user."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pretrain.loop.evaluate import Scores
from pretrain.loop.peak import Meter, Peak, find_peak, listed_teraflops
from pretrain.loop.trainer import in_words
from pretrain.ranks.collectives import Moment

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA RTX A5000", "fp32", 27.8),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
    ],
)
def test_a_data_sheet_counts_for_its_very_device_alone(
    name: str, precision: str, teraflops: float | None
) -> None:
    assert listed_teraflops(name, precision=precision) == teraflops


def test_what_the_user_says_counts_first() -> None:
    assert find_peak(CPU, precision="fp32", given=1.5) == Peak(1.5, "tracking.peak_teraflops")


def meter_of(*ends_s: float, peak_teraflops: float, wait_s: float = 0.0) -> Meter:
    """Return the meter after steps with these end times; the first step began at 100 s."""
    meter = Meter(
        global_batch_size=64, flops_per_image=3e9, peak_teraflops=peak_teraflops, device=CPU
    )
    clock = iter([100.0, *ends_s])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "pretrain.ranks.collectives.time", SimpleNamespace(monotonic=lambda: next(clock))
        )
        meter.restart()
        for _ in ends_s:
            meter.count(Moment(CPU), wait_s=wait_s)
    return meter


def test_a_reading_holds_the_achieved_operations_against_the_peak() -> None:
    meter = meter_of(*(100 + step / 2 for step in range(1, 21)), peak_teraflops=0.768, wait_s=0.125)
    reading = {"train/loss": 2.0, "train/epoch": 3.14} | meter.reading()
    # 20 batches of 64 in 10 s are 128 images/s, with 1 + 2 billion operations each
    assert reading["usage/images_per_s"] == 128 and reading["usage/teraflops"] == pytest.approx(
        0.384
    )
    assert (
        reading["usage/mfu"] == pytest.approx(0.5) and reading["usage/data_wait_fraction"] == 0.25
    )
    assert 0.01 < reading["usage/peak_rss_gb"] < 1000
    scores = Scores(top1=0.412, top5=0.7, loss=2.1, num_samples=10)
    assert (
        in_words(reading, scores, scored_step=1200)
        == "epoch 3.1  training loss 2.000  top-1 41.2 % at step 1,200  128 images/s  MFU 50 %"
    )
    unequal = replace(scores, class_top1=0.305)
    assert in_words({}, unequal, scored_step=7) == "top-1 41.2 %, class mean 30.5 % at step 7"
    assert in_words({}, None, scored_step=0) == ""
    assert (
        meter_of(105.0, 110.0, peak_teraflops=0.01).reading()["usage/mfu"] == 1
    )  # the peak is at least the reached speed


def test_the_speed_of_a_run_is_that_of_its_steps_without_the_first_which_compiles() -> None:
    assert meter_of(160.0, 161.0, 162.0, peak_teraflops=1).images_per_s == 64
    assert (
        meter_of(160.0, peak_teraflops=1).images_per_s is None
        and meter_of(peak_teraflops=1).images_per_s is None
    )
