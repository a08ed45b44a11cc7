"""`data_prep verify`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.commands import FAULTY, OK

if TYPE_CHECKING:
    from data_prep.commands import Verbs

NOTHING_CHANGED = "nothing was changed"


def add_verbs(verbs: "Verbs") -> None:
    verify = verbs.add_parser("verify", help="read everything again and hold it against the manifest")
    verify.add_argument("dataset", type=Path)
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_verify, after_a_stop=NOTHING_CHANGED)


def _verify(options: argparse.Namespace) -> int:
    from data_prep.verify import verify

    manifest, faults = verify(options.dataset)
    if options.json:
        print(json.dumps({"dataset": str(options.dataset), "samples": manifest.num_written, "faults": faults}))
    else:
        print(
            "\n".join(faults) or f"{options.dataset}: {manifest.num_written:,} samples, every one as the manifest says"
        )
    return FAULTY if faults else OK
