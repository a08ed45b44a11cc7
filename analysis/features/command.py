"""`analysis cka` and `analysis invariance`: what trained networks make of pictures, and of changed ones. Light: what takes time is
imported once the arguments are known to be good."""

import argparse

from analysis.output import add_out, check_out
from data_prep.explain import Verbs, at_least
from data_prep.manifest import load_manifest
from data_prep.progress import doing
from pretrain.checkpoints.checkpoint import Checkpoint

QUICK_PICTURES = 1024


def add_verbs(verbs: Verbs) -> None:
    cka = verbs.add_parser(
        "cka",
        help="how alike the features of two networks are, mixing by mixing (paper A, Fig. 2)",
        description="Unbiased minibatch CKA. Memory: the weights, and mixings of all runs x BATCH^2 x 8 bytes; with --whole, for "
        "mixings of d and e entries, (d^2 + e^2 + d e) x 8 bytes.",
        epilog="analysis cka runs/mixer runs/sw-mlp data/cifar10 --split test",
    )
    cka.add_argument("run_a", help="a run, one of its checkpoints, or a folder of weights: the rows")
    cka.add_argument("run_b", help="another: the columns")
    cka.add_argument("dataset", help="a directory that data_prep has finished")
    more = "a further pair; pairs of the same two architectures are seeds"
    cka.add_argument("--and", nargs=2, action="append", default=[], metavar=("RUN_A", "RUN_B"), dest="more", help=more)
    _add_data(cka)
    cka.add_argument("--whole", action="store_true", help="of the diagonals CKA of the whole sample, too: slower, without batches")
    add_out(cka, "cka")
    cka.set_defaults(run=_cka)


def _add_data(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--split", default="val", help="the pictures (default: val)")
    verb.add_argument("--batch", type=at_least(8), default=256, help="pictures whose features are compared with each other")
    verb.add_argument("--count", type=at_least(8), help="no more pictures than that, drawn from the split (default: all)")
    verb.add_argument("--quick", action="store_true", help=f"the same as --count {QUICK_PICTURES}")
    verb.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")


def _cka(options: argparse.Namespace) -> int:
    check_out(options.out)
    manifest = load_manifest(options.dataset)
    manifest.split(options.split, directory=options.dataset)
    pairs = [(options.run_a, options.run_b), *map(tuple, options.more)]
    for run in dict.fromkeys(run for pair in pairs for run in pair):
        Checkpoint.open(run, verify=False)  # that it is there; its hashes are held to it when it is read
    with doing("loading torch"):
        from analysis.features import cka, drawing
        from analysis.features.mixings import device_of
        from analysis.output import write
        from finetune.looks import looks
    request = cka.Request(pairs, options.dataset, manifest, options.split, options.batch, _count(options), options.whole)
    found = cka.compare(request, device=device_of(options.device))
    groups = cka.groups_of(found, pairs)
    drawing.print_groups(groups)
    with looks(*(model for group in groups for model in group.models)):
        written = write(
            options.out,
            facts=cka.facts_of(found, groups, request),
            read=[options.dataset, *found.subjects],
            rows=cka.rows_of(found, pairs),
            figures=drawing.cka_figures(groups),
        )
    print(*written, sep="\n")
    return 0


def _count(options: argparse.Namespace) -> int | None:
    count: int | None = options.count
    return min(count or QUICK_PICTURES, QUICK_PICTURES) if options.quick else count
