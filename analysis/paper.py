"""`analysis paper A | B`: every figure and table of a paper on one page: what is there of it, what
is missing and the command for it, and all that can be drawn, beside what the paper prints.

    OUT/index.html       needs nothing else: the pictures are in it
    OUT/NAME.*           of each experiment what its own command writes, such as a_fig7_depth.png, .svg, .parquet and .json

An experiment is drawn by its own command, so the page shows what that shows; where it fails, the
page has its words.
"""  # noqa: E501 (a table)

import base64
import html
import io
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from analysis.experiments import EXPERIMENTS, TITLES, Experiment, Paper
from analysis.points import STAGES, Point, read_points
from analysis.tables.pages import in_words
from analysis.tables.published import TABLES, A, B
from analysis.tables.table import Filled, fill
from cluster.plan_file import load_plan
from data_prep.progress import progress
from data_prep.publish import make_directory, write_atomic
from finetune.looks import DPI
from finetune.runs import runs_below
from pretrain.tracking.run_tags import git_commit

Run = Callable[[list[str]], int]
PLANS, RUNS = Path("configs/plan"), Path("runs/plans")

PAGE = Template(Path(__file__).with_suffix(".html").read_text())


@dataclass
class Shown:
    """An experiment with what is there of it."""

    experiment: Experiment
    num_finished: int = 0
    num_members: int = 0
    pictures: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_demo: bool = False
    has_slurm: bool = False

    def draw(self, words: list[str], out: Path, run: Run) -> None:
        """The verb's pictures, or what it complained of."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            try:
                code = run([*words, "--out", str(out)])
            except SystemExit:  # words that its parser refuses
                code = 2
        if code:
            self.problems += [
                line for line in said.getvalue().splitlines() if line.startswith("analysis: ")
            ]
        else:
            self.pictures += sorted(
                [*out.parent.glob(f"{out.name}.png"), *out.parent.glob(f"{out.name}-*.png")]
            )

    @property
    def commands(self) -> list[str]:
        """Return the commands of this experiment. A command that runs on this machine is first:
        without SLURM `wide-mlps run`."""
        plans = [
            f"configs/plan/{plan}{'_demo' * self.is_demo}.yaml" for plan in self.experiment.plans
        ]
        ways = (
            ["wide-mlps run"]
            if self.is_demo
            else sorted(["cluster/submit", "wide-mlps run"], reverse=not self.has_slurm)
        )
        made = [f"{way} {plan}" for plan in plans for way in ways]
        return made + [f"analysis {self.experiment.verb}"] * bool(self.experiment.verb)

    @property
    def state(self) -> tuple[str, str]:
        """(how far, its class)"""
        if not self.experiment.plans:
            return ("drawn", "whole") if self.pictures else ("one command", "")
        if not self.num_finished:
            return "not run", ""
        is_whole = self.num_finished == self.num_members
        return (
            ("all runs", "whole")
            if is_whole
            else (f"{self.num_finished:,} of {self.num_members:,} runs", "begun")
        )


def make(paper: Paper, out: Path, *, demo: bool, kept: Sequence[Path], run: Run) -> Path:
    """`demo`: of the plans' twins. `kept`: files of points, which take the place of runs. `run`:
    does a command of `analysis`."""
    has_slurm = shutil.which("sbatch") is not None
    points = read_points(kept)
    make_directory(out)
    shown = [
        Shown(each, is_demo=demo, has_slurm=has_slurm)
        for each in EXPERIMENTS
        if each.paper == paper
    ]
    with progress(f"paper {paper}", total=len(shown), unit="experiments") as line:
        for each in shown:
            _add_plans(each, out, kept, points, run)
            if each.experiment.needs_nothing:
                each.draw(each.experiment.verb.split(), out / each.experiment.verb, run)
            line.advance(1)
    source = A if paper == "A" else B
    filled = fill(
        [table for table in TABLES if table.source.startswith(source)],
        runs_below(RUNS) if RUNS.is_dir() else [],
    )
    about = [
        f"{len(shown)} figures and tables, {sum(bool(each.pictures) for each in shown)} of them"
        " drawn here"
    ]
    about += (
        ["the twins of the plans, on synthetic shapes: no number of these is the paper's"]
        if demo
        else []
    )
    words = {
        "title": html.escape(f"{paper}: {TITLES[paper]}"),
        "about": html.escape(f"{'; '.join(about)}; commit {git_commit()}"),
    }
    tables = "\n".join(_table(table) for table in filled if table.source)
    path = out / "index.html"
    write_atomic(
        path,
        PAGE.substitute(words, sections="\n".join(map(_section, shown)), tables=tables).encode(),
    )
    return path


def _add_plans(
    shown: Shown, out: Path, kept: Sequence[Path], points: Sequence[Point], run: Run
) -> None:
    for name in shown.experiment.plans:
        path = PLANS / f"{name}{'_demo' * shown.is_demo}.yaml"
        if not path.is_file():
            shown.problems.append(
                f"{path} is not here; begin in a folder that `wide-mlps init` has laid out"
            )
            continue
        plan = load_plan(str(path))
        members = [
            (stage.name, member)
            for stage in plan.stages
            if stage.kind in STAGES
            for member in stage.members
        ]
        there = {(point.stage, point.member) for point in points if point.plan == path.stem}
        is_there = [
            (stage, each.index) in there if kept else each.work.state() == "finished"
            for stage, each in members
        ]
        shown.num_members, shown.num_finished = (
            shown.num_members + len(members),
            shown.num_finished + sum(is_there),
        )
        if any(is_there) and plan.figure is not None:
            words = [
                "figure",
                str(path),
                "--partial",
                *(word for file in kept for word in ("--points", str(file))),
            ]
            shown.draw(words, out / path.stem, run)


def _section(shown: Shown) -> str:
    experiment, (state, kind) = shown.experiment, shown.state
    lines = [
        "<section>",
        (
            '<span class="state'
            f' {kind}">{html.escape(state)}</span><h2>{html.escape(experiment.name)}</h2>'
        ),
        f"<p>{html.escape(experiment.about)}</p>",
        *(
            [f'<p class="soft">The paper: {html.escape(experiment.printed)}</p>']
            if experiment.printed
            else []
        ),
        *(f"<p><code>{html.escape(command)}</code></p>" for command in shown.commands),
        *(f'<p class="soft">{html.escape(problem)}</p>' for problem in shown.problems),
        *map(_picture, shown.pictures),
        "</section>",
    ]
    return "\n".join(lines)


def _picture(path: Path) -> str:
    """A letter of it is as large as the page's, whatever the picture's resolution."""
    content = path.read_bytes()
    width = int.from_bytes(content[16:20], "big")  # where PNG has it
    shown = f'alt="{html.escape(path.stem)}" width="{width * 110 // DPI}"'
    return f'<img {shown} src="data:image/png;base64,{base64.b64encode(content).decode()}">'


def _table(table: Filled) -> str:
    header, rows = in_words(table)
    lines = [("th", header), *(("td", row) for row in rows)]
    body = "".join(
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"
        for tag, row in lines
    )
    source = (
        f' <span class="soft">{html.escape(table.source)}: ours / the paper / gap, in per'
        " cent</span>"
    )
    return f"<section><h2>{html.escape(table.title)}</h2>{source}<table>{body}</table></section>"
