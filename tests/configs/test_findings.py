"""The table of `make findings`: its arithmetic on runs that are made up, and that the plan trains
every arm that a claim names; and the sizes in docs/findings.md."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from cluster.plan_file import load_checked
from finetune.runs import runs_below
from pretrain.config import PretrainSettings
from pretrain.models.cost import cost_of, width_and_connections
from pretrain.models.spec import AnySpec, MixerSpec, StructuredMlpSpec
from tests.ranks import REPOSITORY
from tests.records import write_record_of


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("findings")


def write_run(place: Path, name: str, top1: float | None) -> None:
    (place / name / "tracking").mkdir(parents=True)
    (place / name / "config.yaml").write_text(
        yaml.safe_dump({"run_dir": name, "data": {"eval_split": "val"}})
    )
    write_record_of(place / name, {})
    if top1 is not None:
        (place / name / "result.json").write_text(json.dumps({"eval/top1": top1, "step": 10}))


def test_arms_are_paired_by_their_seeds(findings: ModuleType, tmp_path: Path) -> None:
    arms = {
        "smixer-wide": (0.60, 0.62, 0.70),
        "smixer-narrow": (
            0.50,
            0.66,
            0.60,
        ),  # differences 10, -4, 10 points: mean 5.333, deviation 8.083
        "smixer-wide-rp": (0.58, 0.68, 0.71),  # 2, -6, -1: two are nearer than 5
        "sw-mlp": (0.20, None, 0.30),  # an unfinished run has no pair: 40, 40
        "inverted": (None, None, 0.5),
    }
    for arm, values in arms.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, f"{arm}-seed-{seed}", value)
    rows = [
        line.split(" | ")[2:]
        for line in findings.table(findings.accuracies(runs_below(tmp_path, deepest=1)))[2:]
    ]
    assert rows[0] == ["64.0, 58.7", "+5.3", "8.1", "2 of 3 |"]
    assert rows[1] == ["64.0, 65.7", "-1.7", "4.0", "2 of 3 |"]
    assert rows[2] == ["65.0, 25.0", "+40.0", "0.0", "2 of 2 |"]
    assert len(rows) == 7 and all(row[0] == "not yet run" for row in rows[3:])


def test_the_plan_trains_what_the_claims_compare(
    findings: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    works = [
        work for stage in load_checked("configs/plan/findings.yaml").stages for work in stage.works
    ]
    settings = {
        Path(work.writes).name: work.settings
        for work in works
        if isinstance(work.settings, PretrainSettings)
    }
    arms = {arm for claim in findings.CLAIMS for arm in (claim.arm, claim.other)}
    assert set(settings) == {f"{arm}-seed-{seed}" for arm in arms for seed in (0, 1, 2)}
    assert all(each.train.seed == int(name[-1]) for name, each in settings.items())
    models = {name.removesuffix("-seed-0"): each.model for name, each in settings.items()}
    sparse = [
        width_and_connections(models[name], image_size=32)
        for name in ("smixer-wide", "smixer-wide-rp", "sw-mlp")
    ]
    assert sparse == [(1024, 2**15)] * 3  # of the same width and Omega
    assert width_and_connections(models["smixer-narrow"], image_size=32) == (504, 32_760)
    parameters = [
        cost_of(models[name], num_classes=16, image_size=32).num_parameters
        for name in ("inverted", "standard-wide")
    ]
    assert parameters == [923_280, 924_846]


def test_findings_print_the_sizes_of_the_networks_of_width_or_locality(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(REPOSITORY)
    models = {
        work.settings.record.labels["network"]: work.settings.model
        for stage in load_checked("configs/plan/findings_locality_rates.yaml").stages
        for work in stage.works
        if isinstance(work.settings, PretrainSettings)
    }
    rows = re.findall(
        r"^\| (`.+) \| (\d) \| (.+) \| (.+) \| (.+) \| \w.* \|$",
        Path("docs/findings.md").read_text(),
        flags=re.MULTILINE,
    )
    printed = {
        name: tuple(int(cell.replace(",", "")) for cell in cells)
        for names, *cells in rows
        for name in re.findall("`(.+?)`", names)
    }
    assert printed == {name: sizes(model) for name, model in models.items()}


def sizes(spec: AnySpec) -> tuple[int, int, int, int]:
    """Return the layers, m, Omega and the number of parameters."""
    cost = cost_of(spec, num_classes=10, image_size=32)
    width, omega = width_and_connections(spec, image_size=32)
    assert width is not None
    match spec:
        case MixerSpec():
            layers = 2 * spec.depth
        case StructuredMlpSpec():  # the second layer's factors, as a Mixer's two mixings
            layers, omega = 2, width * (spec.num_rows + spec.num_columns) / 2
        case _:
            layers = spec.depth + (spec.depth == 1)  # the first matrix of a shallow MLP counts
    assert omega is not None
    return layers, width, round(omega), cost.num_parameters
