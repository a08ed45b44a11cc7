"""`make demo`: run all commands one after the other, from synthetic images to fine-tuned models.

Finished stages are skipped, and an interrupted training resumes from its last checkpoint. You can
therefore press Ctrl-C and repeat `make demo`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from pretrain.tracking.node import usable_gpus

RUNS = Path("runs/demo")
SCRATCH_LR = {"mlp": "8e-4", "mixer": "5e-3"}
"""Learning rate for training each model from scratch: the best of the two or three we tried."""


def stages() -> list[tuple[str, list[str], Path]]:
    """Return (title, command, file that marks it as finished) of each stage."""
    found: list[tuple[str, list[str], Path]] = []
    # two processes, or one if only one GPU is visible: NCCL needs a GPU for each process
    ranks = ("--ranks", "1" if len(usable_gpus()) == 1 else "2")
    for role in ("pretrain", "transfer"):
        command = ["data_prep", "build", f"configs/data_prep/demo_{role}.yaml"]
        found.append(
            (f"make and pack the {role} images", command, Path(f"data/demo-{role}/manifest.json"))
        )
    for model in SCRATCH_LR:
        command = ["pretrain", "train", f"configs/pretrain/demo_{model}.yaml", *ranks]
        found.append((f"pretrain the {model}", command, RUNS / f"pretrain-{model}/result.json"))
    pixels = [
        "finetune",
        "probe",
        "configs/probe/demo.yaml",
        "pretrained=null",
        f"run_dir={RUNS}/probe-pixels",
    ]
    found.append(
        ("linear classifier on pixels, for comparison", pixels, RUNS / "probe-pixels/result.json")
    )
    for model, scratch_lr in SCRATCH_LR.items():
        tune = ["finetune", "tune", "configs/finetune/demo.yaml"]
        scratch = ["init=scratch", f"optimizer.lr={scratch_lr}", "optimizer.head_lr_scale=1"]
        for task, title, command in (
            ("probe", f"probe the {model}", ["finetune", "probe", "configs/probe/demo.yaml"]),
            ("tune", f"fine-tune the {model}", [*tune, *ranks]),
            (
                "scratch",
                f"train the {model} from scratch, for comparison",
                [*tune, *ranks, *scratch],
            ),
        ):
            run = RUNS / f"{task}-{model}"
            overrides = [f"pretrained={RUNS}/pretrain-{model}", f"run_dir={run}"]
            found.append((title, [*command, *overrides], run / "result.json"))
    return found


def run_stage(command: list[str]) -> int:
    """Return the exit code of a stage. Ctrl-C also reaches the stage from the terminal, so this
    process only waits until the stage has saved and ended."""
    process = subprocess.Popen([sys.executable, "-m", *command])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def margins() -> list[str]:
    """Return lines with the gain of top-1 from pretraining. Exit if a gain is not above zero."""
    top1 = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(RUNS.glob("*/result.json"))
    }
    reached = {
        name: result[key]
        for name, result in top1.items()
        for key in ("eval/top1", "test_top1")
        if key in result
    }
    lines = []
    for model in SCRATCH_LR:
        for better, worse, words in (
            ("tune", f"scratch-{model}", "from scratch"),
            ("probe", "probe-pixels", "on pixels"),
        ):
            gap = 100 * (reached[f"{better}-{model}"] - reached[worse])
            lines.append(
                f"{model}: top-1 of {better} after pretraining minus top-1 {words}: {gap:+.1f} "
                "percentage points"
            )
            if gap <= 0:
                raise SystemExit(f"demo: {lines[-1]}, but the gain must be above 0. Report this")
    return lines


def main() -> int:
    began_s, todo = time.monotonic(), stages()
    for number, (title, command, done) in enumerate(todo, start=1):
        if done.exists():
            continue
        print(f"\n[{number}/{len(todo)}] {title}\n$ {' '.join(command)}", flush=True)
        stage_s = time.monotonic()
        code = run_stage(command)
        print(f"({time.monotonic() - stage_s:.0f} s)", flush=True)
        if code != 0 or not done.exists():
            print(f"demo: stopped in stage {number}; `make demo` resumes it", file=sys.stderr)
            return code or 130
    print(
        f"\nAll stages are finished ({time.monotonic() - began_s:.0f} s this time).\n", flush=True
    )
    code = 0
    for command in (
        [
            "finetune",
            "evaluate",
            f"pretrained={RUNS}/tune-mlp",
            "data.dataset=data/demo-transfer",
            "num_views=20",
        ],
        ["analysis", "report", str(RUNS)],
    ):
        code = code or run_stage(command)
    print(*margins(), sep="\n")
    print(
        "checkpoints:",
        *(f"  {path}" for path in sorted(RUNS.glob("*/checkpoints/step-*"))),
        sep="\n",
    )
    print("To see the runs in MLflow: .venv/bin/python -m pretrain ui runs/demo")
    return code


if __name__ == "__main__":
    sys.exit(main())
