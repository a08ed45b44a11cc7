"""`finetune tune` on the command line. No torch until the settings are known to be good."""

import argparse
import os
from pathlib import Path

from data_prep.exit_codes import OK
from data_prep.explain import Verbs
from finetune.split import check_apart
from finetune.tune.config import (
    TuneSettings,
    check_kind,
    check_resume_of,
    in_words,
    is_finished,
    repeats_of,
    unfinished_of,
)
from finetune.verbs import add_common, check_config, launch_ranks, show, warn_once
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint, check_source
from pretrain.checkpoints.mirror import bring
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
from pretrain.ranks.launch import LAUNCHED_WITH
from pretrain.ranks.preemption import StopFlag


def add_verbs(verbs: Verbs) -> None:
    tune = verbs.add_parser(
        "tune", help="fine-tune a checkpoint, or train its architecture from scratch (init=scratch)"
    )
    tune.add_argument(
        "config", help="a YAML file, such as configs/finetune/demo.yaml, or the directory of a run"
    )
    tune.epilog = """finetune tune configs/finetune/demo.yaml pretrained=runs/mine dataset=data/others run_dir=runs/tuned epochs=10
finetune tune configs/finetune/demo.yaml pretrained=runs/mine dataset=data/others run_dir=runs/tuned seeds=[0,1,2] --ranks 2
finetune tune runs/tuned epochs=20"""  # noqa: E501 (a table)
    add_common(tune, _tune, schema="finetune.tune.config:TuneSettings")


def _tune(options: argparse.Namespace) -> int:
    if not options.ranks:
        StopFlag().install()  # before the long imports: what comes while they last counts
    if stored_config(TuneSettings, options.config) is None:
        check_config(options.config, command="finetune tune configs/finetune/demo.yaml")
    settings = load_run_settings(TuneSettings, path=options.config, overrides=options.overrides)
    if options.show:
        return show(settings)
    world, run_dir = world_of(options), Path(settings.run_dir)
    check_settings(run_dir, settings)
    bring(settings, world)
    check_kind(settings)
    repeats = repeats_of(settings)
    for each in repeats if repeats != [settings] else []:
        bring(each, world)
    is_done = is_finished(settings)
    goes_on = not is_done and all(
        map(list_checkpoints, unfinished_of(repeats))
    )  # each from weights of its own
    if settings.init == "pretrained" and not goes_on:
        check_source(run_dir, settings.pretrained)
    if is_done:
        if world.is_first:
            print(
                f"{run_dir}: finished before; raise train.duration to go on, or name another"
                " run_dir"
            )
        return OK
    check_resume_of(settings, repeats)
    checkpoint = Checkpoint.open(settings.pretrained)  # once: it reads and hashes the weights
    checked = [
        (each, _checked_data(each, checkpoint.card, num_ranks=world.num_ranks)) for each in repeats
    ]
    if settings.init == "pretrained":
        warn_once(
            checkpoint.card.other_pixels(
                checked[0][1].parts[0].manifest, dataset=settings.data.dataset
            ),
            world,
        )
    if options.ranks or (world.is_first and LAUNCHED_WITH not in os.environ):
        label, from_ = (
            checkpoint.card.model.label,
            settings.pretrained if settings.init == "pretrained" else "scratch",
        )
        print(
            f"{run_dir}: starting {label} from {from_} on {ranks_of(world)}; loading torch takes"
            " some seconds",
            flush=True,
        )
        warn_if_enlarged(checked[0][1], settings.run_dir)
    if options.ranks:
        return launch_ranks("tune", [options.config], options, heed_signals=True)
    options.started = True
    from finetune.tune.tune import Tuning, tune_repeatedly
    from pretrain.loop.train import summary as end_of
    from pretrain.loop.train import train

    if repeats == [settings]:
        outcome = train(Tuning(settings, checked[0][1], checkpoint), world)
        data = checked[0][1]
        more = (
            end_of(outcome, run_dir, dataset=settings.data.dataset, data=data)
            if outcome.finished
            else []
        )
        return leave(outcome.finished, run_dir=run_dir, is_first=world.is_first, more=more)
    finished = tune_repeatedly(settings, checked, checkpoint, world)
    if world.is_first:
        stopped = "stopped; the same command goes on from there"
        print(
            f"{run_dir}:"
            " "
            f"{in_words(finished_result(run_dir) or {}, baselines=checked[0][1].baselines) if finished else stopped}"  # noqa: E501
        )
    return leave(finished, run_dir=None, is_first=world.is_first)


def _checked_data(settings: TuneSettings, card: ModelCard, *, num_ranks: int) -> TrainingData:
    """Of one run, with all that can be known of it before torch is imported."""
    training = settings.as_training(card)
    data = load_training_data(training.data)
    judged = data.eval_part()
    if judged is not None:
        split, trained = judged.split, data.parts[0].split
        check_apart(
            judged.directory,
            judged.manifest,
            train=trained,
            test=split,
            test_field="data.eval_split",
        )
    check_against_data(data, model=training.model, train=training.train, schedule=training.schedule)
    check_settings(Path(settings.run_dir), settings)
    check_length(data, training)
    check_against_ranks(settings.train, settings.augment, num_ranks=num_ranks)
    return data
