"""Resolve the arguments of a job to a command: `python -m cluster.resolve`, for cluster/job.py.

    [--starting] [--kept SNAPSHOT] PROGRAM COMMAND CONFIG [key=value ...]
    [--starting] [--kept SNAPSHOT] grid PLAN STAGE INDEX

The output is JSON with these fields:

- `words`: arguments of python -m.
- `writes`: output path; `reads`: input paths; `result`: last file that the command writes.
- `can_stage`: true if data.stage_dir can be set. `needs_one_rank`: true for an export.
- `is_build`: true for a dataset.
- `state`: finished or unfinished; with --starting also blind, if this node lacks the mount of an
  input. `about` is then the path of the input.

Configs are read from SNAPSHOT, also configs that a plan names. After a mistake, the exit code is 2
and stderr has the message.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.plan_file import load_plan
from cluster.work import COMMANDS, Work, kept
from data_prep.errors import SettingsError, UserError
from finetune.tune.config import TuneSettings
from pretrain.config import PretrainSettings


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.resolve")
    parser.add_argument("--starting", action="store_true")
    parser.add_argument("--kept", metavar="SNAPSHOT", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    snapshot = options.kept
    try:
        answer = describe(resolve(options.words, snapshot), is_starting=options.starting)
    except UserError as error:
        text = error.with_codes().replace(f"{snapshot}/given/", "/").replace(f"{snapshot}/", "")
        print(f"{options.words[0]}: {text}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


def resolve(words: Sequence[str], snapshot: Path | None) -> Work:
    if words[0] != "grid":
        kind = next(kind for kind, command in COMMANDS.items() if command.words == tuple(words[:2]))
        if len(words) < 3:
            problem, fix = "no config is given", "run sbatch cluster/NAME.slurm CONFIG"
            raise SettingsError("CONFIG", problem, fix, code="missing-value")
        if kind != "build" and "SLURM_ARRAY_TASK_ID" in os.environ:
            fix = "for several runs, write a plan: cluster/submit PLAN"
            raise SettingsError("--array", f"{words[1]} is one run", fix, code="conflict")
        return Work(kind, kept(words[2], snapshot), tuple(words[3:]))
    if len(words) != 4 or not words[3].isdigit():
        problem = "it needs PLAN STAGE and a job array"
        fix = "run cluster/submit cluster/grid.slurm PLAN STAGE; put overrides into the plan"
        raise SettingsError("cluster/grid.slurm", problem, fix, code="bad-syntax")
    stage, index = load_plan(words[1], snapshot=snapshot).stage(words[2]), int(words[3])
    if index >= len(stage.members):
        problem = f"{words[2]} has no member {index}"
        fix = f"choose members from 0 to {len(stage.members) - 1}"
        raise SettingsError(words[1], problem, fix, code="unknown-name")
    return stage.members[index].work


def describe(work: Work, *, is_starting: bool) -> dict[str, object]:
    state, about = "finished" if work.is_finished() else "unfinished", ""
    # the tasks of a build need no check
    if is_starting and state == "unfinished" and work.kind != "build":
        absent = [path for path in work.reads if not Path(path).exists()]
        unseen = [path for path in absent if _file_system(Path(path)) != _file_system(Path())]
        state, about = ("blind", unseen[0]) if unseen else (state, about)
    settings = work.settings
    return {
        "state": state,
        "about": about,
        "words": work.words,
        "writes": work.writes,
        "reads": work.reads,
        "result": COMMANDS[work.kind].result,
        "is_build": work.kind == "build",
        "can_stage": isinstance(settings, PretrainSettings | TuneSettings)
        and settings.data.stage_dir is None,
        "needs_one_rank": work.kind == "export",
    }


def _file_system(path: Path) -> int:
    """Return the device of the path, or of its nearest existing parent."""
    path = path.absolute()
    return next(parent.stat().st_dev for parent in (path, *path.parents) if parent.exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
