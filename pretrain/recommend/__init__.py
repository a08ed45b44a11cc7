"""`pretrain recommend`: write a config, with a reason for each choice, for images or a dataset."""

import argparse
from pathlib import Path
from typing import Any

from data_prep.catalog import CATALOG
from data_prep.explain import at_least
from pretrain.models.imported import add_allow_import


def add_verb(verbs: Any) -> None:
    words = "write a training config, with a reason for each choice, for images or a dataset"
    verb = verbs.add_parser("recommend", help=words)
    place = "folder of images (PATH/CLASS/* or PATH/{train,val}/CLASS/*), dataset or its URL, or"
    place = f"{place} published dataset to download ({', '.join(CATALOG)})"
    verb.add_argument("place", metavar="FOLDER|DATASET|NAME", type=_place, help=place)
    name = "name for data/NAME, runs/NAME.yaml and runs/NAME (default: the folder's name; --from"
    verb.add_argument("--name", help=f"{name} appends -tuned or -probed)")
    labels = "CSV or Parquet file with columns file and label, for images without class folders"
    verb.add_argument("--labels", metavar="FILE", help=labels)
    size = "pixels of stored images (default: 64; 32 for small images; the weights' with --from)"
    verb.add_argument("--image-size", type=at_least(8), metavar="PX", help=size)
    weights = (
        "fine-tune these weights: a run, hf-hub:USER/NAME, timm:NAME, or finetune import's folder"
    )
    verb.add_argument("--from", dest="pretrained", metavar="RUN", help=weights)
    probe = "train only a classifier on the features (needs --from)"
    verb.add_argument("--probe", action="store_true", help=probe)
    verb.add_argument("--overwrite", action="store_true", help="replace an existing config")
    verb.add_argument("--no-timing", action="store_true", help="do not time training steps")
    add_allow_import(verb)
    verb.epilog = (
        "pretrain recommend photos\npretrain recommend cifar10 --name mine\n"
        "pretrain recommend photos --labels photos/labels.csv --from runs/public"
    )
    verb.set_defaults(run=_recommend)


def _place(word: str) -> Path | str:
    return word if "://" in word else Path(word)


def _recommend(options: argparse.Namespace) -> int:
    # imports Pillow, which no other command needs so early
    from pretrain.recommend.command import recommend

    return recommend(options)
