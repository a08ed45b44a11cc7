"""Decide the claims of docs/findings/ by their rules, from tests/analysis/points/findings_*.

    .venv/bin/python benchmarks/findings.py                   prints the result of each claim as Markdown
    .venv/bin/python benchmarks/findings.py baseline DATASET  fits logistic regression on a dataset
    .venv/bin/python benchmarks/findings.py cka               compares the features of the runs of `sparse`

`make findings` trains the runs and writes findings_*. Each module of claims/ has the rules of the
page of the same name.
"""

import sys

import pandas as pd
from claims.decisions import TABLES
from claims.depth import depth
from claims.locality import locality
from claims.mlp import mlp
from claims.sparse import cka_pairs, sparse
from claims.width import width
from fashion import fit

from analysis.cli import main as analysis

CLAIMS = {"width": width, "locality": locality, "mlp": mlp, "depth": depth, "sparse": sparse}
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Values of scikit-learn's C for logistic regression."""


def baseline(dataset: str) -> tuple[float, float]:
    """Fit logistic regression on gray pixels. Return the C with the best accuracy on `val`, and the
    test error for this C."""
    name, seed = "logistic regression", 0
    best = max(PENALTIES, key=lambda c: fit(name, c, seed, dataset, "val")["top1"])
    return best, 100 * (1 - fit(name, best, seed, dataset, "test")["top1"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["baseline"]:
        print("C = {}, test error {:.2f} %".format(*baseline(sys.argv[2])))
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
