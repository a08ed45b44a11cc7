"""Every sweep of both papers and its demo variant are resolved. The first member of each demo
trains for two steps.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from analysis.figure import figure_settings
from analysis.results import STAGES, as_frame, read_results, results_of_plans
from analysis.run_rows import about_model
from analysis.sweeps.curves import losses_of
from analysis.sweeps.sweep import places_of
from cluster.plan_file import Plan, load_checked
from cluster.work import Work
from data_prep.settings import load_settings
from pretrain.checkpoints.run import run_and_length
from pretrain.config import PretrainSettings
from pretrain.data.datasets import load_training_data
from pretrain.engine.zero_cost import Cluster, in_hours, plan_of, slower_than_fewer
from pretrain.loop.train import Pretraining, train
from pretrain.models.cost import cost_of
from pretrain.models.presets import spec_of
from pretrain.models.spec import MixerSpec, SparseMlpSpec
from pretrain.ranks.world import read_world
from tests.analysis.conftest import make_card
from tests.forked import begin, environments, new_output, wait
from tests.papers_page import DATASETS, PAGE, PLANS, gpu_hours, replaced, sizes_of, trained
from tests.ranks import REPOSITORY

FOLDER = REPOSITORY / "configs/plan"
POINTS = REPOSITORY / "tests/analysis/points/demos.parquet"
"""Results of `make demos`; each row has the commit of its run."""
OMEGA = {
    "mixer_fig4_width": 2**19,
    "mixer_figS1_left": 2**16,
    "mixer_figS3": 2**20,
    "mixer_figS6": 2**18,
    "mixer_figS7": 2**20,
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """All plans, loaded in a directory without runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place := tmp_path_factory.mktemp("plans"))
        (place / "configs").symlink_to(REPOSITORY / "configs")
        paths = [f"configs/plan/{name}.yaml" for name in PLANS]
        loaded = [load_checked(path, is_demo=demo) for path in paths for demo in (False, True)]
        return {plan.name: plan for plan in loaded}


def demos(plans: dict[str, Plan]) -> list[Plan]:
    return [plan for plan in plans.values() if plan.is_demo]


@pytest.mark.slow
def test_the_gpu_hours_in_headers_are_those_of_all_members(plans: dict[str, Plan]) -> None:
    for name in PLANS:
        if not trained(plans[name]):
            continue
        hours = in_hours(sum(map(gpu_hours, trained(plans[name]))))
        is_all = {stage.kind for stage in plans[name].stages} == {"build", "pretrain"}
        note = "" if is_all else ", pretraining alone"
        line = f"# gpu-hours at least {hours}{note} (pretrain estimate, 300 TFLOP/s)"
        assert line in (FOLDER / f"{name}.yaml").read_text().splitlines(), f"{name}: {line}"


@pytest.mark.slow
def test_the_page_lists_every_item_with_its_plan() -> None:
    """If this fails, run `make settings`."""
    assert replaced(PAGE.read_text()) == PAGE.read_text()


@pytest.mark.slow
def test_no_config_asks_for_nodes_that_make_it_slower(plans: dict[str, Plan]) -> None:
    """The nodes in configs' headers and plans, for 4 GPUs and the links of `pretrain estimate`."""
    asked = [
        (work, stage.entry.nodes or 1)
        for name in PLANS
        for stage in plans[name].stages
        for work in stage.works
    ]
    for path in (REPOSITORY / "configs/pretrain").glob("*.yaml"):
        for nodes in re.findall(r"^# command .*--nodes (\d+) ", path.read_text(), re.MULTILINE):
            asked.append((Work("pretrain", str(path)), int(nodes)))
    several = [(work, nodes) for work, nodes in asked if work.kind == "pretrain" and nodes > 1]
    assert len(several) > 40, "Mixers at 224 px have operations enough"
    for work, nodes in several:
        settings = cast(PretrainSettings, work.settings)
        sizes = sizes_of(settings)
        plan = plan_of(settings, Cluster(4), **sizes)
        assert slower_than_fewer(plan, nodes) is None, work.config
        other = replace(plan, cost=cost_of(spec_of("mlp_b12_wi1024"), **sizes))
        assert slower_than_fewer(other, nodes), "another model would be"


def test_each_plan_has_a_small_demo_and_a_header(plans: dict[str, Plan]) -> None:
    for name in PLANS:
        plan, demo = plans[name], plans[f"{name}_demo"]
        small = {each.name: len(each.members) for each in demo.stages if each.kind != "build"}
        kinds = {stage.kind for stage in plan.stages} | {"pretrain"}
        assert {stage.kind for stage in demo.stages} <= kinds, name
        num_trained = sum(count for key, count in small.items() if key.startswith("pretrain"))
        assert num_trained <= 4 and sum(small.values()) <= 10, name
        lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
        assert max(map(len, lines)) <= 140, name
        for command in ("cluster/submit {}", "wide-mlps run {} --demo"):
            assert f"# command   {command.format(plan.path)}" in lines, name
        for word in ("hardware", "result"):
            assert sum(line.startswith(f"# {word} ") for line in lines) == 2, name


def test_models_fit_their_images_and_have_the_omega_of_their_names(plans: dict[str, Plan]) -> None:
    checked = 0
    for name, plan in plans.items():
        for settings in trained(plan):
            model, run_dir = settings.model, settings.run_dir
            model.check(image_size=sizes_of(settings)["image_size"])
            named = (2**k for k in (18, 19, 20, 21, 27) if f"omega{k}-" in run_dir)
            wanted = OMEGA.get(name) or next(named, None)
            if wanted is None:
                continue
            if isinstance(model, MixerSpec):
                assert (model.permuted_blocks == "all") == ("-rp-" in run_dir), run_dir
                tokens, channels = model.num_tokens or 0, model.num_channels
                gamma = 1 if model.layers_per_mixing == 1 else model.expansion
                omega = gamma * (channels * tokens**2 + channels**2 * tokens) / 2
            else:
                assert isinstance(model, SparseMlpSpec)
                omega = model.density * (model.expansion or 1) * (model.width or 0) ** 2
            assert abs(omega / wanted - 1) < 0.13, (run_dir, omega)
            checked += 1
    assert checked > 700
    models: list[Any] = [settings.model for settings in trained(plans["mixer_fig5_cifar10"])]
    pairs = {(each.num_channels, each.num_tokens) for each in models if each.kind == "mixer"}
    printed = {(16, 173), (32, 113), (48, 83), (16, 504), (32, 346), (64, 226)}
    printed |= {(128, 1386), (256, 904), (64, 64), (128, 128), (512, 512)}
    assert pairs == printed | {(tokens, channels) for channels, tokens in printed}


@pytest.mark.nightly
@pytest.mark.processes
def test_the_first_member_of_each_demo_trains_for_two_steps(
    plans: dict[str, Plan], shapes: Path, tmp_path: Path
) -> None:
    """All runs share one process."""
    stages = [
        next(each for each in plan.stages if each.kind == "pretrain") for plan in demos(plans)
    ]
    works = [stage.works[0] for stage in stages]
    commands = [_two_steps(work, shapes, tmp_path / "runs") for work in works]
    output, (environment,) = new_output(), environments(1)
    words = ("tests.configs.test_sweeps:train_all", commands, str(REPOSITORY))
    process = begin(*words, environment=environment, output=output)
    assert wait([process], timeout_s=900) == [0], output.read_text()[-3000:]
    assert len(works) == len(PLANS)
    assert all((tmp_path / work.writes / "result.json").is_file() for work in works)


def _two_steps(work: Work, shapes: Path, runs: Path) -> list[str]:
    settings = work.settings
    assert isinstance(settings, PretrainSettings)
    short = [f"{key}=2 steps" for key in ("train.duration", "train.eval_every", "checkpoint.every")]
    short += ["train.global_batch_size=8", "checkpoint.milestones=[]", f"data.dataset={shapes}"]
    short += [f"data.image_size={settings.data.image_size or 32}"]
    short += ["schedule.warmup=1 steps"] * (settings.schedule.warmup != "0 steps")
    short += [f"run_dir={runs}/{settings.run_dir.removeprefix('runs/')}"]
    return [work.config, *work.overrides, *short]


def train_all(commands: list[list[str]], place: str) -> None:
    """Train like `pretrain train`, but leave the process at once."""
    os.chdir(place)
    for config, *overrides in commands:
        settings = load_settings(PretrainSettings, path=config, overrides=overrides)
        training = Pretraining(settings, load_training_data(settings.data))
        assert train(training, read_world()).finished, config
    os._exit(0)


def test_the_kept_points_are_of_the_members_that_the_demos_have(plans: dict[str, Plan]) -> None:
    """If this fails, run `make clean-demos demos`."""
    kept = {
        (each.plan, each.stage, each.member): json.loads(each.labels)
        for each in read_results([POINTS]).itertuples()
    }
    there = {
        (plan.name, stage.name, member.index): member.labels
        for plan in demos(plans)
        for stage in plan.stages
        if stage.kind in STAGES
        and "not yet run" not in Path(REPOSITORY, plan.path).read_text().rpartition("# command ")[2]
        for member in stage.members
    }
    assert kept.keys() == there.keys()
    for place, labels in there.items():
        assert (labels.items() - {("name", place[0])}) <= kept[place].items(), place


def test_no_demo_variant_ends_near_chance() -> None:
    """The committed accuracies are more than five standard errors above chance."""
    results = read_results([POINTS])
    chance = 1 / results.target.map({name: classes for name, (_, classes, _) in DATASETS.items()})
    standard_error = (chance * (1 - chance) / results.num_test) ** 0.5
    near = results[~(1 - results.error > chance + 5 * standard_error)]
    assert len(results) > 50 and near.empty, near[["plan", "run", "error"]].to_string()


def test_headers_have_the_accuracies_of_the_demo_variants() -> None:
    ends = read_results([POINTS]).sort_values("step").groupby(["plan", "task", "run"]).tail(1)
    ends["name"] = ends.run.str.rpartition("/")[2].replace(  # views-tune-low: low
        r"^(views-)?(tune-|probe-?)|-seed-\d+$", "", regex=True
    )
    for (plan, _, name), runs in ends.sort_values("run").groupby(["plan", "task", "name"]):
        text = (FOLDER / f"{plan.removesuffix('_demo')}.yaml").read_text()
        header = text.rpartition("# result ")[2].partition("\ndemo:")[0].replace("\n#", "")
        values = " and ".join(f"{value:.1f}" for value in 100 - 100 * runs.error)
        entry = re.escape(f"{name} {values}".strip())
        assert re.search(rf"[:,] {entry}(,| %)", " ".join(header.split())), (plan, name)


@pytest.mark.processes
def test_a_demo_runs_by_the_real_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo from nothing to its figure: two widths at both lengths, and a probe of each."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    plan = "configs/plan/scaling_laws.yaml"
    command = [sys.executable, "-m", "cluster", "run", plan, "--demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert Path("runs/plans/scaling_laws_demo/figure.json").is_file()
    results = results_of_plans([load_checked(plan, is_demo=True)])
    # 1,000 images do not fill the last batch
    results = results.assign(epochs=results.epochs.round())
    reached = results.set_index(["task", "width", "epochs"]).error
    assert {
        (task, width, epochs)
        for task in ("pretrain", "probe")
        for width in (32, 128)
        for epochs in (2, 6)
    } <= {*reached.index}
    assert reached["pretrain", 128, 6] < reached["pretrain", 32, 2]


def made_points(plan: Plan) -> pd.DataFrame:
    """Return the table of `analysis collect` without training."""
    found = dict[str, dict[str, Any]]()
    stages = [stage for stage in plan.stages if stage.kind in ("pretrain", "probe", "tune")]
    for stage, member in [(each, member) for each in stages for member in each.members]:
        settings: Any = member.work.settings
        source, length = run_and_length(member.work.pretrained or "")
        base, labels = found.get(source), {**member.labels}
        row: dict[str, Any] = {"plan": plan.path, "stage": stage.name, "member": member.index}
        row |= {"run": settings.run_dir, "task": stage.kind, "error": 0.5, "num_test": 100}
        row |= {"step": 1, "target": settings.data.dataset, "target_hash": settings.data.dataset}
        if base is not None:
            labels = json.loads(base["labels"]) | labels
            epochs = float(length.removesuffix("epochs")) if length else base["epochs"]
            row = base | row | {"own_seed": 0, "epochs": epochs, "test_losses": None}
        elif stage.kind != "pretrain":  # weights from outside the plan
            spec = spec_of(f"mlp_{Path(source).name.replace('-', '_')}")
            card = make_card(spec, image_size=64)
            row |= about_model(card) | {"weights": source, "epochs": 1.0}
        else:
            card = make_card(settings.model, image_size=sizes_of(settings)["image_size"])
            row |= about_model(card) | {"weights": settings.run_dir, "seed": settings.train.seed}
            row |= {"epochs": 1.0, "test_epochs": [1.0], "test_losses": [1.0]}
            row |= {"augmented": settings.augment.crop_scale is not None}
            row["optimizer"] = settings.optimizer.name
            row["global_batch_size"] = settings.train.global_batch_size
        labels.pop("name", None)
        found[settings.run_dir] = row | {"labels": json.dumps(labels)}
    return as_frame(list(found.values()))


@pytest.mark.slow
def test_the_figure_of_each_plan_draws_what_its_members_reach(plans: dict[str, Plan]) -> None:
    """No two results of a seed at one place, no mean over two datasets; each result is drawn."""
    kinds = Counter[str]()
    for name, plan in plans.items():
        figure, points = figure_settings(plan), made_points(plan)
        if figure.kind == "sweep":
            places = places_of(points, figure.x or "", figure.hue, figure.facet, figure.task)
            meant = points if figure.task is None else points[points.task == figure.task]
            assert len(places) > 1 and places.num_results.sum() == len(meant), name
        elif figure.kind == "curves":
            losses = losses_of(points, figure.hue, figure.facet)
            assert losses.run.nunique() == len(points), name
        kinds[figure.kind] += 1
    assert kinds == {"sweep": 48, "curves": 6, "scaling": 2, "cka": 2}
