"""Table of the figures of benchmarks/gpu.py: a row for each claim, with its goal."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import HERE, markdown

PAGE = HERE.parent / "docs" / "measured.md"
BEGIN, END = "<!-- benchmarks/gpu.py writes from here -->", "<!-- to here -->"
NO_FIGURE = "its parts lack a figure"
EPOCH = 12.5e6
"""Number of images in ImageNet-21k."""
PROCESSED_EPOCH = 11_801_680
"""Number of images in the processed ImageNet-21k of Scaling MLPs."""


@dataclass(frozen=True)
class Row:
    claim: str
    goal: str
    parts: tuple[str, ...]
    """Names of the parts whose figures are the arguments of `value`."""
    value: Callable[..., Any]
    """Function of the parts' figures. It returns None if the value needs a GPU."""
    form: str = "{:.2f} x"
    is_met: Callable[[float], bool] | None = None

    def cells(self, found: dict[str, Any]) -> tuple[str, str]:
        missing = [name for name in self.parts if name not in found["figures"]]
        if failed := [name for name in missing if name in found["failed"]]:
            return f"failed: {', '.join(failed)}", ""
        if missing:
            needs_more = found["num_gpus"] == 1 and missing[0].startswith("run-ranks")
            return "only with several GPUs" if needs_more else "not run", ""
        try:
            value = self.value(*(found["figures"][name] for name in self.parts))
        except (KeyError, TypeError, ZeroDivisionError, StopIteration) as error:
            return f"{NO_FIGURE}: {type(error).__name__} {error}", ""
        if value is None:
            return "only with a GPU", ""
        verdict = ""
        if self.is_met is not None and not found.get("is_dry_run"):
            verdict = "met" if self.is_met(value) else "missed"
        return self.form.format(value), verdict


def _ending(figures: dict[str, Any], end: str) -> Any:
    return next(value for name, value in figures.items() if name.endswith(end))


def _points_apart(end: str) -> Callable[..., float]:
    return lambda one, other: float(100 * abs(_ending(one, end) - _ending(other, end)))


def _ratio_of(figure: str) -> Callable[..., float]:
    return lambda one, other: float(one[figure] / other[figure])


RATE, STEP, SHARE = "usage/images_per_s", "profile-b12-z1-compiled", "share_of_product_rate"
ROWS = (
    Row("B-12/Wi-1024 from shards: FLOP/s, fraction of a large product", ">= 60 %", (STEP, "run-b12"),
        lambda step, run: step[SHARE] * run[RATE] / step["images_per_s"], "{:.0%}", lambda x: x >= 0.6),
    Row("an epoch of 12.5 M images of 64 px, from shards", "< 25 s", ("run-b12",),
        lambda run: EPOCH / run[RATE], "{:,.1f} s", lambda x: x < 25),
    *(Row(f"{model}/Wi-1024, batch 16,384: an epoch of 11.8 M images (Scaling MLPs, 4.5)", f"about {printed_s} s on an A5000", (part,),
          lambda run: PROCESSED_EPOCH / run[RATE], "{:,.0f} s") for model, printed_s, part in (("B-12", 450, "run-b12"), ("B-6", 250, "run-b6"))),
    *(Row(f"{model}/Wi-1024, batch 16,384: memory that torch reserves on one GPU (Scaling MLPs, 4.5)", "< 24 GB", (part,),
          lambda run: run.get("usage/peak_gpu_reserved_gb"), "{:,.1f} GiB", lambda x: x * 2**30 < 24e9)
      for model, part in (("B-12", "run-b12"), ("B-6", "run-b6"))),
    Row("fraction of its time spent waiting for data", "<= 2 %", ("run-b12",),
        lambda run: run["usage/data_wait_fraction"], "{:.1%}", lambda x: x <= 0.02),
    Row("augmentation, fraction of the time of an augmented step", "<= 5 %", (f"{STEP}-augmented", STEP),
        lambda augmented, plain: 1 - plain["ms"] / augmented["ms"], "{:.1%}", lambda x: x <= 0.05),
    Row("B-12/Wi-1024, ZeRO 1 on one GPU: time of a step relative to plain DDP", "<= 1.03 x", ("train-mlp",),
        lambda train: 1 / _ending(train, "resident of plain DDP"), is_met=lambda x: x <= 1.03),
    Row("Mixer-B-W at 224 px: images/s relative to timm, both compiled", ">= 1.15 x", ("models-mixer",),
        lambda models: _ending(models, "compiled of timm"), is_met=lambda x: x >= 1.15),
    Row("features for a probe, from shards to a file: fraction of the forward pass in images/s", ">= 80 %", ("probe-rate",),
        lambda probe: probe["features of forward"], "{:.0%}", lambda x: x >= 0.8),
    Row("probe of bf16 features compared with fp32, same cell, top-1", "<= 0.1 point", ("probe-fp32", "probe-bf16"),
        _points_apart("test_top1"), "{:.2f} points", lambda x: x <= 0.1),
    Row("evaluation in bf16 compared with fp32, top-1", "<= 0.1 point", ("evaluate-fp32", "evaluate-bf16"),
        _points_apart("/top1"), "{:.2f} points", lambda x: x <= 0.1),
    Row("weak scaling from one GPU to all: images/s per GPU, fraction of one GPU", "", ("run-ranks-z1", "run-b12"),
        lambda ranks, one: ranks[RATE] / one[RATE] / ranks["ranks"], "{:.0%}"),
    *(Row(f"ZeRO {stage}{', eager,' * (stage == 3)} on all GPUs: images/s relative to ZeRO 1", "", (f"run-ranks-z{stage}", "run-ranks-z1"),
          _ratio_of(RATE)) for stage in (0, 2, 3)),
    Row("B-12/Wi-1024, the step without loading", "", (STEP,), lambda step: step["ms"], "{:,.1f} ms"),
    Row("B-12/Wi-1024, the step without loading: FLOP/s, fraction of a large product", "", (STEP,), lambda step: step[SHARE], "{:.0%}"),
    Row("the large product, in bf16", "", (STEP,), lambda step: step["product_rate_teraflops"], "{:,.3g} TFLOP/s"),
    Row("idle device in that step, fraction of its time", "", (STEP,), lambda step: step["device_idle_fraction"], "{:.1%}"),
    *(Row(f"B-12/Wi-1024, ZeRO {stage} on one GPU: time of a step relative to ZeRO 1", "", (f"profile-b12-z{stage}-compiled", STEP),
          _ratio_of("ms")) for stage in (0, 2)),
    Row("B-12/Wi-1024, eager: time of a step relative to the compiled step", "", ("profile-b12-z1-eager", STEP), _ratio_of("ms")),
    Row("Mixer-B-W at 224 px, the step without loading: FLOP/s, fraction of a large product", "", ("profile-mixer-z1-compiled",),
        lambda step: step[SHARE], "{:.0%}"),
    Row("Mixer-B-W at 224 px, eager: time of a step relative to the compiled step", "", ("profile-mixer-z1-eager", "profile-mixer-z1-compiled"),
        _ratio_of("ms")),
    Row("Mixer-B-W at 224 px, from shards", "", ("run-mixer",), lambda run: run[RATE], "{:,.0f} images/s"),
    Row("Mixer-B-W at 224 px, ZeRO 1 on one GPU: time of a step relative to plain DDP", "", ("train-mixer",),
        lambda train: 1 / _ending(train, "resident of plain DDP")),
    Row("B-12/Wi-1024, forward and backward: images/s, fraction of only its products", "", ("models-b12",),
        lambda models: _ending(models, "of products"), "{:.0%}"),
    Row("an epoch of a linear probe: time with forward passes relative to stored features", "", ("probe-rate",),
        lambda probe: probe["an epoch of the public way's"], "{:.1f} x"),
    Row("B-12/Wi-1024, step of fine-tuning: images/s relative to pretraining", "", ("train-mlp",),
        lambda train: _ending(train, "tuning of resident")),
    Row("evaluation of raw images by B-12/Wi-1024: images/s, fraction of the forward pass", "", ("evaluate-rate",),
        lambda rates: _ending(rates, "evaluate of forward"), "{:.0%}"),
    Row("B-12/Wi-768, one forward pass: images/s relative to ViT-B/4 (the paper: 72 x)", "", ("efficiency",),
        lambda rates: rates["mlp_b12_wi768: images/s"] / rates["vit_b_4: images/s"], "{:.1f} x"),
)  # fmt: skip


def kind_of(found: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties that all figures of a table share, such as commit and machine."""
    return tuple(found.get(key) for key in ("machine", "commit", "num_gpus", "is_dry_run"))


def table(found: dict[str, Any]) -> str:
    count = f"{found['num_gpus']} x " if found["num_gpus"] else ""
    place = f"{count}{found['machine']}, torch {found.get('torch', 'unknown')}, commit {found['commit']}, {found['date']}"  # fmt: skip
    head = f"On {place}; all ratios are between figures of this machine and commit."
    if found.get("is_dry_run"):
        head = f"A dry run of small models at small sizes. Ignore the figures. {head}"
    rows = ((row.claim, row.goal, *row.cells(found)) for row in ROWS)
    lines = markdown(("", "goal", "found", ""), rows)
    failed = f"\n\nFailed: {', '.join(found['failed'])}." if found["failed"] else ""
    return f"{head}\n\n" + "\n".join(lines) + failed


def write_table(found: dict[str, Any], page: Path = PAGE, *, into: Path | None = None) -> None:
    """Replace the table in `page`, or write a copy of the page with the new table to `into`."""
    text = page.read_text()
    before, began, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (began and ended):
        sys.exit(f"{page}: the page has no place for the table. Add {BEGIN} and {END}.")
    (into or page).write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


def together(places: list[Path]) -> dict[str, Any]:
    """Merge the figures of several calls on one machine and commit."""
    every = [json.loads(place.read_text()) for place in places]
    if len(kinds := {kind_of(each) for each in every}) > 1:
        sys.exit(f"--table: the files need one machine and commit, but have {kinds}.")
    figures = {name: value for each in every for name, value in each["figures"].items()}
    failed = sorted({name for each in every for name in each["failed"]} - figures.keys())
    return every[-1] | {"figures": figures, "failed": failed}
