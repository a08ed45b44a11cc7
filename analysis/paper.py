"""`analysis paper A | B`: every figure and table of a paper on one page: what is there of it, what is missing and the command for
it, and all that can be drawn, beside what the paper prints.

    OUT/index.html       needs nothing else: the pictures are in it
    OUT/NAME.*           of each experiment what its own command writes, such as a_fig7_depth.png, .svg, .parquet and .json

An experiment is drawn by its own command, so the page shows what that shows; where it fails, the page has its words.
"""

import base64
import html
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from string import Template

from analysis.experiments import EXPERIMENTS, TITLES, Experiment, Paper
from analysis.points import STAGES, Point, read_points
from analysis.tables.pages import words_of
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

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --card: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --line: #30363d; --soft: #9198a1; --card: #161b22 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.05rem; margin: 0 } p { margin: .3rem 0 }
.soft { color: var(--soft) } code { background: var(--card); padding: .1rem .3rem; border-radius: 4px; font-size: .85em }
.all { columns: 26rem; column-gap: 1rem; margin: 1rem 0 }
section { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin-bottom: 1rem; break-inside: avoid }
.state { float: right; border-radius: 1rem; padding: 0 .6rem; font-size: .85em; border: 1px solid var(--line) }
.whole { background: #1a7f37; color: white } .begun { background: #9a6700; color: white }
img { display: block; max-width: 100%; background: white; border-radius: 4px; margin: .5rem auto 0 }
table { border-collapse: collapse; margin-top: .5rem; font-size: .85em; width: 100% }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .5rem; text-align: right }
td:first-child, th:first-child { text-align: left }
</style>
<h1>$title</h1>
<p class="soft">$about</p>
<div class="all">
$sections
</div>
$tables
</html>
""")


@dataclass(frozen=True)
class Shown:
    """An experiment with what is there of it."""

    experiment: Experiment
    num_finished: int = 0
    num_members: int = 0
    pictures: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    is_demo: bool = False

    @property
    def commands(self) -> list[str]:
        plans = [f"configs/plan/{plan}{'_demo' * self.is_demo}.yaml" for plan in self.experiment.plans]
        made = [f"{'wide-mlps run' if self.is_demo else 'cluster/submit'} {plan}" for plan in plans]
        return made + [f"analysis {self.experiment.verb}"] * bool(self.experiment.verb)

    @property
    def state(self) -> tuple[str, str]:
        """(how far, its class)"""
        if not self.experiment.plans:
            return ("drawn", "whole") if self.pictures else ("one command", "")
        if not self.num_finished:
            return "not run", ""
        is_whole = self.num_finished == self.num_members
        return ("all runs", "whole") if is_whole else (f"{self.num_finished:,} of {self.num_members:,} runs", "begun")


def make(paper: Paper, out: Path, *, demo: bool, kept: Sequence[Path], run: Run) -> Path:
    """`demo`: of the plans' twins. `kept`: files of points, which take the place of runs. `run`: does a command of `analysis`."""
    points = read_points(kept)
    make_directory(out)
    chosen = [each for each in EXPERIMENTS if each.paper == paper]
    ending = "_demo" if demo else ""
    shown = []
    with progress(f"paper {paper}", total=len(chosen), unit="experiments") as line:
        for each in chosen:
            shown.append(_of_plans(each, out, ending, kept, points, run) if each.plans else _alone(each, out, run))
            line.advance(1)
    source = A if paper == "A" else B
    filled = fill([table for table in TABLES if table.source.startswith(source)], runs_below(RUNS) if RUNS.is_dir() else [])
    tables = [table for table in filled if table.source]
    about = [f"{len(chosen)} figures and tables, {sum(bool(each.pictures) for each in shown)} of them drawn here"]
    about += ["the twins of the plans, on synthetic shapes: no number of these is the paper's"] if demo else []
    about += [f"commit {git_commit()}"]
    path = out / "index.html"
    write_atomic(path, page(paper, shown, tables=tables, about="; ".join(about)).encode())
    return path


def _of_plans(experiment: Experiment, out: Path, ending: str, kept: Sequence[Path], points: Sequence[Point], run: Run) -> Shown:
    num_finished = num_members = 0
    pictures, problems = list[Path](), list[str]()
    for name in experiment.plans:
        path = PLANS / f"{name}{ending}.yaml"
        if not path.is_file():
            problems.append(f"{path} is not here; begin in a folder that `wide-mlps init` has laid out")
            continue
        plan = load_plan(str(path))
        members = [member for stage in plan.stages if stage.kind in STAGES for member in stage.members]
        runs = {point.run for point in points if point.plan == path.stem}
        finished = runs if points else [member for member in members if member.work.state() == "finished"]
        num_members, num_finished = num_members + len(members), num_finished + len(finished)
        if finished and plan.figure is not None:
            words = ["figure", str(path), "--partial", "--out", str(out / path.stem)]
            words += [word for file in kept for word in ("--points", str(file))]
            problems += _drawn(words, out / path.stem, pictures, run)
    return Shown(experiment, num_finished, num_members, tuple(pictures), tuple(problems), is_demo=bool(ending))


def _alone(experiment: Experiment, out: Path, run: Run) -> Shown:
    """What needs no runs is drawn; of the others the command is enough."""
    pictures = list[Path]()
    name = experiment.verb.partition(" ")[0]
    words = [*experiment.verb.split(), "--out", str(out / name)]
    problems = _drawn(words, out / name, pictures, run) if experiment.needs_nothing else []
    return Shown(experiment, pictures=tuple(pictures), problems=tuple(problems))


def _drawn(words: list[str], out: Path, pictures: list[Path], run: Run) -> list[str]:
    """The verb's pictures are added; what it complained of is returned."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        try:
            code = run(words)
        except SystemExit:  # words that its parser refuses
            code = 2
    pictures += sorted([*out.parent.glob(f"{out.name}.png"), *out.parent.glob(f"{out.name}-*.png")]) if code == 0 else []
    return [line for line in said.getvalue().splitlines() if line.startswith("analysis: ")] if code else []


def page(paper: Paper, shown: Sequence[Shown], *, tables: Sequence[Filled], about: str) -> str:
    title, sections, filled = f"{paper}: {TITLES[paper]}", map(_section, shown), map(_table, tables)
    words = {"title": html.escape(title), "about": html.escape(about)}
    return PAGE.substitute(words, sections="\n".join(sections), tables="\n".join(filled))


def _section(shown: Shown) -> str:
    experiment, (state, kind) = shown.experiment, shown.state
    lines = [
        "<section>",
        f'<span class="state {kind}">{html.escape(state)}</span><h2>{html.escape(experiment.name)}</h2>',
        f"<p>{html.escape(experiment.about)}</p>",
        *([f'<p class="soft">The paper: {html.escape(experiment.printed)}</p>'] if experiment.printed else []),
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
    rows = [["", *table.columns], *([line.name, *(words_of(cell, table) for cell in line.cells)] for line in table.lines)]
    tags = ["th"] + ["td"] * len(table.lines)
    cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True))
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    source = f' <span class="soft">{html.escape(table.source)}: ours / the paper / gap, in per cent</span>'
    return f"<section><h2>{html.escape(table.title)}</h2>{source}<table>{body}</table></section>"
