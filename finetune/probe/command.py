"""`finetune probe` and `finetune knn` on the command line."""

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.errors import SettingsError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs, show
from data_prep.manifest import Manifest, baselines, load_manifest
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
    warn_once,
)
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import check_place, check_settings
from pretrain.cli import leave, world_of
from pretrain.models.imported import allow_import


def add_verbs(verbs: Verbs) -> None:
    for name, words in (
        (
            "probe",
            "train linear classifiers on a checkpoint's features (pretrained=null: on pixels)",
        ),
        ("knn", "evaluate a checkpoint's features by k nearest neighbors"),
    ):
        config = f"configs/{name}/demo.yaml"
        example = f"finetune {name} {config} pretrained=runs/mine dataset=data/mine run_dir=runs/mine-{name}"  # noqa: E501
        verb = verbs.add_parser(name, help=words, epilog=example)
        verb.add_argument("config", help=f"a YAML file, such as {config}")
        schema = f"finetune.probe.config:{name.capitalize()}Settings"
        add_common(verb, partial(_run, name), schema=schema)


def _run(verb: str, options: argparse.Namespace) -> int:
    schema: type[ProbeSettings | KnnSettings] = ProbeSettings if verb == "probe" else KnnSettings
    check_config(options.config, command=f"finetune {verb} configs/{verb}/demo.yaml")
    settings = load_settings(schema, path=options.config, overrides=options.overrides)
    if options.show:
        return show(settings)
    allow_import(settings.allow_import)
    world, run_dir, data = world_of(options), Path(settings.run_dir), settings.data
    check_settings(run_dir, settings)
    if finished_before(run_dir, settings.pretrained, world):
        return OK
    check_place(settings.features_place, field="features_dir")
    manifest, checkpoint = _checked_data(settings), None
    if settings.pretrained is not None:
        # one process of a node hashes the weights; the session compares the hashes
        checkpoint = Checkpoint.open(settings.pretrained, verify=world.local_rank == 0)
        card = checkpoint.card
        if data.image_size not in (None, card.image_size):
            trained = f"{settings.pretrained} was trained with image_size {card.image_size}"
            problem, fix = f"{data.image_size} is set, but {trained}", "remove data.image_size"
            raise SettingsError("data.image_size", problem, fix, code="mismatch")
        warn_once(card.other_pixels(manifest, dataset=data.dataset), world)
    check_room(settings, manifest, checkpoint)
    if options.ranks:
        return launch_ranks(verb, [options.config], options)
    options.started = True
    end_on_signals(f"complete features are kept in {settings.features_place}")
    with doing("loading torch", enabled=world.is_first):
        from finetune.probe.knn import knn
        from finetune.probe.probe import probe

    if isinstance(settings, KnnSettings):
        result = knn(settings, world, checkpoint)
    else:
        result = probe(settings, world, checkpoint)
    if result is not None:
        largest = manifest.splits[data.test_split].largest_class
        print(
            f"{run_dir}: top-1 on {data.test_split} {_in_words(settings, result, largest)}"
            f" ({baselines(len(manifest.classes), largest)})"
        )
    more = []
    if verb == "probe" and checkpoint is not None:
        place = shlex.quote(str(run_dir))
        more = [f"  next     finetune predict {place} IMAGES --out predictions.csv"]
    return leave(True, run_dir=run_dir, is_first=world.is_first, more=more)


def _checked_data(settings: ProbeSettings | KnnSettings) -> Manifest:
    data, holdout = settings.data, settings.holdout_split
    train, test = data.train_split, data.test_split
    manifest = load_manifest(data.directory)
    for split in filter(None, (train, test, holdout)):
        check_split(manifest, split, directory=data.dataset)
    check_apart(data.directory, manifest, train=train, test=test, holdout=holdout)
    settings.check_against(manifest)
    return manifest


def _in_words(
    settings: ProbeSettings | KnnSettings, result: dict[str, Any], largest: float | None
) -> str:
    if isinstance(settings, KnnSettings):
        return ", ".join(f"{result[f'top1_k{k}']:.1%} (k={k})" for k in sorted(settings.neighbors))
    mean = f" (class mean {result['test_class_mean']:.1%})" if largest else ""
    chosen = f"lr {result['chosen_lr']:g}, weight decay {result['chosen_weight_decay']:g}"
    return f"{result['test_top1']:.1%}{mean} at {chosen}"
