"""`pretrain plan`: rows that can be worked out by hand, and what cannot be planned."""

import pytest

from pretrain.cli import main as pretrain
from pretrain.engine.zero_cost import Plan, rows


def test_a_row_is_what_one_works_out_by_hand() -> None:
    """B-12/Wi-1024: 124,843,998 weights, as many multiply-adds but for biases and norms."""
    one, four = rows(Plan("mlp_b12_wi1024", 16_384, [1, 4], 4, num_classes=11_230))
    assert (one.num_ranks, one.local_batch_size, four.local_batch_size) == (4, 4096, 1024)
    assert one.held_gb[0] == pytest.approx(3 * 4 * 0.124843998, rel=1e-6)  # weights, Lion's momentum, gradients
    assert four.sent_mb[1] == pytest.approx(3 * 15 / 16 * 2 * 124.843998, rel=1e-6)
    assert one.network_ms == (0, 0, 0, 0) and four.network_ms[1] == pytest.approx(four.sent_mb[1] / 25, rel=1e-6)
    assert one.compute_ms == pytest.approx(6 * 0.1247e9 * 4096 / 300e12 * 1e3, rel=2e-3)


def test_every_stage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["plan", "mixer_b_w", "--optimizer", "adamw", "--nodes", "1,2"]) == 0
    said = capsys.readouterr().out
    assert "GB held, 0/1/2/3" in said and "0.50 0.18 0.19 0.13" in said and "network ms, 0/1/2/3" in said
    assert pretrain(["plan", "mixer_b_w", "--nodes", "1"]) == 0  # between nodes it sends nothing
    said = capsys.readouterr().out
    assert "MB sent, 0/1/2/3" in said and "network" not in said.lower()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["mlp_b12"], "is not a known model"),
        (["mixer_b_w", "--batch", "1000", "--nodes", "3"], "--batch: 1000 does not split over 3 x 4 GPUs"),
    ],
)
def test_what_cannot_be_planned(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["plan", *words]) == 2
    assert complaint in capsys.readouterr().err
