"""The verbs of this room. Light: what takes time is imported once the arguments are known to be
good."""

import argparse
from pathlib import Path

from analysis.device import add_device, device_of
from analysis.output import add_out, check_out, write, written
from data_prep.errors import UserError
from data_prep.explain import Verbs, at_least
from data_prep.progress import doing


def add_verbs(verbs: Verbs) -> None:
    spectra = verbs.add_parser(
        "spectra",
        help=(
            "singular values of a run's matrices, from its first weights on; or of initial ones"
            " (paper A's Figures 4, S.1)"
        ),
        epilog="analysis spectra runs/mine --out runs/mine-spectra",
    )
    spectra.add_argument(
        "--fig4", action="store_true", help="no run: Figure 4 right; a minute on a core"
    )
    spectra.add_argument(
        "--figs1",
        action="store_true",
        help="no run: Figure S.1 centre, and the largest against Omega; seconds",
    )
    spectra.set_defaults(run=_spectra)
    structure = verbs.add_parser(
        "structure",
        help=(
            "how near trained matrices are to Monarch and Kronecker ones, beside random matrices of"
            " equal spectrum"
        ),
        epilog="analysis structure runs/mine --out runs/mine-structure",
    )
    structure.set_defaults(run=_structure)
    masks = verbs.add_parser(
        "masks",
        help="which entries effective matrices have (paper A, Figures 1 and S.9)",
        epilog="analysis masks --tokens 8 --channels 6",
    )
    masks.add_argument("--tokens", type=int, default=8, help="S: how many tokens")
    masks.add_argument("--channels", type=int, default=8, help="C: how many channels")
    masks.add_argument(
        "--seed", type=at_least(0), default=1, help="of permutations and of the SW-MLP's mask"
    )
    add_out(masks, "masks")
    masks.set_defaults(run=_masks)
    filters = verbs.add_parser(
        "filters",
        help=(
            "the first-layer filters of MLPs and Mixers as pictures side by side, and how local"
            " they are"
        ),
        epilog="analysis filters runs/mine",
    )
    filters.add_argument(
        "--which", choices=["first", "largest", "all"], default="first", help="which neurons"
    )
    filters.add_argument(
        "--count",
        type=at_least(1),
        default=25,
        help="how many are drawn of each (not with --which all)",
    )
    filters.add_argument(
        "--init", action="store_true", help="beside each the weights that its run began with"
    )
    filters.set_defaults(run=_filters)
    what = "run directories, checkpoints, RUN@50epochs, imported folders"
    for verb, name, nargs in (
        (spectra, "spectra", "*"),
        (structure, "structure", "*"),
        (filters, "filters", "+"),
    ):
        verb.add_argument("runs", type=Path, nargs=nargs, metavar="RUN", help=what)
        add_out(verb, name)
        if verb is not filters:
            verb.add_argument(
                "--quick",
                action="store_true",
                help="the newest checkpoint alone, and fewer random matrices",
            )
            add_device(verb)


def _check(options: argparse.Namespace) -> None:
    """What is asked of a run is asked before torch is imported."""
    from pretrain.checkpoints.checkpoint import Checkpoint

    check_out(options.out)
    for place in options.runs:
        Checkpoint.open(place, verify=False)


def _spectra(options: argparse.Namespace) -> int:
    if bool(options.runs) + options.fig4 + options.figs1 != 1:
        raise UserError("spectra: give runs, or --fig4, or --figs1")
    _check(options)
    with doing("loading torch"):
        from analysis.matrices import initial, spectra
        from analysis.matrices.weights import checkpoints_of
    if not options.runs:
        rows, facts, figure = (initial.figure_4 if options.fig4 else initial.figure_s1)(
            quick=options.quick
        )
        return written(write(options.out, facts=facts, read=(), rows=rows, figures={"": figure}))
    device = device_of(options.device).type
    runs, read = checkpoints_of(options.runs, newest_only=options.quick)
    rows = list(spectra.spectra(runs, device=device))
    return written(
        write(
            options.out, facts={"device": device}, read=read, rows=rows, figures=spectra.draw(rows)
        )
    )


def _structure(options: argparse.Namespace) -> int:
    _check(options)
    with doing("loading torch"):
        from analysis.matrices import structure
        from analysis.matrices.spectra import LARGEST_DENSE
        from analysis.matrices.weights import checkpoints_of
    device = device_of(options.device).type
    runs, read = checkpoints_of(options.runs, newest_only=options.quick)
    rows = list(structure.distances(runs, randoms=1 if options.quick else 3, device=device))
    if left_out := dict.fromkeys(
        f"{row['run']}, {row['name']} ({row['form']})" for row in rows if not row["random"]
    ):
        print(
            f"left out, with a prime side or more than {LARGEST_DENSE:,} entries:",
            *left_out,
            sep="\n  ",
        )
    bound = structure.bound_on_random_matrices()
    figures = {"prop33": structure.draw_bound(bound)} | ({"": structure.draw(rows)} if rows else {})
    largest = {kind: max(ratios) for kind, ratios in bound.items()}
    facts = {
        "device": device,
        "proposition 3.3": {"holds": max(largest.values()) <= 1 + 1e-12, "largest ratio": largest},
    }
    return written(write(options.out, facts=facts, read=read, rows=rows, figures=figures))


def _masks(options: argparse.Namespace) -> int:
    for name in ("tokens", "channels"):
        if not 2 <= getattr(options, name) <= 64:
            raise UserError(
                f"--{name}: {getattr(options, name)} will not do; give 2 to 64, more would not be"
                " seen"
            )
    check_out(options.out)
    from analysis.matrices.masks import draw, masks

    found = masks(options.tokens, options.channels, seed=options.seed)
    rows = [
        {
            "mask": name,
            "width": len(mask),
            "connections": int(mask.sum()),
            "density": float(mask.mean()),
        }
        for name, mask in found.items()
    ]
    facts = {"tokens": options.tokens, "channels": options.channels, "seed": options.seed}
    return written(write(options.out, facts=facts, read=(), rows=rows, figures={"": draw(found)}))


def _filters(options: argparse.Namespace) -> int:
    _check(options)
    with doing("loading torch"):
        from analysis.matrices import filters
        from analysis.tables.pages import show
        from pretrain.checkpoints.checkpoint import Checkpoint
    opened = [Checkpoint.open(place) for place in options.runs]
    layers = filters.first_layers(options.runs, opened, with_initial=options.init)
    facts = {layer.name: layer.medians for layer in layers}
    words = [
        [name, *(f"{value:.3f}" for value in medians.values())] for name, medians in facts.items()
    ]
    show(["median over the neurons", *filters.MEASURES.values()], words)
    figures = {
        "": filters.sheet(layers, which=options.which, count=options.count),
        "locality": filters.draw_locality(layers),
    }
    rows = [row for layer in layers for row in layer.rows]
    return written(
        write(
            options.out,
            facts=facts,
            read=[each.directory for each in opened],
            rows=rows,
            figures=figures,
        )
    )
