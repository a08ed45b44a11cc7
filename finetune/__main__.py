"""Command line of the third floor: `finetune probe | tune | evaluate`, started by --ranks N, accelerate, torchrun or srun."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from data_prep.manifest import load_manifest
from data_prep.settings import Settings, dump, load_settings, parse_command_line
from finetune.config import EvaluateSettings, ProbeSettings, TuneSettings, class_numbers
from pretrain.__main__ import OK, guarded, leave, rank_count, world_of
from pretrain.card import read_card
from pretrain.config import check_against_ranks
from pretrain.datasets import check_against_data, load_training_data
from pretrain.preemption import StopFlag
from pretrain.run import check_resume, check_settings, finished_result
from pretrain.world import World

S = TypeVar("S", bound=Settings)


def main(arguments: list[str] | None = None) -> int:
    return guarded("finetune", parse_command_line(_parser(), arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune", description="Probes, fine-tunes and evaluates pretrained checkpoints."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, run, what in (
        ("probe", _probe, "train linear classifiers on a checkpoint's features (pretrained=null: on pixels)"),
        ("tune", _tune, "fine-tune a checkpoint, or train its architecture from scratch (init=scratch)"),
    ):
        verb = verbs.add_parser(name, help=what)
        verb.add_argument(
            "config", help=f"a YAML file, such as configs/{'probe' if name == 'probe' else 'finetune'}/demo.yaml"
        )
        _add_common(verb, run)
    evaluate = verbs.add_parser("evaluate", help="top-1, top-5 and loss of a checkpoint on a dataset with its classes")
    evaluate.add_argument("pretrained", help="a run directory, or one of its checkpoints")
    evaluate.add_argument("dataset")
    evaluate.add_argument("--json", action="store_true")
    _add_common(evaluate, _evaluate)
    return parser


def _add_common(verb: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    verb.add_argument("overrides", nargs="*", help="key.path=value")
    verb.add_argument("--ranks", type=rank_count, help="start this many local ranks")
    verb.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    verb.set_defaults(run=run)


def _probe(options: argparse.Namespace) -> int:
    settings = load_settings(ProbeSettings, path=options.config, overrides=options.overrides)
    if options.show:
        return _print(settings)
    world = world_of(options)
    run_dir = Path(settings.run_dir)
    if _finished_before(run_dir, world):
        return OK
    check_settings(run_dir, settings)
    manifest = load_manifest(settings.dataset)
    for split in (settings.train_split, settings.test_split):
        manifest.labelled_split(split, directory=settings.dataset)
    if settings.pretrained is not None:
        read_card(Path(settings.pretrained))
    if options.ranks:
        return _launch("probe", options.config, options)
    options.started = True
    from finetune.probe import probe

    result = probe(settings, world)
    if result is not None:
        print(f"{run_dir}: top-1 {result['test_top1']:.1%} on {settings.test_split} at lr {result['chosen_lr']:g}")
    return leave(True, run_dir=run_dir, is_first=world.is_first, together=False)


def _tune(options: argparse.Namespace) -> int:
    if not options.ranks:
        StopFlag().install()  # before the long imports: what comes while they last counts
    settings = load_settings(TuneSettings, path=options.config, overrides=options.overrides)
    if options.show:
        return _print(settings)
    world = world_of(options)
    run_dir = Path(settings.run_dir)
    if _finished_before(run_dir, world):
        return OK
    training = settings.as_training(read_card(Path(settings.pretrained)))
    data = load_training_data(training.data)
    check_against_data(data, model=training.model, train=training.train, schedule=training.schedule)
    check_settings(run_dir, settings)
    check_resume(run_dir, settings.resume)
    check_against_ranks(settings.train, settings.augment, num_ranks=world.num_ranks)
    if options.ranks:
        return _launch("tune", options.config, options)
    options.started = True
    from finetune.tune import tune

    return leave(tune(settings, world).finished, run_dir=run_dir, is_first=world.is_first)


def _evaluate(options: argparse.Namespace) -> int:
    overrides = [
        f"pretrained={json.dumps(options.pretrained)}",
        f"dataset={json.dumps(options.dataset)}",
        *options.overrides,
    ]
    settings = load_settings(EvaluateSettings, path=None, overrides=overrides)
    if options.show:
        return _print(settings)
    manifest = load_manifest(settings.dataset)
    manifest.labelled_split(settings.split, directory=settings.dataset)
    class_numbers(read_card(Path(settings.pretrained)), manifest, dataset=settings.dataset)
    world = world_of(options)
    if options.ranks:
        flags = ["--json"] if options.json else []
        return _launch("evaluate", options.pretrained, options, options.dataset, *flags)
    options.started = True
    from finetune.evaluate import evaluate_checkpoint

    scores = evaluate_checkpoint(settings, world)
    if world.is_first:
        if options.json:
            print(json.dumps(scores.metrics("eval") | {"num_samples": scores.num_samples}))
        else:
            top = f"top-1 {scores.top1:.2%}, top-5 {scores.top5:.2%}"
            print(f"{settings.split}: {top}, loss {scores.loss:.4f}, {scores.num_samples:,} images")
    return leave(True, run_dir=None, is_first=world.is_first)


def _launch(verb: str, first: str, options: argparse.Namespace, *more: str) -> int:
    from pretrain.launch import launch

    command = [sys.executable, "-m", "finetune", verb, first, *more, *options.overrides]
    return launch(command, num_ranks=options.ranks, heed_signals=verb == "tune")


def _finished_before(run_dir: Path, world: World) -> bool:
    result = finished_result(run_dir)
    if result is not None and world.is_first:
        print(f"{run_dir}: finished before; name another run_dir to do it anew")
    return result is not None


def _print(settings: Settings) -> int:
    print(dump(settings), end="")
    return OK


if __name__ == "__main__":
    sys.exit(main())
