"""The scaling-law fit finds the law that made the points, and refuses points that cannot fix one."""

from pathlib import Path

import numpy as np
import pytest

from analysis.cli import main
from analysis.scaling.laws import Law, fit
from tests.conftest import Capture


def points_of(law: Law, *, low: float, high: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The law written out once more, in plain Python."""
    ratio = (high / low) ** (1 / (count - 1))
    compute = [low * ratio**number for number in range(count)]
    error = [law.floor + law.a / (law.b + value) ** law.alpha for value in compute]
    return np.array(compute), np.array(error)


@pytest.mark.parametrize(
    ("law", "low", "high"),
    [
        (Law(a=0.5, b=1.0, alpha=0.3, floor=0.2), 1.0, 1e4),
        (Law(a=0.8, b=0.5, alpha=0.5, floor=0.0), 0.5, 1e3),
        (Law(a=200.0, b=1e12, alpha=0.25, floor=0.1), 1e12, 1e17),
        (Law(a=25.0, b=1e10, alpha=0.14, floor=0.05), 1e10, 1e16),
    ],
)
def test_exact_points_give_back_their_law(law: Law, low: float, high: float) -> None:
    compute, error = points_of(law, low=low, high=high, count=8)
    for rows in (np.arange(8), np.random.default_rng(1).permutation(8)):  # in any order
        assert fit(compute[rows], error[rows]) == pytest.approx(law, rel=1e-4, abs=1e-6)


def test_points_with_a_little_noise_give_back_about_their_law() -> None:
    law = Law(a=200.0, b=1e12, alpha=0.25, floor=0.1)
    compute, error = points_of(law, low=1e12, high=1e17, count=12)
    found = fit(compute, error * np.exp(np.random.default_rng(0).normal(0, 0.005, 12)))
    assert found.alpha == pytest.approx(0.25, abs=0.03) and found.floor == pytest.approx(0.1, abs=0.02)
    _, beyond = points_of(law, low=1e18, high=1e19, count=2)
    assert found.error(np.array([1e18, 1e19])) == pytest.approx(beyond, rel=0.1)


def csv(compute: object, error: object) -> str:
    rows = zip(compute, error, strict=True)  # type: ignore[call-overload]
    return "name,compute,error\n" + "".join(f"n,{float(c)!r},{float(e)!r}\n" for c, e in rows)


FALLING = (0.9, 0.8, 0.7, 0.6, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (csv([1, 10, 100, 1000], FALLING[:4]), "4 points cannot fix 4 parameters; give at least 5"),
        (csv([], []), "0 points cannot fix 4 parameters"),
        (csv([7] * 5, FALLING), "1 points cannot fix 4 parameters"),
        (csv([1, 10, 100, 1000, 1e4], [90, 80, 70, 60, 50]), "divide percents by 100"),
        (csv([1, 10, 100, 1000, 1e4], [0.9, 0.8, float("nan"), 0.6, 0.5]), "every error must be a share"),
        (csv([0, 10, 100, 1000, 1e4], FALLING), "every compute must be a positive number"),
        (None, "no such file; give a CSV with the columns compute and error"),
        ("a folder", "points.csv"),
        ("flops,error\n1,0.5\n", "needs the columns compute and error, all numbers"),
        ("compute,error\n1\n", "needs the columns compute and error, all numbers"),
        ("", "0 points cannot fix 4 parameters"),
    ],
)
def test_points_that_will_not_do_are_one_clear_line(tmp_path: Path, capsys: Capture, text: str | None, message: str) -> None:
    path = tmp_path / "points.csv"
    if text == "a folder":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    assert main(["scaling", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("analysis: ") and message in error and error.count("\n") == 1


def test_the_command_reads_columns_by_name_and_prints_the_law(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "points.csv").write_text(csv(*points_of(Law(0.5, 2.0, 0.3, 0.2), low=1, high=1e4, count=8)))
    assert main(["scaling", str(tmp_path / "points.csv")]) == 0
    assert capsys.readouterr().out == "E(C) = 0.5 (2 + C)^-0.3000 + 0.2000\n"
