"""`finetune probe` on the command line. No torch until the settings are known to be good."""

import argparse
from pathlib import Path

from data_prep.manifest import load_manifest
from data_prep.settings import load_settings
from finetune.probing.config import ProbeSettings
from finetune.verbs import add_common, end_on_signals, finished_before, launch_ranks, show
from pretrain.__main__ import OK, leave, world_of
from pretrain.card import read_card
from pretrain.run import check_settings


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    probe = verbs.add_parser(
        "probe", help="train linear classifiers on a checkpoint's features (pretrained=null: on pixels)"
    )
    probe.add_argument("config", help="a YAML file, such as configs/probe/demo.yaml")
    add_common(probe, _probe)


def _probe(options: argparse.Namespace) -> int:
    settings = load_settings(ProbeSettings, path=options.config, overrides=options.overrides)
    if options.show:
        return show(settings)
    world = world_of(options)
    run_dir = Path(settings.run_dir)
    if finished_before(run_dir, world):
        return OK
    check_settings(run_dir, settings)
    manifest = load_manifest(settings.dataset)
    for split in (settings.train_split, settings.test_split):
        manifest.labelled_split(split, directory=settings.dataset)
    if settings.pretrained is not None:
        read_card(Path(settings.pretrained))
    if options.ranks:
        return launch_ranks("probe", [options.config], options)
    options.started = True
    end_on_signals()  # before the long imports
    from finetune.probing.probe import probe

    result = probe(settings, world)
    if result is not None:
        print(f"{run_dir}: top-1 {result['test_top1']:.1%} on {settings.test_split} at lr {result['chosen_lr']:g}")
    return leave(True, run_dir=run_dir, is_first=world.is_first, together=False)
