"""The papers' findings on made data: one row a claim, from the finished runs of
configs/plan/findings.yaml, as Markdown.

    .venv/bin/python benchmarks/findings.py [RUNS]       `make findings` trains what is not finished, then prints this

Runs of two arms that have the same seed are a pair. Differences are of held-out top-1, the arm that
the claim favours minus the other; SD is the sample deviation of the pairs' differences. A seed
agrees where its difference is above 0; where the claim is that two arms are near each other, where
they are less than NEAR apart. It reports, and judges nothing.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


class Row(NamedTuple):
    """Of a claim: over the seeds that both arms have, as shares."""

    claim: Claim
    mean: float
    other: float
    differences: tuple[float, ...]

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.differences) if len(self.differences) > 1 else float("nan")

    @property
    def num_agree(self) -> int:
        return sum(
            abs(each) < NEAR if self.claim.is_near else each > 0 for each in self.differences
        )


def accuracies(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """arm -> seed -> held-out top-1, of finished runs in ARM-seed-N."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.top1 is not None:
            arm, _, seed = run.name.rpartition("-seed-")
            found.setdefault(arm, {})[int(seed)] = run.top1
    return found


def compare(claim: Claim, found: Mapping[str, Mapping[int, float]]) -> Row | None:
    """None where the arms have no seed in common."""
    one, two = found.get(claim.arm, {}), found.get(claim.other, {})
    seeds = sorted(one.keys() & two.keys())
    if not seeds:
        return None
    means = [statistics.fmean(arm[seed] for seed in seeds) for arm in (one, two)]
    return Row(claim, means[0], means[1], tuple(one[seed] - two[seed] for seed in seeds))


def table(found: Mapping[str, Mapping[int, float]]) -> list[str]:
    """In per cent, and points of it."""
    lines = [
        "| claim | arms | top-1 | difference | SD | seeds that agree |",
        "|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        row, arms = compare(claim, found), f"`{claim.arm}`, `{claim.other}`"
        if row is None:
            lines.append(f"| {claim.words} | {arms} | not yet run | | | |")
            continue
        cells = [
            f"{100 * row.mean:.1f}, {100 * row.other:.1f}",
            f"{100 * statistics.fmean(row.differences):+.1f}",
        ]
        cells += [f"{100 * row.deviation:.1f}", f"{row.num_agree} of {len(row.differences)}"]
        lines.append(f"| {claim.words} | {arms} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print(
        *table(accuracies(runs_below(Path(sys.argv[1]) if sys.argv[1:] else RUNS, deepest=1))),
        sep="\n",
    )
    print(f"\n{machine()}, commit {commit()}")
