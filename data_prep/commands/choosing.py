"""`data_prep subset` and `data_prep dedup`: which samples of a dataset are to be used."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.commands import OK
from data_prep.settings import validate

if TYPE_CHECKING:
    from data_prep.commands import Verbs


def add_verbs(verbs: "Verbs") -> None:
    subset = verbs.add_parser("subset", help="some samples of a dataset as another dataset, without copying a picture")
    subset.add_argument("dataset", type=Path)
    subset.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new dataset directory")
    subset.add_argument("--fraction", type=float, help="this share of every class, such as 0.1")
    subset.add_argument("--count", type=int, metavar="N", help="N samples, in the proportions of the classes")
    subset.add_argument("--per-class", type=int, metavar="N", help="N samples of every class")
    subset.add_argument(
        "--split", default="train", help="the split that the size is of (train); others are taken whole"
    )
    subset.add_argument("--seed", type=int, default=0, help="with one seed, smaller subsets lie within larger ones")
    subset.add_argument("--classes-file", metavar="FILE", help="the classes to keep, one on each line")
    subset.add_argument("--exclude", action="append", default=[], metavar="LIST", help="a list that dedup wrote")
    subset.add_argument("--json", action="store_true", help="print the summary as JSON")
    subset.set_defaults(run=_subset, after_a_stop="nothing was published; run the same command again")


def _subset(options: argparse.Namespace) -> int:
    from data_prep.subset import Selection, subset

    names = ("fraction", "count", "per_class", "split", "seed", "classes_file", "exclude")
    selection = validate(Selection, {name: getattr(options, name) for name in names})
    manifest = subset(options.dataset, options.out, selection)
    splits = {name: split.num_samples for name, split in manifest.splits.items()}
    if options.json:
        left_out = {"left_out": manifest.num_left_out}
        print(json.dumps({"dataset": str(options.out), "splits": splits, "hash": manifest.hash, **left_out}))
        return OK
    sizes = ", ".join(f"{name} {count:,}" for name, count in splits.items())
    print(f"{options.out}: {len(manifest.classes)} classes, {sizes}; the pictures stay with {options.dataset}")
    if manifest.num_left_out:
        print("left out: " + ", ".join(f"{reason} {count:,}" for reason, count in manifest.num_left_out.items()))
    return OK
