"""The results table, for figures, tables and fits: one row for each accuracy of a finished run.

A pretraining (or training from scratch) has a row for its end and for each evaluated milestone
(`checkpoint.milestones`). A probe, tuning or evaluation has a row that also describes its weights.
k-NN has a row for each k. Unknown values are null.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.run_rows import rows_of_run
from cluster.plan_file import Member, Plan
from data_prep.errors import SettingsError, UserError
from finetune.runs import NOT_STATED, read_run, runs_below

COLUMNS = {
    "plan": "name of the plan file",
    "stage": "section of the plan",
    "member": "number of the run in the section",
    "labels": 'JSON of the plan\'s axes for this run and its weights, {"model.width": "64"}',
    "run": "directory of the run",
    "began_ms": "start of the run, as a Unix time in ms",
    "commit": "commit of the code; -dirty if files were changed",
    "hardware": "GPUs of the first node, or its processor",
    "task": "pretrain, scratch (by `finetune tune`), probe, knn, tune or evaluate",
    "method": "scratch, tune, probe, knn, tta (a tuned model with views) or null",
    "recipe": "hash of all settings that change what is learned, except seeds and folds",
    "family": "hash of the recipe without the length and the sizes of model and data",
    "repetition": "seeds and folds of the run and its weights",
    "fold": "fold of the training split, if only one was used",
    "weights": "run that pretrained the weights, or their imported folder",
    "start": "datasets and lengths of the trainings before this one",
    "length": "length of the training, such as 50 epochs",
    "step": "step of the weights in their pretraining",
    "epochs": "T = samples / N",
    "samples": "images seen",
    "images": "N: different images seen",
    "compute": "C = 3 x MACs of one image x samples, as Scaling MLPs counts",
    "flop": "2 x compute",
    "trained_on": "dataset of the pretraining",
    "model": "label, such as B-12/Wi-1024, and every other setting that is not the default",
    "kind": "mlp, mixer, smixer (one layer per mixing), sw_mlp, structured or timm",
    "tokens": "number of tokens, S",
    "channels": "number of channels, C",
    "width": "m (S C for a Mixer)",
    "gamma": "hidden width divided by width; 1 without hidden layers",
    "hidden_width": "gamma m",
    "omega": "connections of one layer",
    "density": "density p of a SW-MLP",
    "depth": "layers or blocks",
    "patch_size": "side of a patch in pixels",
    "permuted_blocks": "number of randomly permuted Mixer blocks",
    "parameters": "number of parameters, P",
    "block_parameters": "P without stem and head",
    "multiply_adds": "MACs of one image, forward",
    "seed": "seed of the pretraining",
    "own_seed": "seed of the probe or fine-tuning",
    "optimizer": "optimizer of the pretraining",
    "lr": "learning rate of the pretraining",
    "own_lr": "learning rate of the fine-tuning",
    "weight_decay": "weight decay of the pretraining",
    "global_batch_size": "images per step of the pretraining",
    "augmented": "true if the pretraining used crop, flip, auto-augment, erasing or mixing",
    "own_augmented": "the same for fine-tuning; for a probe, true with views",
    "num_views": "augmented views of an evaluation or probe",
    "neighbors": "k of k-NN",
    "target": "dataset of the accuracy",
    "benchmark": "public name of this dataset, such as cifar10",
    "target_hash": "content hash of this dataset",
    "split": "split of the accuracy",
    "num_test": "images in that split",
    "error": "1 - top-1",
    "error_real": "1 - top-1 for ImageNet's ReaL labels",
    "loss": "evaluation loss",
    "train_loss": "mean training loss of the last tenth of the event log",
    "images_per_s": "images per second",
    "train_epochs": "epochs of the training curve (at most 200 values)",
    "train_losses": "losses of the training curve",
    "test_epochs": "epochs of the evaluation curve",
    "test_losses": "losses of the evaluation curve",
    "test_errors": "errors of the evaluation curve",
}
VARIABLES = (
    *("width", "hidden_width", "density", "channels", "tokens", "log_cs", "log2_omega", "gamma"),
    *("depth", "patch_size", "mixing", "kind", "model", "parameters", "multiply_adds", "epochs"),
    *("images", "samples", "compute", "lr", "optimizer", "global_batch_size", "augmented"),
    *("num_views", "task", "target", "neighbors"),
)
"""Variables of figures, in addition to the axes of a plan. Three are computed from columns: log_cs
= ln(C / S), log2_omega (rounded), mixing (normal, or RP: randomly permuted)."""
STAGES = ("pretrain", "probe", "knn", "tune", "evaluate")
"""Kinds of plan entries that end with an accuracy."""


def as_frame(rows: Sequence[dict[str, Any]] | pd.DataFrame) -> pd.DataFrame:
    """Return a results table with all columns. Empty columns have NaN instead of None."""
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({name: float for name in frame if frame[name].isna().all()})


def read_results(paths: Iterable[Path]) -> pd.DataFrame:
    """Read files of `analysis collect`, or raise UserError. Missing columns become null."""
    frames = []
    for path in paths:
        fix = "write it with `analysis collect PLAN --out FILE.parquet`"
        if path.is_dir():
            fix = f"for runs, write `analysis report {path}`; for a plan, {fix}"
            raise UserError(str(path), "this is a directory", fix, code="unknown-format")
        try:
            frame = pd.read_parquet(path)
        except FileNotFoundError:
            problem = "the file does not exist"
            raise UserError(str(path), problem, fix, code="missing-path") from None
        except (ValueError, OSError) as error:
            problem = f"the file is not a results table ({str(error).partition(chr(10))[0]})"
            raise UserError(str(path), problem, fix, code="unknown-format") from None
        if "task" not in frame:
            raise UserError(str(path), "the file has no column task", fix, code="unknown-format")
        frames.append(as_frame(frame))
    results = pd.concat(frames, ignore_index=True)
    _check_top1(results)
    return results


def _check_top1(results: pd.DataFrame) -> None:
    """Raise UserError if a result on an evaluation split has no top-1."""
    is_evaluated = results.split.notna() & (results.split != NOT_STATED)
    lacking = results[results.error.isna() & is_evaluated]
    if len(lacking):
        problem = f"the run has no top-1; {len(lacking):,} results lack it"
        raise UserError(lacking.run.iloc[0], problem, "repeat the run", code="missing-value")


def last_of_each_run(results: pd.DataFrame) -> pd.DataFrame:
    step = results.step.fillna(0)
    return results[step == step.groupby(results.run).transform("max")]


def results_of_plans(plans: Sequence[Plan], *, partial: bool = False) -> pd.DataFrame:
    """Return the results of the plans' runs. Without `partial`, raise SettingsError if a run is
    unfinished."""
    names = ", ".join(plan.name for plan in plans)
    if len({plan.name for plan in plans}) < len(plans):
        fix = "remove one of them"
        raise SettingsError(names, "two plans have the same name", fix, code="conflict")
    rows, unfinished = list[dict[str, Any]](), list[str]()
    for plan in plans:
        for stage in (stage for stage in plan.stages if stage.kind in STAGES):
            undone = stage.undone()
            unfinished += [f"{plan.name}: {stage.title(member)}" for member in undone]
            for member in stage.members:
                if member not in undone:
                    about = {"plan": plan.name, "stage": stage.name, "member": member.index}
                    rows += [row | about for row in _rows_of_member(member)]
    if unfinished and not partial:
        more = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
        problem = f"there are unfinished runs: {', '.join(unfinished[:3])}{more}"
        fix = "finish the plan, or give --allow-incomplete"
        raise SettingsError(names, problem, fix, code="unfinished")
    if not rows:
        raise SettingsError(names, "no run is finished", "run the plan first", code="empty")
    results = as_frame(rows)
    _check_top1(results)
    return results


def _rows_of_member(member: Member) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run, or of its repetitions, with the labels of the member."""
    run = read_run(Path(member.work.writes))
    for repetition in run.result["runs"] if run.is_group else ["."]:
        for row in rows_of_run(read_run(run.directory / repetition)):
            labels = json.loads(row["labels"]) | dict(member.labels)
            yield row | {"labels": json.dumps(labels)}


def results_below(root: Path) -> pd.DataFrame:
    return as_frame([row for run in runs_below(root) for row in rows_of_run(run)])
