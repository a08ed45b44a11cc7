"""`pretrain plan`: rows that can be worked out by hand, and what cannot be planned."""

import math
from dataclasses import replace
from typing import get_args

import pytest

from pretrain.cli import main as pretrain
from pretrain.engine.zero_cost import (
    STAGES,
    Plan,
    Precision,
    Stage,
    advice,
    bucket_elements,
    rows,
    slower_than_fewer,
)
from pretrain.models.presets import spec_of

B12 = Plan(
    "B-12", spec_of("mlp_b12_wi1024"), 11_230, 64, 16_384, [1, 4], 4, gbit_per_s_inside=math.inf
)
MIXER = Plan("Mixer", spec_of("mixer_b_w"), 1000, 224, 4096, [1, 2, 4, 8, 16, 32], 4)


def test_a_row_is_what_one_works_out_by_hand() -> None:
    """B-12/Wi-1024: 124,843,998 weights, as many multiply-adds but for biases and norms."""
    one, four = rows(B12)
    assert (one.num_ranks, one.local_batch_size, four.local_batch_size) == (4, 4096, 1024)
    assert one.held_gb[0] == pytest.approx(
        3 * 4 * 0.124843998, rel=1e-6
    )  # weights, Lion's momentum, gradients
    assert four.sent_mb[1] == pytest.approx(3 * 15 / 16 * 2 * 124.843998, rel=1e-6)
    assert one.network_ms == (0, 0, 0, 0) and four.network_ms[1] == pytest.approx(
        four.sent_mb[1] / 25, rel=1e-6
    )
    assert one.compute_ms == pytest.approx(6 * 0.1247e9 * 4096 / 300e12 * 1e3, rel=2e-3)


def test_every_stage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["plan", "mixer_b_w_c3", "--optimizer", "adamw", "--nodes", "1,2"]) == 0
    said = capsys.readouterr().out
    assert (
        "GB held, 0/1/2/3" in said
        and "0.50 0.22 0.22 0.12" in said
        and "network ms, 0/1/2/3" in said
    )
    assert pretrain(["plan", "mixer_b_w", "--nodes", "1"]) == 0
    assert "Use 1 node: a step takes " in capsys.readouterr().out


def test_the_hours_of_a_config_are_its_floating_point_operations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B-12/Wi-1024 on winter21: 400 epochs of 11,060,223 pictures, in steps of 16,384, at 6 x
    124.74 M operations a picture."""
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
        f"at least {hours:.2g} GPU-hours: {steps:,} steps of nothing but compute, at 100 TFLOP/s"
        " a GPU" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["mlp_b12"], "is not a known model"),
        (
            ["configs/pretrain/imagenet21k_b12_wi1024_paper.yaml", "data.dataset=nowhere"],
            "(or give --samples, --classes and --image-size)",
        ),
        (
            ["mixer_b_w", "--batch", "1000", "--nodes", "3"],
            "--batch: 1000 does not split over 3 x 4 GPUs",
        ),
    ],
)
def test_what_cannot_be_planned(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(["plan", *words]) == 2
    assert complaint in capsys.readouterr().err


# ---- the number of nodes
# -----------------------------------------------------------------------------------------------


def test_four_nodes_are_slower_than_one_for_a_model_of_few_operations() -> None:
    """2.6 + 28.1 ms against 10.2: what hides is the reduction beside the backward pass, but for its
    last bucket."""
    one, four = B12.step(1), B12.step(4)
    assert [round(1e3 * each, 1) for each in (one.whole, four.compute, four.network)] == [
        10.2,
        2.6,
        28.1,
    ]
    buckets = math.ceil(124_843_998 / bucket_elements(124_843_998))
    assert four.hidden == pytest.approx(2 / 3 * four.compute * (1 - 1 / buckets)), (
        "less than the reduction"
    )
    assert B12.best() == 1 and advice(B12).startswith(
        "Use 1 node: a step takes 10.2 ms, 100% of it computing. 4 nodes take "
    )
    line = slower_than_fewer(B12, 4)
    assert (
        line
        and line.startswith("4 nodes would take ")
        and "use --nodes=1, or a batch of 65,536 and more" in line
    )
    assert (
        slower_than_fewer(B12, 1) is None
        and slower_than_fewer(replace(B12, global_batch_size=65_536), 4) is None
    )
    assert slower_than_fewer(MIXER, 16) is None


def test_larger_batches_pay_for_nodes_where_they_are_said_to() -> None:
    batch = B12.batch_for(4)
    assert batch == 65_536, "4.1 x 16,384 would pay for a network that hides nothing"
    assert [replace(B12, global_batch_size=size).best() for size in (batch // 2, batch)] == [1, 4]
    assert replace(B12, gbit_per_s=0.01).batch_for(
        4
    ) is None and "at no batch up to 16,777,216" in advice(replace(B12, gbit_per_s=0.01))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", get_args(Precision))
def test_links_without_limit_and_work_without_weight(stage: Stage, precision: Precision) -> None:
    """More nodes are never slower where links cost nothing, and never faster where computing does;
    in between hiding saves no more than there is, and twice the speed of everything is half the
    time."""
    for plan in (
        replace(each, stage=stage, precision=precision, micro_batch_size=micro)
        for each in (B12, MIXER)
        for micro in (None, 8)
    ):
        counts = [1, 2, 4, 8, 16, 32]
        free = replace(plan, gbit_per_s=math.inf, gbit_per_s_inside=math.inf)
        times = [free.step(count).whole for count in counts]
        assert times == sorted(times, reverse=True) and free.best(counts) == 32
        slow = replace(plan, teraflops=math.inf, gbit_per_s_inside=3600)
        if plan.micro_batch_size is None or stage < 2:  # else fewer ranks reduce more often
            assert [slow.best(counts[:number]) for number in range(1, 7)] == [1] * 6
        for count in counts:
            speeds = (
                {"teraflops": 300.0 * n, "gbit_per_s": 200.0 * n, "gbit_per_s_inside": 3600.0 * n}
                for n in (1, 2)
            )
            step, twice = (replace(plan, **each).step(count) for each in speeds)
            assert 0 <= step.hidden <= min(step.compute, step.network) and (
                stage or not step.hidden
            )
            assert twice.whole == pytest.approx(step.whole / 2)


def test_accumulation_sends_more_at_stages_2_and_3_and_hides_less_at_stage_1() -> None:
    whole, cut = (
        replace(B12, micro_batch_size=micro) for micro in (None, 256)
    )  # 4 of them on 4 nodes
    sent = [
        cut.step(4, stage=stage).network / whole.step(4, stage=stage).network for stage in STAGES
    ]
    assert sent == pytest.approx([1, 1, (2 * 4 + 1) / 3, 4])
    assert cut.step(4).hidden == pytest.approx(whole.step(4).hidden / 4), (
        "only the last backward pass has a reduction beside it"
    )


def test_a_reduction_in_buckets_ends_when_its_last_bucket_does() -> None:
    """Bucket by bucket, with a clock: what the formula says in one line."""
    for factor in (0.01, 0.5, 1, 2, 100):
        plan = replace(B12, gbit_per_s=200 * factor, teraflops=30)
        step, ring = plan.step(4), 15 / 16 * 2 * 124_843_998 / (25e9 * factor)
        backward, reduction = 2 / 3 * step.compute, 2 * ring
        count = math.ceil(124_843_998 / bucket_elements(124_843_998))
        clock = 0.0
        for number in range(1, count + 1):
            clock = max(clock, backward * number / count) + reduction / count
        assert step.whole == pytest.approx(step.compute / 3 + clock + ring)


def test_the_best_row_is_marked_and_a_sentence_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "plan",
        "mlp_b12_wi1024",
        "--batch",
        "16384",
        "--nodes",
        "1,4",
        "--zero",
        "2",
        "--micro-batch",
        "1024",
        "--gbit",
        "100",
    ]
    assert pretrain(words) == 0
    said = capsys.readouterr().out
    assert (
        "A step at ZeRO 2, micro-batches of 1,024: 300 TFLOP/s a GPU, 100 Gbit/s between nodes,"
        " 3600 inside" in said
    )
    assert [line.split()[0] for line in said.splitlines() if line.endswith("<- best")] == [
        "1"
    ] and "\nUse 1 node: " in said
