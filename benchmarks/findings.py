"""Decide the claims of docs/findings/ by their rules, from tests/analysis/points/findings_*.

    .venv/bin/python benchmarks/findings.py                   prints the result of each claim as Markdown
    .venv/bin/python benchmarks/findings.py baseline TUNE [DATASET ...]
                                                              fits logistic regression
    .venv/bin/python benchmarks/findings.py cka               compares the features of the runs of `sparse`

`make findings` trains the runs and writes findings_*. Each module of claims/ has the rules of the
page of the same name.
"""

import sys

import numpy as np
import pandas as pd
from claims.clip_art import clip_art
from claims.decisions import TABLES
from claims.depth import depth
from claims.gain import gain
from claims.locality import locality
from claims.mlp import mlp
from claims.scaling import scaling
from claims.sparse import cka_pairs, sparse
from claims.transfer import transfer
from claims.width import width
from fashion import fit

from analysis.cli import main as analysis

CLAIMS = {
    one.__name__: one
    for one in (width, locality, mlp, depth, sparse, scaling, gain, transfer, clip_art)
}
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Values of scikit-learn's C for logistic regression."""


def baseline(tune: str, *datasets: str) -> tuple[float, float]:
    """Fit logistic regression on pixels. Return C and the mean test error on `datasets` (default:
    `tune`). C has the best accuracy on the `val` split of `tune`."""

    def top1(c: float, dataset: str, split: str) -> float:
        return fit("logistic regression", c, 0, dataset, split)["top1"]

    best = max(PENALTIES, key=lambda c: top1(c, tune, "val"))
    return best, 100 * (1 - np.mean([top1(best, each, "test") for each in datasets or [tune]]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["baseline"]:
        print("C = {}, test error {:.2f} %".format(*baseline(*sys.argv[2:])))
    elif sys.argv[1:] == ["cka"]:
        (a, b), *others = cka_pairs()
        out = f"{TABLES / 'findings_sparse_cka'}"
        options = ["--split", "test", "--count", "2560", "--out", out]
        more = [word for pair in others for word in ("--pair", *pair)]
        sys.exit(analysis(["cka", a, b, "data/fashion-mnist-6k", *options, *more]))
    else:
        for name, lines_of_claim in CLAIMS.items():
            table = pd.read_parquet(TABLES / f"findings_{name}.parquet")
            print(*lines_of_claim(table), sep="\n")
