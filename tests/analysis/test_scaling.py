"""The scaling-law fits: exact laws are recovered, and intervals cover. Units and the order of rows
do not matter; too few points are reported. The laws are written a second time in this file, in
plain Python.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy.optimize import nnls
from scipy.stats import binom

from analysis.cli import main
from analysis.results import as_frame
from analysis.scaling.allocation import Allocation, IsoFlop, by_frontier, by_parabolas
from analysis.scaling.fitting import Law, _non_negative, fit
from analysis.scaling.laws import FULL, REPEATS_LAW, SUM_LAW, Estimate, estimate, forms_of
from analysis.scaling.samples import Sample, read_points, samples_of
from analysis.scaling.study import study
from finetune.looks import looks, set_log_ticks
from tests import soak
from tests.conftest import Capture
from tests.errors import printed_errors

FORMS, FORMS_IN_N = forms_of("compute"), forms_of("images")
GRID = [
    (p, n, t)
    for p in (1e6, 3e6, 1e7, 3e7, 1e8, 3e8)
    for n in (1e5, 4e5, 2e6, 1e7)
    for t in (0.5, 50, 100, 400)
]


def law(x: float, *, a: float, b: float, alpha: float, floor: float) -> float:
    return floor + a / (b + x) ** alpha


@pytest.mark.parametrize(
    ("a", "b", "alpha", "floor", "low", "high"),
    [
        (0.5, 1.0, 0.3, 0.2, 1.0, 1e4),
        (0.8, 0.5, 0.5, 0.0, 0.5, 1e3),
        (200.0, 1e12, 0.25, 0.1, 1e12, 1e17),
        (25.0, 1e10, 0.14, 0.05, 1e10, 1e16),
        (300.0, 0.0, 0.35, 0.1, 1e12, 1e17),
    ],
)
def test_exact_points_give_back_their_law(
    a: float, b: float, alpha: float, floor: float, low: float, high: float
) -> None:
    compute = np.geomspace(low, high, 8)
    error = np.array([law(value, a=a, b=b, alpha=alpha, floor=floor) for value in compute])
    found = {
        name: value[0]
        for name, value in fit(FORMS[FULL], {"compute": compute}, error).parameters.items()
    }
    assert found == pytest.approx(
        {"a": a, "b": b, "alpha": alpha, "E_inf": floor}, rel=1e-5, abs=1e-8 + 1e-9 * low
    )


@pytest.mark.parametrize("again", [0.0, 15.0])
def test_exact_laws_in_size_and_data_come_back(again: float) -> None:
    """`again` is R*. At 0 each image counts once, and all lengths are equal. Half an epoch shows
    half of the images."""
    p, n, t = np.array(GRID).T
    points = {"parameters": p, "images": n, "epochs": t}
    planted = {"A": 3, "alpha": 0.25, "B": 20, "beta": 0.4, "E_inf": 0.1}
    effective = n
    if again:
        planted["R*"] = again
        more = 1 + again * (1 - np.exp(-(t - 1) / again))
        effective = n * np.where(t < 1, t, more)
    error = 0.1 + 3 * p**-0.25 + 20 * effective**-0.4
    found = fit(REPEATS_LAW if again else SUM_LAW, points, error).parameters
    assert {name: value[0] for name, value in found.items()} == pytest.approx(planted, rel=1e-4)


def test_factors_are_those_of_non_negative_least_squares() -> None:
    rng = np.random.default_rng(0)
    columns, wanted = rng.normal(size=(50, 3, 9)), rng.normal(size=(50, 9))
    found = _non_negative(columns @ columns.mT, np.einsum("bkn,bn->bk", columns, wanted))
    for each, row, answer in zip(columns, wanted, found, strict=True):
        assert answer == pytest.approx(nnls(each.T, row)[0], abs=1e-8)


IN_SIZES = {"a": 0.3, "b": 0.0, "alpha": 0.5, "floor": 0.1}


@pytest.mark.soak
@pytest.mark.parametrize("num_sizes", [4, 6, 24])
def test_intervals_cover_the_law_at_chosen_sizes(num_sizes: int) -> None:
    """About 95 of 100 intervals should contain each parameter. 24 runs have six sizes and four
    amounts of data; for these the exponent of P* is checked."""
    number = 60 if soak.FACTOR == 1 else 400
    sizes = np.geomspace(1e6, 1.2e7, min(num_sizes, 6))
    points, truth = {"images": sizes}, np.array([law(size / 3e6, **IN_SIZES) for size in sizes])
    planted, form = {"alpha": 0.5, "E_inf": 0.1}, FORMS_IN_N["b = 0"]
    if num_sizes == 24:
        data = np.tile(np.geomspace(1.5e6, 1.2e7, 4), 6)
        sizes = np.repeat(sizes, 4)
        truth = 0.1 + 0.15 * (sizes / 3e6) ** -0.5 + 0.2 * (data / 4e6) ** -0.35
        points = {"images": data, "parameters": sizes, "samples": data, "compute": data * sizes}
        planted, form = {"P* exponent": 0.35 / 0.85}, SUM_LAW
    inside = dict.fromkeys(planted, 0)
    for salt in range(number):
        noisy = truth + np.random.default_rng([salt, 7]).normal(0, 0.003, num_sizes)
        sample = Sample("", points, noisy, np.arange(num_sizes))
        rows = rows_of(form, sample, resamples=200)
        for name, value in planted.items():
            inside[name] += rows[name]["low"] <= value <= rows[name]["high"]
    low, high = binom.ppf([0.005, 0.9995], number, 0.95)
    assert all(low <= count <= high for count in inside.values()), inside


def rows_of(form: Law, sample: Sample, *, resamples: int) -> dict[str, dict[str, Any]]:
    everything = np.ones(len(sample.errors_N), bool)
    found = estimate(form, sample, everything, size="images", resamples=resamples)
    assert isinstance(found, Estimate)
    return {row["parameter"]: row for row in found.rows()}


def test_checkpoints_of_equal_noise_are_no_second_measurement() -> None:
    """Repeating each point within its run changes neither AICc nor intervals."""
    images = np.geomspace(1, 1e4, 9)
    errors = 0.1 + 0.5 * images**-0.3 + np.random.default_rng(0).normal(0, 0.003, 9)
    for form in FORMS_IN_N.values():
        once, thrice = (
            rows_of(form, Sample("", {"images": images[runs]}, errors[runs], runs), resamples=99)
            for runs in (np.arange(9), np.repeat(np.arange(9), 3))
        )
        for name, row in once.items():
            for column in ("aicc", "low", "high"):
                assert thrice[name][column] == pytest.approx(row[column], rel=1e-3, abs=1e-6)


def test_sets_of_errors_are_fitted_as_each_alone_would_be() -> None:
    compute = np.geomspace(1e14, 1e18, 30)
    noise = np.random.default_rng(3).normal(1, 0.02, (5, 30))
    errors = np.array([law(c / 1e14, a=0.6, b=0, alpha=0.35, floor=0.1) for c in compute]) * noise
    for name, form in FORMS.items():
        together = fit(form, {"compute": compute}, errors)
        for row, each in enumerate(errors):
            alone = fit(form, {"compute": compute}, each)
            assert together.squares_B[row] == pytest.approx(alone.squares_B[0], rel=1e-6), name


def sample_of(
    alpha: float, beta: float, *, sizes: int = 6, noise: float = 0.0, unit: float = 1.0
) -> pd.DataFrame:
    """Return samples of E = .1 + .1 (P / 3e7)^-alpha + b (N / 3e6)^-beta at T = 50. b makes P =
    3e7, N = 3e6 optimal for its compute."""
    rng, rows = np.random.default_rng(0), []
    images = np.geomspace(1e5, 1e8, max(sizes, 4))
    for p, n, t in itertools.product(np.geomspace(1e6, 1e9, sizes), images, (50, 100, 200)):
        seen = n * (t / 50) ** 0.5
        error = 0.1 + 0.1 * (p / 3e7) ** -alpha + 0.1 * alpha / beta * (seen / 3e6) ** -beta
        row = {"task": "probe", "target": "shapes", "run": f"{len(rows)}"}
        row |= {"weights": f"{p:.3g}-{n:.3g}", "error": error * rng.normal(1, noise)}
        row |= {"epochs": t * (1 + 1e-3 * rng.random()), "samples": round(n * t)}
        row |= {"compute": unit * 6 * p * n * t, "parameters": round(p), "images": round(n)}
        rows.append(row)
    return as_frame(rows)


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.3), (0.35, 0.2)])
def test_the_allocation_is_the_closed_form(alpha: float, beta: float) -> None:
    """P* ~ C^(beta / (alpha + beta)): exact from the law, approximate from the frontier of a fine
    grid."""
    best = 6 * 3e7 * 3e6 * 50
    grid = sample_of(alpha, beta, sizes=40)
    inside = grid[(grid.epochs < 60) & grid.compute.between(best / 200, best * 200)]
    (sample,), _ = samples_of(inside)
    found = by_frontier(sample)
    assert isinstance(found, Allocation)
    closed = beta / (alpha + beta)
    assert found.parameters["parameters exponent"][0] == pytest.approx(closed, abs=0.04)
    assert found.parameters["images exponent"][0] == pytest.approx(1 - closed, abs=0.04)
    curves = by_parabolas(sample)
    assert isinstance(curves, IsoFlop) and isinstance(curves.allocation, Allocation)
    exponents = {name: values[0] for name, values in curves.allocation.parameters.items()}
    best = {"parameters exponent": closed, "samples exponent": 1 - closed}
    assert exponents == pytest.approx(best, abs=0.15)  # a parabola only approximates the law
    exact = fit(SUM_LAW, sample.points, sample.errors_N).parameters
    assert exact["beta"][0] / (exact["alpha"][0] + exact["beta"][0]) == pytest.approx(
        closed, rel=1e-3
    )


def test_the_frontier_is_the_least_error_so_far() -> None:
    rng = np.random.default_rng(1)
    errors, runs = rng.random(40), np.repeat(np.arange(8), 5)
    sample = Sample("", {"compute": np.arange(1.0, 41.0)}, errors, runs)
    for counted in rng.random((20, 40)) < 0.7:
        seen = [errors[:n][counted[:n]].min(initial=2.0) for n in range(40)]
        assert sample.frontier(counted).tolist() == (counted & (errors < seen)).tolist()


def test_what_is_read_off_a_frontier_has_no_interval() -> None:
    (sample,), _ = samples_of(sample_of(0.3, 0.25, noise=0.01))
    rows = study(sample, epochs=50, resamples=40).rows
    has_interval = np.isfinite(rows.low) & np.isfinite(rows.high)
    is_frontier = rows.law.isin(["compute", "allocation", "isoFLOP"])
    assert set(rows.law[~is_frontier]) == {"size", "data", "sum", "repeats"}
    assert {"compute", "allocation"} <= set(rows.law)
    assert (has_interval == ~is_frontier).all()


def test_each_recipe_and_family_has_its_own_law() -> None:
    slow, fast = sample_of(0.3, 0.25), sample_of(0.2, 0.3)
    slow, fast = slow.assign(kind="mlp", lr=1e-5), fast.assign(kind="mlp", lr=1e-4)
    mixed = pd.concat([slow, fast, slow.assign(kind="sw_mlp"), slow.assign(family="smoothed")])
    found, _ = samples_of(mixed)
    assert len({each.name for each in found}) == len(found) == 4
    exponents = [fit(SUM_LAW, each.points, each.errors_N).parameters["alpha"][0] for each in found]
    assert sorted(exponents) == pytest.approx([0.2, 0.3, 0.3, 0.3], rel=1e-3)
    (alone,), _ = samples_of(slow)
    assert alone.name == "shapes"


def test_the_best_size_follows_from_exponents_if_compute_is_proportional() -> None:
    points = sample_of(0.3, 0.25)
    costly = points.assign(compute=points.compute * points.parameters**0.2)
    cases = ((points, True), (points.assign(kind="mixer"), False), (costly, False))
    for rows, is_proportional in cases:
        (sample,), _ = samples_of(rows)
        assert bool(sample.disproportion) != is_proportional
        held = np.abs(sample.points["epochs"] / 50 - 1) < 0.01
        for law, has_exponents in ((SUM_LAW, is_proportional), (REPEATS_LAW, False)):
            counted = held if law is SUM_LAW else np.ones_like(held)
            found = estimate(law, sample, counted)
            assert isinstance(found, Estimate)
            assert ("P* exponent" in found.parameters) == has_exponents


def test_isoflop_minima_of_parabolas_in_the_logarithm_are_exact() -> None:
    """The least error is at P = 0.1 C^0.6: log error is a parabola in log P, and linear in log C
    for each P."""
    rows = []
    for p, c in itertools.product(np.geomspace(1e6, 1e9, 7), np.geomspace(1e12, 1e15, 13)):
        off = np.log(p) - (np.log(0.1) + 0.6 * np.log(c))
        log_error = -0.5 - 0.3 * np.log(c / 1e12) + 0.04 * (off**2 - (0.6 * np.log(c)) ** 2)
        row = {"task": "probe", "target": "shapes", "run": f"{p:.3g}-{c:.3g}", "compute": c}
        row |= {"parameters": p, "images": 1e6, "samples": c / p, "epochs": 1.0}
        rows.append(row | {"error": np.exp(log_error)})
    errors = pd.Series([row["error"] for row in rows])
    frame = as_frame(rows).assign(error=0.9 * errors / errors.max())
    (sample,), _ = samples_of(frame)
    found = by_parabolas(sample)
    assert isinstance(found, IsoFlop) and isinstance(found.allocation, Allocation)
    best = 0.1 * found.allocation.compute_K**0.6
    assert found.allocation.best["parameters"] == pytest.approx(best, rel=1e-6)
    (few,), _ = samples_of(frame[frame.parameters < 1e8 * 0.9])
    assert few.num_different("parameters") == 4 and isinstance(by_parabolas(few), IsoFlop)
    (few,), _ = samples_of(frame[frame.parameters < 2e7])
    assert few.num_different("parameters") == 3 and isinstance(by_parabolas(few), str)


def test_a_largest_size_without_errors_is_not_predicted() -> None:
    compute = np.geomspace(1, 1e4, 8)
    points = {"compute": compute, "parameters": compute}
    for least, is_known in ((0.05, True), (0.0, False)):
        sample = Sample("", points, np.where(compute == 1e4, least, compute**-0.2), np.arange(8))
        found = estimate(FORMS["b = 0"], sample, np.ones(8, bool))
        assert isinstance(found, Estimate) and np.isfinite(found.beyond) == is_known


def test_rows_of_two_files_of_one_name_are_different_runs(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "law.csv").write_text(csv([1, 10, 100], FALLING[:3]))
    (sample,), _ = samples_of(read_points([tmp_path / name / "law.csv" for name in "ab"]))
    assert sample.num_runs == 6


def test_nothing_depends_on_units_or_on_the_order_of_rows() -> None:
    def laws_of(points: pd.DataFrame) -> pd.DataFrame:
        (sample,), _ = samples_of(points)
        return study(sample, epochs=50, resamples=40).rows

    plain = laws_of(points := sample_of(0.3, 0.25, noise=0.01))
    pd.testing.assert_frame_equal(plain, laws_of(points.sample(frac=1, random_state=2)))
    scaled = laws_of(sample_of(0.3, 0.25, noise=0.01, unit=1e-15))
    free = ~((plain.law == "compute") & plain.parameter.isin(["a", "b"]))
    np.testing.assert_allclose(scaled.value[free], plain.value[free], rtol=1e-6, atol=1e-9)
    offset = (plain.law == "compute") & (plain.form == FULL) & (plain.parameter == "b")
    np.testing.assert_allclose(scaled.value[offset], plain.value[offset] * 1e-15, rtol=1e-5)


@pytest.mark.slow
def test_the_command_writes_rows_figures_and_how_it_was_done(
    tmp_path: Path, capsys: Capture
) -> None:
    points, laws = tmp_path / "points.parquet", tmp_path / "laws"
    sample_of(0.35, 0.2, noise=0.01).to_parquet(points)
    assert main(["scaling", str(points), "--quick", "--epochs", "30", "--out", str(laws)]) == 0
    printed = capsys.readouterr().out
    assert "repeats" in printed and "T = 30" in printed and "T = 50" in printed
    facts = json.loads((tmp_path / "laws.json").read_text())
    assert facts["checklist"]["resamples"] == 200 and facts["inputs"]
    assert facts["targets"]["shapes"]["runs"] == 36
    rows = pd.read_parquet(tmp_path / "laws.parquet").set_index(["law", "form", "parameter"])
    found = rows.loc["sum", "", "P* exponent"]
    assert found.low <= 0.2 / 0.55 <= found.high and found.points == 36 and found.beyond < 0.05
    laws_found = {"compute", "size", "data", "sum", "repeats", "allocation"}
    assert laws_found <= {*rows.index.get_level_values("law")}
    assert (rows.low <= rows.high)[rows.low.notna()].all()
    for which in ("compute", "size-data", "allocation", "isoflop"):
        assert (tmp_path / f"laws-{which}.png").stat().st_size > 5_000
        assert (tmp_path / f"laws-{which}.svg").exists()


def csv(compute: object, error: object) -> str:
    rows = zip(compute, error, strict=True)  # type: ignore[call-overload]
    return "name,compute,error\n" + "".join(f"n,{float(c)!r},{float(e)!r}\n" for c, e in rows)


FALLING = (0.9, 0.8, 0.7, 0.6, 0.5)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (csv([], []), "empty"),
        (csv([1, 10, 100, 1000, 1e4], [90, 80, 70, 60, 50]), "bad-value"),
        (csv([0, 10, 100, 1000, 1e4], FALLING), "bad-value"),
        (None, "missing-path"),
        ("a folder", "unreadable"),
        ("flops,error\n1,0.5\n", "unknown-format"),
        ("compute,error\n1,x\n", "unknown-format"),
    ],
)
def test_points_that_are_not_valid_are_one_line(
    tmp_path: Path, capsys: Capture, text: str | None, code: str
) -> None:
    path = tmp_path / "points.csv"
    if text == "a folder":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    assert main(["scaling", str(path), "--out", str(tmp_path / "laws")]) == 2
    assert [found for _, found in printed_errors(capsys.readouterr().err)] == [code]


def test_points_too_few_for_a_law_are_named_and_drawn(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "points.csv").write_text(csv([1, 10, 100], FALLING[:3]))
    words = ["scaling", str(tmp_path / "points.csv"), "--quick", "--out", str(tmp_path / "laws")]
    assert main(words) == 0
    assert "compute: 3 amounts of compute cannot determine 3 parameters" in capsys.readouterr().out
    facts = json.loads((tmp_path / "laws.json").read_text())
    lacking = facts["targets"]["points"]["too_few_points"]
    names = {"compute", "size", "data", "sum", "repeats", "allocation", "isoFLOP"}
    assert set(lacking) == names and lacking["allocation"] == "no epochs are known"
    assert (tmp_path / "laws-compute.png").exists() and not list(tmp_path.glob("laws-[sai]*"))


@pytest.mark.parametrize("most", [1.1, 3, 30, 1e5])
def test_labels_of_logarithmic_axes_are_few_and_without_tex(most: float) -> None:
    with looks():
        axes = Figure().subplots()
        axes.set(xscale="log", xlim=(1.5e5, most * 1.5e5))
        set_log_ticks(axes.xaxis, most=3)
        texts = [each.get_text() for each in axes.get_xticklabels(which="both")]
        labels = [text for text in texts if text]
    assert labels and len({*labels}) == len(labels) <= 10 and "$" not in "".join(labels)
