"""The papers' findings on made data: one row a claim, from the finished runs of
configs/plan/findings.yaml, as Markdown.

    .venv/bin/python benchmarks/findings.py [RUNS]       `make findings` trains what is not finished, then prints this

Runs of two arms that have the same seed are a pair. Differences are of held-out top-1, the arm that
the claim favours minus the other; SD is the sample deviation of the pairs' differences. A seed
agrees where its difference is above 0; where the claim is that two arms are near each other, where
they are less than NEAR apart. It reports, and judges nothing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from frame import commit, machine

from finetune.runs import Run, runs_below

RUNS = Path("runs/plans/findings")
NEAR = 0.05
"""Two standard errors of the difference of two accuracies of 60 % on 960 pictures are 0.045."""


class Claim(NamedTuple):
    words: str
    arm: str
    other: str
    is_near: bool = False


CLAIMS = (
    Claim("A: wider at fixed Omega is better", "smixer-wide", "smixer-narrow"),
    Claim(
        "A: normal and RP Mixer are near each other", "smixer-wide", "smixer-wide-rp", is_near=True
    ),
    Claim("A: S-Mixer beats SW-MLP at high sparsity", "smixer-wide", "sw-mlp"),
    Claim("B: augmentation helps MLPs", "inverted", "inverted-plain"),
    Claim("B: larger batches help MLPs", "inverted-batch-128", "inverted"),
    Claim("B: inverted bottleneck beats standard MLP", "inverted", "standard"),
    Claim("the same, at equal parameters", "inverted", "standard-wide"),
)


def accuracies(runs: Sequence[Run]) -> pd.DataFrame:
    """Return held-out top-1 of finished runs named ARM-seed-N: a row per seed, a column per arm."""
    scores = pd.Series(
        {
            (int(seed), arm): run.top1
            for run in runs
            for arm, _, seed in [run.name.rpartition("-seed-")]
            if run.top1 is not None
        },
        dtype=float,
    )
    return scores.unstack() if len(scores) else pd.DataFrame()


def table(found: pd.DataFrame) -> list[str]:
    """Return the lines of the table, in percent and percentage points."""
    lines = [
        "| claim | arms | top-1 | difference | SD | seeds that agree |",
        "|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        pairs, arms = (
            100 * found.reindex(columns=[claim.arm, claim.other]).dropna(),
            f"`{claim.arm}`, `{claim.other}`",
        )
        if pairs.empty:
            lines.append(f"| {claim.words} | {arms} | not yet run | | | |")
            continue
        mean, other = pairs.mean()
        differences = pairs[claim.arm] - pairs[claim.other]
        agree = differences.abs() < 100 * NEAR if claim.is_near else differences > 0
        lines.append(
            f"| {claim.words} | {arms} | {mean:.1f}, {other:.1f} | {differences.mean():+.1f}"
            f" | {differences.std():.1f} | {agree.sum()} of {len(pairs)} |"
        )
    return lines


if __name__ == "__main__":
    print(
        *table(accuracies(runs_below(Path(sys.argv[1]) if sys.argv[1:] else RUNS, deepest=1))),
        sep="\n",
    )
    print(f"\n{machine()}, commit {commit()}")
