"""What is claimed of GPUs, measured on those that there are (1 or 8), beside its goal; and the
table of it in docs/measured.md.

    .venv/bin/python benchmarks/gpu.py [--only step,data,peers] [--names 'profile-* run-*']
    .venv/bin/python benchmarks/gpu.py --quick              a dry run at small sizes, on a CPU, too; its table goes beside --out
    .venv/bin/python benchmarks/gpu.py --table FOUND ...    the table of what was measured elsewhere

Each part is a command of its own with a time limit, one after the other; what fails is named in the
table, makes the exit status 1, and does not keep the rest from going on. Figures are kept after
each part, beside those of the same machine and commit in `--out`, so that parts may be run in
several calls (benchmarks/gpu/measure.sh).
"""

import argparse
import fnmatch
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import HERE, commit, machine
from gpu_table import NO_FIGURE, PAGE, Figures, kind_of, table, together, write_table

KIT, RUNS, DATA = "benchmarks/gpu", "runs/gpu-measured", "data/gpu"


@dataclass(frozen=True)
class Part:
    group: str
    name: str
    limit_s: int
    words: tuple[str, ...]
    """Of python."""
    shown: int = 14
    """Lines of the end of its output."""
    environment: tuple[tuple[str, str], ...] = ()


def parts(*, quick: bool, num_gpus: int) -> list[Part]:
    """All of them, in the order that matters if time is short; a dry run has the same commands at
    small sizes."""
    return [
        *_steps(quick=quick),
        *_data(quick=quick, num_ranks=num_gpus or 2),
        *_peers(quick=quick),
    ]


def _steps(*, quick: bool) -> list[Part]:
    b12 = "--model mlp_b6_wi256 --batch 16 --classes 101 --rounds 1 --steps 1" if quick else ""
    small = "--model smixer_c32 --batch 4 --classes 10 --rounds 1 --steps 1"
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
    found = [
        Part(
            "step",
            "pieces",
            240,
            (f"{KIT}/pieces.py", *(["--only", "loss,lion,augment"] if quick else [])),
            70,
        )
    ]
    for name, words in profiles.items():
        found.append(
            Part("step", f"profile-{name}", 110, (f"{KIT}/profile_step.py", *words.split()), 22)
        )
    return found


def _data(*, quick: bool, num_ranks: int) -> list[Part]:
    pictures, classes, large, batch = (
        (2048, 101, 128, 32) if quick else (98_304, 11_230, 4096, 16_384)
    )
    sizes = {
        64: ("--pictures", str(pictures), "--classes", str(classes)),
        224: ("--pictures", str(large), "--classes", "100"),
    }
    steps, mixed, mixer_batch = (
        ("4 steps", "2 steps", 4) if quick else ("300 steps", "60 steps", 1024)
    )
    eager = ["engine.compile=false"] if quick else []
    small = ["model={preset: mlp_b6_wi256}", *eager] if quick else []
    smallest = (
        ["model={kind: mixer, patch_size: 32, num_channels: 64, depth: 2}", *eager] if quick else []
    )

    def run(name: str, config: str, *words: str) -> Part:
        base = (f"run_dir={RUNS}/{name}", "data.eval_split=null", "tracking.enabled=false")
        return Part(
            "data",
            f"run-{name}",
            170,
            ("-m", "pretrain", "train", f"configs/pretrain/{config}.yaml", *base, *words),
            3,
        )

    def make(size: int) -> Part:
        return Part(
            "data",
            f"make-{size}",
            120,
            (f"{KIT}/make_data.py", f"{DATA}/noise-{size}", "--size", str(size), *sizes[size]),
            2,
        )

    def b12(name: str, batch: int, *words: str) -> Part:
        lengths = (
            f"train.duration={steps}",
            f"train.global_batch_size={batch}",
            "train.log_every_steps=20",
            f"checkpoint.every={steps}",
        )
        return run(
            name,
            "imagenet21k_b12_wi1024_paper",
            f"data.dataset={DATA}/noise-64",
            *lengths,
            *small,
            *words,
        )

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
    found.append(
        run("mixer", "imagenet1k_mixer_b_w", f"data.dataset={DATA}/noise-224", *lengths, *smallest)
    )
    for stage in (1, 0, 2, 3) if num_ranks > 1 else ():
        how = (
            f"engine.zero_stage={stage}",
            *(["engine.compile=false"] if stage == 3 else []),
        )  # which cannot be compiled
        found.append(b12(f"ranks-z{stage}", batch * num_ranks, *how, "--ranks", str(num_ranks)))
    return found


def _peers(*, quick: bool) -> list[Part]:
    models = ("--batch", "1", "--compile", "no", "--rounds", "1") if quick else ("--rounds", "5")
    mixer = (
        ("mixer_ss_w", "--batch", "1", "--compile", "blocks", "--rounds", "1")
        if quick
        else ("mixer_b_w_c3", "--rounds", "5")
    )
    efficiency = ("--batch", "1", "--no-compile") if quick else ()
    size = "--dry-run" if quick else "--quick"
    return [
        Part("peers", "models-mixer", 200, ("benchmarks/models.py", "--only", *mixer), 16),
        Part("peers", "train-mlp", 300, ("benchmarks/train.py", size, "--only", "mlp"), 16),
        Part("peers", "probe-rate", 120, ("benchmarks/transfer_probe.py", size), 30),
        *_parity(quick=quick),
        Part(
            "peers",
            "models-b12",
            160,
            ("benchmarks/models.py", "--only", "mlp_b12_wi1024", *models),
            16,
        ),
        Part("peers", "train-mixer", 200, ("benchmarks/train.py", size, "--only", "mixer"), 16),
        Part("peers", "tune-rate", 150, ("benchmarks/transfer_tune.py", size), 16),
        Part("peers", "evaluate-rate", 150, ("benchmarks/transfer_evaluate.py", size), 40),
        Part(
            "peers",
            "efficiency",
            150,
            ("-m", "analysis", "efficiency", "--quick", "--out", f"{RUNS}/efficiency", *efficiency),
            12,
        ),
    ]


def _parity(*, quick: bool) -> list[Part]:
    """A small model that has learned something, judged in both precisions on as many pictures as
    tell a tenth of a point; and the bits of a run that was stopped."""
    data, length = (
        "dataset=data/demo-pretrain",
        f"train.duration={'20 steps' if quick else '4 epochs'}",
    )
    build, per_class = ("-m", "data_prep", "build"), 10 if quick else 1000
    judged = (
        f"out={DATA}/judged",
        "source.num_train_per_class=1",
        f"source.num_val_per_class={per_class}",
    )
    transfer = (
        f"out={DATA}/transfer",
        f"source.num_train_per_class={min(per_class, 320)}",
        judged[-1],
    )
    words = {
        "parity-data": (*build, "configs/data_prep/demo_pretrain.yaml"),
        "parity-judged": (*build, "configs/data_prep/demo_pretrain.yaml", *judged),
        "parity-transfer": (*build, "configs/data_prep/demo_transfer.yaml", *transfer),
        "parity-train": (
            "-m",
            "pretrain",
            "train",
            "configs/pretrain/demo_mlp.yaml",
            data,
            f"run_dir={RUNS}/parity",
            length,
        ),
    }
    one_cell, model = ("optimizer=lion", "lrs=1e-2", "weight_decays=1"), f"pretrained={RUNS}/parity"
    for each in ("fp32", "bf16"):
        run = (f"run_dir={RUNS}/evaluate-{each}", f"precision={each}", "tracking.enabled=false")
        words[f"evaluate-{each}"] = (
            "-m",
            "finetune",
            "evaluate",
            model,
            f"dataset={DATA}/judged",
            *run,
        )
        run = (
            f"run_dir={RUNS}/probe-{each}",
            f"feature_precision={each}",
            *one_cell,
            "tracking.enabled=false",
        )
        words[f"probe-{each}"] = (
            "-m",
            "finetune",
            "probe",
            "configs/probe/demo.yaml",
            model,
            f"dataset={DATA}/transfer",
            *run,
        )
    words["resume"] = (f"{KIT}/resume.py", "engine.zero_stage=1", "engine.precision=bf16")
    few = (("RESUME_STEPS", "18"),) if quick else ()
    return [
        Part("peers", name, 150, each, 3, few if name == "resume" else ())
        for name, each in words.items()
    ]


# ---- running them
# -----------------------------------------------------------------------------------------------------


class Measuring:
    """Runs parts and keeps what they found, by the name of the part, in a file that is whole after
    each. A dry run may run groups beside each other, each in a thread."""

    def __init__(self, found: dict[str, Any], *, out: Path, logs: Path, until_s: float, slow: int):
        self.found, self.out, self.logs, self.until_s, self.slow = found, out, logs, until_s, slow
        self.failed: list[str] = []
        self.is_stopped, self._one_at_a_time = threading.Event(), threading.Lock()
        self.compiled = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{HERE.parent}/{RUNS}/compiled-{os.getpid()}"
        )
        logs.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and kind_of(before := json.loads(out.read_text())) == kind_of(found):
            found |= {"figures": before["figures"], "failed": before["failed"]}

    def run(self, part: Part) -> None:
        limit_s, log = (
            min(part.limit_s * self.slow, self.until_s - time.monotonic()),
            self.logs / f"{part.name}.log",
        )
        if limit_s < 15 or self.is_stopped.is_set():
            with self._one_at_a_time:
                self._keep(part, None, "none    ", "no time was left")
            return
        figures = self.logs.absolute() / f"{part.name}.json"
        figures.unlink(missing_ok=True)
        if part.name.startswith(("run-", "evaluate-", "probe-", "parity-train")):
            for place in (
                each.partition("=")[2] for each in part.words if each.startswith("run_dir=")
            ):
                shutil.rmtree(place, ignore_errors=True)
        began_s, code = (
            time.monotonic(),
            self._code_of(part, log=log, figures=figures, limit_s=limit_s),
        )
        took_s = time.monotonic() - began_s
        found, word, lines = (
            None,
            "TIMEOUT " if code == -1 else "FAILED  ",
            _last_lines(log, part.shown),
        )
        if code == 0:
            try:
                read = dict(json.loads(figures.read_text())) if figures.exists() else {}
                found, word = (
                    read | _of_run(part) | _of_log(part, log) | {"seconds": round(took_s, 1)},
                    "ok      ",
                )
            except (OSError, ValueError) as error:
                lines.append(f"its figures cannot be read: {error}")
        with self._one_at_a_time:
            print("\n".join(lines))
            self._keep(part, found, word, f"({took_s:.0f} s, exit {code})")

    def _code_of(self, part: Part, *, log: Path, figures: Path, limit_s: float) -> int:
        """-1: it took longer than it may."""
        paths = f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
        environment = {
            **os.environ,
            **dict(part.environment),
            "BENCHMARK_FIGURES": str(figures),
            "PYTHONPATH": paths,
        }
        environment["TORCHINDUCTOR_CACHE_DIR"] = self.compiled
        how: dict[str, Any] = {
            "stderr": subprocess.STDOUT,
            "env": environment,
            "start_new_session": True,
        }
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, *part.words], stdout=file, **how)
            try:
                ends_s = time.monotonic() + limit_s
                while (
                    process.poll() is None
                    and time.monotonic() < ends_s
                    and not self.is_stopped.wait(0.1)
                ):
                    pass
                return -1 if process.poll() is None else process.returncode
            finally:  # after Ctrl-C, too
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait()
                    # a compiler that is killed leaves half a file, which the next part would load
                    self.compiled += "-anew"

    def _keep(self, part: Part, figures: Figures | None, word: str, rest: str) -> None:
        known = {name: each for name, each in self.found["figures"].items() if name != part.name}
        failed = set(self.found["failed"]) - {part.name}
        if figures is None:
            self.failed.append(part.name)
            failed.add(part.name)
        else:
            known[part.name] = figures
        self.found |= {"figures": known, "failed": sorted(failed)}
        self.out.write_text(json.dumps(self.found, indent=1))
        print(f"{word} {part.name} {rest}", flush=True)
        with (self.logs / "verdicts").open("a") as file:
            file.write(f"{word} {part.name} {rest}\n")


def _last_lines(path: Path, count: int) -> list[str]:
    lines = [
        line.rpartition("\r")[2][:190] for line in path.read_text(errors="replace").splitlines()
    ]
    return [
        line
        for line in lines
        if line.strip() and "Warning" not in line and not line.startswith("[W")
    ][-count:]


def _of_run(part: Part) -> Figures:
    """What a run of ours has written: its readings of speed (the median of those after the first),
    or its scores."""
    run = next(
        (Path(each.partition("=")[2]) for each in part.words if each.startswith("run_dir=")), None
    )
    if run is None:
        return {}
    found: Figures = {}
    if (run / "result.json").exists():
        found = {
            name: value
            for name, value in json.loads((run / "result.json").read_text()).items()
            if isinstance(value, (int, float))
        }
    journal = run / "tracking" / "journal.jsonl"
    lines = (
        [json.loads(line).get("values", {}) for line in journal.read_text().splitlines()]
        if journal.exists()
        else []
    )
    readings = [values for values in lines if "usage/images_per_s" in values]
    later = readings[1:] or readings
    for name in later[-1] if later else ():
        if name.startswith("usage/"):
            found[name] = statistics.median(each[name] for each in later if name in each)
    return found


def _of_log(part: Part, log: Path) -> Figures:
    """What is said in words, or in a table, alone."""
    if part.name == "resume":
        return {"was stopped": "says nothing" not in log.read_text(errors="replace")}
    if part.name != "efficiency":
        return {}
    import pyarrow.parquet as pq

    rows = pq.read_table(f"{RUNS}/efficiency.parquet").to_pylist()
    return {f"{row['model']}: images/s": row["images_per_s"] for row in rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a dry run, on a CPU, too; leaves docs/measured.md as it is",
    )
    parser.add_argument("--only", default="step,data,peers", help="groups of parts")
    parser.add_argument("--names", default="*", help="globs of parts")
    parser.add_argument("--budget-s", type=int, default=3600, help="of all together")
    parser.add_argument(
        "--slow", type=int, help="limits are so many times as long (default: 1; of a dry run 6)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="what was found (default: found.json, of a dry run dry.json, in runs/gpu-measured)",
    )
    parser.add_argument("--logs", type=Path, default=Path(RUNS) / "logs")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FOUND",
        help="measure nothing; write the table of these",
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.table:
        found = together(options.table)
        if found.get("is_dry_run"):
            sys.exit(
                f"--table: {options.table[0]} is of a dry run, whose figures mean nothing; give"
                " what was measured"
            )
        write_table(found)
        return 0
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus and not options.quick:
        sys.exit("no GPU here: --quick is a dry run, whose numbers mean nothing")
    os.chdir(HERE.parent)
    found = {
        "machine": re.sub("^NVIDIA ", "", machine()),
        "torch": torch.__version__,
        "commit": commit(),
        "num_gpus": num_gpus,
    }
    found |= {"is_dry_run": options.quick, "date": time.strftime("%F"), "figures": {}, "failed": []}
    out = options.out or Path(RUNS) / ("dry.json" if options.quick else "found.json")
    slow = options.slow or (6 if options.quick else 1)
    measuring = Measuring(
        found, out=out, logs=options.logs, until_s=time.monotonic() + options.budget_s, slow=slow
    )
    groups: dict[str, list[Part]] = {}
    for part in parts(quick=options.quick, num_gpus=num_gpus):
        if part.group in options.only.split(",") and any(
            fnmatch.fnmatch(part.name, each) for each in options.names.split()
        ):
            groups.setdefault(part.group, []).append(part)
    if options.quick:  # whose figures mean nothing: two groups at a time, the longest first
        with ThreadPoolExecutor(2) as pool:
            try:
                list(
                    pool.map(
                        lambda group: [measuring.run(part) for part in group],
                        reversed(groups.values()),
                    )
                )
            except BaseException:
                measuring.is_stopped.set()  # or the pool would wait for all that is left
                raise
    else:
        for part in itertools.chain(*groups.values()):
            measuring.run(part)
    for place in Path(RUNS).glob(f"compiled-{os.getpid()}*"):
        shutil.rmtree(place)
    print(f"\n{table(found)}")
    into = out.with_suffix(".md") if options.quick else None
    write_table(found, into=into)
    print(f"written into {into or PAGE}")
    if measuring.failed:
        print(f"failed: {', '.join(measuring.failed)}; their output is in {options.logs}")
    return int(bool(measuring.failed or NO_FIGURE in table(found)))


if __name__ == "__main__":
    sys.exit(main())
