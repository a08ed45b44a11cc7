"""Figures over many runs, from made-up points."""

import itertools
import json
import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.stats import kendalltau

from analysis.cli import main
from analysis.output import write_table
from analysis.points import VARIABLES, Point, table_of
from analysis.sweeps.series import DERIVED, By, places_of
from analysis.sweeps.statistics import kendall, num_orders, optimum


@pytest.mark.parametrize(
    "values",
    [[1], [1, 2], [1, 2, 3, 4, 5, 6], [1, 1, 2, 2, 2], [1, 2, 2, 3, 4, 4], [1, 1, 1, 1, 2, 3]],
)
def test_orders_are_those_of_all_permutations(values: list[int]) -> None:
    wrong = Counter(
        sum(a > b for a, b in itertools.combinations(order, 2))
        for order in itertools.permutations(values)
    )
    ties, counts = list(Counter(values).values()), num_orders(list(Counter(values).values()))
    same = np.prod([np.prod(range(1, tie + 1)) for tie in ties])  # orders that look alike
    assert {at: int(count * same) for at, count in enumerate(counts)} == dict(sorted(wrong.items()))


@pytest.mark.parametrize("num", [2, 3, 6, 11, 25, 40])
def test_kendall_is_scipys_where_that_is_exact(num: int) -> None:
    random = np.random.default_rng(num)
    x, y = random.permutation(num).tolist(), random.normal(size=num).tolist()
    found = kendall(x, y)
    assert found is not None and found["num"] == num
    assert (found["tau"], found["p"]) == pytest.approx(
        tuple(kendalltau(x, y, method="exact")), rel=1e-9
    )
    assert found["p_falling"] == pytest.approx(
        kendalltau(x, y, method="exact", alternative="less").pvalue, rel=1e-9
    )


def test_kendall_with_equal_values_is_that_of_all_permutations() -> None:
    x, y = [5, 1, 2, 4, 3], [0.1, 0.4, 0.4, 0.1, 0.3]
    found = kendall(x, y)
    assert found is not None and found["tau"] == pytest.approx(kendalltau(x, y).statistic)
    taus = [kendalltau(x, order).statistic for order in itertools.permutations(y)]
    assert found["p"] == pytest.approx(
        np.mean([abs(tau) >= abs(found["tau"]) - 1e-12 for tau in taus])
    )
    assert found["p_falling"] == pytest.approx(
        np.mean([tau <= found["tau"] + 1e-12 for tau in taus])
    )
    assert kendall([1, 2], [0.3, 0.3]) is None


def test_a_planted_optimum_is_found() -> None:
    x = np.repeat(np.linspace(-2.4, 2.4, 7), 3)
    exact = optimum(x.tolist(), (0.3 + 0.02 * (x - 0.5) ** 2).tolist())
    assert (
        exact is not None
        and exact["at"] == pytest.approx(0.5)
        and exact["high"] - exact["low"] < 1e-9
        and not exact["has_zero"]
    )
    covered = []
    for seed in range(60):
        y = 0.3 + 0.02 * (x - 0.5) ** 2 + np.random.default_rng(seed).normal(scale=0.01, size=21)
        found = optimum(x.tolist(), y.tolist(), num_resamples=300)
        assert found is not None
        covered.append(found["low"] <= 0.5 <= found["high"])
    assert 50 <= sum(covered) < 60
    falling = optimum([-1, 0, 1, 2], [0.4, 0.3, 0.22, 0.1])
    assert falling is not None and falling["at"] == 2
    assert optimum([0, 1, 1, 0], [1, 2, 3, 4]) is None


SHAPES = [(16, 173), (32, 113), (48, 83), (64, 64), (83, 48), (113, 32), (173, 16)]


def made(plan: str = "made", *, targets: tuple[str, ...] = ("cifar10",)) -> list[Point]:
    """S-Mixers whose error is least at ln(C / S) = 0.3, RP's 0.5 points above the normal one's at
    each seed."""
    found = []
    for (channels, tokens), permuted, seed, target in itertools.product(
        SHAPES, (0, 12), range(3), targets
    ):
        error = (
            0.2
            + 0.02 * (math.log(channels / tokens) - 0.3) ** 2
            + 0.005 * (permuted > 0)
            + 0.003 * seed
        )
        run = f"runs/{plan}/{target}-c{channels}-{permuted}-{seed}"
        found.append(
            Point(
                plan=plan,
                stage="pretrain",
                member=0,
                run=run,
                weights=run,
                task="pretrain",
                target=target,
                num_test=1000,
                labels=json.dumps({"name": plan, "shape": f"c{channels}", "seed": str(seed)}),
                kind="smixer",
                depth=12,
                tokens=tokens,
                channels=channels,
                width=tokens * channels,
                permuted_blocks=permuted,
                seed=seed,
                error=error,
                test_epochs=[1.0, 2.0, 3.0],
                test_losses=[2.0 + seed, 1.0, 1.5 + 0.25 * seed],
                train_epochs=[1.0, 2.0],
                train_losses=[2.0 - 0.5 * seed, 1.0],
            )
        )
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    write_table(table_of(made(targets=("cifar10", "stl10")), metadata={}), tmp_path / "two.parquet")
    write_table(table_of(made(), metadata={}), tmp_path / "one.parquet")
    few = [point for point in made() if point.channels in (32, 64)]
    write_table(table_of(few, metadata={}), tmp_path / "few.parquet")
    one = [point for point in few if point.channels == 64 and not point.permuted_blocks]
    write_table(
        table_of([replace(point, lr=0.1 + 0.1 * (point.seed == 1)) for point in one], metadata={}),
        tmp_path / "lr.parquet",
    )
    probes = [replace(point, task="probe", own_seed=0) for point in one]
    write_table(table_of([*one, *probes], metadata={}), tmp_path / "tasks.parquet")
    short = [
        replace(point, test_epochs=[1.0, 2.0], test_losses=[4.0, 1.0]) if point.seed == 2 else point
        for point in one
    ]
    write_table(table_of(short, metadata={}), tmp_path / "short.parquet")
    return tmp_path


def test_a_sweep_finds_what_was_planted(kept: Path) -> None:
    words = ["--x", "log_cs", "--hue", "mixing", "--facet", "target", "--out", str(kept / "cs")]
    assert main(["sweep", str(kept / "two.parquet"), *words]) == 0
    facts, rows = (
        json.loads((kept / "cs.json").read_text()),
        pq.read_table(kept / "cs.parquet").to_pylist(),
    )
    assert len(facts["lines"]) == 4 and len(rows) == 4 * 7
    for line in facts["lines"]:
        assert line["optimum"]["at"] == pytest.approx(0.3) and not line["optimum"]["has_zero"]
    assert facts["rp_minus_normal"] == {
        "pairs": 2 * 7 * 3,
        "mean": pytest.approx(0.005),
        "lower": 0,
    }
    row = next(row for row in rows if row["hue"] == "RP" and row["x"] == 0)
    assert row["errors"] == pytest.approx([0.2068, 0.2098, 0.2128]) and row[
        "error_sd"
    ] == pytest.approx(0.003)
    assert row["binomial_se"] == pytest.approx(math.sqrt(0.2098 * 0.7902 / 1000))
    assert row["minus_normal"] == pytest.approx([0.005] * 3)
    with Image.open(kept / "cs.png") as picture:
        assert picture.width == pytest.approx(6.9 * 220, abs=3) and (kept / "cs.svg").exists()


def test_mirrored_shapes_are_one_width_and_wider_is_better(kept: Path) -> None:
    words = ["--x", "width", "--hue", "kind,mixing", "--out", str(kept / "width")]
    assert main(["sweep", str(kept / "one.parquet"), *words]) == 0
    lines = json.loads((kept / "width.json").read_text())["lines"]
    assert [line["hue"] for line in lines] == ["S-Mixer, normal", "S-Mixer, RP"]
    for line in lines:  # four widths in order, of 4! orders
        assert line["kendall"] == {
            "tau": -1.0,
            "p": pytest.approx(2 / 24),
            "p_falling": pytest.approx(1 / 24),
            "num": 4,
        }


def test_what_is_permuted_may_be_the_x(kept: Path) -> None:
    points = [
        replace(point, labels=json.dumps({"blocks": "all" if point.permuted_blocks else "none"}))
        for point in made()
    ]
    by = By("blocks", facet=("channels",))
    pairs = [place for place in places_of(points, by) if place.minus_normal]
    assert len(pairs) == 7 and all(
        [*place.minus_normal.values()] == pytest.approx([0.005] * 3) for place in pairs
    )
    by, narrow = (
        By("width"),
        [
            point
            for point in points
            if (point.channels, point.permuted_blocks) in ((16, 12), (32, 0))
        ],
    )
    assert not [
        place for place in places_of(narrow, by) if place.minus_normal
    ]  # they differ in width as well


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["two.parquet", "--x", "log_cs", "--hue", "mixing"],
            "at one place stand results on cifar10 (pretrain) and stl10 (pretrain)",
        ),
        (["one.parquet", "--x", "log_cs"], "they differ in mixing: make that a hue or a facet"),
        (
            ["lr.parquet", "--x", "log_cs"],
            "-1 stand at one place (log_cs 0.0); they differ in lr: make that a hue or a facet",
        ),
        (
            ["tasks.parquet", "--x", "log_cs"],
            "at one place stand results on cifar10 (pretrain) and cifar10 (probe); give",
        ),
        (
            ["one.parquet", "--x", "shap"],
            "shap: no variable, and no axis of these plans; did you mean 'shape'?",
        ),
        (["one.parquet", "--x", "density"], "density: no point has it"),
        (
            ["one.parquet", "--x", "width", "--task", "probe"],
            "no point has an accuracy of task probe; there are pretrain",
        ),
    ],
)
def test_what_a_sweep_cannot_draw_is_said(
    kept: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["sweep", str(kept / words[0]), *words[1:], "--out", str(kept / "bad")]) == 2
    assert said in capsys.readouterr().err and not list(kept.glob("bad*"))


def test_bands_are_from_the_least_to_the_greatest(kept: Path) -> None:
    words = ["--hue", "mixing", "--facet", "shape", "--out", str(kept / "curves")]
    assert main(["curves", str(kept / "few.parquet"), *words]) == 0
    rows = pq.read_table(kept / "curves.parquet").to_pylist()
    own = [
        row for row in rows if (row["facet"], row["hue"], row["curve"]) == ("c64", "normal", "test")
    ]
    assert [(row["min"], row["mean"], row["max"]) for row in own] == [
        (2, 3, 4),
        (1, 1, 1),
        (1.5, 1.75, 2.0),
    ]
    assert [row["sd"] for row in own] == pytest.approx([1.0, 0.0, 0.25])
    line = json.loads((kept / "curves.json").read_text())["lines"][0]
    assert line["overfit"] == pytest.approx([0.5, 0.75, 1.0]) and line[
        "overfit_mean"
    ] == pytest.approx(0.75)
    assert (kept / "curves.png").exists()


def test_a_band_goes_as_far_as_all_its_seeds(kept: Path) -> None:
    assert main(["curves", str(kept / "short.parquet"), "--out", str(kept / "short-curves")]) == 0
    rows = [
        row
        for row in pq.read_table(kept / "short-curves.parquet").to_pylist()
        if row["curve"] == "test"
    ]
    assert [(row["epochs"], row["mean"], row["num_seeds"]) for row in rows] == [
        (1, 3, 3),
        (2, 1, 3),
    ]


def test_the_widest_mixer_of_figure_3_has_as_many_tokens_as_channels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["widths", "--omega", "2^18,2^27", "--out", str(tmp_path / "widths")]) == 0
    rows = pq.read_table(tmp_path / "widths.parquet").to_pylist()
    for name, side in (("2^18", 64), ("2^27", 512)):
        own = [row for row in rows if row["omega_name"] == name]
        widest = max(own, key=lambda row: row["width"])
        assert (widest["channels"], widest["tokens"], widest["density"]) == (
            side,
            side,
            pytest.approx(1 / side),
        )
        assert {row["channels"] for row in own} == {row["tokens"] for row in own}
        assert all(row["channels"] * row["tokens"] * (row["channels"] + row["tokens"]) / 2 == pytest.approx(row["omega"], rel=0.13)
                   for row in own)  # fmt: skip
    assert (
        main(["widths", "--omega", "2^18", "--gamma", "4", "--out", str(tmp_path / "x")]) == 0
    )  # less than a decade of p
    assert "$" not in (tmp_path / "x.svg").read_text()
    capsys.readouterr()
    assert (
        main(["widths", "--omega", "10"]) == 2
        and "too small with gamma 1" in capsys.readouterr().err
    )
    assert (
        main(["widths", "--omega", ","]) == 2
        and "names no number of connections" in capsys.readouterr().err
    )


def test_variables_are_columns_or_follow_from_them() -> None:
    assert set(VARIABLES) - set(DERIVED) <= {field.name for field in fields(Point)} and set(
        DERIVED
    ) <= set(VARIABLES)
