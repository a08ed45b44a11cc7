"""`python -m cluster.sweep VERB FILE`: many runs of one command (the file: see sweep_file.py).

On SLURM cluster/sweep.slurm is an array over the members: `array` says which, `member` what one of them is. Without SLURM `run`
does the same here, one after the other. Either leaves out what is finished, so the same command goes on after any interruption.
"""

import argparse
import sys
from collections.abc import Callable

from cluster.studies.local import Here, num_gpus
from cluster.studies.sweep_file import Sweep, load_sweep, problems_of
from cluster.studies.work import print_columns
from data_prep.settings import SettingsError, UserError
from pretrain.cli import rank_count

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UserError as error:
        print(f"cluster.sweep: {error}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.sweep", description="Many runs of one command.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Callable[[argparse.Namespace], int], help_: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help_)
        added.add_argument("file", help="such as configs/sweep/demo.yaml")
        added.set_defaults(run=run)
        return added

    verb("list", _list, "the members, and how far each has come")
    verb("check", _check, "resolve every member's config; name what is wrong")
    verb("array", _array, "what sbatch's --array takes for all of them, such as 0-11%%4")
    member = verb("member", _member, "the words of one member's command, one on each line")
    member.add_argument("index", help="from 0")
    run = verb("run", _run, "run the members here, one after the other; what fails does not stop the others")
    run.add_argument("--ranks", type=rank_count, help="local ranks of each (default: one per GPU, or 1)")
    return parser


def load_checked(path: str) -> Sweep:
    """The sweep, if every member will do."""
    sweep = load_sweep(path)
    problems = problems_of(sweep)
    if problems:
        more = f"\n... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SettingsError(f"{sweep.path} will not do:\n" + "\n".join(problems[:20]) + more)
    return sweep


def _list(options: argparse.Namespace) -> int:
    sweep = load_sweep(options.file)
    states = [member.work.state() for member in sweep.members]
    rows = [
        [str(member.index), state, member.run_dir, " ".join(member.own)]
        for member, state in zip(sweep.members, states, strict=True)
    ]
    print_columns(["member", "state", "run_dir", "overrides"], rows)
    if sweep.settings.overrides:
        print(f"all: {' '.join(sweep.settings.overrides)}")
    done = states.count("finished")
    print(f"{done} of {len(rows)} finished")
    if done < len(rows):
        print(f"on SLURM: cluster/submit cluster/sweep.slurm {sweep.path}")
        print(f"here:     python -m cluster.sweep run {sweep.path}")
    return OK


def _check(options: argparse.Namespace) -> int:
    sweep = load_checked(options.file)
    print(f"{sweep.path}: {len(sweep.members)} members, every config resolves, every run_dir is another")
    undone = [member.work for member in sweep.members if not member.work.is_finished()]
    for line in dict.fromkeys(line for work in undone for line in work.missing()):
        print(f"not there yet: {line}")
    return OK


def _array(options: argparse.Namespace) -> int:
    sweep = load_checked(options.file)
    print(sweep.array(range(len(sweep.members))))
    return OK


def _member(options: argparse.Namespace) -> int:
    sweep = load_sweep(options.file)
    last = len(sweep.members) - 1
    if not (options.index.isascii() and options.index.isdigit() and int(options.index) <= last):
        raise SettingsError(f"{sweep.path}: there is no member {options.index!r}; its members are 0 to {last}")
    print("\n".join(sweep.members[int(options.index)].work.words))
    return OK


def _run(options: argparse.Namespace) -> int:
    sweep = load_checked(options.file)
    ranks = options.ranks or num_gpus() or 1
    outcomes: list[str] = []
    with Here().listening() as here:
        for member in sweep.members:
            if member.work.is_finished():
                outcomes.append("finished before")
                continue
            if not here.stopped:
                print(f"\n[{member.index + 1}/{len(sweep.members)}] {member.run_dir}", flush=True)
            code = here.run([*member.work.words, "--ranks", str(ranks)])
            if member.work.is_finished():
                outcomes.append("finished")
            elif here.stopped:
                outcomes.append("stopped")
            else:
                outcomes.append(f"failed with exit code {code}" if code else "failed: ended unfinished")
    print()
    rows = [
        [str(member.index), outcome, member.run_dir] for member, outcome in zip(sweep.members, outcomes, strict=True)
    ]
    print_columns(["member", "outcome", "run_dir"], rows)
    if here.stopped:
        print("stopped; the same command goes on from there")
        return INTERRUPTED
    num_failed = sum(outcome.startswith("failed") for outcome in outcomes)
    if num_failed:
        print(f"{num_failed} of {len(rows)} failed; the same command tries them again")
    return FAILED if num_failed else OK


if __name__ == "__main__":
    sys.exit(main())
