"""`finetune evaluate` on the command line: checks, and what is printed of a result, made or stored.
No torch until the settings are known to be good."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.errors import SettingsError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs
from data_prep.manifest import baselines
from data_prep.progress import doing
from data_prep.settings import load_settings
from finetune.evaluate.config import EvaluateSettings, Evaluation
from finetune.split import class_numbers
from finetune.verbs import add_common, end_on_signals, launch_ranks, show, split_config, warn_once
from pretrain.cli import leave, world_of
from pretrain.config import AugmentSettings

WORSE_BY = 0.02
"""Than on the plain pictures: no chance any more."""


def add_verbs(verbs: Verbs) -> None:
    evaluate = verbs.add_parser(
        "evaluate",
        help=(
            "scores, pictures and predictions of a checkpoint on a dataset with its classes;"
            " views=100 augments at test time"
        ),
    )
    evaluate.add_argument("--json", action="store_true", help="print the result as one JSON object")
    evaluate.add_argument(
        "config",
        nargs="?",
        help="a YAML file, such as configs/evaluate/demo.yaml; or settings alone",
    )
    evaluate.epilog = """finetune evaluate pretrained=runs/mine dataset=data/mine views=10
finetune evaluate configs/evaluate/demo.yaml pretrained=runs/mine dataset=data/mine run_dir=runs/mine-views"""  # noqa: E501 (a table)
    add_common(evaluate, _evaluate, schema="finetune.evaluate.config:EvaluateSettings")


def _evaluate(options: argparse.Namespace) -> int:
    words = [word for word in (options.config, *options.overrides) if word is not None]
    config, overrides = split_config(words)
    bare = [word for word in overrides if "=" not in word]
    if bare:
        meant = f"pretrained={bare[0]} data.dataset={bare[1] if len(bare) > 1 else 'DATASET'}"
        raise SettingsError(f"{bare[0]}: which setting is it? Write finetune evaluate {meant}")
    settings = load_settings(EvaluateSettings, path=config, overrides=overrides)
    if options.show:
        return show(
            Evaluation.of(settings).settings if settings.views else settings
        )  # with what views=... chooses
    world = world_of(options)
    evaluation = Evaluation.of(settings, verify=world.local_rank == 0)
    class_numbers(evaluation.card, evaluation.manifest, dataset=settings.data.dataset)
    stored = evaluation.stored_result()
    warn_once(evaluation.warning(), world)
    warn_once(
        evaluation.card.other_pixels(evaluation.manifest, dataset=settings.data.dataset), world
    )
    if stored is None and options.ranks:
        return launch_ranks(
            "evaluate",
            [*(["--json"] if options.json else []), *words[: bool(options.config)]],
            options,
        )
    result = stored if world.is_first else None
    if stored is None:
        options.started = True
        end_on_signals("nothing is saved")  # before the long imports
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
    left_out = result["num_unreadable"]
    missing = (
        f", {left_out:,} more do not decode: {', '.join(result['unreadable'])}" if left_out else ""
    )
    missing += ", ..." if left_out > len(result["unreadable"]) else ""
    views = f", {result['num_views']} views each" if result["views"] else ""
    heading = (
        f"{result['model']} on {result['dataset']}, {result['split']}: {result['num_samples']:,}"
        f" images{views}{missing}"
    )
    worst = ", ".join(f"{name} {top1:.0%}" for name, top1 in result["worst_classes"][:3])
    augment = (
        AugmentSettings.model_validate(result["augment"], strict=False)
        if result.get("augment")
        else None
    )
    rows = {
        "top-1": f"{result['eval/top1']:.2%}",
        "guessing": (
            baselines(result["num_classes"], result["largest_class"])
            if "num_classes" in result
            else ""
        ),
        "top-1, ReaL": f"{result['eval/real']:.2%}" if "eval/real" in result else "",
        "top-5": f"{result['eval/top5']:.2%}",
        "loss": f"{result['eval/loss']:.4f}",
        "ECE": (
            f"{result['eval/ece']:.2%} (largest gap {result['eval/mce']:.1%}), Brier"
            f" {result['eval/brier']:.4f}"
        ),
        "top-1 by views": "  ".join(
            f"{moment['num_views']}: {moment['top1']:.2%}" for moment in result["curve"]
        ),
        "views": f"{augment.recipe}: {result['augment_from']}" if augment else "",
        "class top-1": f"mean {result['eval/class_top1']:.2%}; worst: {worst}",
        "most confused": ", ".join(
            f"{one} as {other} ({count:,})" for one, other, count in result["most_confused"][:3]
        ),
        "speed": f"{result['images_per_s']:,.0f} images/s, {result['seconds']:.1f} s",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in rows.items():
        if words:
            table.add_row(name, escape(words))
    console.print(heading, highlight=False, markup=False, soft_wrap=True)
    console.print(table, highlight=False)
    plain = result.get("plain_top1")
    if result["views"] and plain is not None and plain - result["eval/top1"] > WORSE_BY:
        flips = ", its flips above all" if result["augment"]["flip_probability"] else ""
        hint = (
            f"the plain pictures reach {plain:.2%}: these views may not suit the classes; see"
            f" augment{flips}"
        )
        console.print(hint, highlight=False, soft_wrap=True)
    if stored:
        console.print(
            "asked before: the stored result; name another run_dir to do it anew", highlight=False
        )
    place = Path(result["run_dir"])
    place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    console.print(
        f"{place}: predictions, classes, pictures", highlight=False, markup=False, soft_wrap=True
    )
