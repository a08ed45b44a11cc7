"""A run that was stopped by SIGTERM and started again against one that was not: the same bits? In
the project:

    resume.py [key=value ...]


Prints one line; exits with 1 where weights or optimizer state differ.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STEPS = int(os.environ.get("RESUME_STEPS", "240"))
EVERY = STEPS // 6
BATCH = os.environ.get("BATCH", "512")
FILES = ("model.safetensors", "optimizer.safetensors")


def command(run: Path, settings: list[str]) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "pretrain",
        "train",
        "configs/pretrain/demo_mlp.yaml",
        f"run_dir={run}",
    ]
    words += [
        "data.dataset=data/demo-pretrain",
        f"train.duration={STEPS} steps",
        f"train.eval_every={STEPS} steps",
    ]
    words += [f"train.global_batch_size={BATCH}"]
    return [
        *words,
        f"checkpoint.every={EVERY} steps",
        "tracking.enabled=false",
        "augment.mixup_alpha=0.8",
        *settings,
    ]


def digests(run: Path) -> dict[str, str]:
    place = run / "checkpoints" / f"step-{STEPS:08d}"
    return {name: hashlib.sha256((place / name).read_bytes()).hexdigest() for name in FILES}


def largest_difference(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    place = Path("checkpoints") / f"step-{STEPS:08d}" / FILES[0]
    left, right = load_file(one / place), load_file(other / place)
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    return parser.parse_args()


def main() -> int:
    settings: list[str] = arguments().settings
    name = "-".join(each.partition("=")[2] for each in settings) or "default"
    whole, broken = (Path(f"runs/gpu-resume/{name}-{kind}") for kind in ("whole", "broken"))
    for run in (whole, broken):
        shutil.rmtree(run, ignore_errors=True)
    subprocess.run(command(whole, settings), check=True)
    process, began_s = subprocess.Popen(command(broken, settings)), time.monotonic()
    while (
        process.poll() is None
        and not list(broken.glob("checkpoints/step-*"))
        and time.monotonic() - began_s < 120
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    reached = max((path.name for path in broken.glob("checkpoints/step-*")), default="nothing")
    was_stopped = not (broken / "result.json").exists()
    subprocess.run(command(broken, settings), check=True)
    same = digests(whole) == digests(broken)
    words = (
        "bit for bit the same"
        if same
        else f"DIFFERENT, weights by up to {largest_difference(whole, broken):.3g}"
    )
    print(
        f"stopped with exit {code} at"
        f" {reached}{'' if was_stopped else ' (it had finished before: says nothing)'}, went on:"
        f" {words}"
    )
    return 0 if same and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
