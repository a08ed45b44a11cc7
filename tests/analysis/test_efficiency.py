"""The efficiency table: rounds in turn, medians and ratios as literals, what is printed and
written, one message for a mistake."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from torch import Tensor, nn

from analysis import efficiency
from analysis.cli import main
from analysis.efficiency import PRINTED, Conditions, Row, Timings, cost_of_named, measure, summarise
from pretrain.models.build import build_model
from pretrain.models.cost import Cost
from pretrain.models.spec import MlpSpec
from tests.conftest import Capture, Patch

ON_CPU = Conditions(
    device="cpu", dtype="fp32", is_compiled=False, batch_size=3, num_rounds=2, seconds=0
)


class Recorder(nn.Module):
    def __init__(self, name: str, calls: list[tuple[str, int]]):
        super().__init__()
        self.name, self.calls = name, calls

    def forward(self, x_BCHW: Tensor) -> Tensor:
        self.calls.append((self.name, len(x_BCHW)))
        return x_BCHW


def test_models_take_turns_within_a_round() -> None:
    calls: list[tuple[str, int]] = []
    found = measure({name: Recorder(name, calls) for name in "ab"}, ON_CPU, image_size=4)
    one_round = [("a", 1), ("a", 3), ("b", 1), ("b", 3)]
    assert calls == one_round * 3  # the first is the warm-up
    assert [len(found[name].latency_s) for name in "ab"] == [2, 2]


def test_a_real_model_is_measured_in_the_dtype_asked_for() -> None:
    model = build_model(MlpSpec(kind="mlp", depth=1, width=4), num_classes=2, image_size=4, seed=0)
    conditions = Conditions(
        device="cpu", dtype="bf16", is_compiled=False, batch_size=2, num_rounds=1, seconds=0
    )
    found = measure({"mlp": model}, conditions, image_size=4)["mlp"]
    assert found.latency_s[0] > 0 and found.images_per_s[0] > 0
    assert {str(weight.dtype) for weight in model.parameters()} == {"torch.bfloat16"}


def test_medians_and_ratios() -> None:
    # ratios of rates within a round: 0.5, 0.1, 0.2; the ratio of the medians would be 0.1
    timings = {
        "first": Timings([0.001, 0.002, 0.010], [100.0, 200.0, 50.0]),
        "second": Timings([0.004, 0.020, 0.030], [50.0, 20.0, 10.0]),
    }
    first, second = summarise({name: Cost(num_parameters=7) for name in timings}, timings)
    assert (first.latency_ms, first.images_per_s) == (2.0, 100.0)
    assert (first.times_the_latency, first.times_the_rate) == (1.0, 1.0)
    assert (second.latency_ms, second.images_per_s) == (20.0, 20.0)
    assert second.times_the_latency == pytest.approx(
        4.0
    ) and second.times_the_rate == pytest.approx(0.2)


def test_what_the_paper_prints_is_what_we_count() -> None:
    for name, printed in PRINTED.items():
        cost = cost_of_named(name)
        assert round(cost.num_parameters / 1e6, 2) == printed.million_parameters
        assert printed.giga_multiply_adds == pytest.approx(
            cost.multiply_adds / 1e9, rel=4e-3
        )  # norms count in the paper


@pytest.fixture
def instant(monkeypatch: Patch) -> None:
    def measured(names: list[str], _conditions: Conditions) -> list[Row]:
        return [
            Row(name, cost_of_named(name), 2.5 * n, 1000.0 / n, n, 1 / n)
            for n, name in enumerate(names, start=1)
        ]

    monkeypatch.setattr(efficiency, "measure_named", measured)


def test_the_command_prints_and_writes(
    instant: None, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    words = ["efficiency", "--quick", "--device", "cpu", "--batch", "5"]
    assert main([*words, "--out", str(tmp_path / "table")]) == 0
    shown = capsys.readouterr().out
    assert "fp32, eager, batch 5, medians of 3 rounds" in shown and "commit" in shown
    row = "ViT-B/4 86.06 M 23.06 G 7.5 ms 3 x 333 0.333 x 23.08 G 424 ms 222 0.0138 x"
    assert row.split() in [line.split() for line in shown.splitlines()]
    assert [
        line.split()[0]
        for line in shown.splitlines()
        if line.startswith(("B-", "Res", "ViT", "Mixer"))
    ] == [printed.label for printed in PRINTED.values()]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"table.{ending}" for ending in ("json", "parquet", "png", "svg")
    }
    assert json.loads((tmp_path / "table.json").read_text())["conditions"]["batch_size"] == 5
    resnet = pq.read_table(tmp_path / "table.parquet").to_pylist()[1]
    assert (resnet["images_per_s"], resnet["paper_images_per_s"], resnet["paper_latency_ms"]) == (
        500,
        506,
        423,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 0", "--batch: 0 will not do"),
        ("--device cuda", "--device: torch finds no CUDA device here"),
        ("--out table.svg", "--out: table.svg has an ending; give table"),
    ],
)
def test_a_mistake_is_one_message(words: str, message: str, instant: None, capsys: Capture) -> None:
    assert main(["efficiency", *words.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and len(shown.err.splitlines()) == 1 and not shown.out
