"""`analysis cka` and `analysis invariance`."""

import argparse
from typing import TYPE_CHECKING

from analysis.command import add_command, add_device, device_of
from analysis.output import Result
from data_prep.explain import Verbs, at_least
from data_prep.local_copy import local_copy
from data_prep.manifest import Manifest, load_manifest
from data_prep.progress import doing
from finetune.split import check_split, class_numbers
from pretrain.checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:
    from analysis.features.mixings import Images

QUICK_IMAGES, QUICK_VIEWS = 1024, 5


def add_commands(verbs: Verbs) -> None:
    cka = add_command(
        verbs,
        "cka",
        _cka,
        help="compare the features of two networks, mixing by mixing (Mixer paper, Fig. 2)",
        description=(
            "Computes the unbiased minibatch CKA. Memory: 1 GB, the weights, and 16 BATCH^2 bytes"
            " for each mixing of each run. --full-sample adds 8 (d^2 + e^2 + d e) bytes for layers"
            " with d and e features."
        ),
        epilog="analysis cka runs/mixer runs/sw-mlp data/cifar10 --split test",
    )
    cka.add_argument("run_a", help="run, checkpoint or folder of weights (rows)")
    cka.add_argument("run_b", help="run, checkpoint or folder of weights (columns)")
    cka.add_argument(
        "--pair",
        nargs=2,
        action="append",
        default=[],
        metavar=("RUN_A", "RUN_B"),
        dest="more",
        help="also compare this pair; pairs of the same two architectures are averaged",
    )
    cka.add_argument(
        "--full-sample",
        action="store_true",
        help="also compute the diagonals over the complete sample, without batches (slower)",
    )
    invariance = add_command(
        verbs,
        "invariance",
        _invariance,
        help="accuracy, agreement and CKA on shifted, flipped, cropped and permuted images, and"
        " accuracy with augmented views",
        description="Memory: 1 GB, the weights, and 24 BATCH^2 bytes for each mixing of a run.",
        epilog="analysis invariance runs/mlp runs/mixer data/cifar10 --split test",
    )
    invariance.add_argument(
        "runs", nargs="+", metavar="RUN", help="runs, checkpoints, or folders of weights"
    )
    invariance.add_argument(
        "--views",
        type=at_least(0),
        default=20,
        help="number of test-time augmentation views (default: 20; 0: none)",
    )
    invariance.add_argument(
        "--seeds", type=at_least(1), default=3, help="number of seeds of the views"
    )
    for command in (cka, invariance):
        command.add_argument("dataset", help="finished dataset, or its URL")
        command.add_argument("--split", default="val", help="split of the images")
        command.add_argument(
            "--batch",
            type=at_least(8),
            default=256,
            help="images per batch; CKA compares them with each other",
        )
        command.add_argument(
            "--count", type=at_least(8), help="number of random images (default: all)"
        )
        command.add_argument(
            "--quick",
            action="store_true",
            help=f"at most {QUICK_IMAGES} images (invariance: fewer shifts and views)",
        )
        add_device(command)


def _images(options: argparse.Namespace, manifest: Manifest) -> "Images":
    from analysis.features.mixings import Images

    count = min(options.count or QUICK_IMAGES, QUICK_IMAGES) if options.quick else options.count
    return Images(options.dataset, manifest, options.split, options.batch, count)


def _cka(options: argparse.Namespace) -> Result:
    manifest = load_manifest(local_copy(options.dataset, storage=None))
    manifest.split(options.split, directory=options.dataset)
    pairs = [(options.run_a, options.run_b), *map(tuple, options.more)]
    for run in {run for pair in pairs for run in pair}:
        Checkpoint.open(run, verify=False)
    with doing("loading torch"):
        from analysis.features.cka import compare_features
    images = _images(options, manifest)
    return compare_features(
        images, pairs, whole=options.full_sample, device=device_of(options.device)
    )


def _invariance(options: argparse.Namespace) -> Result:
    manifest = load_manifest(local_copy(options.dataset, storage=None))
    check_split(manifest, options.split, directory=options.dataset)
    for run in options.runs:
        class_numbers(Checkpoint.open(run, verify=False).card, manifest, dataset=options.dataset)
    with doing("loading torch"):
        from analysis.features.invariance import invariance
    views = min(options.views, QUICK_VIEWS) if options.quick else options.views
    return invariance(
        options.runs,
        _images(options, manifest),
        views=views,
        seeds=options.seeds,
        quick=options.quick,
        device=device_of(options.device),
    )
