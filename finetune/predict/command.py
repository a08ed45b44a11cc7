"""`finetune predict` on the command line. What is asked for is checked, and the pictures are
counted, before torch is imported."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from data_prep.errors import SettingsError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs, at_least
from data_prep.local_copy import local_copy
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.pictures import Picture, in_folder, in_tar, is_tar
from finetune.verbs import end_on_signals, warn_once
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import check_place
from pretrain.data.datasets import Part
from pretrain.ranks.world import rank_of, read_alone

TOP = 5
Input = Part | Sequence[Path]
"""A split of a dataset; or files, folders and tars that were named one after the other."""


def add_verbs(verbs: Verbs) -> None:
    predict = verbs.add_parser(
        "predict", help="what a checkpoint sees in any pictures: a row for each, as CSV or Parquet"
    )
    predict.add_argument(
        "pretrained",
        metavar="RUN",
        help="a run of pretrain, probe or tune, a checkpoint, an export or an import",
    )
    kinds = (
        "picture files, folders (with all folders in them), plain tars with or without labels,"
        " datasets of data_prep or their URLs"
    )
    predict.add_argument("pictures", metavar="PICTURES", nargs="+", help=kinds)
    predict.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="a .csv or .parquet file: picture, class, probability, ..., error",
    )
    predict.add_argument(
        "--features",
        metavar="FILE",
        type=Path,
        help="a .parquet file with what a linear probe would see",
    )
    predict.add_argument(
        "--top",
        metavar="K",
        type=at_least(1),
        help=f"so many classes for each picture (default: {TOP} at most)",
    )
    predict.add_argument(
        "--split", metavar="NAME", help="of the datasets (default: all their splits)"
    )
    predict.epilog = "finetune predict runs/mine photos --out predictions.csv"
    predict.set_defaults(run=_predict)


def _predict(options: argparse.Namespace) -> int:
    if options.out is None and options.features is None:
        raise SettingsError(
            "--out",
            "is missing",
            "choose a file, for example --out predictions.csv",
            code="missing-value",
        )
    if options.out == options.features:
        raise SettingsError(
            "--features", f"{options.features} is also --out", "choose two files", code="conflict"
        )
    for option, endings in (("out", (".csv", ".parquet")), ("features", (".parquet",))):
        path = getattr(options, option)
        if path is not None:
            if path.suffix not in endings or path.is_dir():
                raise SettingsError(
                    f"--{option}",
                    f"{path} is not a file name with a known ending",
                    f"choose a name that ends in {' or '.join(endings)}",
                    code="bad-value",
                )
            check_place(path.parent, field=f"--{option}")
    inputs = inputs_of([_here(place) for place in options.pictures], split=options.split)
    if rank_of() != 0:
        return OK  # of several ranks one is enough
    world = read_alone()
    checkpoint = Checkpoint.open(options.pretrained)
    card, num_classes = checkpoint.card, len(checkpoint.card.classes)
    if (options.top or 1) > num_classes:
        raise SettingsError(
            "--top",
            f"{options.top} is more than the {num_classes:,} classes of {options.pretrained}",
            "remove --top",
            code="bad-value",
        )
    for part in {each.directory: each for each in inputs if isinstance(each, Part)}.values():
        warn_once(card.other_pixels(part.manifest, dataset=str(part.directory)), world)
    about = (
        f"{card.model.label} trained on {card.dataset}, {num_classes:,} classes,"
        f" {card.image_size} px"
    )
    print(
        f"{checkpoint.directory}: {about}; finding the pictures and loading torch take some"
        " seconds",
        file=sys.stderr,
        flush=True,
    )
    end_on_signals("nothing is saved")  # before the long imports
    counts = [
        each.num_samples if isinstance(each, Part) else sum(map(_count, each)) for each in inputs
    ]
    options.started = True
    from finetune.predict.predict import predict

    top = options.top or min(TOP, num_classes)
    print(
        "\n".join(
            predict(checkpoint, inputs, counts, top=top, out=options.out, features=options.features)
        )
    )
    return OK


def _here(place: str) -> Path:
    """Of a dataset in a store what is read instead of it: the copy of all but its shards."""
    return (
        local_copy(place, storage=None)
        if "://" in place and not Path(place).suffix
        else Path(place)
    )


def inputs_of(paths: Sequence[Path], *, split: str | None) -> list[Input]:
    """In their order; each path is there."""
    found: list[Input] = []
    for is_dataset, group in groupby(paths, lambda path: (_there(path) / MANIFEST_NAME).is_file()):
        for path in group if is_dataset else ():
            manifest = load_manifest(path)
            names = sorted(manifest.splits) if split is None else [split]
            found += [
                Part(path, manifest, name)
                for name in names
                if manifest.split(name, directory=path).num_samples
            ]
        found += [] if is_dataset else [list(group)]
    if split is not None and not any(isinstance(each, Part) for each in found):
        raise SettingsError(
            "--split",
            f"{split} is not valid: PICTURES names no dataset",
            "remove --split",
            code="conflict",
        )
    return found


def _there(path: Path) -> Path:
    if ":/" in str(path):  # Path makes one slash of two
        raise SettingsError(
            "PICTURES",
            f"{path} is not on this disk",
            "download it, or index it first with data_prep index ... label=none",
            code="unsupported",
        )
    if not path.is_dir() and not path.is_file():
        raise SettingsError(
            "PICTURES",
            f"{path} does not exist",
            "choose image files, folders, tars or datasets",
            code="missing-path",
        )
    return path


def pictures_in(path: Path) -> Iterable[Picture]:
    return (
        in_folder(path)
        if path.is_dir()
        else in_tar(path)
        if is_tar(path)
        else [Picture(str(path), str(path))]
    )


def _count(path: Path) -> int:
    """All tars are walked through, so that a damaged one does not end hours of work."""
    count = sum(1 for _ in pictures_in(path))
    if not count:
        remedy = (
            f"for its tars name {path}/*.tar"
            if any(path.glob("*.tar"))
            else "name another, or leave it out"
        )
        raise SettingsError("PICTURES", f"{path} holds no images", remedy, code="empty")
    return count
