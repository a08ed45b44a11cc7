"""`finetune evaluate` on the command line. No torch until the settings are known to be good."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from data_prep.settings import load_settings
from finetune.evaluate.config import EvaluateSettings
from finetune.evaluate.console import say
from finetune.evaluate.place import Evaluation
from finetune.split import class_numbers
from finetune.verbs import add_common, end_on_signals, launch_ranks, show, warn_once
from pretrain.cli import OK, leave, world_of


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = verbs.add_parser(
        "evaluate",
        help="scores, pictures and predictions of a checkpoint on a dataset with its classes; views=100 augments at test time",
    )
    evaluate.add_argument("pretrained", help="a run directory, or one of its checkpoints")
    evaluate.add_argument("dataset")
    evaluate.add_argument("--json", action="store_true", help="print the result as one JSON object")
    add_common(evaluate, _evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    overrides = [
        f"pretrained={json.dumps(options.pretrained)}",
        f"dataset={json.dumps(options.dataset)}",
        *options.overrides,
    ]
    settings = load_settings(EvaluateSettings, path=None, overrides=overrides)
    if options.show:
        return show(Evaluation.of(settings).settings if settings.views else settings)  # with what views=... chooses
    evaluation = Evaluation.of(settings)
    class_numbers(evaluation.card, evaluation.manifest, dataset=settings.dataset)
    stored = evaluation.stored_result()
    world = world_of(options)
    warn_once(evaluation.warning(), world)
    warn_once(evaluation.card.other_pixels(evaluation.manifest, dataset=settings.dataset), world)
    if stored is not None:
        if world.is_first:
            _print(stored, as_json=options.json, stored=True)
        return OK
    if options.ranks:
        flags = ["--json"] if options.json else []
        return launch_ranks("evaluate", [options.pretrained, options.dataset, *flags], options)
    options.started = True
    end_on_signals()  # before the long imports
    from finetune.evaluate.evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(settings, world)
    if result is not None:
        _print(result, as_json=options.json)
    return leave(True, run_dir=None, is_first=world.is_first)


def _print(result: dict[str, Any], *, as_json: bool, stored: bool = False) -> None:
    if as_json:
        print(json.dumps(result))
    else:
        say(result, Console(width=None if sys.stdout.isatty() else 120), stored=stored)
