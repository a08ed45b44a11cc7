"""`pretrain plan`: rows that can be worked out by hand, and what cannot be planned."""

import pytest

from pretrain.cli import main as pretrain
from pretrain.engine.zero_cost import Plan, rows
from pretrain.models.presets import spec_of


def test_a_row_is_what_one_works_out_by_hand() -> None:
    """B-12/Wi-1024: 124,843,998 weights, as many multiply-adds but for biases and norms."""
    one, four = rows(Plan("B-12", spec_of("mlp_b12_wi1024"), 11_230, 64, 16_384, [1, 4], 4))
    assert (one.num_ranks, one.local_batch_size, four.local_batch_size) == (4, 4096, 1024)
    assert one.held_gb[0] == pytest.approx(3 * 4 * 0.124843998, rel=1e-6)  # weights, Lion's momentum, gradients
    assert four.sent_mb[1] == pytest.approx(3 * 15 / 16 * 2 * 124.843998, rel=1e-6)
    assert one.network_ms == (0, 0, 0, 0) and four.network_ms[1] == pytest.approx(four.sent_mb[1] / 25, rel=1e-6)
    assert one.compute_ms == pytest.approx(6 * 0.1247e9 * 4096 / 300e12 * 1e3, rel=2e-3)


def test_every_stage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["plan", "mixer_b_w_c3", "--optimizer", "adamw", "--nodes", "1,2"]) == 0
    said = capsys.readouterr().out
    assert "GB held, 0/1/2/3" in said and "0.50 0.18 0.19 0.13" in said and "network ms, 0/1/2/3" in said
    assert pretrain(["plan", "mixer_b_w", "--nodes", "1"]) == 0  # between nodes it sends nothing
    said = capsys.readouterr().out
    assert "MB sent, 0/1/2/3" in said and "network" not in said.lower()


def test_the_hours_of_a_config_are_its_floating_point_operations(capsys: pytest.CaptureFixture[str]) -> None:
    """B-12/Wi-1024 on winter21: 400 epochs of 11,060,223 pictures, in steps of 16,384, at 6 x 124.74 M operations a picture."""
    config = [
        "configs/pretrain/imagenet21k_b12_wi1024_paper.yaml",
        "--samples",
        "11060223",
        "--classes",
        "10450",
        "--image-size",
        "64",
    ]
    assert pretrain(["plan", *config, "--teraflops", "100"]) == 0
    steps = -(-400 * 11_060_223 // 16_384)
    hours = steps * 16_384 * 6 * (114_270_208 + 1024 * (10_450 - 1000)) / 100e12 / 3600
    assert (
        f"at least {hours:.2g} GPU-hours: {steps:,} steps of nothing but compute, at 100 TFLOP/s a GPU" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["mlp_b12"], "is not a known model"),
        (
            ["configs/pretrain/imagenet21k_b12_wi1024_paper.yaml", "data.dataset=nowhere"],
            "(or give --samples, --classes and --image-size)",
        ),
        (["mixer_b_w", "--batch", "1000", "--nodes", "3"], "--batch: 1000 does not split over 3 x 4 GPUs"),
    ],
)
def test_what_cannot_be_planned(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["plan", *words]) == 2
    assert complaint in capsys.readouterr().err
