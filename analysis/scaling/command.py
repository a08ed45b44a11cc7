"""`analysis scaling`. Light: what takes time is imported once the arguments are known to be good."""

import argparse
from pathlib import Path

from data_prep.explain import Verbs


def add_verbs(verbs: Verbs) -> None:
    scaling = verbs.add_parser(
        "scaling", help="fit E(C) = a (b + C)^-alpha + E_inf to a CSV of compute,error", epilog="analysis scaling points.csv"
    )
    scaling.add_argument("points", type=Path, help="the CSV; its first line is compute,error")
    scaling.set_defaults(run=_scaling)


def _scaling(options: argparse.Namespace) -> int:
    from analysis.scaling.laws import fit, read_points

    law = fit(*read_points(options.points))
    print(f"E(C) = {law.a:.4g} ({law.b:.4g} + C)^-{law.alpha:.4f} + {law.floor:.4f}")
    return 0
