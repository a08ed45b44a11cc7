"""What is claimed of GPUs, measured on those that there are (1 or 8), beside its goal; and the table of it in docs/measured.md.

    .venv/bin/python benchmarks/gpu.py [--only step,data,peers] [--names 'profile-* run-*']
    .venv/bin/python benchmarks/gpu.py --quick              a dry run at small sizes, on a CPU, too; writes no table
    .venv/bin/python benchmarks/gpu.py --table FOUND ...    the table of what was measured elsewhere

Each part is a command of its own with a time limit, one after the other; what fails is named, and the rest goes on. Figures are
added to those of the same machine and commit in `--out`, so that parts may be run in several calls (benchmarks/gpu/measure.sh).
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import HERE, commit, machine

KIT, PAGE = "benchmarks/gpu", HERE.parent / "docs" / "measured.md"
BEGIN, END = "<!-- benchmarks/gpu.py writes from here -->", "<!-- to here -->"
RUNS, DATA = "runs/gpu-measured", "data/gpu"
EPOCH = 12.5e6
"""Pictures, as ImageNet-21k has them."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Part:
    group: str
    name: str
    limit_s: int
    words: tuple[str, ...]
    """Of python."""
    shown: int = 14
    """Lines of the end of its output."""


def parts(*, quick: bool, num_gpus: int) -> list[Part]:
    """All of them, in the order that matters if time is short; a dry run has the same commands at small sizes."""
    return [*_steps(quick=quick), *_data(quick=quick, num_ranks=2 if quick else num_gpus), *_peers(quick=quick)]


def _steps(*, quick: bool) -> list[Part]:
    b12 = "--model mlp_b6_wi256 --batch 64 --classes 101 --rounds 1 --steps 1" if quick else ""
    small = "--model mixer_ss_w --batch 4 --classes 10 --rounds 1 --steps 1"
    mixer = small if quick else "--model mixer_b_w --batch 512 --classes 1000"
    profiles = {
        "b12-z1-compiled": f"{b12} --compile",
        "b12-z1-compiled-augmented": f"{b12} --compile --augment",
        "b12-z1-eager": b12,
        "mixer-z1-compiled": f"{mixer} --compile",
        "b12-z0-compiled": f"{b12} --compile --stage 0",
        "mixer-z1-eager": mixer,
        "b12-z2-compiled": f"{b12} --compile --stage 2",
    }
    found = [Part("step", "pieces", 240, (f"{KIT}/pieces.py", *(["--only", "loss,lion,augment"] if quick else [])), 70)]
    for name, words in profiles.items():
        found.append(Part("step", f"profile-{name}", 110, (f"{KIT}/profile_step.py", *words.split()), 22))
    return found


def _data(*, quick: bool, num_ranks: int) -> list[Part]:
    pictures, classes, large, batch = (2048, 101, 256, 256) if quick else (98_304, 11_230, 4096, 16_384)
    sizes = {64: ("--pictures", str(pictures), "--classes", str(classes)), 224: ("--pictures", str(large), "--classes", "100")}
    steps, mixed, mixer_batch = ("4 steps", "2 steps", 4) if quick else ("300 steps", "60 steps", 1024)
    eager = ["engine.compile=false"] if quick else []
    small = ["model={preset: mlp_b6_wi256}", *eager] if quick else []

    def run(name: str, config: str, *words: str) -> Part:
        base = (f"run_dir={RUNS}/{name}", "data.eval_split=null", "tracking.enabled=false")
        return Part("data", f"run-{name}", 170, ("-m", "pretrain", "train", f"configs/pretrain/{config}.yaml", *base, *words), 3)

    def make(size: int) -> Part:
        return Part(
            "data", f"make-{size}", 120, (f"{KIT}/make_data.py", f"{DATA}/noise-{size}", "--size", str(size), *sizes[size]), 2
        )

    def b12(name: str, batch: int, *words: str) -> Part:
        lengths = (
            f"train.duration={steps}",
            f"train.global_batch_size={batch}",
            "train.log_every_steps=20",
            f"checkpoint.every={steps}",
        )
        return run(name, "imagenet21k_b12_wi1024_paper", f"data.dataset={DATA}/noise-64", *lengths, *small, *words)

    rates = ("--batch", str(batch), *(("--seconds", "0.5") if quick else ()))
    found = [
        make(64),
        Part("data", "data-rates", 100, (f"{KIT}/data_rates.py", f"{DATA}/noise-64", *rates), 9),
        b12("b12", batch),
        make(224),
    ]  # fmt: skip
    lengths = (
        f"train.duration={mixed}",
        f"train.global_batch_size={mixer_batch}",
        "schedule.warmup=1 steps",
        f"checkpoint.every={mixed}",
    )
    found.append(run("mixer", "imagenet1k_mixer_b_w", f"data.dataset={DATA}/noise-224", *lengths, *eager))
    if num_ranks > 1:
        found.append(b12("ranks", batch * num_ranks, "--ranks", str(num_ranks)))
    return found


def _peers(*, quick: bool) -> list[Part]:
    models = ("--batch", "1", "--compile", "no", "--rounds", "1") if quick else ("--rounds", "5")
    efficiency = ("--batch", "1", "--no-compile") if quick else ()
    return [
        Part("peers", "models-mixer", 200, ("benchmarks/models.py", "--only", "mixer_b_w", *models), 16),
        Part("peers", "train-mlp", 300, ("benchmarks/train.py", "--quick", "--only", "mlp"), 16),
        Part("peers", "probe-rate", 120, ("benchmarks/transfer_probe.py", "--quick"), 30),
        *_parity(quick=quick),
        Part("peers", "models-b12", 160, ("benchmarks/models.py", "--only", "mlp_b12_wi1024", *models), 16),
        Part("peers", "train-mixer", 200, ("benchmarks/train.py", "--quick", "--only", "mixer"), 16),
        Part("peers", "tune-rate", 150, ("benchmarks/transfer_tune.py", "--quick"), 16),
        Part("peers", "evaluate-rate", 150, ("benchmarks/transfer_evaluate.py", "--quick"), 40),
        Part("peers", "efficiency", 150, ("-m", "analysis", "efficiency", "--quick", *efficiency), 12),
    ]


def _parity(*, quick: bool) -> list[Part]:
    """A small model that has learned something, judged in both precisions; and the bits of a run that was stopped."""
    data, length = ("dataset=data/demo-pretrain",), (f"train.duration={'40 steps' if quick else '4 epochs'}",)
    words = {
        "parity-data": ("-m", "data_prep", "build", "configs/data_prep/demo_pretrain.yaml"),
        "parity-data-transfer": ("-m", "data_prep", "build", "configs/data_prep/demo_transfer.yaml"),
        "parity-train": ("-m", "pretrain", "train", "configs/pretrain/demo_mlp.yaml", *data, f"run_dir={RUNS}/parity", *length),
    }  # fmt: skip
    for precision in ("fp32", "bf16"):
        run = (f"run_dir={RUNS}/evaluate-{precision}", f"precision={precision}", "tracking.enabled=false")
        words[f"evaluate-{precision}"] = ("-m", "finetune", "evaluate", f"pretrained={RUNS}/parity", *data, *run)
    words["resume"] = (f"{KIT}/resume.py", "engine.zero_stage=1", "engine.precision=bf16")
    return [Part("peers", name, 150, each, 3) for name, each in words.items()]


# ---- running them -----------------------------------------------------------------------------------------------------


class Measuring:
    """Runs parts and gathers their figures, by the name of the part."""

    def __init__(self, *, logs: Path, until_s: float, slow: int):
        self.logs, self.until_s, self.slow = logs, until_s, slow
        self.found: dict[str, Figures] = {}
        self.failed: list[str] = []
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, part: Part) -> None:
        limit_s, log, figures = (
            min(part.limit_s * self.slow, self.until_s - time.monotonic()),
            self.logs / f"{part.name}.log",
            self.logs / "figures.json",
        )
        if limit_s < 15:
            self.failed.append(part.name)
            self._say("none    ", part.name, "no time was left")
            return
        figures.unlink(missing_ok=True)
        if part.name.startswith(("run-", "evaluate-", "parity-train")):
            for place in (each.partition("=")[2] for each in part.words if each.startswith("run_dir=")):
                shutil.rmtree(place, ignore_errors=True)
        began_s = time.monotonic()
        with log.open("w") as file:
            environment = {
                **os.environ,
                "BENCHMARK_FIGURES": str(figures),
                "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
            }
            process = subprocess.Popen(
                [sys.executable, *part.words], stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = -1
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        took_s = time.monotonic() - began_s
        print("\n".join(_last_lines(log, part.shown)), flush=True)
        self._say({0: "ok      ", -1: "TIMEOUT "}.get(code, "FAILED  "), part.name, f"({took_s:.0f} s, exit {code})")
        if code:
            self.failed.append(part.name)
        else:
            read = dict(json.loads(figures.read_text())) if figures.exists() else {}
            self.found[part.name] = read | _of_run(part) | {"seconds": round(took_s, 1)}

    def _say(self, word: str, name: str, rest: str) -> None:
        print(f"{word} {name} {rest}", flush=True)
        with (self.logs / "verdicts").open("a") as file:
            file.write(f"{word} {name} {rest}\n")


def _last_lines(path: Path, count: int) -> list[str]:
    lines = [line.rpartition("\r")[2][:190] for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if line.strip() and "Warning" not in line and not line.startswith("[W")][-count:]


def _of_run(part: Part) -> Figures:
    """What a run of ours has written: its readings of speed (the median of those after the first), or its scores."""
    run = next((Path(each.partition("=")[2]) for each in part.words if each.startswith("run_dir=")), None)
    if run is None:
        return {}
    found: Figures = {}
    if (run / "result.json").exists():
        found = {
            name: value for name, value in json.loads((run / "result.json").read_text()).items() if isinstance(value, (int, float))
        }
    journal = run / "tracking" / "journal.jsonl"
    lines = [json.loads(line).get("values", {}) for line in journal.read_text().splitlines()] if journal.exists() else []
    readings = [values for values in lines if "usage/images_per_s" in values]
    later = readings[1:] or readings
    for name in later[-1] if later else ():
        if name.startswith("usage/"):
            found[name] = statistics.median(each[name] for each in later if name in each)
    return found


# ---- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    what: str
    goal: str
    value: Callable[[dict[str, Figures]], float]
    form: str
    """Of the value."""
    is_met: Callable[[float], bool] | None = None


def _share_from_shards(found: dict[str, Figures]) -> float:
    """The FLOPs of an image, and the rate of products, are those of the profile of the same model."""
    profile = found["profile-b12-z1-compiled"]
    return float(profile["share_of_product_rate"] * found["run-b12"]["usage/images_per_s"] / profile["images_per_s"])


def _augmentation(found: dict[str, Figures]) -> float:
    with_it, without = (found[f"profile-b12-z1-compiled{each}"]["ms"] for each in ("-augmented", ""))
    return float(1 - without / with_it)


def _parity_of(found: dict[str, Figures]) -> float:
    one, other = (
        next(value for name, value in found[f"evaluate-{each}"].items() if name.endswith("top1")) for each in ("fp32", "bf16")
    )
    return float(100 * abs(one - other))


def _same_bits(found: dict[str, Figures]) -> float:
    return float(found["resume"]["seconds"])  # which a part has that did not fail


def _of_ranks(found: dict[str, Figures]) -> float:
    of_all, of_one = (found[name]["usage/images_per_s"] for name in ("run-ranks", "run-b12"))
    return float(of_all / of_one / found["gpus"]["count"])


def _of(part: str, figure: str) -> Callable[[dict[str, Figures]], float]:
    return lambda found: float(found[part][figure])


RATE, ZERO, TIMM = "usage/images_per_s", "mlp: resident of plain DDP", "mixer_b_w: compiled of timm"
FEATURES, STEP = "features of forward", "profile-b12-z1-compiled"
ROWS = (
    Row("B-12/Wi-1024 from shards, of a large product's rate", ">= 60 %", _share_from_shards, "{:.0%}", lambda x: x >= 0.6),
    Row(
        "an epoch of 12.5 M pictures of 64 px, from shards",
        "< 25 s",
        lambda f: EPOCH / f["run-b12"][RATE],
        "{:.1f} s",
        lambda x: x < 25,
    ),
    Row("waiting for data in it", "<= 2 %", _of("run-b12", "usage/data_wait_share"), "{:.1%}", lambda x: x <= 0.02),
    Row("B-12/Wi-1024, the step alone", "", _of(STEP, "ms"), "{:.1f} ms"),
    Row("the device idle in it", "", _of(STEP, "device_idle_share"), "{:.1%}"),
    Row("augmentation, of the step with it", "<= 5 %", _augmentation, "{:.1%}", lambda x: x <= 0.05),
    Row("plain DDP's rate, of ZeRO 1's on one GPU", "<= 1.03", lambda f: 1 / f["train-mlp"][ZERO], "{:.2f}", lambda x: x <= 1.03),
    Row(
        "Mixer-B-W at 224 px, of timm's rate, both compiled", ">= 1.15", _of("models-mixer", TIMM), "{:.2f} x", lambda x: x >= 1.15
    ),
    Row("Mixer-B-W from shards", "", _of("run-mixer", RATE), "{:,.0f} images/s"),
    Row("probe features, of the forward pass alone", ">= 80 %", _of("probe-rate", FEATURES), "{:.0%}", lambda x: x >= 0.8),
    Row("evaluation in bf16 beside fp32, top-1", "<= 0.1 point", _parity_of, "{:.2f} points", lambda x: x <= 0.1),
    Row("stopped and gone on, beside a run that was not", "the same bits", _same_bits, "the same bits", lambda _: True),
    Row("images/s of all GPUs, of as many times one GPU's", "", _of_ranks, "{:.0%}"),
)


def table(found: dict[str, Any]) -> str:
    lines = ["| | goal | found | |", "|---|---|---|---|"]
    for row in ROWS:
        try:
            value = row.value(found["figures"] | {"gpus": {"count": found["num_gpus"]}})
        except (KeyError, TypeError, ZeroDivisionError, StopIteration):
            continue  # its parts were not run, or failed
        verdict = "" if row.is_met is None else "met" if row.is_met(value) else "missed"
        lines.append(f"| {row.what} | {row.goal} | {row.form.format(value)} | {verdict} |")
    head = f"On {found['num_gpus']} x {found['machine']}, commit {found['commit']}, {found['date']}; every ratio within one run."
    failed = f"\n\nFailed: {', '.join(found['failed'])}." if found["failed"] else ""
    return f"{head}\n\n" + "\n".join(lines) + failed


def write_table(found: dict[str, Any], page: Path = PAGE) -> None:
    text = page.read_text()
    before, marked, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (marked and ended):
        sys.exit(f"{page}: has no place for the table; put the lines {BEGIN} and {END} where it belongs")
    page.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


def together(places: list[Path]) -> dict[str, Any]:
    """Of one machine and commit, the later of equal names."""
    every = [json.loads(place.read_text()) for place in places]
    kinds = {(each["machine"], each["commit"], each["num_gpus"]) for each in every}
    if len(kinds) > 1:
        sys.exit(f"--table: of different machines or commits: {kinds}; give those of one")
    figures = {name: value for each in every for name, value in each["figures"].items()}
    failed = sorted({name for each in every for name in each["failed"]} - figures.keys())
    return every[-1] | {"figures": figures, "failed": failed}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dry run, on a CPU, too; writes no table")
    parser.add_argument("--only", default="step,data,peers", help="groups of parts")
    parser.add_argument("--names", default="*", help="globs of parts")
    parser.add_argument("--budget-s", type=int, default=3600, help="of all together")
    parser.add_argument("--slow", type=int, default=1, help="limits are so many times as long")
    parser.add_argument("--out", type=Path, default=Path(RUNS) / "found.json")
    parser.add_argument("--logs", type=Path, default=Path(RUNS) / "logs")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FOUND", help="measure nothing; write the table of these")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.table:
        write_table(together(options.table))
        return 0
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus and not options.quick:
        sys.exit("no GPU here: --quick is a dry run, whose numbers mean nothing")
    os.chdir(HERE.parent)
    measuring = Measuring(logs=options.logs, until_s=time.monotonic() + options.budget_s, slow=options.slow)
    for part in parts(quick=options.quick, num_gpus=num_gpus):
        if part.group in options.only.split(",") and any(fnmatch.fnmatch(part.name, each) for each in options.names.split()):
            measuring.run(part)
    found: dict[str, Any] = {
        "machine": re.sub("^NVIDIA ", "", machine()),
        "commit": commit(),
        "num_gpus": num_gpus,
        "date": time.strftime("%F"),
    }
    found |= {"figures": measuring.found, "failed": measuring.failed}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if all(before[key] == found[key] for key in ("machine", "commit", "num_gpus")):
            found["figures"] = before["figures"] | found["figures"]
            found["failed"] = sorted({*before["failed"], *found["failed"]} - measuring.found.keys())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    print(f"\n{table(found)}")
    if not options.quick:
        write_table(found)
    return int(bool(measuring.failed))


if __name__ == "__main__":
    sys.exit(main())
