"""How many lines each floor has, beside its budget: `make lint` prints it, and fails above one. A floor that outgrows its budget
deletes something, or explains in CONTRIBUTING why it must grow."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
BUDGETS = {
    "data_prep": 11_930,
    "pretrain": 18_130,
    "finetune": 5_550,
    "cluster": 3_720,  # with its shell
    "analysis": 5_660,
    "demo.py": 300,  # with install.sh
    "tests": 37_580,
}
BESIDE = {"demo.py": ("install.sh",)}
NUM_PRODUCT = 45_250


def lines_of(name: str) -> int:
    """Of the files that people write: Python and shell."""
    found = []
    for place in (REPOSITORY / each for each in (name, *BESIDE.get(name, ()))):
        found += [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    return sum(len(path.read_bytes().splitlines()) for path in found if path.suffix in ("", ".py", ".sh", ".slurm"))


def main() -> int:
    counts = {name: lines_of(name) for name in BUDGETS}
    rows = [(name, count, BUDGETS[name]) for name, count in counts.items()]
    rows.insert(-1, ("product", sum(count for name, count in counts.items() if name != "tests"), NUM_PRODUCT))
    for name, count, budget in rows:
        over = f"  {count - budget:,} over" if count > budget else ""
        print(f"{name:10}{count:8,} of {budget:6,} lines{over}")
    return int(any(count > budget for _, count, budget in rows))


if __name__ == "__main__":
    sys.exit(main())
