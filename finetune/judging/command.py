"""`finetune evaluate` on the command line. No torch until the settings are known to be good."""

import argparse
import json
from pathlib import Path

from data_prep.manifest import load_manifest
from data_prep.settings import load_settings
from finetune.classes import class_numbers
from finetune.judging.config import EvaluateSettings
from finetune.verbs import add_common, end_on_signals, launch_ranks, show
from pretrain.__main__ import leave, world_of
from pretrain.card import read_card


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = verbs.add_parser("evaluate", help="top-1, top-5 and loss of a checkpoint on a dataset with its classes")
    evaluate.add_argument("pretrained", help="a run directory, or one of its checkpoints")
    evaluate.add_argument("dataset")
    evaluate.add_argument("--json", action="store_true")
    add_common(evaluate, _evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    overrides = [
        f"pretrained={json.dumps(options.pretrained)}",
        f"dataset={json.dumps(options.dataset)}",
        *options.overrides,
    ]
    settings = load_settings(EvaluateSettings, path=None, overrides=overrides)
    if options.show:
        return show(settings)
    manifest = load_manifest(settings.dataset)
    manifest.labelled_split(settings.split, directory=settings.dataset)
    class_numbers(read_card(Path(settings.pretrained)), manifest, dataset=settings.dataset)
    world = world_of(options)
    if options.ranks:
        flags = ["--json"] if options.json else []
        return launch_ranks("evaluate", [options.pretrained, options.dataset, *flags], options)
    options.started = True
    end_on_signals()  # before the long imports
    from finetune.judging.evaluate import evaluate_checkpoint

    scores = evaluate_checkpoint(settings, world)
    if world.is_first:
        if options.json:
            print(json.dumps(scores.metrics("eval") | {"num_samples": scores.num_samples}))
        else:
            top = f"top-1 {scores.top1:.2%}, top-5 {scores.top5:.2%}"
            print(f"{settings.split}: {top}, loss {scores.loss:.4f}, {scores.num_samples:,} images")
    return leave(True, run_dir=None, is_first=world.is_first)
