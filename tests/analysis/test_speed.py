"""Tables S.3 and 4: the papers' costs, alternating rounds, medians of ratios, and the output
files."""

import math

import pandas as pd
import pytest

from analysis.cli import main
from analysis.speed import cost, efficiency
from analysis.speed.cost import Model, block_cost, models_of
from analysis.speed.efficiency import (
    MEASURED,
    PUBLISHED,
    Conditions,
    cost_of_named,
    measure,
    summarize,
)
from pretrain.models.build import build_model
from pretrain.models.spec import MixerSpec, MlpSpec, SparseMlpSpec
from tests.conftest import Capture
from tests.errors import printed_errors


def test_memory_and_flops_are_those_of_docs_papers() -> None:
    """The printed 12.5M, 3.22 GB and 805M belong to C = 64, not to the printed C = 48."""
    found = [[block_cost(model) for model in models_of(channels)] for channels in (48, 64)]
    mixers, stored, masked = zip(*((each[:2], each[2], each[3]) for each in found), strict=True)
    assert mixers == ([(307_200, 8_257_536)] * 2, [(393_216, 12_582_912)] * 2)
    assert stored == ((16_515_072, 8_257_536), (25_165_824, 12_582_912))
    assert masked == ((1_811_939_328, 452_984_832), (3_221_225_472, 805_306_368))


def test_models_are_trained_and_ratios_are_to_the_first() -> None:
    small = {"patch_size": 16, "num_channels": 4, "depth": 1}
    specs = (
        MixerSpec.model_validate({"kind": "mixer", **small}),
        SparseMlpSpec.model_validate({"kind": "sw_mlp", **small}),
    )
    models = [Model(type(spec).__name__, spec, 4, None) for spec in specs]
    rows = cost.measure(models, device="cpu", num_rounds=1, num_steps=1)
    assert rows.ratio[0] == 1 and (rows.epoch_s > 0).all()
    assert rows.ratio[1] == pytest.approx(rows.epoch_s[1] / rows.epoch_s[0])
    drawn = cost.draw(rows, device="cpu").axes[0].lines[0]
    assert list(drawn.get_xdata()) == rows.epoch_s.tolist()


def test_models_take_turns_within_a_round_in_their_dtype() -> None:
    spec = MlpSpec(kind="mlp", depth=1, width=4)
    models = {name: build_model(spec, num_classes=2, image_size=4, seed=0) for name in "ab"}
    found = measure(models, Conditions("cpu", "bf16", False, 2, 2, 0), image_size=4)
    assert list(zip(found.model, found["round"], strict=True)) == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    assert (found.latency_s > 0).all() and (found.images_per_s > 0).all()
    assert found.images_per_s_with_transfer.isna().all()  # a CPU transfers nothing
    assert {str(weight.dtype) for weight in models["a"].parameters()} == {"torch.bfloat16"}


def test_ratios_are_medians_of_the_ratios_within_a_round() -> None:
    first, second = list(PUBLISHED)[:2]
    seconds = {first: [0.001, 0.002, 0.010], second: [0.004, 0.020, 0.030]}
    rates = {first: [100.0, 200.0, 50.0], second: [50.0, 20.0, 10.0]}
    timings = [
        (model, number, seconds[model][number], rates[model][number], rates[model][number] / 6)
        for number in range(3)
        for model in seconds
    ]
    rows = summarize(pd.DataFrame(timings, columns=["model", "round", *MEASURED]))
    assert rows.latency_ms.tolist() == pytest.approx([2, 20])
    assert rows.images_per_s.tolist() == pytest.approx([100, 20])
    assert rows.latency_ratio.tolist() == pytest.approx([1, 4])
    assert rows.throughput_ratio.tolist() == pytest.approx([1, 0.2])
    assert rows.transfer_factor.tolist() == pytest.approx([6, 6])
    resnet = rows.iloc[1]
    assert (resnet.paper_images_per_s, resnet.paper_latency_ms) == (506, 423)
    conditions = Conditions("cpu", "fp32", False, 5, 3, 0)
    assert len(efficiency.draw(rows, conditions).axes[0].lines) > 4


def test_the_printed_latencies_are_not_those_of_one_image() -> None:
    """Scaling MLPs, Table 4: latency x throughput. For single images it would be at most 1."""
    timings = [(name, 0, 1.0, 1.0, math.nan) for name in PUBLISHED]
    rows = summarize(pd.DataFrame(timings, columns=["model", "round", *MEASURED]))
    assert rows.paper_latency_images.round().tolist() == [341, 214, 94, 128]


def test_published_costs_are_ours() -> None:
    for name, published in PUBLISHED.items():
        ours = cost_of_named(name)
        assert round(ours.num_parameters / 1e6, 2) == published.million_parameters
        assert published.giga_multiply_adds == pytest.approx(
            ours.multiply_adds / 1e9, rel=4e-3
        )  # the paper includes norms


@pytest.mark.parametrize(
    ("words", "field", "code"),
    [("--device cuda", "--device", "missing-device"), ("--out table.svg", "--out", "bad-value")],
)
def test_a_mistake_is_one_message(words: str, field: str, code: str, capsys: Capture) -> None:
    assert main(["efficiency", *words.split()]) == 2
    shown = capsys.readouterr()
    assert printed_errors(shown.err) == [(field, code)] and not shown.out
