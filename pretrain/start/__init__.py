"""`pretrain start`: from a folder of pictures, or a dataset, to a config with its reasons and the
command that trains."""

import argparse
from pathlib import Path
from typing import Any

from data_prep.explain import at_least


def add_verb(verbs: Any) -> None:
    words = (
        "a folder of pictures, or a dataset, in; a config with its reasons and the command that"
        " trains out"
    )
    verb = verbs.add_parser("start", help=words)
    verb.add_argument(
        "place",
        metavar="FOLDER|DATASET",
        type=_place,
        help="PATH/CLASS/*, PATH/{train,val}/CLASS/*, or a dataset or its URL",
    )
    verb.add_argument(
        "--name",
        help=(
            "name data/NAME, runs/NAME.yaml, runs/NAME (default: the folder's; --from adds -tuned"
            " or -probed in runs/)"
        ),
    )
    verb.add_argument(
        "--labels",
        metavar="FILE",
        help="of a folder without classes: CSV or Parquet with columns file and label",
    )
    verb.add_argument(
        "--image-size",
        type=at_least(8),
        metavar="PX",
        help="to store pictures at (default: 64, small ones 32)",
    )
    verb.add_argument(
        "--from",
        dest="pretrained",
        metavar="RUN",
        help=(
            "weights to fine-tune: a run, hf-hub:USER/NAME, timm:NAME, or a folder of `pretrain"
            " import`"
        ),
    )
    verb.add_argument(
        "--probe", action="store_true", help="with --from: train a classifier on its features alone"
    )
    verb.add_argument(
        "--new", action="store_true", help="write the config anew where another one stands"
    )
    verb.add_argument("--untimed", action="store_true", help="do not time any steps")
    verb.epilog = (
        "pretrain start photos\npretrain start photos --labels photos/labels.csv --from runs/public"
    )
    verb.set_defaults(run=_start)


def _place(word: str) -> Path | str:
    return word if "://" in word else Path(word)


def _start(options: argparse.Namespace) -> int:
    from pretrain.start.command import start  # and Pillow, which no other verb needs so early

    return start(options)
