"""`finetune probe` and `finetune knn` on the command line. No torch until the settings are known to
be good."""

import argparse
import shlex
from functools import partial
from pathlib import Path

from data_prep.errors import SettingsError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs
from data_prep.manifest import DatasetError, baselines, load_manifest
from data_prep.progress import doing
from data_prep.settings import load_settings
from finetune.probe.cache import check_room
from finetune.probe.config import KnnSettings, ProbeSettings
from finetune.split import check_apart, check_split
from finetune.verbs import (
    add_common,
    check_config,
    end_on_signals,
    finished_before,
    launch_ranks,
    show,
    warn_once,
)
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import check_place, check_settings
from pretrain.cli import leave, world_of


def add_verbs(verbs: Verbs) -> None:
    grid = (
        "train a grid of linear classifiers on a checkpoint's features (pretrained=null: on pixels)"
    )
    nearest = "judge a checkpoint's features by the nearest training pictures"
    for name, words in (("probe", grid), ("knn", nearest)):
        example = (
            f"finetune {name} configs/{name}/demo.yaml pretrained=runs/mine dataset=data/mine"
            f" run_dir=runs/mine-{name}"
        )
        verb = verbs.add_parser(name, help=words, epilog=example)
        verb.add_argument("config", help=f"a YAML file, such as configs/{name}/demo.yaml")
        add_common(
            verb, partial(_run, name), schema=f"finetune.probe.config:{name.capitalize()}Settings"
        )


def _run(verb: str, options: argparse.Namespace) -> int:
    schema: type[ProbeSettings | KnnSettings] = ProbeSettings if verb == "probe" else KnnSettings
    check_config(options.config, command=f"finetune {verb} configs/{verb}/demo.yaml")
    settings = load_settings(schema, path=options.config, overrides=options.overrides)
    if options.show:
        return show(settings)
    world, run_dir, data = world_of(options), Path(settings.run_dir), settings.data
    check_settings(run_dir, settings)
    if finished_before(run_dir, settings.pretrained, world):
        return OK
    check_place(settings.features_place, field="features_dir")
    manifest = load_manifest(data.directory)
    holdout = settings.holdout_split if isinstance(settings, ProbeSettings) else None
    for split in (data.train_split, data.test_split, *([holdout] if holdout else [])):
        check_split(manifest, split, directory=data.dataset)
    check_apart(
        data.directory, manifest, train=data.train_split, test=data.test_split, holdout=holdout
    )
    checkpoint = None
    if settings.pretrained is not None:
        # its weights are read and hashed once, by one process of a node; the session compares what
        # the ranks have found
        checkpoint = Checkpoint.open(settings.pretrained, verify=world.local_rank == 0)
        card = checkpoint.card
        if data.image_size not in (None, card.image_size):
            trained = f"{settings.pretrained} was trained at {card.image_size}"
            raise SettingsError(
                "data.image_size",
                f"{data.image_size} is set, but {trained}",
                "remove data.image_size",
                code="mismatch",
            )
        warn_once(card.other_pixels(manifest, dataset=data.dataset), world)
    if isinstance(settings, KnnSettings):
        settings.check_against(manifest)
    elif holdout is None and manifest.splits[data.train_split].num_samples < 2:
        raise DatasetError(
            "data.train_split",
            f"{data.train_split!r} has one sample, and one must be held out",
            "choose another split",
            code="empty",
        )
    check_room(settings, manifest, checkpoint)
    if options.ranks:
        return launch_ranks(verb, [options.config], options)
    options.started = True
    end_on_signals(f"whole features stay in {settings.features_place}")  # before the long imports
    with doing("loading torch", enabled=world.is_first):
        from finetune.probe.knn import knn
        from finetune.probe.probe import probe

    judged = manifest.splits[data.test_split]
    if isinstance(settings, KnnSettings):
        if result := knn(settings, world, checkpoint):
            top1 = ", ".join(
                f"{result[f'top1_k{count}']:.1%} (k={count})"
                for count in sorted(settings.neighbours)
            )
    elif result := probe(settings, world, checkpoint):
        mean = f" (class mean {result['test_class_mean']:.1%})" if judged.largest_class else ""
        top1 = (
            f"{result['test_top1']:.1%}{mean} at lr {result['chosen_lr']:g}, weight decay"
            f" {result['chosen_weight_decay']:g}"
        )
    if result is not None:
        print(
            f"{run_dir}: top-1 on {data.test_split} {top1}"
            f" ({baselines(len(manifest.classes), judged.largest_class)})"
        )
    has_weights = verb == "probe" and checkpoint is not None
    more = (
        [f"  next     finetune predict {shlex.quote(str(run_dir))} PICTURES --out predictions.csv"]
        if has_weights
        else []
    )
    return leave(True, run_dir=run_dir, is_first=world.is_first, more=more)
