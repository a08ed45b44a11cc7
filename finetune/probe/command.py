"""`finetune probe` and `finetune knn` on the command line. No torch until the settings are known to be good."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from data_prep.explain import Verbs
from data_prep.manifest import DatasetError, Manifest, load_manifest
from data_prep.progress import doing
from data_prep.settings import SettingsError, load_settings
from finetune.probe.config import FeatureSettings, KnnSettings, ProbeSettings
from finetune.split import check_apart, check_split
from finetune.verbs import add_common, end_on_signals, finished_before, launch_ranks, show, warn_once
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import check_place, check_settings
from pretrain.cli import OK, leave, world_of
from pretrain.ranks.world import World


def add_verbs(verbs: Verbs) -> None:
    grid = "train a grid of linear classifiers on a checkpoint's features (pretrained=null: on pixels)"
    nearest = "judge a checkpoint's features by the nearest training pictures"
    for name, words, run in (("probe", grid, _probe), ("knn", nearest, _knn)):
        example = f"finetune {name} configs/{name}/demo.yaml pretrained=runs/mine dataset=data/mine run_dir=runs/mine-{name}"
        verb = verbs.add_parser(name, help=words, epilog=example)
        verb.add_argument("config", help=f"a YAML file, such as configs/{name}/demo.yaml")
        add_common(verb, run, schema=f"finetune.probe.config:{name.capitalize()}Settings")


def _probe(options: argparse.Namespace) -> int:
    settings = load_settings(ProbeSettings, path=options.config, overrides=options.overrides)

    def check(manifest: Manifest) -> None:
        if settings.holdout_split is None and manifest.splits[settings.data.train_split].num_samples < 2:
            raise DatasetError(
                f"data.train_split: {settings.data.train_split!r} has one sample, and one must be held out; take another"
            )

    def work(world: World, checkpoint: Checkpoint | None) -> str | None:
        with doing("loading torch", enabled=world.is_first):
            from finetune.probe.probe import probe

        result = probe(settings, world, checkpoint)
        if result is None:
            return None
        return f"{result['test_top1']:.1%} at lr {result['chosen_lr']:g}, weight decay {result['chosen_weight_decay']:g}"

    return _run("probe", options, settings, check=check, work=work, holdout=settings.holdout_split)


def _knn(options: argparse.Namespace) -> int:
    settings = load_settings(KnnSettings, path=options.config, overrides=options.overrides)

    def check(manifest: Manifest) -> None:
        num_training, most = manifest.splits[settings.data.train_split].num_samples, max(settings.neighbours)
        if most > num_training:
            split = f"the {num_training:,} samples of {settings.data.train_split!r}"
            raise DatasetError(f"neighbours: {most} is more than {split}; leave it out")

    def work(world: World, checkpoint: Checkpoint | None) -> str | None:
        with doing("loading torch", enabled=world.is_first):
            from finetune.probe.knn import knn

        result = knn(settings, world, checkpoint)
        if result is None:
            return None
        return ", ".join(f"{result[f'top1_k{count}']:.1%} (k={count})" for count in sorted(settings.neighbours))

    return _run("knn", options, settings, check=check, work=work)


def _run(
    verb: str,
    options: argparse.Namespace,
    settings: FeatureSettings,
    *,
    check: Callable[[Manifest], None],
    work: Callable[[World, Checkpoint | None], str | None],
    holdout: str | None = None,
) -> int:
    """`check`: of this verb against the dataset; `work`: returns top-1 in words, on the first rank."""
    if options.show:
        return show(settings)
    world, run_dir = world_of(options), Path(settings.run_dir)
    check_settings(run_dir, settings)
    if finished_before(run_dir, settings.pretrained, world):
        return OK
    check_place(settings.features_place, field="features_dir")
    manifest = load_manifest(settings.data.dataset)
    for split in (settings.data.train_split, settings.data.test_split, *([holdout] if holdout else [])):
        check_split(manifest, split, directory=settings.data.dataset)
    check_apart(settings.data.dataset, manifest, train=settings.data.train_split, test=settings.data.test_split, holdout=holdout)
    checkpoint = None
    if settings.pretrained is not None:
        # its weights are read and hashed once, by one process of a node; the session compares what the ranks have found
        checkpoint = Checkpoint.open(settings.pretrained, verify=world.local_rank == 0)
        card = checkpoint.card
        if settings.data.image_size not in (None, card.image_size):
            trained = f"{settings.pretrained} was trained at {card.image_size}"
            raise SettingsError(f"data.image_size: {settings.data.image_size}, but {trained}; leave it out")
        warn_once(card.other_pixels(manifest, dataset=settings.data.dataset), world)
    check(manifest)
    if options.ranks:
        return launch_ranks(verb, [options.config], options)
    options.started = True
    end_on_signals(f"whole features stay in {settings.features_place}")  # before the long imports
    top1 = work(world, checkpoint)
    if top1 is not None:
        print(f"{run_dir}: top-1 on {settings.data.test_split} {top1}")
    has_weights = verb == "probe" and checkpoint is not None
    more = [f"  next     finetune predict {shlex.quote(str(run_dir))} PICTURES --out predictions.csv"] if has_weights else []
    return leave(True, run_dir=run_dir, is_first=world.is_first, more=more)
