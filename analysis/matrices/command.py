"""`analysis spectra`, `structure`, `masks` and `filters`."""

import argparse
from pathlib import Path

from analysis.command import add_command, add_device, device_of
from analysis.output import Result
from data_prep.errors import UserError
from data_prep.explain import Verbs, at_least
from data_prep.progress import doing
from pretrain.checkpoints.checkpoint import Checkpoint


def add_commands(verbs: Verbs) -> None:
    spectra = add_command(
        verbs,
        "spectra",
        _spectra,
        help=(
            "singular values of a run's matrices during training, or of initial matrices (Mixer"
            " paper, Figures 4 and S.1)"
        ),
        epilog="analysis spectra runs/mine --out runs/mine-spectra",
    )
    spectra.add_argument(
        "--fig4", action="store_true", help="draw Figure 4 right without runs (about a minute)"
    )
    spectra.add_argument(
        "--figs1",
        action="store_true",
        help="draw Figure S.1 center and right without runs (a few seconds)",
    )
    structure = add_command(
        verbs,
        "structure",
        _structure,
        help=(
            "check propositions of the Mixer paper on random matrices; with runs, also measure the"
            " distance of their matrices to Monarch and Kronecker matrices"
        ),
        description=(
            "Prints the largest difference between both sides of Proposition 3.2 and Corollary 3.4,"
            " and the largest ratio for Proposition 3.3. Distances of a run are"
            " compared with distances of random matrices of equal spectrum."
        ),
        epilog="analysis structure runs/mine --out runs/mine-structure",
    )
    masks = add_command(
        verbs,
        "masks",
        _masks,
        help="the nonzero entries of effective matrices (Mixer paper, Figures 1 and S.9)",
        epilog="analysis masks --tokens 8 --channels 6",
    )
    masks.add_argument("--tokens", type=at_least(2), default=8, help="number of tokens, S")
    masks.add_argument("--channels", type=at_least(2), default=8, help="number of channels, C")
    masks.add_argument(
        "--seed", type=at_least(0), default=1, help="seed of the permutations and the SW-MLP mask"
    )
    filters = add_command(
        verbs,
        "filters",
        _filters,
        help="first-layer filters of MLPs and Mixers side by side, and their locality",
        epilog="analysis filters runs/mine",
    )
    filters.add_argument(
        "--which",
        choices=["first", "largest"],
        default="first",
        help="neurons to draw; largest: with the largest weights",
    )
    filters.add_argument(
        "--count", type=at_least(1), default=25, help="number of neurons for each run"
    )
    filters.add_argument(
        "--init", action="store_true", help="also show the initial weights of each run"
    )
    words = "run directories, checkpoints, RUN@50epochs, imported folders"
    for command, nargs in ((spectra, "*"), (structure, "*"), (filters, "+")):
        command.add_argument("runs", type=Path, nargs=nargs, metavar="RUN", help=words)
    for command in (spectra, structure):
        command.add_argument(
            "--quick",
            action="store_true",
            help="only the newest checkpoint, and fewer random matrices",
        )
        add_device(command)


def _spectra(options: argparse.Namespace) -> Result:
    if bool(options.runs) + options.fig4 + options.figs1 != 1:
        problem = "exactly one of RUN, --fig4 and --figs1 is needed"
        raise UserError("RUN", problem, "give runs/mine, for example", code="conflict")
    _check_checkpoints(options)
    with doing("loading torch"):
        from analysis.matrices import initial, spectra
    if options.fig4:
        return initial.figure_4(quick=options.quick)
    if options.figs1:
        return initial.figure_s1(quick=options.quick)
    return spectra.spectra(options.runs, quick=options.quick, device=device_of(options.device))


def _structure(options: argparse.Namespace) -> Result:
    _check_checkpoints(options)
    with doing("loading torch"):
        from analysis.matrices.structure import structure
    return structure(options.runs, quick=options.quick, device=device_of(options.device))


def _masks(options: argparse.Namespace) -> Result:
    from analysis.matrices.masks import masks

    return masks(options.tokens, options.channels, seed=options.seed)


def _filters(options: argparse.Namespace) -> Result:
    _check_checkpoints(options)
    with doing("loading torch"):
        from analysis.matrices.filters import filters
    return filters(options.runs, options.which, options.count, with_initial=options.init)


def _check_checkpoints(options: argparse.Namespace) -> None:
    for place in options.runs:
        Checkpoint.open(place, verify=False)
