"""`finetune tune` on the command line."""

import argparse
import os
from pathlib import Path

from data_prep.exit_codes import OK
from data_prep.explain import Verbs, show
from finetune.split import check_apart
from finetune.tune.config import (
    TuneSettings,
    check_resume_of,
    in_words,
    is_finished,
    repeats_of,
    unfinished_of,
)
from finetune.verbs import add_common, check_config, launch_ranks, warn_once
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint, check_source
from pretrain.checkpoints.remote import fetch_run
from pretrain.checkpoints.run import (
    check_length,
    check_settings,
    finished_result,
    list_checkpoints,
    load_run_settings,
    stored_config,
)
from pretrain.cli import leave, ranks_of, warn_if_enlarged, world_of
from pretrain.config import check_against_ranks
from pretrain.data.datasets import TrainingData, check_against_data, load_training_data
from pretrain.models.imported import allow_import
from pretrain.ranks.launch import LAUNCHED_WITH
from pretrain.ranks.preemption import StopFlag


def add_verbs(verbs: Verbs) -> None:
    tune = verbs.add_parser(
        "tune", help="fine-tune a checkpoint, or train its architecture from scratch (init=scratch)"
    )
    tune.add_argument(
        "config", help="a YAML file, such as configs/finetune/demo.yaml, or the directory of a run"
    )
    tune.epilog = """finetune tune configs/finetune/demo.yaml pretrained=runs/mine epochs=10
finetune tune configs/finetune/demo.yaml run_dir=runs/tuned seeds=[0,1,2] --ranks 2
finetune tune runs/tuned epochs=20"""
    add_common(tune, _tune, schema="finetune.tune.config:TuneSettings")


def _tune(options: argparse.Namespace) -> int:
    if not options.ranks:
        StopFlag().install()  # handles signals during the long imports, too
    if stored_config(TuneSettings, options.config) is None:
        check_config(options.config, command="finetune tune configs/finetune/demo.yaml")
    settings = load_run_settings(TuneSettings, path=options.config, overrides=options.overrides)
    if options.show:
        return show(settings)
    allow_import(settings.allow_import)
    world, run_dir = world_of(options), Path(settings.run_dir)
    is_pretrained = settings.init == "pretrained"
    check_settings(run_dir, settings)
    fetch_run(settings, world)
    repeats = repeats_of(settings)
    for each in repeats if repeats != [settings] else []:
        fetch_run(each, world)
    is_done = is_finished(settings)
    resumes = not is_done and all(map(list_checkpoints, unfinished_of(repeats)))
    if is_pretrained and not resumes:
        check_source(run_dir, settings.pretrained)
    if is_done:
        if world.is_first:
            fix = "increase train.duration to resume it, or choose another run_dir"
            print(f"{run_dir}: finished before; {fix}")
        return OK
    check_resume_of(settings, repeats)
    checkpoint = Checkpoint.open(settings.pretrained)  # only once: this hashes the weights
    card = checkpoint.card
    checked = [(each, _checked_data(each, card, num_ranks=world.num_ranks)) for each in repeats]
    data = checked[0][1]
    if is_pretrained:
        warn_once(card.other_pixels(data.parts[0].manifest, dataset=settings.data.dataset), world)
    if options.ranks or (world.is_first and LAUNCHED_WITH not in os.environ):
        start = f"{card.model.label} from {settings.pretrained if is_pretrained else 'scratch'}"
        wait = "loading torch takes some seconds"
        print(f"{run_dir}: starting {start} on {ranks_of(world)}; {wait}", flush=True)
        warn_if_enlarged(data, settings.run_dir)
    if options.ranks:
        return launch_ranks("tune", [options.config], options, heed_signals=True)
    options.started = True
    from finetune.tune.tune import Tuning, tune_repeatedly
    from pretrain.loop.train import summary as end_of
    from pretrain.loop.train import train

    if repeats == [settings]:
        outcome = train(Tuning(settings, data, checkpoint), world)
        more = end_of(outcome, run_dir, data) if outcome.finished else []
        return leave(outcome.finished, run_dir=run_dir, is_first=world.is_first, more=more)
    finished = tune_repeatedly(settings, checked, checkpoint, world)
    if world.is_first:
        result = finished_result(run_dir) if finished else None
        words = in_words(result, baselines=data.baselines) if result else None
        print(f"{run_dir}: {words or 'interrupted; the same command resumes the runs'}")
    return leave(finished, run_dir=None, is_first=world.is_first)


def _checked_data(settings: TuneSettings, card: ModelCard, *, num_ranks: int) -> TrainingData:
    training = settings.as_training(card)
    data = load_training_data(training.data)
    if (judged := data.eval_part()) is not None:
        for part in data.parts:
            if part.manifest.content_hash == judged.manifest.content_hash:
                check_apart(
                    judged.directory,
                    judged.manifest,
                    train=part.split,
                    test=judged.split,
                    test_field="data.eval_split",
                )
    check_against_data(data, training)
    check_settings(Path(settings.run_dir), settings)
    check_length(data, training)
    check_against_ranks(settings.train, settings.augment, num_ranks=num_ranks)
    return data
