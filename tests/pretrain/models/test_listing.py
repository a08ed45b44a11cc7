"""The output of `pretrain models`: complete lines, correct numbers, and one-line errors."""

import pytest

from pretrain.cli import main
from pretrain.models.listing import list_models, parse_power
from pretrain.models.presets import PRESETS


def test_every_model_has_one_whole_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 120 and not any(
        "…" in line for line in lines
    )
    by_name = {
        line.split()[0]: line.split()
        for line in lines
        if line.split()[:1] and line.split()[0] in PRESETS
    }
    assert by_name.keys() == PRESETS.keys()
    wide = "mixer_b_w_c3 31,064,548 9.378 G 256 588 150,528 290.3 M 224"
    assert by_name["mixer_b_w_c3"][:10] == wide.split()
    assert by_name["mlp_b12_wi768"][:5] == ["mlp_b12_wi768", "66,894,568", "66.83", "M", "768"]
    assert by_name["resnet152_64"][:5] == ["resnet152_64", "60,192,808", "13.02", "G", "64"]


def test_classes_size_and_pattern_are_obeyed_and_what_is_left_out_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = {
        row.name: row.cost.num_parameters
        for row in list_models(match="mlp_b*", num_classes=11_230)[0]
    }
    assert len(counts) == 7 and counts["mlp_b12_wi1024"] == 124_843_998
    assert {row.name for row in list_models(match="mixer_p*", image_size=32)[0]} == {
        "mixer_p8",
        "mixer_p16",
        "mixer_p32",
    }
    assert main(["models", "--match", "mixer_p*", "--image-size", "32"]) == 0
    assert "mixer_p7, mixer_p14, mixer_p28" in capsys.readouterr().out


def test_omega_may_be_a_power() -> None:
    for text, value in (("2^18", 2**18), ("2**18", 2**18), ("2.6e8", 2.6e8), ("17", 17)):
        assert parse_power(text) == value


@pytest.mark.parametrize("words", ["models --classes 0", "models --image-size -4"])
def test_options_of_the_listing_are_positive(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert len(capsys.readouterr().err.splitlines()) == 1
