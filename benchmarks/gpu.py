"""Check the claims about GPUs on this machine, and write the table in docs/measured.md.

    .venv/bin/python benchmarks/gpu.py [--only step data 'run-*']      all parts, or groups and globs of parts
    .venv/bin/python benchmarks/gpu.py --only make-64 run-b12 run-b6   section 4.5 of Scaling MLPs
    .venv/bin/python benchmarks/gpu.py --quick              dry run at small sizes, also on a CPU; writes its table next to --out
    .venv/bin/python benchmarks/gpu.py --table FOUND ...    table of several calls (benchmarks/gpu/call.sh)

Each part is a command with a time limit. A failed part does not stop other parts, but is
named in the table, and the exit status is 1. The file `--out` gets the numbers of all parts.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from frame import HERE, commit, machine
from gpu_table import NO_FIGURE, PAGE, table, together, write_table

RUNS, DATA = "runs/gpu-measured", "data/gpu"


@dataclass(frozen=True)
class Part:
    group: str
    name: str
    limit_s: int
    words: tuple[str, ...]
    """Command-line arguments of python."""


def parts(*, quick: bool, num_gpus: int) -> list[Part]:
    """Return all parts, most important first. `quick`: the same commands at small sizes."""
    return [*_steps(quick), *_data(quick, num_ranks=num_gpus or 2), *_peers(quick)]


def _steps(quick: bool) -> list[Part]:
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
    return [
        Part("step", f"profile-{name}", 110, ("benchmarks/gpu_profile.py", *words.split()))
        for name, words in profiles.items()
    ]


def _data(quick: bool, *, num_ranks: int) -> list[Part]:
    num_images, num_large = (2048, 512) if quick else (98_304, 4096)
    batch, steps = (32, "4 steps") if quick else (16_384, "300 steps")
    mixer_batch, mixer_steps = (4, "2 steps") if quick else (1024, "60 steps")
    small = ["model={preset: mlp_b6_wi256}", "engine.compile=false"] if quick else []
    smallest = ["model={kind: mixer, patch_size: 32, num_channels: 64, depth: 2}", "engine.compile=false"]  # fmt: skip

    def make(size: int, num_images: int, num_classes: int) -> Part:
        shape = f"--size {size} --images {num_images} --classes {num_classes}"
        words = ("benchmarks/images.py", f"{DATA}/noise-{size}", *shape.split())
        return Part("data", f"make-{size}", 150, words)

    def train(name: str, config: str, size: int, *words: str) -> Part:
        command = ("-m", "pretrain", "train", f"configs/pretrain/{config}.yaml", f"run_dir={RUNS}/{name}")  # fmt: skip
        common = (f"data.dataset={DATA}/noise-{size}", "data.eval_split=null", "tracking.enabled=false", "train.log_every_steps=20")  # fmt: skip
        return Part("data", f"run-{name}", 170, (*command, *common, *words))

    def b12(name: str, num_images: int, *words: str) -> Part:
        length = (f"train.duration={steps}", f"checkpoint.every={steps}")
        batch = f"train.global_batch_size={num_images}"
        return train(name, "imagenet21k_b12_wi1024_paper", 64, *length, batch, *small, *words)

    mixer = (
        f"train.duration={mixer_steps}", f"checkpoint.every={mixer_steps}", f"train.global_batch_size={mixer_batch}",
        "schedule.warmup=1 steps", *(smallest if quick else ()),
    )  # fmt: skip
    found = [
        make(64, num_images, 101 if quick else 11_230),
        b12("b12", batch),
        b12("b6", batch, *(() if quick else ("model={preset: mlp_b6_wi1024}",))),
        make(224, num_large, 100),
        train("mixer", "imagenet1k_mixer_b_w", 224, *mixer),
    ]
    for stage in (1, 0, 2, 3) if num_ranks > 1 else ():
        eager = ["engine.compile=false"] if stage == 3 else []  # stage 3 cannot be compiled
        how = (f"engine.zero_stage={stage}", *eager, "--ranks", str(num_ranks))
        found.append(b12(f"ranks-z{stage}", batch * num_ranks, *how))
    return found


def _peers(quick: bool) -> list[Part]:
    size = "--dry-run" if quick else "--quick"
    models = "--batch 1 --compile no --rounds 1" if quick else "--rounds 5"
    mixer = "mixer_ss_w --batch 1 --compile blocks --rounds 1" if quick else "mixer_b_w_c3 --rounds 5"  # fmt: skip
    small = " --batch 1 --no-compile" if quick else ""
    per_class = 10 if quick else 1000
    train = "-m pretrain train configs/pretrain/demo_mlp.yaml dataset=data/demo-pretrain"
    build = "-m data_prep build configs/data_prep/demo"
    found = {
        "models-mixer": (200, f"benchmarks/models.py --only {mixer}"),
        "train-mlp": (400, f"benchmarks/train.py {size} --only mlp"),
        "probe-rate": (120, f"benchmarks/transfer_probe.py {size}"),
        "parity-data": (150, f"{build}_pretrain.yaml"),
        "parity-judged": (150, f"{build}_pretrain.yaml out={DATA}/judged source.num_train_per_class=1 source.num_val_per_class={per_class}"),
        "parity-transfer": (150, f"{build}_transfer.yaml out={DATA}/transfer source.num_train_per_class={min(per_class, 320)} "
                                 f"source.num_val_per_class={per_class}"),
        "parity-train": (150, f"{train} run_dir={RUNS}/parity epochs={1 if quick else 4}"),
        **{
            f"evaluate-{each}": (150, f"-m finetune evaluate pretrained={RUNS}/parity dataset={DATA}/judged precision={each} "
                                      f"run_dir={RUNS}/evaluate-{each} tracking.enabled=false")
            for each in ("fp32", "bf16")
        },
        **{
            f"probe-{each}": (150, f"-m finetune probe configs/probe/demo.yaml pretrained={RUNS}/parity dataset={DATA}/transfer "
                                   f"feature_precision={each} optimizer=lion lrs=1e-2 weight_decays=1 run_dir={RUNS}/probe-{each} "
                                   "tracking.enabled=false")
            for each in ("fp32", "bf16")
        },
        "models-b12": (160, f"benchmarks/models.py --only mlp_b12_wi1024 {models}"),
        "train-mixer": (250, f"benchmarks/train.py {size} --only mixer"),
        "evaluate-rate": (150, f"benchmarks/transfer_evaluate.py {size}"),
        "efficiency": (150, f"-m analysis efficiency --quick --out {RUNS}/efficiency{small}"),
    }  # fmt: skip
    return [Part("peers", name, limit, tuple(words.split())) for name, (limit, words) in found.items()]  # fmt: skip


def run(part: Part, *, logs: Path, limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Run a part. Return its figures (None if the command failed) and a text, such as `ok (12 s)`."""
    log, figures = logs / f"{part.name}.log", logs.absolute() / f"{part.name}.json"
    figures.unlink(missing_ok=True)
    run_dir = next((Path(word[8:]) for word in part.words if word.startswith("run_dir=")), None)
    if run_dir:
        shutil.rmtree(run_dir, ignore_errors=True)
    paths = f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"BENCHMARK_FIGURES": str(figures), "PYTHONPATH": paths}
    began_s = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *part.words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    took_s = time.monotonic() - began_s
    if code:
        return None, f"{'TIMEOUT' if code == -1 else 'FAILED'} ({took_s:.0f} s, exit {code})"
    lines = figures.read_text().splitlines() if figures.exists() else []
    found = {name: value for line in lines for name, value in json.loads(line).items()}
    if run_dir:
        found |= figures_of_run(run_dir)
    if part.name == "efficiency":
        rates = pd.read_parquet(f"{RUNS}/efficiency.parquet").set_index("model")["images_per_s"]
        found |= {f"{model}: images/s": rate for model, rate in rates.items()}
    return found, f"ok ({took_s:.0f} s)"


def figures_of_run(run_dir: Path) -> dict[str, Any]:
    """Return the scores of a run, and the medians of its `usage/` metrics without the first value."""
    found = {}
    if (run_dir / "result.json").exists():
        result = json.loads((run_dir / "result.json").read_text())
        found = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    journal = run_dir / "tracking" / "journal.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    values = [json.loads(line).get("values", {}) for line in lines]
    readings = [each for each in values if "usage/images_per_s" in each]
    usage = pd.DataFrame(readings[1:] or readings).filter(like="usage/").median()
    return found | usage.to_dict()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="dry run at small sizes, also on a CPU"
    )
    parser.add_argument("--only", nargs="+", default=["*"], help="groups, or globs of parts")
    parser.add_argument("--budget-s", type=int, default=3600, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, help="file for the figures (default: found.json or dry.json in runs/gpu-measured)")  # fmt: skip
    parser.add_argument("--table", type=Path, nargs="+", metavar="FOUND", help="only write the table of these figures")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.table:
        found = together(options.table)
        if found.get("is_dry_run"):
            sys.exit(f"--table: {options.table[0]} is from a dry run. Give figures of a real run.")
        write_table(found)
        return 0
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus and not options.quick:
        sys.exit("torch finds no GPU. Give --quick for a dry run on the CPU.")
    os.chdir(HERE.parent)
    found = {
        "machine": re.sub("^NVIDIA ", "", machine()), "torch": torch.__version__, "commit": commit(), "num_gpus": num_gpus,
        "is_dry_run": options.quick, "date": time.strftime("%F"), "figures": {}, "failed": [],
    }  # fmt: skip
    out = options.out or Path(RUNS) / ("dry.json" if options.quick else "found.json")
    logs = out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + options.budget_s
    for part in parts(quick=options.quick, num_gpus=num_gpus):
        names = (part.group, part.name)
        if not any(fnmatch.fnmatch(name, glob) for name in names for glob in options.only):
            continue
        limit_s = min(part.limit_s * (6 if options.quick else 1), until_s - time.monotonic())
        figures, verdict = (None, "no time left") if limit_s < 15 else run(part, logs=logs, limit_s=limit_s)  # fmt: skip
        if figures is None:
            found["failed"].append(part.name)
        else:
            found["figures"][part.name] = figures
        out.write_text(json.dumps(found, indent=1))
        print(f"{part.name}: {verdict}", flush=True)
    print(f"\n{table(found)}")
    into = out.with_suffix(".md") if options.quick else None
    write_table(found, into=into)
    print(f"wrote the table to {into or PAGE}")
    if found["failed"]:
        print(f"failed: {', '.join(found['failed'])}. Read the output in {logs}.")
    return int(bool(found["failed"] or NO_FIGURE in table(found)))


if __name__ == "__main__":
    sys.exit(main())
