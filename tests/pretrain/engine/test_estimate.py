"""The numbers of `pretrain estimate` compared with numbers computed by hand, and its errors."""

import math
from dataclasses import replace
from typing import get_args

import pytest

from pretrain.cli import main as pretrain
from pretrain.engine.zero_cost import (
    STAGES,
    Cluster,
    Plan,
    Precision,
    Stage,
    bucket_elements,
    bytes_sent,
    held,
    slower_than_fewer,
)
from pretrain.models.cost import cost_of
from pretrain.models.presets import spec_of

GPUS = Cluster(4, gbit_per_s_inside=math.inf)
B12_COST = cost_of(spec_of("mlp_b12_wi1024"), num_classes=11_230, image_size=64)
B12 = Plan(B12_COST, 16_384, GPUS)
MIXER = Plan(cost_of(spec_of("mixer_b_w"), num_classes=1000, image_size=224), 4096, GPUS)
NUM_WEIGHTS = 124_843_998


def on(plan: Plan, **speeds: float) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, **speeds))


def test_bytes_and_times_are_worked_out_by_hand() -> None:
    """B-12/Wi-1024 has 124,843,998 weights, and the same number of MACs without biases and
    norms."""
    one, four = B12.training(0, 1), B12.training(1, 4)
    assert (one.num_ranks, four.num_ranks) == (4, 16)
    # weights, Lion's momentum, gradients
    assert held(one) == pytest.approx(3 * 4 * NUM_WEIGHTS, rel=1e-6)
    assert bytes_sent(four) == pytest.approx(3 * 15 / 16 * 2 * NUM_WEIGHTS, rel=1e-6)
    assert B12.compute_s(1) == pytest.approx(6 * 0.1247e9 * 4096 / 300e12, rel=2e-3)
    assert B12.step_s(1) == B12.compute_s(1), "links inside are without limit"


def test_the_hours_of_a_config_are_its_floating_point_operations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B-12/Wi-1024 on winter21: 400 epochs of 11,060,223 images in steps of 16,384, with 6 x 124.74
    M operations per image."""
    words = (
        "estimate configs/pretrain/imagenet21k_b12_wi1024_paper.yaml --samples 11060223"
        " --classes 10450 --image-size 64 --teraflops 100"
    )
    assert pretrain(words.split()) == 0
    steps = -(-400 * 11_060_223 // 16_384)
    hours = steps * 16_384 * 6 * (114_270_208 + 1024 * (10_450 - 1000)) / 100e12 / 3600
    assert f"{steps:,} steps take at least {hours:.2g} GPU-hours" in capsys.readouterr().out


def test_a_config_without_its_dataset_says_which_options_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = "configs/pretrain/imagenet21k_b12_wi1024_paper.yaml"
    assert pretrain(["estimate", config, "data.dataset=nowhere"]) == 2
    assert "--samples" in capsys.readouterr().err


def test_four_nodes_are_slower_than_one_for_a_model_of_few_operations() -> None:
    """A step takes 2.6 + 28.1 ms (little overlap) on four nodes, and 10.2 ms on one."""
    assert 1e3 * B12.step_s(1) == pytest.approx(10.2, abs=0.05)
    assert B12.best([1, 4]) == 1
    line = slower_than_fewer(B12, 4)
    assert line and "use --nodes=1" in line
    assert slower_than_fewer(B12, 1) is None
    assert slower_than_fewer(replace(B12, global_batch_size=65_536), 4) is None
    assert slower_than_fewer(MIXER, 16) is None


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", get_args(Precision))
def test_links_without_limit_and_work_without_weight(stage: Stage, precision: Precision) -> None:
    """More nodes are never slower if links are free, and never faster if computing is free. Overlap
    never exceeds compute or network time, and double speed halves the time."""
    for plan in (
        replace(each, stage=stage, precision=precision, micro_batch_size=micro)
        for each in (B12, MIXER)
        for micro in (None, 8)
    ):
        counts = [1, 2, 4, 8, 16, 32]
        free = on(plan, gbit_per_s=math.inf)
        times = [free.step_s(count) for count in counts]
        assert times == sorted(times, reverse=True) and free.best(counts) == 32
        slow = on(plan, teraflops=math.inf, gbit_per_s_inside=3600)
        if plan.micro_batch_size is None or stage < 2:  # otherwise fewer ranks reduce more often
            assert [slow.best(counts[:number]) for number in range(1, 7)] == [1] * 6
        for count in counts:
            once, twice = (
                on(plan, teraflops=300 * n, gbit_per_s=200 * n, gbit_per_s_inside=3600 * n)
                for n in (1, 2)
            )
            compute_s, bytes_per_s = once.compute_s(count), (25e9 if count > 1 else 450e9)
            network_s = bytes_sent(once.training(stage, count)) / bytes_per_s
            least, most = max(compute_s, network_s), compute_s + network_s
            assert least * (1 - 1e-9) <= once.step_s(count) <= most * (1 + 1e-9)
            assert stage or once.step_s(count) == pytest.approx(most)
            assert twice.step_s(count) == pytest.approx(once.step_s(count) / 2)


def test_accumulation_sends_more_at_stages_2_and_3_and_hides_less_at_stage_1() -> None:
    cut = replace(B12, micro_batch_size=256)  # 4 micro-batches on 4 nodes
    sent = [bytes_sent(cut.training(n, 4)) / bytes_sent(B12.training(n, 4)) for n in STAGES]
    assert sent == pytest.approx([1, 1, (2 * 4 + 1) / 3, 4])
    hidden_s = [
        plan.compute_s(4) + bytes_sent(plan.training(1, 4)) / 25e9 - plan.step_s(4)
        for plan in (B12, cut)
    ]
    assert hidden_s[1] == pytest.approx(hidden_s[0] / 4), "beside the last backward pass only"


def test_a_reduction_in_buckets_ends_when_its_last_bucket_does() -> None:
    """A simulation bucket by bucket equals the formula."""
    for factor in (0.01, 0.5, 1, 2, 100):
        plan = on(B12, gbit_per_s=200 * factor, teraflops=30)
        compute_s, ring_s = plan.compute_s(4), 15 / 16 * 2 * NUM_WEIGHTS / (25e9 * factor)
        backward_s, reduction_s = 2 / 3 * compute_s, 2 * ring_s
        count = math.ceil(NUM_WEIGHTS / bucket_elements(NUM_WEIGHTS))
        clock_s = 0.0
        for number in range(1, count + 1):
            clock_s = max(clock_s, backward_s * number / count) + reduction_s / count
        assert plan.step_s(4) == pytest.approx(compute_s / 3 + clock_s + ring_s)


def test_the_best_row_is_marked_and_a_sentence_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "estimate mlp_b12_wi1024 --batch 16384 --nodes 1,4 --zero 2 --micro-batch 1024 --internode-gbps 100"
    assert pretrain(words.split()) == 0
    said = capsys.readouterr().out
    rows = [line.split()[0] for line in said.splitlines() if line.endswith("<- best")]
    assert rows == ["1"] and "\nUse 1 node: " in said
    assert pretrain(["estimate", "mixer_b_w_c3", "--optimizer", "adamw", "--nodes", "1,2"]) == 0
    assert "0.50 0.22 0.22 0.12" in capsys.readouterr().out
