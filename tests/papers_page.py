"""The table of docs/papers.md: every item of both papers, with its plan or command.

`python -m tests.papers_page` (part of `make settings`) writes it between two marks of the page. A
test compares the page with it.
"""

import math
from typing import Any, get_args

from analysis.papers.experiments import EXPERIMENTS, TITLES, Experiment, Paper
from analysis.papers.sources import origins_of
from cluster.plan_file import Plan, load_plan
from pretrain.config import PretrainSettings
from pretrain.engine.zero_cost import in_hours
from pretrain.models.cost import cost_of
from tests.budgets import REPOSITORY

PAGE = REPOSITORY / "docs/papers.md"
PLANS = sorted(
    path.stem
    for paper in ("mixer", "scaling")
    for path in (REPOSITORY / "configs/plan").glob(f"{paper}_*.yaml")
)
BEGIN, END = "<!-- experiments: written by `make settings` -->", "<!-- end of experiments -->"
IN21K, IN1K = 11_801_680, 1_281_167
DATASETS = {
    "cifar10": (50_000, 10, 32),
    "cifar100": (50_000, 100, 32),
    "mnist": (60_000, 10, 28),
    "stl10": (5_000, 10, 64),
    "stl10-32": (5_000, 10, 32),
    "stl10-90": (5_000, 10, 90),
    "tinyimagenet": (100_000, 200, 64),
    "demos": (1_000, 10, 32),
    "demos-second": (400, 10, 32),
    "demos-third": (1_196, 8, 32),
    "imagenet1k-64": (IN1K, 1_000, 64),
    "imagenet1k-full": (IN1K, 1_000, 224),
    "imagenet1k-256": (IN1K, 1_000, 224),
    "imagenet21k-64": (IN21K, 11_230, 64),
    "imagenet21k-64-n50": (IN21K // 2, 11_230, 64),
    "imagenet21k-64-n25": (IN21K // 4, 11_230, 64),
    "imagenet21k-64-n12": (IN21K // 8, 11_230, 64),
}
"""Images per epoch, number of classes, and side of the model's input in pixels. ImageNet-21k is
fall11 as *Scaling MLPs* processed it."""


def trained(plan: Plan) -> list[PretrainSettings]:
    settings = [work.settings for stage in plan.stages for work in stage.works]
    return [each for each in settings if isinstance(each, PretrainSettings)]


def sizes_of(settings: PretrainSettings) -> dict[str, int]:
    _, num_classes, size = DATASETS[settings.data.dataset.removeprefix("data/")]
    return {"num_classes": num_classes, "image_size": settings.data.image_size or size}


def gpu_hours(settings: PretrainSettings) -> float:
    """Return the lower bound of `pretrain estimate`: six floating-point operations for each MAC of a
    forward pass."""
    num_samples, _, _ = DATASETS[settings.data.dataset.removeprefix("data/")]
    macs = cost_of(settings.model, **sizes_of(settings)).multiply_adds
    batch, (epochs, unit) = settings.train.global_batch_size, settings.train.duration.split()
    assert unit == "epochs"
    whole = num_samples // batch * batch if settings.data.last_batch == "drop" else num_samples
    return 6 * macs * batch * math.ceil(int(epochs) * whole / batch) / 300e12 / 3600


def table(paper: Paper) -> list[str]:
    """Return the lines of a Markdown table."""
    rows = [["item", "plan or command", "members", "GPU-hours", "printed", "chosen", "status"]]
    for each in EXPERIMENTS[paper]:
        rows += [_plan_row(each, name) for name in each.plans] or [_command_row(each)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _plan_row(experiment: Experiment, name: str) -> list[str]:
    plan = load_plan(f"configs/plan/{name}.yaml")
    stages = [stage for stage in plan.stages if stage.kind != "build"]
    members = " + ".join(f"{len(stage.members):,}" for stage in stages)
    hours = in_hours(sum(map(gpu_hours, trained(plan)))) if trained(plan) else "-"
    printed, chosen = dict[str, Any](), dict[str, Any]()
    for each in origins_of(plan):
        into = printed if each.row.section else chosen
        into |= dict.fromkeys(each.names, each.row.section)
    sections = ", ".join(dict.fromkeys(printed.values()))
    numbers = [f"{len(printed)} ({sections})" if printed else "-", str(len(chosen))]
    header = (REPOSITORY / plan.path).read_text().partition("\ndemo:")[0]
    status = "not yet run" if "\n# result    not yet run" in header else "run"
    return [experiment.name, f"`{name}`", members, hours, *numbers, status]


def _command_row(experiment: Experiment) -> list[str]:
    if experiment.reason:
        return [experiment.name, *"-----", f"not applicable: {experiment.reason}"]
    command = experiment.command or f"analysis {experiment.verb}"
    return [experiment.name, f"`{command}`", *"----", "command"]


def section() -> str:
    parts = [[f"### {TITLES[paper]}", "", *table(paper), ""] for paper in get_args(Paper)]
    return "\n".join([BEGIN, "", *(line for part in parts for line in part), END])


def replaced(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
