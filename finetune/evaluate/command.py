"""`finetune evaluate` on the command line."""

import argparse
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.errors import SettingsError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs, show
from data_prep.manifest import baselines
from data_prep.progress import doing
from data_prep.settings import load_settings
from finetune.evaluate.config import EvaluateSettings, Evaluation
from finetune.split import class_numbers
from finetune.verbs import add_common, end_on_signals, launch_ranks, split_config, warn_once
from pretrain.cli import leave, world_of
from pretrain.config import AugmentSettings
from pretrain.models.imported import allow_import

WORSE_BY = 0.02
"""The command prints a warning if views lower the accuracy by more than 2 percentage points."""


def add_verbs(verbs: Verbs) -> None:
    evaluate = verbs.add_parser(
        "evaluate",
        help=(
            "evaluate a checkpoint on a dataset with its classes: scores, figures, predictions;"
            " num_views=100 uses test-time augmentation"
        ),
    )
    evaluate.add_argument("--json", action="store_true", help="print the result as one JSON object")
    evaluate.add_argument(
        "config", nargs="?", help="a YAML file, such as configs/evaluate/demo.yaml"
    )
    evaluate.epilog = """finetune evaluate pretrained=runs/mine dataset=data/mine num_views=10
finetune evaluate configs/evaluate/demo.yaml pretrained=runs/mine run_dir=runs/mine-views"""
    add_common(evaluate, _evaluate, schema="finetune.evaluate.config:EvaluateSettings")


def _evaluate(options: argparse.Namespace) -> int:
    words = [word for word in (options.config, *options.overrides) if word is not None]
    config, overrides = split_config(words)
    if bare := [word for word in overrides if "=" not in word]:
        fix = f"write finetune evaluate pretrained={bare[0]} data.dataset={(*bare, 'DATASET')[1]}"
        raise SettingsError(bare[0], "is not of the form key=value", fix, code="bad-syntax")
    settings = load_settings(EvaluateSettings, path=config, overrides=overrides)
    allow_import(settings.allow_import)
    if options.show:
        return show(Evaluation.of(settings).settings if settings.num_views else settings)
    world = world_of(options)
    evaluation = Evaluation.of(settings, verify=world.local_rank == 0)
    class_numbers(evaluation.card, evaluation.manifest, dataset=settings.data.dataset)
    stored = evaluation.stored_result()
    warn_once(evaluation.warning(), world)
    pixels = evaluation.card.other_pixels(evaluation.manifest, dataset=settings.data.dataset)
    warn_once(pixels, world)
    if stored is None and options.ranks:
        return launch_ranks("evaluate", ["--json"] * options.json + words[:1], options)
    result = stored if world.is_first else None
    if stored is None:
        options.started = True
        end_on_signals("nothing is saved")
        with doing("loading torch", enabled=world.is_first):
            from finetune.evaluate.evaluate import evaluate_checkpoint

        result = evaluate_checkpoint(evaluation, world)
    if result is not None and options.json:
        print(json.dumps(result))
    elif result is not None:
        print_result(
            result, Console(width=None if sys.stdout.isatty() else 120), stored=stored is not None
        )
    return OK if stored is not None else leave(True, run_dir=None, is_first=world.is_first)


def print_result(result: dict[str, Any], console: Console, *, stored: bool = False) -> None:
    num_bad = result["num_unreadable"]
    bad = f", {num_bad:,} more do not decode: {', '.join(result['unreadable'])}" if num_bad else ""
    views = f", {result['num_averaged']} views each" if result["num_views"] else ""
    heading = (
        f"{result['model']} on {result['dataset']}, {result['split']}: {result['num_samples']:,}"
        f" images{views}{bad}"
    )
    rows = {
        "top-1": f"{result['eval/top1']:.2%}",
        "guessing": baselines(result["num_classes"], result["largest_class"]),
        "top-5": f"{result['eval/top5']:.2%}",
        "loss": f"{result['eval/loss']:.4f}",
        "ECE": (
            f"{result['eval/ece']:.2%} (largest gap {result['eval/mce']:.1%}), Brier"
            f" {result['eval/brier']:.4f}"
        ),
        "class top-1": f"mean {result['eval/class_top1']:.2%}; worst: "
        + ", ".join(f"{name} {top1:.0%}" for name, top1 in result["worst_classes"][:3]),
        "speed": f"{result['images_per_s']:,.0f} images/s, {result['seconds']:.1f} s",
    }
    if "eval/real" in result:
        rows["top-1, ReaL"] = f"{result['eval/real']:.2%}"
    if result["most_confused"]:
        pairs = result["most_confused"][:3]
        rows["most confused"] = ", ".join(f"{a} as {b} ({count:,})" for a, b, count in pairs)
    if result["num_views"]:
        augment = AugmentSettings.model_validate(result["augment"], strict=False)
        rows["views"] = f"{augment.recipe}, {result['augment_from']}"
        rows["top-1 by views"] = "  ".join(
            f"{moment['num_views']}: {moment['top1']:.2%}" for moment in result["curve"]
        )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in rows.items():
        table.add_row(name, escape(words))
    lines: list[str | Table] = [heading, table]
    plain = result.get("plain_top1")
    if result["num_views"] and plain is not None and plain - result["eval/top1"] > WORSE_BY:
        lines.append(
            f"Without views, top-1 is {plain:.2%}. The augmentation may not suit these classes."
            " Change augment, for example augment.flip_probability=0."
        )
    if stored:
        lines.append("This result is from an earlier run. To repeat it, choose another run_dir.")
    lines.append(f"{os.path.relpath(result['run_dir'])}: predictions, classes, figures")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))
