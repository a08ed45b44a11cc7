"""`cluster/study.sh FILE`, or `python -m cluster.study FILE`: prepare -> pretrain -> probe + finetune, with one command.

On SLURM a job for each stage (study_queue.py); with --local the same stages one after the other on this machine. What the file may
say and what waits for what: study_file.py. Finished stages are left out, so the same command goes on after any interruption.
"""

import argparse
import shlex
import sys
from pathlib import Path

from cluster.studies.local import Here, num_gpus
from cluster.studies.study_file import Stage, Study, load_study
from cluster.studies.study_queue import SubmissionFailed, log_of, submission, submit
from cluster.studies.work import print_columns
from data_prep.settings import UserError
from pretrain.cli import rank_count

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
UNVERIFIED = Path("jobs/unverified")
"""A file for each dataset that was built here and not verified yet: a manifest alone is not enough then."""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    try:
        return _run(options, words[cut + 1 :])
    except SubmissionFailed as error:
        print(f"cluster.study: {error}", file=sys.stderr)
        return FAILED
    except UserError as error:
        print(f"cluster.study: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.study",
        description="Prepares, pretrains, probes and fine-tunes, each when what it reads is there.",
        usage="%(prog)s FILE [--local [--ranks N]] [--dry-run] [-- sbatch options for all jobs]",
    )
    parser.add_argument("file", help="such as configs/study/demo.yaml")
    parser.add_argument(
        "--local", action="store_true", help="on this machine, one stage after the other, without SLURM"
    )
    parser.add_argument("--ranks", type=rank_count, help="with --local: processes of each stage (one per GPU, or 1)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    return parser


def _run(options: argparse.Namespace, sbatch_options: list[str]) -> int:
    if options.local and sbatch_options:
        raise UserError(f"{' '.join(sbatch_options)}: sbatch's options will not do with --local; leave one of them out")
    if options.ranks and not options.local:
        raise UserError(
            "--ranks: is for --local; on SLURM there is a rank for each GPU (RANKS_PER_NODE in cluster/site.env)"
        )
    study = load_study(options.file)
    if options.dry_run:
        _show(study, sbatch_options, local=options.local, ranks=options.ranks or num_gpus() or 1)
    if study.missing:
        raise UserError(f"{study.path}: not started, for\n" + "\n".join(study.missing))
    if options.dry_run:
        return OK
    if options.local:
        return _run_here(study, ranks=options.ranks or num_gpus() or 1)
    return _queue(study, sbatch_options)


def _show(study: Study, options: list[str], *, local: bool, ranks: int) -> None:
    """The commands as they would be; a job that has no number yet stands as its stage's name."""
    jobs: dict[str, str] = {}
    for stage in study.stages:
        if stage.is_finished:
            print(f"{stage.name}: finished, {stage.work.writes}")
        elif local:
            print("\n".join(f"$ {shlex.join(command)}" for command in _commands(stage, ranks=ranks)))
        else:
            print(f"$ {shlex.join(submission(stage, jobs, options))}")
            jobs[stage.name] = f"<{stage.name}>"


def _queue(study: Study, options: list[str]) -> int:
    queued = {each.stage.name: each for each in submit(study, options, say=lambda words: print(words, file=sys.stderr))}
    rows = []
    for stage in study.stages:
        each = queued.get(stage.name)
        waits_for = ", ".join(queued[name].job for name in stage.after if name in queued) or "-"
        said = ["finished", "-", "-"]
        if each is not None:
            said = [", ".join(each.jobs), waits_for, ", ".join(map(log_of, each.jobs)).strip(", ") or "-"]
        rows.append([stage.name, *said, stage.work.writes])
    print_columns(["stage", "jobs", "waits for", "log", "writes"], rows)
    if queued:
        jobs = [job for each in queued.values() for job in each.jobs]
        print(f"look:   squeue -j {','.join(jobs)}")
        print(f"cancel: scancel {' '.join(jobs)}")
        print("When a job fails, those that wait for it leave the queue; the same command then goes on.")
    else:
        print("all stages are finished")
    return OK


def _commands(stage: Stage, *, ranks: int) -> list[list[str]]:
    if stage.work.kind == "build":
        return [stage.work.words, ["data_prep", "verify", stage.work.writes]]
    return [[*stage.work.words, "--ranks", str(ranks)]]


def _run_here(study: Study, *, ranks: int) -> int:
    """Stops at the first stage that fails: those after it mostly need it."""
    with Here().listening() as here:
        for number, stage in enumerate(study.stages, start=1):
            title = f"[{number}/{len(study.stages)}] {stage.name}"
            if stage.is_finished and not _doubt(stage).exists():
                print(f"{title}: finished, {stage.work.writes}", flush=True)
                continue
            print(f"\n{title}: {stage.work.writes}", flush=True)
            code = _run_stage(stage, here, ranks=ranks)
            if code == 0 and stage.work.is_finished():
                continue
            left = ", ".join(each.name for each in study.stages[number:] if not each.is_finished) or "nothing"
            how = "was stopped" if here.stopped else f"failed with exit code {code}" if code else "ended unfinished"
            print(
                f"\ncluster.study: {stage.name} {how}; left out: {left}. What is finished is kept, the same command goes on.",
                file=sys.stderr,
            )
            return INTERRUPTED if here.stopped else FAILED
    print(f"\n{study.path}: all {len(study.stages)} stages are finished")
    for stage in study.stages:
        print(f"  {stage.name}: {stage.work.writes}")
    return OK


def _run_stage(stage: Stage, here: Here, *, ranks: int) -> int:
    if stage.work.kind == "build":
        UNVERIFIED.mkdir(parents=True, exist_ok=True)
        _doubt(stage).touch()
    for command in _commands(stage, ranks=ranks):
        code = here.run(command)
        if code != 0:
            return code
    _doubt(stage).unlink(missing_ok=True)
    return OK


def _doubt(stage: Stage) -> Path:
    return UNVERIFIED / str(Path(stage.work.writes).absolute()).replace("/", "%")


if __name__ == "__main__":
    sys.exit(main())
