"""Every sweep of both papers and its twin: resolved as it is, and the first member of each twin
trained for two steps.

`MEMBERS` and `SETTINGS` are what the papers print (A and B: docs/papers.md), written down from our
notes of them, not read from the configs. What a paper does not print is ours, and stands in the
head of the file. Long because of these two tables.
"""

import json
import math
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
from data_prep.settings import flatten, load_settings
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.run import run_and_length
from pretrain.config import PretrainSettings
from pretrain.data.datasets import load_training_data
from pretrain.engine.zero_cost import Cluster, in_hours, plan_of, slower_than_fewer
from pretrain.loop.train import Pretraining, train
from pretrain.models.cost import cost_of
from pretrain.models.presets import spec_of
from pretrain.models.spec import MixerSpec, SparseMlpSpec
from pretrain.ranks.world import read_world
from tests.forked import begin, environments, new_output, wait
from tests.ranks import REPOSITORY

FOLDER = REPOSITORY / "configs/plan"
POINTS = "tests/analysis/points/twins.parquet"
"""By `make demos`; the commit is in its metadata."""
MEMBERS: dict[str, dict[str, int]] = {
    "a_fig2_cka": {"pretrain/1": 2 * 3, "pretrain/2": 2 * 11 * 3},
    "a_fig2d_monarch": {"pretrain": 2 * 5},
    "a_fig4_width": {"pretrain/1": 13 * 4, "pretrain/2": 13 * 4},
    "a_fig5_cifar10": {"pretrain/1": 19 * 2 * 3, "pretrain/2": 5 * 2 * 3},
    "a_fig5_cifar100": {"pretrain/1": 19 * 2 * 3, "pretrain/2": 5 * 2 * 3},
    "a_fig5_stl10": {"pretrain/1": 19 * 2 * 3, "pretrain/2": 5 * 2 * 3},
    "a_fig6_tableS2": {"pretrain/1": 7 * 2 * 5, "pretrain/2": 7 * 2 * 5, "pretrain/3": 7 * 2 * 3},
    "a_fig6_textC5": {"pretrain/1": 7 * 2 * 5, "pretrain/2": 7 * 2 * 5},
    "a_fig6_imagenet": {"pretrain": 6 * 2 * 3},
    "a_fig7_depth": {"pretrain": 5 * 2 * 3 * 3},
    "a_figS1_left": {"pretrain": 5 * 5},
    "a_figS2": {"pretrain/1": 2 * 7 * 2 * 3, "pretrain/2": 2 * 5 * 2 * 3},
    "a_figS3": {"pretrain": 5 * 3},
    "a_figS4_caption": {"pretrain": 6 * 3},
    "a_figS4_text": {"pretrain": 6 * 3},
    "a_figS5": {"pretrain/1": 6 * 2 * 3, "pretrain/2": 6 * 2 * 5},
    "a_figS6": {"pretrain": 5 * 2 * 5},
    "a_figS7": {"pretrain": 5 * 2 * 5},
    "a_figS8": {"pretrain": 2 * 5},
    "a_table1_cifar": {"pretrain": 2 * 3 * 3},
    "a_table1_imagenet": {"pretrain": 3 * 3},
    "b_scratch": {"pretrain/1": 5 * 4, "pretrain/2": 4},
    "b_scaling": {"pretrain": 6 * 4, "probe": 24 * 5 * 3},
    "b_transfer": {"pretrain": 3, "finetune": 3 * 5, "evaluate": 3 * 5 * 3},
    "b_probe": {"pretrain": 3, "probe": 3 * 5},
    "b_batch_size": {"pretrain": 4, "probe": 4 * 4},
    "b_ablation": {"pretrain": 11, "probe": 11},
}
"""Of each stage but `prepare`: points x mixings (normal, RP) x datasets x seeds."""
FIVE = {0, 1, 2, 3, 4}
CIFAR = {"data/cifar10", "data/cifar100"}
FIG5: dict[str, set[Any]] = {
    "optimizer.lr": {0.02},
    "optimizer.nesterov": {True},
    "train.global_batch_size": {128},
    "train.duration": {"200 epochs"},
    "schedule.name": {"cosine"},
    "engine.precision": {"fp32"},
    "model.depth": {8},
    "train.seed": {0, 1, 2},
}
SETTINGS: dict[str, dict[str, set[Any]]] = {
    # A, Fig. 2: L = 3 (and 6 sparse blocks), gamma 2, p = 2^0..2^-10, AdamW 0.01, batch 128, 600
    # epochs, AutoAugment, 3 seeds
    "a_fig2_cka": {
        "model.depth": {3, 6},
        "model.expansion": {2.0},
        "model.density": {2.0**-n for n in range(11)},
        "optimizer.lr": {0.01},
        "optimizer.name": {"adamw"},
        "train.global_batch_size": {128},
        "train.duration": {"600 epochs"},
        "augment.auto_augment": {"cifar10"},
        "train.seed": {0, 1, 2},
    },
    # A, Fig. 2d: AdamW 0.01, cosine, 200 epochs, five seeds, MNIST
    "a_fig2d_monarch": {
        "model.form": {"monarch", "kronecker"},
        "optimizer.lr": {0.01},
        "optimizer.name": {"adamw"},
        "schedule.name": {"cosine"},
        "train.duration": {"200 epochs"},
        "train.seed": FIVE,
        "data.dataset": {"data/mnist"},
    },
    # A, Fig. 4: C and S as printed, gamma 2, four seeds
    "a_fig4_width": {
        "model.num_tokens": {360, 252, 203, 173, 152, 136, 124, 113, 104, 96, 89, 83, 64},
        "model.expansion": {2.0},
        "train.seed": {0, 1, 2, 3},
    },
    # A, Fig. 5 and C.4
    "a_fig5_cifar10": (
        FIG5
        | {
            "data.dataset": {"data/cifar10"},
            "model.density": {0.1, 0.3, 0.5, 0.7, 0.9},
            "model.width": {540, 612, 724, 935, 1619},
        }
    ),
    "a_fig5_cifar100": FIG5 | {"data.dataset": {"data/cifar100"}},
    "a_fig5_stl10": FIG5 | {"data.dataset": {"data/stl10-32"}},
    # A, Table S.2: CIFAR-10 by AdamW 0.02, batch 1024, 2000 epochs; CIFAR-100 SGD 0.1, 128, 600;
    # STL-10 SGD 0.1, 128, 2000; L 12
    "a_fig6_tableS2": {
        "model.depth": {12},
        "optimizer.name": {"adamw", "sgd"},
        "optimizer.lr": {0.02, 0.1},
        "train.global_batch_size": {1024, 128},
        "train.duration": {"2000 epochs", "600 epochs"},
        "train.seed": FIVE,
    },
    # A, C.5: lr 0.1, 200 epochs on CIFAR-10, 600 on CIFAR-100, Omega 2^18
    "a_fig6_textC5": {
        "model.depth": {12},
        "optimizer.lr": {0.1},
        "train.duration": {"200 epochs", "600 epochs"},
        "data.dataset": CIFAR,
    },
    # A, Fig. 6d: P and C = 3 P^2, L 8, gamma 4, three seeds
    "a_fig6_imagenet": {
        "model.patch_size": {7, 8, 14, 16, 28, 32},
        "model.num_channels": {147, 192, 588, 768, 2352, 3072},
        "model.depth": {8},
        "model.expansion": {4.0},
        "train.seed": {0, 1, 2},
        "train.duration": {"300 epochs"},
    },
    "a_fig7_depth": {
        "model.depth": {4, 8, 12, 16, 20},
        "model.num_channels": {128},
        "model.num_tokens": {128},
        "data.dataset": CIFAR | {"data/stl10-32"},
    },
    "a_figS1_left": {
        "optimizer.lr": {0.1},
        "train.seed": FIVE,
        "model.width": {810, 467, 362, 306, 270},
    },  # Omega 2^16 = p m^2
    "a_figS2": {
        "optimizer.lr": {0.1},
        "model.expansion": {4.0},
        "model.num_channels": {16, 32, 48, 64, 83, 113, 173},
        "model.density": {0.1, 0.3, 0.5, 0.7, 0.9},
        "data.dataset": CIFAR,
    },
    "a_figS3": {
        "optimizer.lr": {0.1},
        "model.num_tokens": {256, 128, 64, 32, 16},
    },  # m = S C = 4096
    "a_figS4_caption": {"model.num_channels": {128}, "model.num_tokens": {128}, "model.depth": {4}},
    "a_figS4_text": {"model.num_channels": {64}, "model.num_tokens": {64}, "model.depth": {4}},
    "a_figS5": {
        "model.patch_size": {1, 2, 4, 8, 16, 32, 3, 6, 10, 18, 30},
        "model.num_channels": {64},
        "model.num_tokens": {64},
        "model.depth": {4},
        "optimizer.lr": {0.1},
        "train.duration": {"200 epochs", "400 epochs"},
    },
    "a_figS6": {
        "model.num_channels": {16, 32, 64, 114, 173},
        "model.depth": {8},
        "optimizer.lr": {0.1},
        "train.duration": {"600 epochs"},
        "train.seed": FIVE,
    },
    "a_figS7": {
        "model.expansion": {4.0},
        "augment.auto_augment": {"cifar10"},
        "optimizer.lr": {0.1},
        "train.global_batch_size": {256},
        "train.duration": {"600 epochs"},
        "train.seed": FIVE,
    },
    "a_figS8": {
        "model.num_channels": {64},
        "model.num_tokens": {64},
        "optimizer.name": {"adamw"},
        "optimizer.lr": {0.01},
        "augment.auto_augment": {"cifar10"},
        "train.global_batch_size": {256},
        "train.duration": {"600 epochs"},
        "train.seed": FIVE,
    },
    # A, Table 1: AdamW 0.04 (0.06 for SS/8 on CIFAR-100), batch 1024, 4000 epochs, 3 seeds
    "a_table1_cifar": {
        "optimizer.lr": {0.04, 0.06},
        "train.global_batch_size": {1024},
        "train.duration": {"4000 epochs"},
        "model.num_channels": {986, 487},
        "model.patch_size": {8, 4},
        "train.seed": {0, 1, 2},
    },
    "a_table1_imagenet": {
        "model.expansion": {4.0948, 4.57, 4.0},
        "model.num_channels": {768, 588},
        "train.seed": {0, 1, 2},
    },
    # B, Table 1: LION 5e-5, 100, 1000 and 5000 epochs
    "b_scratch": {
        "train.duration": {"100 epochs", "1000 epochs", "5000 epochs", "200 epochs"},
        "optimizer.lr": {5e-5, 0.1},
        "augment.flip_probability": {0.0, 0.5},
    },
    # B, scaling laws: LION 1e-5, decay 1e-3, batch 16384, constant, T = 50 .. 800, six sizes
    "b_scaling": {
        "model.depth": {6, 12},
        "model.width": {256, 512, 1024},
        "optimizer.lr": {1e-5},
        "optimizer.weight_decay": {1e-3},
        "train.global_batch_size": {16384},
        "schedule.name": {"constant"},
        "train.duration": {"800 epochs"},
        "checkpoint.keep_at": {
            ("50 epochs", "100 epochs", "200 epochs", "400 epochs", "800 epochs")
        },
    },
    "b_transfer": {
        "model.depth": {6, 12},
        "model.width": {1024},
        "train.duration": {"400 epochs"},
        "augment.mixup_alpha": {0.0, 0.8},
    },
    "b_probe": {"model.depth": {6, 12}, "model.width": {1024}, "train.duration": {"400 epochs"}},
    "b_batch_size": {"train.global_batch_size": {256, 1024, 4096, 16384}},
    "b_ablation": {
        "model.activation": {"gelu", "relu"},
        "model.norm": {"layer", "batch", "none"},
        "model.norm_place": {"before", "after"},
        "model.skip_every": {None, 0, 2},
        "augment.flip_probability": {0.0, 0.5},
    },
}
"""Of all pretraining members of a sweep: the values that a setting has, wherever it is there and
not null."""
IN21K, IN1K = 11_801_680, 1_281_167
DATASETS = {"cifar10": (50_000, 10, 32), "cifar100": (50_000, 100, 32), "mnist": (60_000, 10, 28), "stl10": (5_000, 10, 64),
            "stl10-32": (5_000, 10, 32), "stl10-90": (5_000, 10, 90), "tinyimagenet": (100_000, 200, 64), "twins": (960, 16, 32),
            "imagenet1k-64": (IN1K, 1_000, 64), "imagenet1k-256": (IN1K, 1_000, 224), "imagenet21k-64": (IN21K, 11_230, 64),
            "imagenet21k-64-n50": (IN21K // 2, 11_230, 64), "imagenet21k-64-n25": (IN21K // 4, 11_230, 64),
            "imagenet21k-64-n12": (IN21K // 8, 11_230, 64)}  # fmt: skip
"""Pictures of an epoch, classes, and pixels that a model is fed. ImageNet-21k is fall11 as B
processed it."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """In an empty directory, so that no run is there."""
    place, here = tmp_path_factory.mktemp("plans"), Path.cwd()
    (place / "configs").symlink_to(REPOSITORY / "configs")
    os.chdir(place)
    try:
        return {
            plan.name: plan
            for path in sorted(FOLDER.glob("[ab]_*.yaml"))
            for plan in (
                load_checked(f"configs/plan/{path.name}", is_demo=is_demo)
                for is_demo in (False, True)
            )
        }
    finally:
        os.chdir(here)


def trained(plan: Plan) -> list[PretrainSettings]:
    return [
        work.settings
        for stage in plan.stages
        for work in stage.works
        if isinstance(work.settings, PretrainSettings)
    ]


def of_dataset(settings: PretrainSettings) -> tuple[int, int, int]:
    return DATASETS[settings.data.dataset.removeprefix("data/")]


def gpu_hours(settings: PretrainSettings) -> float:
    """Of floating-point operations alone, six for each multiply-add of a forward pass: what
    `pretrain plan` calls a lower bound."""
    num_samples, num_classes, image_size = of_dataset(settings)
    cost = cost_of(
        settings.model, num_classes=num_classes, image_size=settings.data.image_size or image_size
    )
    batch, (epochs, unit) = settings.train.global_batch_size, settings.train.duration.split()
    assert unit == "epochs"
    whole = {"drop": num_samples // batch * batch, "carry": num_samples}[settings.data.last_batch]
    steps = math.ceil(int(epochs) * whole / batch)
    return 6 * cost.multiply_adds * batch * steps / 300e12 / 3600


def test_the_gpu_hours_in_headers_are_those_of_all_members(plans: dict[str, Plan]) -> None:
    """And those in the table of docs/papers.md."""
    page = (REPOSITORY / "docs/papers.md").read_text()
    for name in MEMBERS:
        hours = in_hours(sum(map(gpu_hours, trained(plans[name]))))
        alone = (
            ""
            if {stage.kind for stage in plans[name].stages} == {"build", "pretrain"}
            else ", pretraining alone"
        )
        line = f"# gpu-hours at least {hours}{alone} (pretrain plan, 300 TFLOP/s)"
        assert line in (FOLDER / f"{name}.yaml").read_text().splitlines(), f"{name}: {line}"
        row = next(row for row in page.splitlines() if row.startswith("|") and f"`{name}`" in row)
        assert hours in row.split("|")[3].split(), f"{name}: {hours}"


def test_no_config_asks_for_nodes_that_make_it_slower(plans: dict[str, Plan]) -> None:
    """Of 4 GPUs, with the links of `pretrain plan`; what its header prints of a config, what a plan
    says of its members."""
    asked = [
        (name, each, stage.entry.nodes or 1)
        for name in MEMBERS
        for stage in plans[name].stages
        for each in stage.works
    ]
    for path in (REPOSITORY / "configs/pretrain").glob("*.yaml"):
        for nodes in re.findall(r"^# command .*--nodes (\d+) ", path.read_text(), re.MULTILINE):
            asked.append((path.stem, Work("pretrain", str(path)), int(nodes)))
    more = 0
    for name, work, nodes in asked:
        if work.kind == "pretrain" and nodes > 1:
            settings, more = cast(PretrainSettings, work.settings), more + 1
            _, num_classes, size = of_dataset(settings)
            sizes = {"num_classes": num_classes, "image_size": settings.data.image_size or size}
            plan = plan_of(settings, Cluster(4), **sizes)
            assert slower_than_fewer(plan, nodes) is None, name
            other = replace(plan, cost=cost_of(spec_of("mlp_b12_wi1024"), **sizes))
            assert slower_than_fewer(other, nodes), "another model would be"
    assert more > 40, "Mixers at 224 px have operations enough"


def test_each_figure_and_table_has_a_plan_with_a_demo(plans: dict[str, Plan]) -> None:
    assert set(plans) == {name for sweep in MEMBERS for name in (sweep, f"{sweep}_demo")}
    for name, plan in plans.items():
        found = {stage.name: len(stage.members) for stage in plan.stages if stage.kind != "build"}
        if not plan.is_demo:
            assert found == MEMBERS[name], name
            continue
        kinds = {stage.kind for stage in plans[name.removesuffix("_demo")].stages}
        assert sum(count for stage, count in found.items() if stage.startswith("pretrain")) <= 4, (
            name
        )
        assert {stage.kind for stage in plan.stages} <= kinds and sum(found.values()) <= 6, name
    for name in MEMBERS:
        assert plans[name].figure is not None, name
        lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
        assert max(map(len, lines)) <= 140, name
        for command in ("cluster/submit {}", "wide-mlps run {} --demo"):
            assert f"# command   {command.format(plans[name].path)}" in lines, name
        for word in ("hardware", "result"):
            assert sum(line.startswith(f"# {word} ") for line in lines) == 2, name


@pytest.mark.parametrize("name", SETTINGS)
def test_the_members_of_a_sweep_have_what_the_paper_prints(
    plans: dict[str, Plan], name: str
) -> None:
    found = [flatten(settings.model_dump()) for settings in trained(plans[name])]
    for key, values in SETTINGS[name].items():
        there = {
            tuple(row[key]) if isinstance(row[key], list) else row[key]
            for row in found
            if key in row
        }
        assert there - {None} == values - {None} and (None in there or None not in values), (
            f"{name}: {key}"
        )


def test_models_fit_their_pictures_and_have_the_omega_that_their_names_say(
    plans: dict[str, Plan],
) -> None:
    checked = 0
    for name, plan in plans.items():
        for settings in trained(plan):
            settings.model.check(image_size=settings.data.image_size or of_dataset(settings)[2])
            wanted = OMEGA.get(name) or next(
                (2**k for k in (18, 20, 21, 27) if f"omega{k}-" in settings.run_dir), None
            )
            if wanted is None:
                continue
            match settings.model:
                case MixerSpec() as model:
                    assert (model.permuted_blocks == "all") == ("-rp-" in settings.run_dir), (
                        settings.run_dir
                    )
                    tokens, channels = model.num_tokens, model.num_channels
                    gamma = 1 if model.layers_per_mixing == 1 else model.expansion
                    assert tokens is not None
                    omega = gamma * (channels * tokens**2 + channels**2 * tokens) / 2
                case SparseMlpSpec() as model:
                    assert model.width is not None
                    omega = model.density * (model.expansion or 1) * model.width**2
                case _:
                    raise AssertionError(name)
            assert abs(omega / wanted - 1) < 0.13, (name, settings.run_dir, omega)
            checked += 1
    assert checked > 700
    pairs = {
        (each.model.num_channels, each.model.num_tokens)
        for each in trained(plans["a_fig5_cifar10"])
        if each.model.kind == "mixer"
    }
    printed = {
        (16, 173),
        (32, 113),
        (48, 83),
        (16, 504),
        (32, 346),
        (64, 226),
        (128, 1386),
        (256, 904),
    }
    assert pairs == printed | {(tokens, channels) for channels, tokens in printed} | {
        (64, 64),
        (128, 128),
        (512, 512),
    }


OMEGA = {
    "a_fig4_width": 2**19,
    "a_figS1_left": 2**16,
    "a_figS3": 2**20,
    "a_figS6": 2**18,
    "a_figS7": 2**20,
}


def test_the_first_member_of_each_demo_trains_for_two_steps(
    plans: dict[str, Plan], shapes: Path, tmp_path: Path
) -> None:
    """In one process."""
    firsts = [
        next(stage for stage in plan.stages if stage.kind == "pretrain").works[0]
        for plan in plans.values()
        if plan.is_demo
    ]
    commands = [_two_steps(work, shapes, tmp_path / "runs") for work in firsts]
    output = new_output()
    (environment,) = environments(1)
    process = begin(
        "tests.configs.test_sweeps:train_all",
        commands,
        str(REPOSITORY),
        environment=environment,
        output=output,
    )
    assert wait([process], timeout_s=900) == [0], output.read_text()[-3000:]
    assert len(firsts) == len(MEMBERS) and all(
        (tmp_path / work.writes / "result.json").is_file() for work in firsts
    )


def test_the_kept_points_are_of_the_members_that_the_demos_have(plans: dict[str, Plan]) -> None:
    """Else `make clean-demos demos` renews them."""
    kept = {
        (each.plan, each.stage, each.member): json.loads(each.labels)
        for each in read_results([REPOSITORY / POINTS]).itertuples()
    }
    for name, plan in ((name, plan) for name, plan in plans.items() if plan.is_demo):
        stages = [stage for stage in plan.stages if stage.kind in STAGES]
        there = {
            (name, stage.name, each.index): each.labels
            for stage in stages
            for each in stage.members
        }
        is_run = (
            "not yet run" not in Path(REPOSITORY, plan.path).read_text().rpartition("# command ")[2]
        )
        assert {place for place in kept if place[0] == name} == (
            there.keys() if is_run else set()
        ), name
        for place, labels in there.items() if is_run else ():
            assert {
                axis: label for axis, label in labels.items() if axis != "name"
            }.items() <= kept[place].items(), place


@pytest.mark.processes
def test_a_demo_runs_by_the_real_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing to the points of its figure: two widths, at both lengths that they keep, and a
    probe of each."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    plan = "configs/plan/b_scaling.yaml"
    command = [sys.executable, "-m", "cluster", "run", plan, "--demo"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert Path("runs/plans/b_scaling_demo/figure.json").is_file()
    reached = {
        (each.task, each.width, each.epochs): each.error
        for each in results_of_plans([load_checked(plan, is_demo=True)]).itertuples()
    }
    for task in ("pretrain", "probe"):
        assert {(task, width, epochs) for width in (32, 128) for epochs in (2, 6)} <= reached.keys()
        assert reached[task, 128, 6] < reached[task, 32, 2] - 0.05


def _two_steps(work: Work, shapes: Path, runs: Path) -> list[str]:
    settings = work.settings
    assert isinstance(settings, PretrainSettings)
    short = [
        "train.duration=2 steps",
        "train.eval_every=2 steps",
        "checkpoint.every=2 steps",
        "train.global_batch_size=8",
    ]
    short += [
        f"data.dataset={shapes}",
        f"data.image_size={settings.data.image_size or 32}",
        "checkpoint.keep_at=[]",
    ]
    if settings.schedule.warmup != "0 steps":
        short.append("schedule.warmup=1 steps")
    return [
        "train",
        work.config,
        *work.overrides,
        *short,
        f"run_dir={runs}/{settings.run_dir.removeprefix('runs/')}",
    ]


def train_all(commands: list[list[str]], place: str) -> None:
    """What `pretrain train` does, without its end, which is that of its process."""
    os.chdir(place)
    for _, config, *overrides in commands:
        settings = load_settings(PretrainSettings, path=config, overrides=overrides)
        assert train(
            Pretraining(settings, load_training_data(settings.data)), read_world()
        ).finished, config
    os._exit(0)


def made_points(plan: Plan) -> pd.DataFrame:
    """What `analysis points` would find of it, without any training."""
    found = dict[str, dict[str, Any]]()
    for stage in plan.stages:
        for member in stage.members if stage.kind in ("pretrain", "probe", "tune") else ():
            settings: Any = member.work.settings
            source, length = run_and_length(member.work.pretrained or "")
            base = found.get(source)
            above = json.loads(base["labels"]) if base is not None else {}
            labels = {
                **above,
                **{axis: label for axis, label in member.labels.items() if axis != "name"},
            }
            own: dict[str, Any] = {"plan": plan.path, "stage": stage.name, "member": member.index, "run": settings.run_dir,
                                   "task": stage.kind, "labels": json.dumps(labels), "error": 0.5, "num_test": 100, "step": 1,
                                   "target": settings.data.dataset, "target_hash": settings.data.dataset}  # fmt: skip
            if base is not None:
                epochs = float(length.removesuffix("epochs")) if length else base["epochs"]
                own |= {"own_seed": 0, "epochs": epochs, "test_losses": None}
                found[settings.run_dir] = base | own
                continue
            size, thirds = settings.data.image_size or of_dataset(settings)[2], (0.5, 0.5, 0.5)
            card = ModelCard(model=settings.model, image_size=size, classes=("a", "b"), channel_mean=thirds, channel_std=thirds,
                             dataset="a", content_hash="0" * 64, step=1, run_key="")  # fmt: skip
            trained: dict[str, Any] = {
                "weights": settings.run_dir,
                "seed": settings.train.seed,
                "epochs": 1.0,
                "augmented": settings.augment.crop_scale is not None,
                "optimizer": settings.optimizer.name,
                "test_epochs": [1.0],
                "test_losses": [1.0],
                "global_batch_size": settings.train.global_batch_size,
            }
            found[settings.run_dir] = own | trained | about_model(card)
    return as_frame(list(found.values()))


def test_the_figure_of_each_plan_draws_what_its_members_reach(plans: dict[str, Plan]) -> None:
    """No two results of one seed at one place, and no mean over two datasets; each result is
    drawn."""
    kinds = Counter[str]()
    for name, plan in plans.items():
        figure = figure_settings(plan)
        points = made_points(plan)
        if figure.kind == "sweep":
            places = places_of(points, figure.x or "", figure.hue, figure.facet, figure.task)
            meant = points if figure.task is None else points[points.task == figure.task]
            assert len(places) > 1 and places.num_results.sum() == len(meant), name
        elif figure.kind == "curves":
            losses = losses_of(points, figure.hue, figure.facet)
            assert losses.run.nunique() == len(points), name
        kinds[figure.kind] += 1
    assert kinds == {"sweep": 44, "curves": 6, "scaling": 2, "cka": 2}
