"""Count the non-whitespace characters of each package and compare them with its budget.

`make lint` prints the table and fails if a package is above its ceiling, which falls with every
change until it reaches the target. Shorter names and denser lines are not savings: delete a
concept, or raise a number with an incident or an issue cited in CONTRIBUTING.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
TARGETS = {
    "data_prep": 335_000,
    "pretrain": 480_000,
    "finetune": 185_000,
    "analysis": 155_000,
    "cluster": 98_000,
    "benchmarks": 125_000,
    "tests": 1_050_000,
}
CEILINGS = {
    "data_prep": 445_413,
    "pretrain": 637_027,
    "finetune": 230_361,
    "analysis": 226_117,
    "cluster": 130_589,
    "benchmarks": 174_170,
    "tests": 1_471_922,
}


def num_characters(text: str) -> int:
    return len("".join(text.split()))


def package_size(package: str) -> int:
    """Return the non-whitespace characters of the package's Python files, without
    benchmarks/.venv."""
    folder = REPOSITORY / package
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    ours = [path for path in paths if not path.parts[0].startswith(".")]
    return sum(num_characters((folder / path).read_text()) for path in ours)


def main() -> int:
    sizes = {package: package_size(package) for package in TARGETS}
    for package, size in sizes.items():
        excess = size - CEILINGS[package]
        note = f"  {excess:,} over the ceiling" if excess > 0 else ""
        print(f"{package:10}{size:10,} characters, target {TARGETS[package]:9,}{note}")
    return int(any(size > CEILINGS[package] for package, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
