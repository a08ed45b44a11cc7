"""`analysis sweep`, `curves` and `widths`. Light: what takes time is imported once the arguments
are known to be good."""

import argparse
from pathlib import Path

from analysis.output import add_out, check_out, write, written
from data_prep.errors import UserError
from data_prep.explain import Verbs
from pretrain.models.listing import parse_power

DEFAULT_OMEGAS = "2^18,2^21,2^27"


def add_verbs(verbs: Verbs) -> None:
    sweep = verbs.add_parser(
        "sweep",
        help=(
            "errors of many runs by width, shape, depth, batch size ... over seeds (paper A, Fig."
            " 2d, 4-7; B, Fig. 4)"
        ),
        description=(
            "Of points, mean and SD over seeds and the binomial error of the test pictures;"
            " differences of RP and normal Mixers by pairs of one seed; against a width Kendall's"
            " tau with its exact null; against log_cs the optimum of a parabola with its interval."
            " Some seconds and 200 MB."
        ),
        epilog=(
            "analysis sweep runs/plans/a_fig6_textC5.parquet --x log_cs --hue mixing --facet target"
        ),
    )
    sweep.add_argument(
        "--x",
        required=True,
        help="a variable: width, hidden_width, density, channels, log_cs, depth, gamma, "
        "patch_size, global_batch_size, ..., or an axis of the plan",
    )
    sweep.add_argument(
        "--task",
        help="results of this alone: pretrain, scratch, probe, knn, tune, evaluate (default: all)",
    )
    sweep.set_defaults(run=_sweep)
    curves = verbs.add_parser(
        "curves",
        help=(
            "train and test loss while training, bands over seeds, and overfit (paper A, Fig."
            " S.6-S.8)"
        ),
        description=(
            "Bands are from the least to the greatest over seeds, as paper A draws them; the SD is"
            " in the table. Overfit: the last test loss less the least. Some seconds and 200 MB."
        ),
        epilog="analysis curves runs/plans/a_figS6.parquet --hue mixing --facet shape",
    )
    curves.set_defaults(run=_curves)
    for verb, name in ((sweep, "sweep"), (curves, "curves")):
        verb.add_argument(
            "points",
            nargs="+",
            type=Path,
            metavar="POINTS.parquet",
            help="files of `analysis points`",
        )
        verb.add_argument(
            "--hue",
            type=_names,
            default=(),
            help="what makes lines: variables with commas between: kind,mixing",
        )
        verb.add_argument(
            "--facet", type=_names, default=(), help="what makes panels, such as target"
        )
        add_out(verb, name)
    widths = verbs.add_parser(
        "widths",
        help=(
            "the effective width m and the density p against C at a fixed number of connections"
            " (paper A, Fig. 3)"
        ),
        epilog="analysis widths --omega 2^18,2^21 --gamma 1",
    )
    widths.add_argument(
        "--omega", default=DEFAULT_OMEGAS, help="connections of a layer, with commas between"
    )
    widths.add_argument(
        "--gamma",
        type=float,
        default=1.0,
        help="hidden width as a multiple (default: 1, the S-Mixer)",
    )
    add_out(widths, "widths")
    widths.set_defaults(run=_widths)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _sweep(options: argparse.Namespace) -> int:
    check_out(options.out)
    from analysis.points import read_points
    from analysis.sweeps.series import By, facts_of, places_of, said_of

    by = By(options.x, options.hue, options.facet, options.task)
    places = places_of(read_points(options.points), by)
    from analysis.sweeps.pictures import draw_sweep

    for line in said_of(facts := facts_of(places, by)):
        print(line)
    figures, rows = {"": draw_sweep(places, facts, by)}, [place.row for place in places]
    return written(write(options.out, facts=facts, read=options.points, rows=rows, figures=figures))


def _curves(options: argparse.Namespace) -> int:
    check_out(options.out)
    from analysis.points import read_points
    from analysis.sweeps.curves import bands_of
    from analysis.sweeps.series import By

    bands = bands_of(read_points(options.points), By("", options.hue, options.facet))
    from analysis.sweeps.pictures import draw_curves

    lines = [band.facts for band in bands if band.curve == "test"]
    for line in lines:
        name = ", ".join(filter(None, [line["facet"], line["hue"]])) or "all"
        sd = f" ± {line['overfit_sd']:.4f}" if line["overfit_sd"] is not None else ""
        print(f"{name}: overfit {line['overfit_mean']:.4f}{sd}, seeds: {len(line['overfit'])}")
    rows, figures = [row for band in bands for row in band.rows], {"": draw_curves(bands)}
    return written(
        write(options.out, facts={"lines": lines}, read=options.points, rows=rows, figures=figures)
    )


def _widths(options: argparse.Namespace) -> int:
    check_out(options.out)
    if not options.gamma > 0:
        raise UserError(f"--gamma: {options.gamma:g} will not do; give a number above 0, such as 4")
    omegas = {name: parse_power(name) for name in _names(options.omega)}
    if not omegas:
        raise UserError("--omega: names no number of connections; give one, such as 2^18")
    from analysis.sweeps.pictures import draw_widths
    from analysis.sweeps.widths import rows_of

    rows = rows_of(omegas, gamma=options.gamma)
    facts = {"omega": omegas, "gamma": options.gamma}
    return written(
        write(options.out, facts=facts, read=(), rows=rows, figures={"": draw_widths(rows)})
    )
