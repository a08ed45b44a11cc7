"""Each plan belongs to one experiment of a paper's page and to docs/papers.md. Missing results are
listed with their command."""

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from analysis.cli import main
from analysis.output import Result, remove_figures, write
from analysis.papers.experiments import EXPERIMENTS, Paper
from analysis.results import as_frame, read_results
from cluster.plan_file import load_plan
from pretrain.models.cost import cost_of
from pretrain.models.presets import PRESETS, spec_of
from tests.conftest import Capture, Patch
from tests.papers_page import PLANS
from tests.ranks import REPOSITORY
from tests.settings_page import PARSERS

ALL = [each for paper in EXPERIMENTS.values() for each in paper]


def test_each_plan_is_of_one_experiment_and_stands_in_the_docs() -> None:
    assert sorted(plan for each in ALL for plan in each.plans) == PLANS and len(PLANS) > 27
    table = (
        (REPOSITORY / "docs" / "papers.md")
        .read_text()
        .partition("## Every experiment")[2]
        .partition("\n## ")[0]
    )
    assert set(re.findall(r"`((?:mixer|scaling)_\w+)`", table)) == set(PLANS)


def test_the_model_listing_has_the_printed_parameters() -> None:
    """Scaling MLPs, Fig. 5, in millions, truncated. B-12/Wi-768 is not in the figure."""
    (figure_5,) = (each for each in EXPERIMENTS["scaling-mlps"] if each.name == "Fig. 5")
    program_name, verb, *words = shlex.split(figure_5.command)
    assert (program_name, verb) == ("pretrain", "models")
    options = PARSERS["pretrain"]().parse_args([verb, *words])
    millions = [
        cost_of(spec_of(name), num_classes=options.classes, image_size=64).num_parameters // 10**6
        for name in PRESETS
        if fnmatch(name, options.match) and name != "mlp_b12_wi768"
    ]
    assert sorted(millions) == [9, 12, 24, 37, 74, 124]
    assert all(str(each) in figure_5.printed for each in millions)


def test_each_verb_is_there() -> None:
    parser = PARSERS["analysis"]()
    for each in ALL:
        if each.verb:
            assert callable(parser.parse_args(each.verb.split()).run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("demo", "slurm", "ways"),
    [
        (False, False, ["wide-mlps run", "cluster/submit"]),
        (False, True, ["cluster/submit", "wide-mlps run"]),
        (True, True, ["wide-mlps run"]),
    ],
)
def test_the_first_command_is_one_that_runs_here(
    demo: bool, slurm: bool, ways: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    if slurm:
        Path("sbatch").write_text("#!/bin/sh\n")
        Path("sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["paper", "mixer", "--out", "page", *["--demo"] * demo]) == 0
    section = (
        Path("page/index.html")
        .read_text()
        .partition("<h2>Fig. 7</h2>")[2]
        .partition("</section>")[0]
    )
    commands = re.findall(r"<code>(.*?)</code>", section)
    assert commands[: len(ways)] == [
        f"{way} configs/plan/mixer_fig7_depth.yaml{' --demo' * demo}" for way in ways
    ]
    assert not any(".yaml" in command for command in commands[len(ways) :])


@pytest.mark.slow
def test_a_page_has_the_figures_and_the_commands_of_missing_ones(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    rows = [
        {
            "plan": "mixer_fig7_depth_demo",
            "stage": "pretrain",
            "task": "pretrain",
            "target": "demos",
            "split": "val",
            "num_test": 100,
            "error": 0.5,
            "seed": 0,
            "kind": "smixer",
            "permuted_blocks": 0,
            "width": 64,
            "depth": depth,
            "member": number,
            "run": f"r{number}",
            "labels": json.dumps({"model.depth": str(depth), "seed": "0"}),
        }
        for number, depth in enumerate((2, 4))
    ]
    # one member in several runs is one result
    rows.append(rows[0] | {"run": "r0-again", "own_seed": 1})
    as_frame(rows).to_parquet("kept.parquet")
    Path("page").mkdir()
    Path("page/mixer_fig2d_monarch_demo.json").write_text(
        '{"files": ["mixer_fig2d_monarch_demo.png"]}'
    )
    for old in ("mixer_fig2d_monarch_demo.png", "mine.png"):
        Path("page", old).write_bytes(b"old")
    assert main(["paper", "mixer", "--demo", "--points", "kept.parquet", "--out", "page"]) == 0
    assert capsys.readouterr().out.startswith("page: page/index.html\n")
    text = Path("page/index.html").read_text()
    fig7, fig2d = (
        text.partition(f"<h2>{name}</h2>")[2].partition("</section>")[0]
        for name in ("Fig. 7", "Fig. 2d")
    )
    assert "data:image/png;base64," in fig7 and "2 of 4 runs</span><h2>Fig. 7<" in text
    assert "wide-mlps run configs/plan/mixer_fig7_depth.yaml --demo" in fig7
    assert "data:image" not in fig2d
    assert (
        not list(Path("page").glob("mixer_fig2d_monarch_demo.*")) and Path("page/mine.png").exists()
    )
    assert "wide-mlps run configs/plan/mixer_fig2d_monarch.yaml --demo" in fig2d
    assert "84.09" in text.partition("Mixer-SS/8")[2]  # 100 - 15.91, as printed
    assert Path("page/mixer_fig7_depth_demo.svg").is_file()
    assert json.loads(Path("page/index.json").read_text())["Fig. 7"] == "2 of 4 runs"


def test_figures_of_an_earlier_result_are_removed(tmp_path: Path) -> None:
    """Only the figures of this result are removed: not `run-other`, and not the user's files."""

    def names() -> set[str]:
        return {path.name for path in tmp_path.glob("*.png")}

    image, out = Image.new("RGB", (8, 8)), tmp_path / "run"
    write(Result(figures={"": image, "training": image}), out)
    write(Result(figures={"": image}), tmp_path / "run-other")
    (tmp_path / "run-mine.png").write_bytes(b"")
    others = {"run-other.png", "run-mine.png"}
    assert names() == others | {"run.png", "run-training.png"}
    write(Result(figures={"": image}), out)
    assert names() == others | {"run.png"}
    (tmp_path / "run.json").write_text('{"files": ["../run-x.png", "run-mine.txt", "mine.png"]}')
    (tmp_path / "mine.png").write_bytes(b"")
    remove_figures(out)
    assert names() == others | {"run.png", "mine.png"} and not (tmp_path / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("paper", get_args(Paper))
def test_every_figure_is_drawn_from_the_kept_points(
    paper: Paper, tmp_path: Path, monkeypatch: Patch
) -> None:
    """All plans with committed results, except plans that compare the features of runs."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    kept = REPOSITORY / "tests" / "analysis" / "points" / "demos.parquet"
    assert main(["paper", paper, "--demo", "--points", str(kept), "--out", "page"]) == 0
    plans = [plan for each in EXPERIMENTS[paper] for plan in each.plans]
    there = set(read_results([kept]).plan)
    kinds = {
        f"{plan}_demo": load_plan(f"configs/plan/{plan}.yaml", is_demo=True).figure
        for plan in plans
        if f"{plan}_demo" in there
    }
    drawn = {plan for plan in kinds if list(Path("page").glob(f"{plan}*.png"))}
    assert drawn == {plan for plan, figure in kinds.items() if figure["kind"] != "cka"} and drawn
    assert all(path.with_suffix(".svg").is_file() for path in Path("page").glob("*.png"))
