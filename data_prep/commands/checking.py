"""`data_prep verify`, `stats` and `show`: what a finished dataset holds; none of them changes it."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.commands import FAULTY, OK

if TYPE_CHECKING:
    from data_prep.commands import Verbs

NOTHING_CHANGED = "the dataset was not changed"
MAX_PRINTED = 20


def add_verbs(verbs: "Verbs") -> None:
    verify = verbs.add_parser("verify", help="read everything again and hold it against the manifest")
    verify.add_argument("dataset", type=Path)
    add_workers(verify)
    verify.add_argument("--json", action="store_true", help="print the findings as JSON")
    verify.set_defaults(run=_verify, after_a_stop=NOTHING_CHANGED)


def add_workers(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, metavar="N", help=f"processes (all {cores} cores)")


def _verify(options: argparse.Namespace) -> int:
    from data_prep.verify import verify

    found = verify(options.dataset, num_workers=options.workers)
    if options.json:
        counts = {"samples": found.manifest.num_written, "num_faults": found.num_faults}
        print(json.dumps({"dataset": str(options.dataset), **counts, "faults": found.faults, "notes": found.notes}))
        return FAULTY if found.num_faults else OK
    for fault in found.faults[:MAX_PRINTED]:
        print(fault)
    if found.num_faults > MAX_PRINTED:
        print(f"... and {found.num_faults - MAX_PRINTED:,} more")
    if not found.num_faults:
        print(f"{options.dataset}: {found.manifest.num_written:,} samples, every one as the manifest says")
    for note in found.notes:
        print(f"note: {note}")
    return FAULTY if found.num_faults else OK
