"""The results and plan sizes in docs/findings/ match the committed tables, and runs use the tuned
learning rates."""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.cli import main as analysis
from analysis.results import read_results
from cluster.plan_file import load_checked
from pretrain.config import PretrainSettings
from pretrain.models.cost import cost_of, width_and_connections
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, StructuredMlpSpec
from tests.ranks import REPOSITORY

PAGES = REPOSITORY / "docs/findings"
POINTS = REPOSITORY / "tests/analysis/points"
CLAIMS = ("width", "locality", "mlp", "depth", "sparse", "scaling", "gain", "transfer", "clip_art")
ARM_AXES = (
    "shape",
    "width",
    "arm",
    "labeled",
    "network",
    "mixing",
    "pixels",
    "variant",
    "init",
    "model.width",
)
Sizes = Callable[[AnySpec], tuple[int, int, int, int]]
Claims = Callable[[str], ModuleType]


@pytest.fixture
def claims(benchmarks: None) -> Claims:
    """Return a function that imports a module of benchmarks/claims/."""
    return lambda name: importlib.import_module(f"claims.{name}")


@pytest.mark.parametrize("name", CLAIMS)
def test_the_page_has_the_results_of_the_table(name: str, benchmarks: None) -> None:
    decide = importlib.import_module("findings").CLAIMS[name]
    results = pd.read_parquet(POINTS / f"findings_{name}.parquet")
    assert "\n".join(decide(results)) in (PAGES / f"{name}.md").read_text()


@pytest.mark.parametrize("name", CLAIMS)
def test_the_command_in_the_docs_draws_the_figure_of_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    docs = (REPOSITORY / "docs/findings.md").read_text()
    (command,) = re.findall("`analysis (figure .+?)`", docs)
    words = command.replace("width", name).split()
    assert f"]({name}.png)" in (PAGES / f"{name}.md").read_text()
    assert analysis([*words, "--out", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn.png").stat().st_size > 10_000


def arm_of(labels: Mapping[str, str]) -> str:
    """Return the labels on all axes except seed and learning rate. Tuning for 100 labeled images
    uses 60."""
    return "-".join(labels[axis].replace("-60", "-100") for axis in ARM_AXES if axis in labels)


@pytest.mark.parametrize("name", CLAIMS)
def test_every_arm_has_its_best_learning_rate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    rates, results = (
        read_results([POINTS / f"findings_{name}{suffix}.parquet"]).dropna(subset="error")
        for suffix in ("_rates", "")
    )
    results = results[~results.labels.str.contains("untrained")]
    assert set(rates.split) == {"val"} and set(results.split) == {"test"}
    assert not set(rates.seed) & set(results.seed)
    for table in (rates, results):
        table["arm"] = [arm_of(json.loads(labels)) for labels in table.labels]
        table["rate"] = table.own_lr.fillna(table.lr)
    best = rates.loc[rates.groupby("arm").error.idxmin()].set_index("arm").rate
    assert (results.arm.map(best) == results.rate).all()
    assert results.groupby("arm").seed.nunique().min() >= (3 if name == "scaling" else 5)
    stages = load_checked(f"configs/plan/findings_{name}_rates.yaml").stages
    settings: list[Any] = [work.settings for stage in stages for work in stage.works]
    tried = pd.Series([each.optimizer.lr for each in settings])
    tried = tried.groupby([arm_of(each.record.labels) for each in settings])
    assert (tried.min()[best.index] < best).all() and (best < tried.max()[best.index]).all()


def test_a_claim_that_is_not_true_fails(claims: Claims) -> None:
    """The verdict of every rule, for synthetic errors that rise and that fall with the width."""
    results = pd.read_parquet(POINTS / "findings_width.parquet")
    noise = results.seed.astype(int) * results.channels / 1e7
    rising = claims("width").width(results.assign(error=results.width / 1e5 + noise))
    falling = claims("width").width(results.assign(error=0.1 - results.width / 1e5 + noise))
    verdicts = [
        [line.split(" | ")[-1] for line in lines if line.startswith("| normal | all")]
        for lines in (rising, falling)
    ]
    assert verdicts == [["no |"], ["yes |"]]


@pytest.mark.parametrize(
    ("mean", "deviation", "side", "outcome"),
    [
        (5, 1, "above", "yes"),
        (5, 1, "below", "reversed"),
        (-5, 1, "below", "yes"),
        (0, 0.1, "above", "equal"),
        (0, 5, "above", "undecided"),
    ],
)
def test_the_outcome_of_a_comparison(
    claims: Claims, mean: float, deviation: float, side: str, outcome: str
) -> None:
    values = pd.DataFrame({"a": [-1.0, 0, 0, 0, 1]}) * deviation + mean
    values["b"] = 0.0
    one = claims("decisions").difference("1", "", values, "a", "b", side)
    assert claims("decisions").decide([one], set())[0] == {"1": {outcome}}
    assert claims("decisions").decide([one], {"b"})[0] == {"1": {"not tested"}}


def test_the_correction_counts_tested_comparisons_only(claims: Claims) -> None:
    values = pd.DataFrame({"a": [1.0, 2, 3, 4, 5], "b": 0.0, "weak": 0.0})  # one-sided p = 0.0066
    one, *others = (
        claims("decisions").difference(str(rule), "", values, "a", arm, "above")
        for rule, arm in enumerate(["b", *["weak"] * 9])
    )
    assert claims("decisions").decide([one, *others], {"weak"})[0]["0"] == {"yes"}
    assert claims("decisions").decide([one, *others], set())[0]["0"] == {"undecided"}


def made_up(rows: Mapping[tuple[str, str], Mapping[str, float]], *axes: str) -> pd.DataFrame:
    """Return a results table with the columns of each arm, and noise for each of five seeds."""
    template = pd.read_parquet(POINTS / "findings_width.parquet").iloc[0].to_dict()
    noise = np.random.default_rng(0)
    return pd.DataFrame(
        {
            **template,
            **columns,
            "labels": json.dumps(dict(zip(axes, arm, strict=True))),
            "seed": str(seed),
            **{name: columns[name] + noise.normal(0, 2e-4) for name in ("error", "train_loss")},
        }
        for arm, columns in rows.items()
        for seed in range(5)
    )


@pytest.mark.parametrize(
    ("gaps", "conclusion"),
    [
        ((2, 1.5, 1, 0.5, 0), "The claim holds"),
        ((2, 2, 2, 2, 2), "still worse"),
        ((-4, -2, 0, 1.5, 1.5), "still worse"),
        ((-4, -3, -2, -1, -0.5), "grows with depth"),
        ((0, 0, 0, 0, 0), "a deficit at limited depth is not shown"),
        ((0.5, 0.4, 0.3, 0.4, 0.5), "a fall with depth is not shown"),
    ],
)
def test_the_conclusion_about_depth(claims: Claims, gaps: Sequence[float], conclusion: str) -> None:
    rows = {
        (mixing, f"blocks-{2**number}"): {
            "error": 0.14 + gap / 100 * is_permuted,
            "train_loss": 0.1,
            "depth": 2.0**number,
            "permuted_blocks": 2.0**number * is_permuted,
        }
        for mixing, is_permuted in (("normal", False), ("rp", True))
        for number, gap in enumerate(gaps)
    }
    assert conclusion in claims("depth").depth(made_up(rows, "mixing", "network"))[-1]


@pytest.mark.parametrize(
    ("default", "effects", "conclusion"),
    [
        ((0, 0, 0, 0.2, 0.4), (0, 0, 0, -0.1, -0.3), "causes a part"),
        ((0, 0, 0, 0.2, 0.4), (-0.04, 0, 0, 0, -0.04), "not through sparsity"),
        ((0, 0, 0, 0.2, 0.4), (0, 0, 0, 0, 0.01), "does not cause"),
        ((0, 0, 0, 0, 0), (0, 0, 0, 0, -0.3), "No deterioration"),
        ((0, 0, 0, 0.2, 0.4), (0, 0, 0, 0, 0.3), "harms training"),
        ((0, 0, 0, 0.2, 0.4), (-0.2, 0, 0, 0, -0.3), "control fails"),
    ],
)
def test_the_conclusion_about_the_gain(
    claims: Claims, default: Sequence[float], effects: Sequence[float], conclusion: str
) -> None:
    widths = (256, 1_024, 4_096, 8_192, 16_384)
    rows = {
        (init, f"m{m}"): {"error": 0.14, "train_loss": 0.5 + loss + effect * is_scaled, "width": m}
        for init, is_scaled in (("default", False), ("spectral", True))
        for m, loss, effect in zip(widths[::-1], default[::-1], effects[::-1], strict=True)
    }
    printed = "\n".join(claims("gain").gain(made_up(rows, "init", "width")))
    assert conclusion in printed
    assert printed.count("not tested |") == 5 * (conclusion == "control fails")


@pytest.mark.parametrize(
    ("change", "conclusions"),
    [
        ({}, ["The claim holds.", "The claim holds."]),
        ({"mixer-c32": 0.02}, ["features. The claim fails.", "The claim holds."]),
        ({"rp-c4": -0.03}, ["The claim holds.", "features. The claim fails."]),
        ({"sparse-m256": -0.03}, ["features. The claim fails."] * 2),
        ({"sparse-p1": 0.2}, ["errors. The claim fails.", "errors. The claim fails."]),
        ({"ceiling": 0.5}, ["errors. The claim fails.", "errors. The claim fails."]),
        ({"noise": 0.01}, ["features.", "features."]),
        ({"mixer-c4": 0.1, "mixer-c8": 0.1}, ["features.", "The claim holds."]),
    ],
)
def test_the_conclusion_about_sparse_mlps(
    claims: Claims, change: Mapping[str, float], conclusions: Sequence[str]
) -> None:
    """Synthetic errors fall with width. The CKA is 0.5 with `sparse-m1024`, 0.4 with `sparse-p1`,
    and 0.55 between two seeds of one network."""
    sparse = claims("sparse")
    widths = {name: m for each in sparse.WIDTHS.values() for name, m in each.items()}
    networks = dict.fromkeys(("sparse-m2048", *sparse.DENSITIES), 1_024) | widths
    rows = {
        (name,): {"error": 0.1 + 0.01 * (10 - np.log2(m)) + change.get(name, 0) * (name in widths)}
        for name, m in networks.items()
    }
    results = made_up({name: {"train_loss": 0, **row} for name, row in rows.items()}, "network")
    noise = np.random.default_rng(1)
    results["error"] += noise.normal(0, change.get("noise", 0), len(results))
    entries = pd.DataFrame(sparse.cka_pairs(), columns=["run_a", "run_b"])
    is_same = [
        a.partition("-seed")[0] == b.partition("-seed")[0]
        for a, b in zip(entries.run_a, entries.run_b, strict=True)
    ]
    is_dense = entries.run_b.str.contains("sparse-p1")
    cka = np.where(is_same, 0.55 + change.get("ceiling", 0), 0.5)
    cka = np.where(is_dense, 0.4 + change.get("sparse-p1", 0), cka)
    entries = entries.assign(on_diagonal=True, floor=0.0, cka=cka)
    entries["cka"] += noise.normal(0, 1e-3, len(entries))
    lines = sparse.sparse(results, entries)
    found = [line.partition(" Mixer: ")[2] for line in lines if " Mixer: " in line]
    assert all(end in line for line, end in zip(found, conclusions, strict=True)), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "conclusions"),
    [
        ({}, {"follows", "Dataset", "Repeated"}),
        ({"alpha": 0.2, "beta": 0.5}, {"does not predict", "Parameters", "Repeated"}),
        ({"again": 1e4}, {"does not predict", "Dataset"}),
        ({"largest": 1.2}, {"does not predict", "Dataset", "Repeated"}),
        ({"floor": 0.2}, {"undecided", "Dataset", "Repeated"}),
        ({"floor": 0.45}, {"Not tested"}),
    ],
)
def test_the_conclusion_about_scaling(
    claims: Claims, monkeypatch: pytest.MonkeyPatch, law: Mapping[str, float], conclusions: set[str]
) -> None:
    """Errors follow the law of repeated data, in which repeated images lose value, with noise."""
    scaling = claims("scaling")
    monkeypatch.setattr(scaling, "LOGISTIC_ERRORS", dict.fromkeys(scaling.LOGISTIC_ERRORS, 50.0))
    shape = {"alpha": 0.9, "beta": 0.3, "again": 5.0, "floor": 0.02, "largest": 1.0} | law
    epochs, noise = np.arange(4.0, 33, 4), np.random.default_rng(0)
    seen = 1 + shape["again"] * (1 - np.exp(-(epochs - 1) / shape["again"]))
    template = pd.read_parquet(POINTS / "findings_mlp.parquet").iloc[0].to_dict()
    rows = []
    for size in (62_298, 149_162, 396_618, 742_378, 1_186_442, 2_036_858):
        for images in scaling.LOGISTIC_ERRORS:
            errors = shape["floor"] + 0.1 * (size / 1e6) ** -shape["alpha"] * 0.1
            errors = errors + 0.2 * (images * seen / 1e5) ** -shape["beta"]
            errors *= shape["largest"] if size == 2_036_858 else 1
            for seed in range(60, 63):
                own = {"run": f"{size}-{images}-{seed}", "parameters": size, "images": images}
                own |= {
                    "weights": own["run"],
                    "seed": str(seed),
                    "epochs": 32.0,
                    "samples": 32 * images,
                }
                own["compute"] = 96.0 * size * images
                own |= {"test_epochs": epochs, "test_errors": errors + noise.normal(0, 1e-4, 8)}
                rows.append(template | own)
    found = scaling.scaling(pd.DataFrame(rows))[-1]
    words = {
        "follows",
        "undecided",
        "does not predict",
        "Dataset",
        "Parameters",
        "Repeated",
        "Not tested",
    }
    assert {word for word in words if word in found} == conclusions, found


@pytest.mark.parametrize(
    ("gains", "conclusions"),
    [
        ({}, ["the claim holds.", "the claim holds."]),
        (dict.fromkeys((10, 30, 100), 0.0), ["makes no difference.", "the claim holds."]),
        ({100: 0.0}, ["holds for 10, 30 images a class only;", "the claim holds."]),
        ({10: -5.0}, ["harms with 10 images a class;", "the claim holds."]),
        ({30: 40.0}, ["not tested with 30.", "the claim holds."]),
    ],
)
def test_the_conclusion_about_transfer(
    claims: Claims,
    monkeypatch: pytest.MonkeyPatch,
    gains: Mapping[int, float],
    conclusions: Sequence[str],
) -> None:
    """Pretraining lowers errors by 5 percentage points, or by `gains` on digits. Errors above 50 %
    do not beat the baseline."""
    transfer = claims("transfer")
    monkeypatch.setattr(transfer, "LOGISTIC_ERRORS", dict.fromkeys(transfer.LOGISTIC_ERRORS, 50.0))
    rows = {
        (f"{target}-{number}", start): {"error": 0.3 + gain / 100 * (start == "scratch")}
        for target in transfer.TARGETS
        for number in transfer.NUMBERS
        for gain in [gains.get(number, 5.0) if target == "digits" else 5.0]
        for start in transfer.STARTS
    }
    results = made_up(
        {arm: {"train_loss": 0, "own_lr": 0.1, **row} for arm, row in rows.items()},
        "labeled",
        "init",
    )
    lines = [line for line in transfer.transfer(results) if line.startswith(("Digits", "Clip art"))]
    assert all(end in line for line, end in zip(lines, conclusions, strict=True)), lines


def test_the_conclusions_about_clip_art(claims: Claims) -> None:
    """Errors are least at C = 64, for normal Mixers only. Permuted pixels cost `mixer` 5 points."""
    shapes = made_up(
        {
            (f"c{c}", mixing): {
                "error": 0.3 + 0.1 * (c != 64) * (mixing == "normal"),
                "train_loss": 0,
                "channels": c,
                "tokens": 1.0,
                "permuted_blocks": 4.0 * (mixing == "rp"),
            }
            for c in (8, 64, 512)
            for mixing in ("normal", "rp")
        },
        "network",
        "variant",
    )
    networks = made_up(
        {
            (name, pixels): {
                "error": 0.3 + 0.05 * (name == "mixer") * (pixels == "permuted"),
                "train_loss": 0,
            }
            for name in ("mixer", "rp", "dense")
            for pixels in ("in-order", "permuted")
        },
        "network",
        "variant",
    )
    shapes.seed, networks.seed = (
        (table.seed.astype(int) + first).astype(str)
        for table, first in ((shapes, 85), (networks, 90))
    )
    lines = claims("clip_art").clip_art(pd.concat([shapes, networks]))
    holds = [line.split(" | ")[-1] for line in lines if "minus" in line or "cost: " in line]
    assert holds == ["yes |", "no |", "yes |", "yes |"]
    assert lines[-1] == "Width by itself does not explain the Mixer's error."


def sizes_by_macs(spec: AnySpec) -> tuple[int, int, int, int]:
    """Return the number of layers, width, MACs and parameters of an MLP."""
    assert isinstance(spec, MlpSpec)
    cost = cost_of(spec, num_classes=10, image_size=32)
    layers = spec.depth * (2 if spec.bottleneck == "inverted" else 1)
    return layers, spec.width, cost.multiply_adds, cost.num_parameters


def sizes_by_omega(spec: AnySpec) -> tuple[int, int, int, int]:
    """Return the number of layers, m (width), Omega (connections) and the number of parameters."""
    cost = cost_of(spec, num_classes=10, image_size=32)
    width, omega = width_and_connections(spec, image_size=32)
    assert width is not None
    match spec:
        case MixerSpec():
            layers = 2 * spec.depth
        case StructuredMlpSpec():  # two factors per layer, like a Mixer's two mixings
            layers, omega = 2, width * (spec.num_rows + spec.num_columns) / 2
        case _:
            layers = spec.depth + (spec.depth == 1)  # the first matrix of a shallow MLP is included
    assert omega is not None
    return layers, width, round(omega), cost.num_parameters


@pytest.mark.parametrize(
    ("plan", "axis", "sizes_of"),
    [
        ("locality", "network", sizes_by_omega),
        ("depth", "network", sizes_by_omega),
        ("sparse", "network", sizes_by_omega),
        ("mlp", "arm", sizes_by_macs),
    ],
)
def test_the_page_has_the_sizes_of_the_networks(
    plan: str, axis: str, sizes_of: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    models = {
        work.settings.record.labels[axis]: work.settings.model
        for stage in load_checked(f"configs/plan/findings_{plan}_rates.yaml").stages
        for work in stage.works
        if isinstance(work.settings, PretrainSettings)
    }
    page = (PAGES / f"{plan}.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|" + r" ([\d,]+) \|" * 4, page, flags=re.MULTILINE)
    printed = {
        name: tuple(int(cell.replace(",", "")) for cell in cells)
        for names, *cells in rows
        for name in re.findall("`(.+?)`", names)
    }
    assert printed == {name: sizes_of(models[name]) for name in printed}
    printed_models = [models[name] for name in printed]
    assert all(model in printed_models for model in models.values())


@pytest.mark.parametrize("name", ["scaling", "gain"])
def test_the_page_has_the_parameters_of_every_width(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    page = (PAGES / f"{name}.md").read_text()
    for stage in load_checked(f"configs/plan/findings_{name}_rates.yaml").stages:
        for work in stage.works:
            assert isinstance(work.settings, PretrainSettings)
            _, width, _, parameters = sizes_by_omega(work.settings.model)
            assert f"| {width:,} | {parameters:,} |" in page
