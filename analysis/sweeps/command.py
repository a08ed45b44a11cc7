"""`analysis sweep`, `curves` and `widths`."""

import argparse

from analysis.command import add_command, add_points
from analysis.output import Result
from data_prep.errors import UserError
from data_prep.explain import Verbs
from pretrain.models.listing import parse_numbers, parse_power


def add_commands(verbs: Verbs) -> None:
    sweep = add_command(
        verbs,
        "sweep",
        _sweep,
        help="errors of many runs by width, shape, depth, batch size ... over seeds (Mixer paper,"
        " Fig. 2d, 4-7; Scaling MLPs, Fig. 4)",
        description=(
            "Draws mean and SD over seeds, and the binomial error of the test images. RP and normal"
            " Mixers of the same seed are compared. A sweep by width also prints Kendall's tau, the"
            " exact one-sided p of falling errors, and Holm's correction over lines. A sweep by"
            " log_cs prints the optimum of a parabola with its interval."
        ),
        epilog="analysis sweep runs/plans/mixer_fig6_textC5.parquet --x log_cs --hue mixing",
    )
    sweep.add_argument(
        "--x",
        required=True,
        help="horizontal axis: a variable, such as width, density, log_cs, depth, gamma, patch_size"
        " or global_batch_size, or an axis of the plan",
    )
    sweep.add_argument("--task", help="only results of this task, such as probe (default: all)")
    curves = add_command(
        verbs,
        "curves",
        _curves,
        help="training and test loss, ranges over seeds, and overfit (Mixer paper, Fig. S.6-S.8)",
        description=(
            "Bands are ranges over seeds; the table has the SD. Overfit is the last minus the"
            " smallest test loss, after a running mean over a tenth of the curve."
        ),
        epilog="analysis curves runs/plans/mixer_figS6.parquet --hue mixing --facet shape",
    )
    curves.add_argument(
        "--accuracy", action="store_true", help="also draw the test accuracy (Fig. S.8)"
    )
    for command in (sweep, curves):
        add_points(command, metavar="POINTS.parquet")
        for option, words in (
            ("--hue", "variables with a line for each value, such as kind,mixing (default: none)"),
            ("--facet", "variables with a panel for each value, such as target (default: none)"),
        ):
            command.add_argument(option, type=_names, default=(), help=words)
    widths = add_command(
        verbs,
        "widths",
        _widths,
        help="the effective width m and the density p against C at a fixed number of connections"
        " (Mixer paper, Fig. 3)",
        epilog="analysis widths --omega 2^18,2^21 --gamma 1",
    )
    widths.add_argument(
        "--omega", default="2^18,2^21,2^27", help="connections of a layer, comma-separated"
    )
    widths.add_argument("--gamma", type=float, default=1.0, help="hidden width divided by width")
    widths.add_argument("--channels", help="print the Mixer of each C, e.g. 16,32")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _sweep(options: argparse.Namespace) -> Result:
    from analysis.results import read_results
    from analysis.sweeps.sweep import sweep

    results = read_results(options.points)
    return sweep(results, options.x, options.hue, options.facet, options.task)


def _curves(options: argparse.Namespace) -> Result:
    from analysis.results import read_results
    from analysis.sweeps.curves import curves

    results = read_results(options.points)
    return curves(results, options.hue, options.facet, with_accuracy=options.accuracy)


def _widths(options: argparse.Namespace) -> Result:
    if not options.gamma > 0:
        problem = f"{options.gamma:g} is not positive"
        raise UserError("--gamma", problem, "give 4", code="bad-value")
    omegas = {name: parse_power(name) for name in options.omega.split(",")}
    channels = parse_numbers(options.channels, field="--channels") if options.channels else ()
    from analysis.sweeps.widths import widths

    return widths(omegas, options.gamma, channels)
