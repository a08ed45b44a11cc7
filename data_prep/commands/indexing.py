"""The command line of `data_prep index`."""

import argparse
import json
from typing import TYPE_CHECKING

from data_prep.commands import OK, settings_of
from data_prep.commands.building import GOES_ON, published
from data_prep.settings import dump

if TYPE_CHECKING:
    from data_prep.commands import Verbs
    from data_prep.manifest import Manifest


def add_verbs(verbs: "Verbs") -> None:
    parser = verbs.add_parser(
        "index", help="make a dataset of WebDataset shards of others (local, http, s3), which stay as they are"
    )
    parser.add_argument("config", nargs="?", help="a YAML file with the settings")
    parser.add_argument("overrides", nargs="*", help="key.path=value, such as label=json:class image_size=224")
    for split in ("train", "val"):
        parser.add_argument(
            f"--{split}",
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"shards of the {split} split, such as 'https://host/{{000..146}}.tar' (short for splits.{split}=[...])",
        )
    parser.add_argument("--out", metavar="DIR", help="the dataset directory (short for out=DIR)")
    parser.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_index, after_a_stop=GOES_ON)


def _index(options: argparse.Namespace) -> int:
    from data_prep.index.config import IndexSettings

    patterns = {split: getattr(options, split) for split in ("train", "val")}
    splits = [f"splits.{split}={json.dumps(given)}" for split, given in patterns.items() if given]
    settings = settings_of(IndexSettings, options, splits)
    if options.show:
        shown = settings.model_copy(update={"storage": dict.fromkeys(settings.storage, "...")})
        print(dump(shown), end="")
        return OK

    def work() -> "Manifest":
        from data_prep.index.index import index

        return index(settings)

    return published(work, settings.out, as_json=options.json)
