"""Figures over many runs, from synthetic results."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, kendalltau

from analysis.cli import main
from analysis.results import COLUMNS, VARIABLES, as_frame
from analysis.sweeps.curves import bands_of, curves, losses_of, overfit_of
from analysis.sweeps.statistics import holm, kendall, optimum
from analysis.sweeps.sweep import lines_of, places_of, with_variables
from tests.conftest import Capture
from tests.errors import fails, printed_errors


def test_p_of_falling_errors_counts_the_orders_of_all_permutations() -> None:
    for x, y in (([5, 1, 2, 4, 3], [0.1, 0.5, 0.4, 0.2, 0.3]), ([3, 1, 2], [0.1, 0.3, 0.2])):
        found = kendall(x, y)
        taus = [kendalltau(x, order).statistic for order in itertools.permutations(y)]
        assert found["tau"] == pytest.approx(kendalltau(x, y).statistic)
        assert found["p_falling"] == pytest.approx(np.mean(np.array(taus) <= found["tau"] + 1e-12))
    assert kendall([1, 2], [0.3, 0.3]) == {}


def test_equal_errors_are_no_evidence_of_falling_ones() -> None:
    x, tied, rising = [1, 2, 3, 4], [0.5, 0.3, 0.3, 0.2], [0.5, 0.3, 0.31, 0.2]
    assert kendall(x, tied)["p_falling"] == kendall(x, rising)["p_falling"]
    assert kendall(x, tied)["tau"] == pytest.approx(kendalltau(x, tied).statistic)


def test_holm_rejects_step_by_step() -> None:
    """A hypothesis is rejected at a level if and only if its corrected p is at most that level."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        p = pd.Series(rng.random(6) ** 3)
        p[rng.random(6) < 0.2] = np.nan
        for level in (0.01, 0.05, 0.2):
            rejected, left = set[int](), p.dropna()
            while len(left) and left.min() <= level / len(left):
                rejected.add(int(left.idxmin()))
                left = left.drop(left.idxmin())
            corrected = holm(p)
            assert set(corrected[corrected <= level].index) == rejected
            assert (corrected.isna() == p.isna()).all()


def test_a_planted_optimum_is_found() -> None:
    x = np.repeat(np.linspace(-2.4, 2.4, 7), 3).tolist()
    levels = [0.3, 0.34, 0.29] * 7
    exact = optimum(
        x, [y + 0.02 * (at - 0.5) ** 2 for at, y in zip(x, levels, strict=True)], levels
    )
    assert exact["at"] == pytest.approx(0.5) and exact["high"] - exact["low"] < 1e-6
    assert not exact["has_zero"]
    falling = optimum([-1, 0, 1, 2, 3, 4, 5], [0.7, 0.6, 0.52, 0.41, 0.3, 0.2, 0.1], [0] * 7)
    assert falling["at"] == 5 and (falling["low"], falling["high"]) == (-1, 5)
    assert optimum([0, 1, 1, 0] * 3, range(12), [0] * 12) == {}


@pytest.mark.parametrize(("num_seeds", "shared"), [(1, 0.0), (3, 0.0), (3, 0.03)])
def test_the_interval_of_an_optimum_covers_it(num_seeds: int, shared: float) -> None:
    """About 95 of 100 intervals should contain the optimum. `shared`: standard deviation of a
    seed's offset."""
    number, x = 400, np.repeat(np.linspace(-2.4, 2.4, 7), num_seeds)
    seeds = np.tile(np.arange(num_seeds), 7)
    inside = widths = 0.0
    for salt in range(number):
        rng = np.random.default_rng([salt, 3])
        y = 0.3 + 0.02 * (x - 0.5) ** 2 + rng.normal(0, 0.005, len(x))
        y += rng.normal(0, shared, num_seeds)[seeds] if shared else 0.0
        found = optimum(x.tolist(), y.tolist(), seeds.tolist())
        inside += found["low"] <= 0.5 <= found["high"]
        widths += found["high"] - found["low"]
    low, high = binom.ppf([0.001, 0.999], number, 0.95)
    assert low <= inside <= high
    assert widths / number < 0.25


def test_few_degrees_of_freedom_have_no_interval() -> None:
    x = np.linspace(-2, 2, 6)
    assert optimum(x.tolist(), (x**2).tolist(), [0] * 6) == {}
    assert optimum([*x, 3], [*x**2, 9], [0] * 7) != {}
    # the level of a second seed uses one degree up
    assert optimum([*x, 3], [*x**2, 9], [0] * 6 + [1]) == {}


def test_noise_is_no_overfit() -> None:
    """The last of 200 noisy values is on average 2.7 deviations above the smallest."""
    rng, epochs = np.random.default_rng(0), np.linspace(0, 1, 200)
    assert math.isnan(overfit_of(pd.Series([1.0])))
    flat = [overfit_of(pd.Series(1 + rng.normal(0, 0.1, 200))) for _ in range(100)]
    assert np.mean(flat) < 0.06
    rising = 1 + (epochs - 0.5) ** 2
    noisy = [overfit_of(pd.Series(rising + rng.normal(0, 0.1, 200))) for _ in range(100)]
    assert np.mean(noisy) == pytest.approx(0.25, abs=0.05)


SHAPES = [(16, 173), (32, 113), (48, 83), (64, 64), (83, 48), (113, 32), (173, 16)]


def made(*targets: str) -> pd.DataFrame:
    """Results of S-Mixers: the error is least at ln(C / S) = 0.3, and RP adds 0.5 points for each
    seed."""
    rows = []
    for (channels, tokens), permuted, seed, target in itertools.product(
        SHAPES, (0, 12), range(3), targets or ("cifar10",)
    ):
        error = 0.2 + 0.02 * (math.log(channels / tokens) - 0.3) ** 2
        run = f"runs/{target}-c{channels}-{permuted}-{seed}"
        labels = {"name": "made", "shape": f"c{channels}", "seed": str(seed)}
        labels["blocks"] = "all" if permuted else "none"
        row: dict[str, Any] = {"run": run, "task": "pretrain", "target": target, "num_test": 1000}
        row |= {"kind": "smixer", "labels": json.dumps(labels), "depth": 12, "seed": seed}
        row |= {"tokens": tokens, "channels": channels, "width": tokens * channels}
        row |= {"permuted_blocks": permuted, "error": error + 0.005 * (permuted > 0) + 0.003 * seed}
        row |= {"test_epochs": [1.0, 2.0, 3.0], "test_losses": [2.0 + seed, 1.0, 1.5 + 0.25 * seed]}
        row |= {"train_epochs": [1.0, 2.0], "train_losses": [2.0 - 0.5 * seed, 1.0]}
        rows.append(row)
    return as_frame(rows)


@pytest.mark.slow
def test_a_sweep_finds_what_was_planted(tmp_path: Path, capsys: Capture) -> None:
    results = tmp_path / "results.parquet"
    made("cifar10", "stl10").to_parquet(results)
    words = ["--x", "log_cs", "--hue", "mixing", "--facet", "target", "--out", str(tmp_path / "cs")]
    assert main(["sweep", str(results), *words]) == 0
    facts = json.loads((tmp_path / "cs.json").read_text())
    assert facts["files"] == ["cs.parquet", "cs.png", "cs.svg"]
    assert set(facts["inputs"]) == {str(results)}
    assert all((tmp_path / name).exists() for name in facts["files"])
    assert "RP - normal: +0.50 points over 42 pairs" in capsys.readouterr().out
    places = pd.read_parquet(tmp_path / "cs.parquet")
    assert len(facts["lines"]) == 4 and len(places) == 4 * 7
    for line in facts["lines"]:
        assert line["at"] == pytest.approx(0.3) and not line["has_zero"]
    pairs = {"pairs": 2 * 7 * 3, "mean": pytest.approx(0.005), "lower": 0}
    assert facts["rp_minus_normal"] == pairs
    row = places[(places.hue == "RP") & (places.x == 0)].iloc[0]
    assert row.errors.tolist() == pytest.approx([0.2068, 0.2098, 0.2128])
    assert row.error_sd == pytest.approx(0.003)
    assert row.binomial_se == pytest.approx(math.sqrt(0.2098 * 0.7902 / 1000))
    assert row.minus_normal.tolist() == pytest.approx([0.005] * 3)


def test_mirrored_shapes_are_one_width_and_wider_is_better() -> None:
    places = places_of(made(), "width", ["kind", "mixing"])
    assert places.hue.unique().tolist() == ["S-Mixer, normal", "S-Mixer, RP"]
    assert (places.num_seeds == 3).all() and sorted(set(places.num_results)) == [3, 6]
    lines = lines_of(places, "width")  # four widths in order, of 4! orders
    expected = [[-1.0, 1 / 24, 2 / 24, 4]] * 2
    found = lines[["tau", "p_falling", "p_holm", "num_widths"]].to_numpy()
    np.testing.assert_allclose(found, expected)


def test_a_pair_differs_in_nothing_but_the_permutation() -> None:
    """The permutation may be the x axis."""
    results = made()
    pairs = places_of(results, "blocks", facet=["channels"]).minus_normal_mean.dropna()
    assert pairs.tolist() == pytest.approx([0.005] * 7)
    shapes = list(zip(results.channels, results.permuted_blocks, strict=True))
    of_two_widths = results[[shape in ((16, 12), (32, 0)) for shape in shapes]]
    assert places_of(of_two_widths, "width").minus_normal_mean.isna().all()


def of_one_shape() -> pd.DataFrame:
    results = made()
    return results[(results.channels == 64) & (results.permuted_blocks == 0)]


def test_results_that_have_no_mean_are_an_error() -> None:
    one = of_one_shape()
    lr = one.assign(lr=[0.1, 0.2, 0.1])
    probes = pd.concat([one, one.assign(task="probe", own_seed=0)], ignore_index=True)
    again = pd.concat([one, one.assign(run="again")], ignore_index=True)
    for results, names in (
        (made("cifar10", "stl10"), {"hue": ["mixing"]}),
        (made(), {}),
        (lr, {}),
        (probes, {}),
        (again, {}),
    ):
        with fails("conflict", "log_cs"):
            places_of(results, "log_cs", **names)
    with fails("unknown-name", "shap"):
        places_of(made(), "shap")
    with fails("empty", "density"):
        places_of(made(), "density")
    with fails("empty", "--task"):
        places_of(made(), "width", task="probe")


def test_bands_are_the_range_over_seeds(tmp_path: Path, capsys: Capture) -> None:
    results = made()
    results[results.channels.isin([32, 64])].to_parquet(tmp_path / "few.parquet")
    words = ["--hue", "mixing", "--facet", "shape", "--out", str(tmp_path / "curves")]
    assert main(["curves", str(tmp_path / "few.parquet"), *words]) == 0
    rows = pd.read_parquet(tmp_path / "curves.parquet")
    own = rows[(rows.facet == "c64") & (rows.hue == "normal") & (rows.curve == "test")]
    bands = own[["min", "mean", "max"]].to_numpy().tolist()
    assert bands == [[2, 3, 4], [1, 1, 1], [1.5, 1.75, 2.0]]
    assert own.sd.tolist() == pytest.approx([1.0, 0.0, 0.25])
    line = json.loads((tmp_path / "curves.json").read_text())["lines"][0]
    assert line["overfit"] == pytest.approx([0.5, 0.75, 1.0])
    assert line["overfit_mean"] == pytest.approx(0.75)
    assert "0.75" in capsys.readouterr().out


def test_the_accuracy_of_the_curves_is_drawn_next_to_the_losses() -> None:
    """Fig. S.8, lower panel. The errors of seed s are 0.5, 0.3 and 0.2 + s / 10."""
    short = of_one_shape()
    short["test_errors"] = [[0.5, 0.3, 0.2 + seed / 10] for seed in range(3)]
    drawn = curves(short, with_accuracy=True)
    accuracies = drawn.rows[drawn.rows.curve == "accuracy"]
    found = accuracies[["min", "mean", "max"]].to_numpy()
    np.testing.assert_allclose(found, [[0.5] * 3, [0.7] * 3, [0.6, 0.7, 0.8]])
    losses, percent = drawn.figures[""].axes
    np.testing.assert_allclose(percent.lines[0].get_xydata(), [[1, 50], [2, 70], [3, 70]])
    assert len(losses.lines) == 2
    without = curves(short)
    assert len(without.figures[""].axes) == 1 and "accuracy" not in set(without.rows.curve)
    pd.testing.assert_frame_equal(without.rows, drawn.rows[drawn.rows.curve != "accuracy"])


def test_a_band_ends_where_its_shortest_curve_ends() -> None:
    short = of_one_shape()
    short.loc[short.index[-1:], "test_epochs"] = pd.Series([[1.0, 2.0]], index=short.index[-1:])
    short.loc[short.index[-1:], "test_losses"] = pd.Series([[4.0, 1.0]], index=short.index[-1:])
    bands = bands_of(losses_of(short))
    tests = bands[bands.curve == "test"][["epochs", "mean", "num_seeds"]]
    assert tests.to_numpy().tolist() == [[1, 3, 3], [2, 1, 3]]
    short["test_epochs"] = [[1.0], [1.0], [2.0]]
    short["test_losses"] = [[1.0], [1.0], [2.0]]
    with fails("conflict", "--hue"):
        losses_of(short)


@pytest.mark.slow
def test_the_widest_mixer_of_figure_3_has_as_many_tokens_as_channels(
    tmp_path: Path, capsys: Capture
) -> None:
    words = ["widths", "--omega", "2^18,2^27", "--channels", "16,32,48"]
    assert main([*words, "--out", str(tmp_path / "widths")]) == 0
    printed = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    papers = [["64", "64", "4,096"], ["16", "173", "2,768"], ["32", "113", "3,616"]]
    assert printed[1:5] == [*papers, ["48", "83", "3,984"]]
    rows = pd.read_parquet(tmp_path / "widths.parquet")
    for name, side in (("2^18", 64), ("2^27", 512)):
        own = rows[rows.omega_name == name]
        widest = own.loc[own.width.idxmax()]
        assert (widest.channels, widest.tokens) == (side, side)
        assert widest.density == pytest.approx(1 / side)
        assert set(own.channels) == set(own.tokens)
        omega = own.channels * own.tokens * (own.channels + own.tokens) / 2
        assert omega.tolist() == pytest.approx(own.omega.tolist(), rel=0.13)
    words = ["widths", "--omega", "2^18", "--gamma", "4"]  # less than a decade of p
    assert main([*words, "--out", str(tmp_path / "x")]) == 0
    labels = re.findall("<!-- (.*?) -->", (tmp_path / "x.svg").read_text())
    assert labels and not [label for label in labels if "$" in label]  # no raw formula
    capsys.readouterr()
    for omega in ("10", ","):
        assert main(["widths", "--omega", omega, "--out", str(tmp_path / "y")]) == 2
        assert printed_errors(capsys.readouterr().err) == [("--omega", "bad-value")]


def test_every_variable_is_a_column() -> None:
    data, axes = with_variables(made())
    assert set(VARIABLES) <= set(data) and set(COLUMNS) <= set(data)
    assert set(axes) == {"name", "shape", "seed", "blocks"}
