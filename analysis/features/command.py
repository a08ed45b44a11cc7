"""`analysis cka` and `analysis invariance`: what trained networks make of pictures, and of changed
ones. Light: what takes time is imported once the arguments are known to be good."""

import argparse
from typing import TYPE_CHECKING, Any

from analysis.device import add_device, device_of
from analysis.output import add_out, check_out, write, written
from data_prep.explain import Verbs, at_least
from data_prep.local_copy import local_copy
from data_prep.manifest import Manifest, load_manifest
from data_prep.progress import doing
from finetune.split import check_split, class_numbers
from pretrain.checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:
    from analysis.features.mixings import Pictures

QUICK_PICTURES, QUICK_VIEWS = 1024, 5


def add_verbs(verbs: Verbs) -> None:
    cka = verbs.add_parser(
        "cka",
        help="how alike the features of two networks are, mixing by mixing (paper A, Fig. 2)",
        description=(
            "Unbiased minibatch CKA. Memory: 1 GB, the weights, mixings of all runs x BATCH^2 x 16"
            " bytes; with --whole, for mixings of d and e entries, (d^2 + e^2 + d e) x 8 bytes."
        ),
        epilog="analysis cka runs/mixer runs/sw-mlp data/cifar10 --split test",
    )
    cka.add_argument(
        "run_a", help="a run, one of its checkpoints, or a folder of weights: the rows"
    )
    cka.add_argument("run_b", help="another: the columns")
    cka.add_argument("dataset", help="a directory that data_prep has finished, or its URL")
    more = "a further pair; pairs of the same two architectures are seeds"
    cka.add_argument(
        "--and",
        nargs=2,
        action="append",
        default=[],
        metavar=("RUN_A", "RUN_B"),
        dest="more",
        help=more,
    )
    _add_data(cka)
    cka.add_argument(
        "--whole",
        action="store_true",
        help="of the diagonals CKA of the whole sample, too: slower, without batches",
    )
    add_out(cka, "cka")
    cka.set_defaults(run=_cka)
    invariance = verbs.add_parser(
        "invariance",
        help=(
            "accuracy, agreement and CKA under shifts, flips, crops and another order of pixels;"
            " accuracy over views"
        ),
        description=(
            "Memory: 1 GB, the weights of one run, its mixings x BATCH^2 x 24 bytes, and a batch."
        ),
        epilog="analysis invariance runs/mlp runs/mixer data/cifar10 --split test",
    )
    invariance.add_argument(
        "runs", nargs="+", metavar="RUN", help="runs, their checkpoints, or folders of weights"
    )
    invariance.add_argument(
        "dataset",
        help=(
            "a directory that data_prep has finished, or its URL, of the classes that the runs know"
        ),
    )
    _add_data(invariance)
    invariance.add_argument(
        "--views",
        type=at_least(0),
        default=20,
        help="of test-time augmentation (default: 20); 0: none",
    )
    invariance.add_argument(
        "--seeds", type=at_least(1), default=3, help="how often such views are drawn (default: 3)"
    )
    add_out(invariance, "invariance")
    invariance.set_defaults(run=_invariance)


def _add_data(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--split", default="val", help="the pictures (default: val)")
    verb.add_argument(
        "--batch",
        type=at_least(8),
        default=256,
        help="pictures whose features are compared with each other",
    )
    verb.add_argument(
        "--count",
        type=at_least(8),
        help="no more pictures than that, drawn from the split (default: all)",
    )
    verb.add_argument("--quick", action="store_true", help=f"the same as --count {QUICK_PICTURES}")
    add_device(verb)


def _pictures(options: argparse.Namespace, manifest: Manifest) -> "Pictures":
    from analysis.features.mixings import Pictures

    count = min(options.count or QUICK_PICTURES, QUICK_PICTURES) if options.quick else options.count
    return Pictures(options.dataset, manifest, options.split, options.batch, count)


def _cka(options: argparse.Namespace) -> int:
    check_out(options.out)
    manifest = load_manifest(local_copy(options.dataset, storage=None))
    manifest.split(options.split, directory=options.dataset)
    pairs = [(options.run_a, options.run_b), *map(tuple, options.more)]
    for run in dict.fromkeys(run for pair in pairs for run in pair):
        Checkpoint.open(
            run, verify=False
        )  # that it is there; its hashes are held to it when it is read
    with doing("loading torch"):
        from analysis.features import cka, drawing
        from finetune.looks import looks
    pictures = _pictures(options, manifest)
    found = cka.compare(pictures, pairs, whole=options.whole, device=device_of(options.device))
    groups = cka.groups_of(found, pairs)
    drawing.print_groups(groups)
    facts, read = cka.facts_of(found, groups, pictures), [options.dataset, *found.subjects]
    with looks(*(group.facts[model] for group in groups for model in ("model_a", "model_b"))):
        figures = drawing.cka_figures(groups)
        return written(
            write(
                options.out, facts=facts, read=read, rows=cka.rows_of(found, pairs), figures=figures
            )
        )


def _invariance(options: argparse.Namespace) -> int:
    check_out(options.out)
    manifest = load_manifest(local_copy(options.dataset, storage=None))
    check_split(manifest, options.split, directory=options.dataset)
    for run in options.runs:
        class_numbers(Checkpoint.open(run, verify=False).card, manifest, dataset=options.dataset)
    with doing("loading torch"):
        from analysis.features import drawing
        from analysis.features.invariance import measure
        from analysis.features.mixings import open_subjects
        from finetune.looks import looks
    device, views = (
        device_of(options.device),
        min(options.views, QUICK_VIEWS) if options.quick else options.views,
    )
    how: dict[str, Any] = {
        "views": views,
        "seeds": options.seeds,
        "quick": options.quick,
        "device": device,
    }
    subjects = (
        open_subjects([run], manifest, device=device)[run] for run in dict.fromkeys(options.runs)
    )  # one at a time
    rows = [
        row for subject in subjects for row in measure(subject, _pictures(options, manifest), **how)
    ]
    drawing.print_changes(rows)
    facts = {"split": options.split, "batch": options.batch, "views": views, "seeds": options.seeds}
    with looks(*(row["run"] for row in rows)):
        figures = drawing.invariance_figures(rows)
        return written(
            write(
                options.out,
                facts=facts,
                read=[options.dataset, *options.runs],
                rows=rows,
                figures=figures,
            )
        )
