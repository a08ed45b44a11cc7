"""`analysis paper`: one page with every figure and table of a paper.

    OUT/index.html       contains its images
    OUT/NAME.*           the files of each figure, such as mixer_fig7_depth.png and .json

`paper` removes the figures of an earlier page and draws new ones from existing runs. The page shows
the command of each missing figure, and the error of each figure that fails.
"""

import base64
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from analysis.figure import figure
from analysis.matrices.masks import masks
from analysis.output import Result, remove_figures, write
from analysis.papers.experiments import EXPERIMENTS, TITLES, WIDTHS, Experiment, Paper
from analysis.papers.sources import Row, origins_of
from analysis.results import STAGES, as_frame, results_below
from analysis.sweeps.widths import widths
from analysis.tables.pages import pages_of
from analysis.tables.published import MIXER, SCALING, TABLES
from analysis.tables.table import OURS, cells_of
from cluster.plan_file import Plan, load_plan
from data_prep.exit_codes import message_of
from data_prep.progress import ProgressLine
from data_prep.publish import make_directory, write_atomic
from data_prep.settings import in_yaml
from finetune.looks import DPI
from pretrain.tracking.run_tags import git_commit

PLANS, RUNS = "configs/plan", Path("runs/plans")


@dataclass
class Section:
    experiment: Experiment
    commands: list[str]
    """Commands that make the figure. The first command works on this machine."""
    num_finished: int = 0
    num_members: int = 0
    images: list[dict[str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    origins: dict[str, list[tuple[Row, dict[str, str]]]] = field(default_factory=dict)
    """Plan -> rows of `source` (printed values, first) and `chosen` in its YAML file, with
    the settings that each row explains."""

    @property
    def state(self) -> str:
        if self.experiment.reason:
            return f"not applicable: {self.experiment.reason}"
        if not self.experiment.plans:
            return "drawn" if self.images else "not drawn"
        if not self.num_finished:
            return "not run"
        is_complete = self.num_finished == self.num_members
        return f"{'all' if is_complete else f'{self.num_finished:,} of {self.num_members:,}'} runs"

    def add(self, result: Result, out: Path) -> None:
        for path in (path for path in write(result, out) if path.suffix == ".png"):
            content = path.read_bytes()
            width = int.from_bytes(content[16:20], "big") * 110 // DPI
            data = base64.b64encode(content).decode()
            self.images.append({"name": path.stem, "width": width, "data": data})


def paper(name: Paper, out: Path, results: pd.DataFrame | None, *, is_demo: bool) -> Result:
    """Write the page from the runs, or from a table of results."""
    make_directory(out)
    sections = [_section(each, is_demo=is_demo) for each in EXPERIMENTS[name]]
    (out / "index.html").unlink(missing_ok=True)
    for plan in (plan for section in sections for plan in section.experiment.plans):
        remove_figures(out / (plan + "_demo" * is_demo))
    with ProgressLine(name, total=len(sections), unit="experiments") as line:
        for section in sections:
            for plan in section.experiment.plans:
                _add_plan(section, plan, out, results, is_demo=is_demo)
            if section.experiment.verb == "masks":
                section.add(masks(8, 8, seed=1), out / "masks")
            elif section.experiment.verb == WIDTHS:
                section.add(widths({"10^8": 1e8}, 1.0), out / "widths")
            line.advance(1)
    tables = [
        table for table in TABLES if table.source.startswith(MIXER if name == "mixer" else SCALING)
    ]
    cells = cells_of(tables, results_below(RUNS) if RUNS.is_dir() else as_frame([]))
    num_drawn = sum(bool(section.images) for section in sections)
    about = f"{len(sections)} figures and tables, {num_drawn} drawn"
    if is_demo:
        about += "; demo variants on small datasets (not comparable with the paper)"
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    page = environment.get_template("page.html").render(
        title=TITLES[name],
        about=f"{about}; commit {git_commit()}",
        sections=sections,
        tables=list(pages_of(cells[cells.table != OURS])),
    )
    write_atomic(out / "index.html", page.encode())
    facts = {section.experiment.name: section.state for section in sections}
    return Result(facts=facts, printed=[f"page: {out / 'index.html'}"])


def _section(experiment: Experiment, *, is_demo: bool) -> Section:
    programs, option = ["wide-mlps run"], " --demo" * is_demo
    if not is_demo:
        programs.insert(shutil.which("sbatch") is None, "cluster/submit")
    paths = [f"{PLANS}/{plan}.yaml{option}" for plan in experiment.plans]
    commands = [f"{program} {path}" for path in paths for program in programs]
    if experiment.verb:
        commands.append(f"analysis {experiment.verb}")
    if experiment.command:
        commands.append(experiment.command)
    return Section(experiment, commands)


def _add_plan(
    section: Section, name: str, out: Path, results: pd.DataFrame | None, *, is_demo: bool
) -> None:
    try:
        plan = load_plan(f"{PLANS}/{name}.yaml", is_demo=is_demo)
        if not is_demo:
            section.origins[plan.name] = _origins(plan)
        stages = [stage for stage in plan.stages if stage.kind in STAGES]
        section.num_members += sum(len(stage.members) for stage in stages)
        if results is None:
            num_finished = sum(work.state() == "finished" for each in stages for work in each.works)
        else:
            own = results[results.plan == plan.name]
            num_finished = len(own.drop_duplicates(["stage", "member"]))
        section.num_finished += num_finished
        if num_finished and plan.figure is not None:
            section.add(figure(plan, results, partial=True), out / plan.name)
    except (ValueError, OSError) as error:
        section.problems.append(message_of(error))


def _origins(plan: Plan) -> list[tuple[Row, dict[str, str]]]:
    by_row: dict[int, tuple[Row, dict[str, str]]] = {}
    for each in origins_of(plan):
        _, settings = by_row.setdefault(id(each.row), (each.row, {}))
        settings[each.key] = in_yaml(each.row.settings[each.key])
    return sorted(by_row.values(), key=lambda pair: pair[0].section is None)
