"""`analysis scaling`. Light: what takes time is imported once the arguments are known to be
good."""

import argparse
from pathlib import Path
from typing import Any

from analysis.output import add_out, check_out, write, written
from data_prep.errors import UserError
from data_prep.explain import Verbs


def add_verbs(verbs: Verbs) -> None:
    scaling = verbs.add_parser(
        "scaling",
        help=(
            "scaling laws of points with intervals: the frontier, laws in C, P and N, repeated"
            " data, the best P and N"
        ),
        epilog="analysis scaling runs/plans/b_scaling.parquet --out runs/plans/b_scaling-laws",
    )
    scaling.add_argument(
        "points",
        type=Path,
        nargs="+",
        help="Parquet of `analysis points`, or a CSV with compute,error",
    )
    scaling.add_argument(
        "--target",
        action="append",
        default=[],
        help="only what is judged on this dataset; may be repeated",
    )
    scaling.add_argument(
        "--epochs", type=float, default=50.0, help="T of the allocation and of the law in P and N"
    )
    scaling.add_argument("--quick", action="store_true", help="200 resamples in the place of 2,000")
    add_out(scaling, "scaling")
    scaling.set_defaults(run=_scaling)


def _scaling(options: argparse.Namespace) -> int:
    check_out(options.out)
    if not 0 < options.epochs < float("inf"):
        raise UserError(f"--epochs: {options.epochs:g} will not do; give more than 0")
    from analysis.scaling.samples import SAME_T, read_samples

    samples, num_left_out = read_samples(options.points, targets=options.target)
    from analysis.scaling.figures import draw
    from analysis.scaling.study import FITS, QUICK_RESAMPLES, RESAMPLES, facts_of, study
    from data_prep.progress import progress
    from finetune.looks import looks

    resamples = QUICK_RESAMPLES if options.quick else RESAMPLES
    with progress("resamples", total=FITS * (resamples + 1) * len(samples), unit="fits") as line:
        studies = [
            study(each, epochs=options.epochs, resamples=resamples, advance=line.advance)
            for each in samples
        ]
        line.advance(line.total - line.done)  # what points were too few for
    rows = [row for each in studies for row in each.rows()]
    _print(rows)
    for each in studies:
        if abs(each.epochs / options.epochs - 1) > SAME_T:
            print(
                f"{each.sample.name}: no points at T = {options.epochs:g}; sum and allocation are"
                f" of T = {each.epochs:.3g}"
            )
        for law, form in each.fewer_parameters():
            print(f"{each.sample.name}: {law}: {form} has the lower AICc")
        for law, why in each.lacking().items():
            print(f"{each.sample.name}: {law}: {why}")
    if num_left_out:
        print(f"{num_left_out:,} points without an error or a compute are left out")
    facts = facts_of(studies, resamples=resamples, num_left_out=num_left_out)
    with looks(*(each.name for each in samples)):
        return written(
            write(options.out, facts=facts, read=options.points, rows=rows, figures=draw(studies))
        )


def _print(rows: list[dict[str, Any]]) -> None:
    """Of each law the form that is drawn; the others, the factors and the offset stand in the
    files."""
    from analysis.tables.pages import show

    table = []
    for row in (
        row for row in rows if row["drawn"] and row["parameter"] not in ("a", "A", "B", "b")
    ):
        between = "no interval" if row["low"] is None else f"{row['low']:.3g} to {row['high']:.3g}"
        beyond = (
            ""
            if row["beyond"] is None or row["beyond"] != row["beyond"]
            else f"off by {row['beyond']:.1%}"
        )
        law, share = (
            f"{row['law']}, {row['form']}" if row["form"] not in ("", "full") else row["law"],
            row["at_bound"],
        )
        words = [
            row["target"],
            law,
            row["parameter"],
            f"{row['value']:.4g}",
            between,
            str(row["points"]),
            beyond,
        ]
        table.append(
            [
                *words,
                "at its bound" if share == 1 else f"{share:.0%} at a bound" if share > 0.02 else "",
            ]
        )
    if table:
        header = (
            "target",
            "law",
            "parameter",
            "value",
            "95 % interval",
            "points",
            "largest left out",
            "",
        )
        show(header, table, num_words=3)
