"""The table of what benchmarks/gpu.py has found: a row for each claim, with its goal, and its place
in docs/measured.md."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import HERE

PAGE = HERE.parent / "docs" / "measured.md"
BEGIN, END = "<!-- benchmarks/gpu.py writes from here -->", "<!-- to here -->"
NO_FIGURE = "its parts say nothing of it"
EPOCH = 12.5e6
"""Pictures, as ImageNet-21k has them."""
Figures = dict[str, Any]
"""Of one part."""


@dataclass(frozen=True)
class Row:
    what: str
    goal: str
    parts: tuple[str, ...]
    """That it is made of."""
    value: Callable[..., Any]
    """Of their figures; None: there is none without a GPU."""
    form: str = "{:.2f} x"
    """Of the value."""
    is_met: Callable[[float], bool] | None = None

    def cells(self, found: dict[str, Any]) -> tuple[str, str]:
        """(value, verdict)."""
        missing = [name for name in self.parts if name not in found["figures"]]
        if missing:
            failed = [name for name in missing if name in found["failed"]]
            is_for_several = found["num_gpus"] == 1 and any(
                name.startswith("run-ranks") for name in missing
            )
            words = "only with several GPUs" if is_for_several else "not run"
            return (f"failed: {', '.join(failed)}" if failed else words), ""
        try:
            value = self.value(*(found["figures"][name] for name in self.parts))
        except (KeyError, TypeError, ZeroDivisionError, StopIteration) as error:
            return f"{NO_FIGURE}: {type(error).__name__} {error}", ""
        if value is None:
            return "only with a GPU", ""
        verdict = (
            ""
            if self.is_met is None or found.get("is_dry_run")
            else "met"
            if self.is_met(value)
            else "missed"
        )
        return self.form.format(value), verdict


def _points_apart(ending: str) -> Callable[[Figures, Figures], float]:
    def value(one: Figures, other: Figures) -> float:
        return float(100 * abs(_named(ending)(one) - _named(ending)(other)))

    return value


def _named(ending: str) -> Callable[[Figures], Any]:
    """The first figure whose name ends so."""
    return lambda figures: next(value for name, value in figures.items() if name.endswith(ending))


def _piece(section: str, one: str, other: str) -> Callable[[Figures], float]:
    """How many times as long as `one` the other takes."""

    def value(pieces: Figures) -> float:
        took_one, took_other = (
            next(took for name, took in pieces[section].items() if each in name)
            for each in (one, other)
        )
        return float(took_other / took_one)

    return value


def _over(figure: str) -> Callable[[Figures, Figures], float]:
    """Of the first part, of the second's."""
    return lambda one, other: float(one[figure] / other[figure])


def _same_bits(resume: Figures) -> str:  # its part has failed where they differ
    return "the same bits" if resume["was stopped"] else "it was over before it was stopped"


RATE, STEP, SHARE = "usage/images_per_s", "profile-b12-z1-compiled", "share_of_product_rate"
ZERO, FEATURES, OF_TIMM = "resident of plain DDP", "features of forward", "compiled of timm"
VIT = "vit_b_4: images/s"
ROWS = (
    Row(
        "B-12/Wi-1024 from shards: FLOP/s, of a large product's rate",
        ">= 60 %",
        (STEP, "run-b12"),
        lambda step, run: step[SHARE] * run[RATE] / step["images_per_s"],
        "{:.0%}",
        lambda x: x >= 0.6,
    ),
    Row(
        "an epoch of 12.5 M pictures of 64 px, from shards",
        "< 25 s",
        ("run-b12",),
        lambda run: EPOCH / run[RATE],
        "{:,.1f} s",
        lambda x: x < 25,
    ),
    Row(
        "waiting for data in it, of its time",
        "<= 2 %",
        ("run-b12",),
        lambda run: run["usage/data_wait_share"],
        "{:.1%}",
        lambda x: x <= 0.02,
    ),
    Row(
        "augmentation, of the time of a step with it",
        "<= 5 %",
        (f"{STEP}-augmented", STEP),
        lambda with_it, without: 1 - without["ms"] / with_it["ms"],
        "{:.1%}",
        lambda x: x <= 0.05,
    ),
    Row(
        "B-12/Wi-1024, ZeRO 1 on one GPU: time of a step, of plain DDP's",
        "<= 1.03 x",
        ("train-mlp",),
        lambda train: 1 / _named(ZERO)(train),
        is_met=lambda x: x <= 1.03,
    ),
    Row(
        "Mixer-B-W at 224 px: images/s, of timm's, both compiled",
        ">= 1.15 x",
        ("models-mixer",),
        _named(OF_TIMM),
        is_met=lambda x: x >= 1.15,
    ),
    Row(
        "features for a probe, from shards to a file: images/s, of the forward pass alone",
        ">= 80 %",
        ("probe-rate",),
        lambda probe: probe[FEATURES],
        "{:.0%}",
        lambda x: x >= 0.8,
    ),
    Row(
        "probe of bf16 features beside fp32 ones, same cell, top-1",
        "<= 0.1 point",
        ("probe-fp32", "probe-bf16"),
        _points_apart("test_top1"),
        "{:.2f} points",
        lambda x: x <= 0.1,
    ),
    Row(
        "evaluation in bf16 beside fp32, top-1",
        "<= 0.1 point",
        ("evaluate-fp32", "evaluate-bf16"),
        _points_apart("/top1"),
        "{:.2f} points",
        lambda x: x <= 0.1,
    ),
    Row(
        "stopped and gone on, beside a run that was not",
        "the same bits",
        ("resume",),
        _same_bits,
        "{}",
        lambda words: words == "the same bits",
    ),
    Row(
        "weak scaling, one GPU to all: images/s of each, of one alone's",
        "",
        ("run-ranks-z1", "run-b12"),
        lambda ranks, one: ranks[RATE] / one[RATE] / ranks["ranks"],
        "{:.0%}",
    ),
    *(
        Row(
            f"ZeRO {stage}{', eager,' * (stage == 3)} on all GPUs: images/s, of ZeRO 1's",
            "",
            (f"run-ranks-z{stage}", "run-ranks-z1"),
            _over(RATE),
        )
        for stage in (0, 2, 3)
    ),
    Row("B-12/Wi-1024, the step alone", "", (STEP,), lambda step: step["ms"], "{:,.1f} ms"),
    Row(
        "B-12/Wi-1024, the step alone: FLOP/s, of a large product's rate",
        "",
        (STEP,),
        lambda step: step[SHARE],
        "{:.0%}",
    ),
    Row(
        "the large product's rate, in bf16",
        "",
        (STEP,),
        lambda step: step["product_rate_teraflops"],
        "{:,.3g} TFLOP/s",
    ),
    Row(
        "the device idle in that step, of its time",
        "",
        (STEP,),
        lambda step: step["device_idle_share"],
        "{:.1%}",
    ),
    *(
        Row(
            f"B-12/Wi-1024, ZeRO {stage} on one GPU: time of a step, of ZeRO 1's",
            "",
            (f"profile-b12-z{stage}-compiled", STEP),
            _over("ms"),
        )
        for stage in (0, 2)
    ),
    Row(
        "B-12/Wi-1024, eager: time of a step, of the compiled one's",
        "",
        ("profile-b12-z1-eager", STEP),
        _over("ms"),
    ),
    Row(
        "Mixer-B-W at 224 px, the step alone: FLOP/s, of a large product's rate",
        "",
        ("profile-mixer-z1-compiled",),
        lambda step: step[SHARE],
        "{:.0%}",
    ),
    Row(
        "Mixer-B-W at 224 px, eager: time of a step, of the compiled one's",
        "",
        ("profile-mixer-z1-eager", "profile-mixer-z1-compiled"),
        _over("ms"),
    ),
    Row(
        "Mixer-B-W at 224 px, from shards",
        "",
        ("run-mixer",),
        lambda run: run[RATE],
        "{:,.0f} images/s",
    ),
    Row(
        "Mixer-B-W at 224 px, ZeRO 1 on one GPU: time of a step, of plain DDP's",
        "",
        ("train-mixer",),
        lambda train: 1 / _named(ZERO)(train),
    ),
    Row(
        "loss of mixed labels: two cross-entropies' time, of one pass's",
        "",
        ("pieces",),
        _piece("loss", "the product's", "two cross-entropies, eager"),
    ),
    Row(
        "augmentation: single operations' time, of the kernels'",
        "",
        ("pieces",),
        _piece("augment", "64 px, the product's: of pictures", "single operations: of pictures"),
    ),
    Row(
        "loader and augmentation alone: an epoch of 12.5 M pictures of 64 px",
        "",
        ("data-rates",),
        lambda rates: EPOCH / max(rate for name, rate in rates.items() if name.startswith("feed")),
        "{:,.1f} s",
    ),
    Row(
        "B-12/Wi-1024, forward and backward: images/s, of its products alone",
        "",
        ("models-b12",),
        _named("of products"),
        "{:.0%}",
    ),
    Row(
        "an epoch of a linear probe: forward passes in every epoch, of features made once",
        "",
        ("probe-rate",),
        lambda probe: probe["an epoch of the public way's"],
        "{:.1f} x",
    ),
    Row(
        "B-12/Wi-1024, fine-tuning's step: images/s, of pretraining's",
        "",
        ("tune-rate",),
        _named("tuning of pretraining"),
    ),
    Row(
        "evaluation of raw pictures by B-12/Wi-1024: images/s, of the forward pass alone",
        "",
        ("evaluate-rate",),
        _named("evaluate of forward"),
        "{:.0%}",
    ),
    Row(
        "B-12/Wi-768, one forward pass: images/s, of ViT-B/4's (the paper: 72 x)",
        "",
        ("efficiency",),
        lambda rates: rates["mlp_b12_wi768: images/s"] / rates[VIT],
        "{:.1f} x",
    ),
)


def kind_of(found: dict[str, Any]) -> tuple[Any, ...]:
    """Figures of one kind may stand in one table."""
    return tuple(found.get(key) for key in ("machine", "commit", "num_gpus", "is_dry_run"))


def table(found: dict[str, Any]) -> str:
    """A row for each claim, measured or not; those with a goal first."""
    rows = [(row.what, row.goal, *row.cells(found)) for row in ROWS]
    lines = [
        "| | goal | found | |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    count = f"{found['num_gpus']} x " if found["num_gpus"] else ""
    place = (
        f"{count}{found['machine']}, torch {found.get('torch', 'unknown')}, commit"
        f" {found['commit']}, {found['date']}"
    )
    head = f"On {place}; every ratio is of figures of this machine and commit."
    if found.get("is_dry_run"):
        head = f"A dry run of small models at small sizes: no figure means anything. {head}"
    failed = f"\n\nFailed: {', '.join(found['failed'])}." if found["failed"] else ""
    return f"{head}\n\n" + "\n".join(lines) + failed


def write_table(found: dict[str, Any], page: Path = PAGE, *, into: Path | None = None) -> None:
    """In the place of the table on the page; `into`: a copy of it."""
    text = page.read_text()
    before, marked, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (marked and ended):
        sys.exit(
            f"{page}: has no place for the table; put the lines {BEGIN} and {END} where it belongs"
        )
    (into or page).write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


def together(places: list[Path]) -> dict[str, Any]:
    """Of one machine and commit, the later of equal names."""
    every = [json.loads(place.read_text()) for place in places]
    kinds = {kind_of(each) for each in every}
    if len(kinds) > 1:
        sys.exit(f"--table: of different machines or commits: {kinds}; give those of one")
    figures = {name: value for each in every for name, value in each["figures"].items()}
    failed = sorted({name for each in every for name in each["failed"]} - figures.keys())
    return every[-1] | {"figures": figures, "failed": failed}
