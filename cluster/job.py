"""What a job script asks of the command that it runs: `python -m cluster.job [--starting] PROGRAM VERB CONFIG [key=value ...]`.

Prints, a line each: finished, unfinished, taken by which other job, or blind: which path of another file system than this is not
there (a job is sent to many nodes, and some may lack a mount); the directory that the command writes; whether it can read staged
data and has not been told where; the paths that it reads. A mistake in the config is said in the command's own words, with exit
code 2.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from cluster.plan_file import load_plan
from cluster.slurm import taken_by
from cluster.work import COMMANDS, Work, refuse_options
from data_prep.settings import UserError
from finetune.tune.config import TuneSettings
from pretrain.config import PretrainSettings


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--member"]:
        try:
            print(*load_plan(words[1]).stage(words[2]).members[int(words[3])].work.words, sep="\n")
        except (UserError, IndexError) as error:
            print(f"cluster.plan: {error}", file=sys.stderr)
            return 2
        return 0
    parser = argparse.ArgumentParser(prog="python -m cluster.job")
    for name in ("program", "verb", "config"):
        parser.add_argument(name)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--starting", action="store_true", help="look for what keeps it from starting here, too")
    options, rest = parser.parse_known_args(arguments)
    kinds = [kind for kind, command in COMMANDS.items() if command.words == (options.program, options.verb)]
    try:
        refuse_options(rest)
        work = Work(kinds[0], options.config, (*options.overrides, *rest))
        state = "finished" if work.is_finished() else "unfinished"
        if options.starting and state == "unfinished":
            state = _obstacle(work) or state
    except UserError as error:
        print(f"{options.program}: {as_submitted(str(error), options.config)}", file=sys.stderr)
        return 2
    settings = work.settings
    can_stage = isinstance(settings, PretrainSettings | TuneSettings) and settings.data.stage_dir is None
    print(state, work.writes, "can stage" if can_stage else "as it is", *work.reads, sep="\n")
    return 0


def _obstacle(work: Work) -> str | None:
    unseen = [path for path in work.absent if _file_system(Path(path)) != _file_system(Path())]
    if unseen:
        return f"blind: {unseen[0]}"
    writer = taken_by(work.writes, os.environ)
    return f"taken by {writer}" if writer else None


def _file_system(path: Path) -> int:
    """Of the path, or of what is there of it."""
    whole = path.absolute()
    return next(parent.stat().st_dev for parent in (whole, *whole.parents) if parent.exists())


def as_submitted(message: str, config: str) -> str:
    """With the user's own path of the config, not that of the copy which the snapshot keeps of it."""
    kept = re.match(r"(?:.*/)?jobs/snapshots/[^/]+/", config)
    return message.replace(f"{kept[0]}given/", "/").replace(kept[0], "") if kept else message


if __name__ == "__main__":
    sys.exit(main())
