"""What the runs of first.sh have ended with, beside the one on the CPU: `losses.py RUNS`;
`losses.py RUNS --books RUN`: does its journal know of a GPU?"""

import argparse
import json
from pathlib import Path


def check_books(run: Path) -> None:
    lines = [
        json.loads(line).get("values", {})
        for line in (run / "tracking" / "journal.jsonl").read_text().splitlines()
    ]
    gpu = sorted({name for values in lines for name in values if "gpu" in name})
    last = [values for values in lines if "usage/mfu" in values][-1]
    print("figures of a GPU:", ", ".join(gpu) or "none")
    print(
        ", ".join(f"{name} {last[name]:.4g}" for name in sorted(last) if name.startswith("usage/"))
    )
    assert any("gpu_0" in name for name in gpu), "no system metrics of the GPU"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--books", type=Path, metavar="RUN")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.books:
        check_books(options.books)
        return
    results = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(options.runs.glob("*/result.json"))
    }
    reference = results.get("cpu-fp32", {}).get("eval/loss")
    print(f"losses after 24 steps; cpu-fp32: {reference}")
    for name, result in results.items():
        if "eval/loss" in result:
            away = f"{result['eval/loss'] - reference:+.4f}" if reference is not None else ""
            rate = f"{result.get('images_per_s') or 0:,.0f} images/s"
            print(
                f"  {name:20} loss {result['eval/loss']:.4f} {away:9} top-1"
                f" {result['eval/top1']:.3f}  {rate}"
            )
        elif "test_top1" in result:
            print(f"  {name:20} test top-1 {result['test_top1']:.3f}")


if __name__ == "__main__":
    main()
