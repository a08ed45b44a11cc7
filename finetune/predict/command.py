"""`finetune predict` on the command line."""

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
"""A split of a dataset, or consecutive paths of image files, folders and tars."""


def add_verbs(verbs: Verbs) -> None:
    predict = verbs.add_parser(
        "predict", help="predict the classes of any images, one row per image, as CSV or Parquet"
    )
    predict.add_argument(
        "pretrained", metavar="RUN", help="a run, a checkpoint, an export or an imported folder"
    )
    kinds = (
        "images, folders, plain tars with or without labels, datasets of data_prep or their URLs"
    )
    predict.add_argument("pictures", metavar="IMAGES", nargs="+", help=kinds)
    columns = "a .csv or .parquet file with columns image, class, probability, ..., error"
    predict.add_argument("--out", metavar="FILE", type=Path, help=columns)
    features = "a .parquet file for the features (input of a linear probe)"
    predict.add_argument("--features", metavar="FILE", type=Path, help=features)
    top = f"number of top classes for each image (default: at most {TOP})"
    predict.add_argument("--top", metavar="K", type=at_least(1), help=top)
    predict.add_argument("--split", metavar="NAME", help="split of datasets (default: all splits)")
    predict.epilog = "finetune predict runs/mine photos --out predictions.csv"
    predict.set_defaults(run=_predict)


def _predict(options: argparse.Namespace) -> int:
    if options.out is None and options.features is None:
        fix = "choose a file, for example --out predictions.csv"
        raise SettingsError("--out", "is missing", fix, code="missing-value")
    if options.out == options.features:
        problem = f"{options.features} is also --out"
        raise SettingsError("--features", problem, "choose two files", code="conflict")
    for field, path, endings in (
        ("--out", options.out, (".csv", ".parquet")),
        ("--features", options.features, (".parquet",)),
    ):
        if path is not None and (path.suffix not in endings or path.is_dir()):
            fix = f"choose a file name that ends in {' or '.join(endings)}"
            raise SettingsError(field, f"{path} is not valid", fix, code="bad-value")
        if path is not None:
            check_place(path.parent, field=field)
    places = [
        # local copy of the manifest and indices of a remote dataset
        local_copy(place, storage=None)
        if "://" in place and not Path(place).suffix
        else Path(place)
        for place in options.pictures
    ]
    inputs = inputs_of(places, split=options.split)
    if rank_of() != 0:
        return OK  # one rank is enough
    checkpoint = Checkpoint.open(options.pretrained)
    card, num_classes = checkpoint.card, len(checkpoint.card.classes)
    if (options.top or 1) > num_classes:
        problem = f"{options.top} is more than the {num_classes:,} classes of {options.pretrained}"
        raise SettingsError("--top", problem, "remove --top", code="bad-value")
    for part in {each.directory: each for each in inputs if isinstance(each, Part)}.values():
        warn_once(card.other_pixels(part.manifest, dataset=str(part.directory)), read_alone())
    print(
        f"{checkpoint.directory}: {card.model.label} trained on {card.dataset}, {num_classes:,}"
        f" classes, {card.image_size} px; finding the images and loading torch take some seconds",
        file=sys.stderr,
        flush=True,
    )
    end_on_signals("nothing is saved")
    counts = [
        each.num_samples if isinstance(each, Part) else sum(map(_count, each)) for each in inputs
    ]
    options.started = True
    from finetune.predict.predict import predict

    top = options.top or min(TOP, num_classes)
    lines = predict(checkpoint, inputs, counts, top=top, out=options.out, features=options.features)
    print("\n".join(lines))
    return OK


def inputs_of(paths: Sequence[Path], *, split: str | None) -> list[Input]:
    """Return the inputs in their order. Fail if a path does not exist."""
    for path in paths:
        if ":/" in str(path):  # Path replaces // with /
            fix = "download it, or run data_prep index --train URL --out NEW label=none"
            raise SettingsError("IMAGES", f"{path} is not on this disk", fix, code="unsupported")
        if not path.is_dir() and not path.is_file():
            fix = "choose image files, folders, tars or datasets"
            raise SettingsError("IMAGES", f"{path} does not exist", fix, code="missing-path")
    found: list[Input] = []
    for is_dataset, group in groupby(paths, lambda path: (path / MANIFEST_NAME).is_file()):
        if not is_dataset:
            found.append(list(group))
            continue
        for path in group:
            manifest = load_manifest(path)
            for name in sorted(manifest.splits) if split is None else [split]:
                if manifest.split(name, directory=path).num_samples:
                    found.append(Part(path, manifest, name))
    if split is not None and not any(isinstance(each, Part) for each in found):
        problem = f"{split} needs a dataset among the `IMAGES`"
        raise SettingsError("--split", problem, "remove --split", code="conflict")
    return found


def pictures_in(path: Path) -> Iterable[Picture]:
    if path.is_dir():
        return in_folder(path)
    return in_tar(path) if is_tar(path) else [Picture(str(path), str(path))]


def _count(path: Path) -> int:
    """Count the images of an input. This finds a damaged tar before hours of work."""
    count = sum(1 for _ in pictures_in(path))
    if not count:
        fix = f"to read its tars, give {path}/*.tar" if any(path.glob("*.tar")) else "remove it"
        raise SettingsError("IMAGES", f"{path} has no images", fix, code="empty")
    return count
