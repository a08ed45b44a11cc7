"""Count the non-whitespace characters of each package and compare them with its budget.

`make lint` prints the table and fails if a package is above its budget. Shorter names and denser
lines are not savings: delete a concept, or raise the budget with an incident or an issue cited in
CONTRIBUTING.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
BUDGETS = {
    "data_prep": 335_000,
    "pretrain": 480_000,
    "finetune": 185_000,
    "analysis": 155_000,
    "cluster": 98_000,
    "benchmarks": 125_000,
    "tests": 1_050_000,
}


def num_characters(text: str) -> int:
    return len("".join(text.split()))


def package_size(package: str) -> int:
    """Return the non-whitespace characters of the package's Python files."""
    paths = (REPOSITORY / package).rglob("*.py")
    return sum(num_characters(path.read_text()) for path in paths)


def main() -> int:
    sizes = {package: package_size(package) for package in BUDGETS}
    for package, size in sizes.items():
        excess = size - BUDGETS[package]
        note = f"  {excess:,} over" if excess > 0 else ""
        print(f"{package:10}{size:10,} of {BUDGETS[package]:9,} characters{note}")
    return int(any(size > BUDGETS[package] for package, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
