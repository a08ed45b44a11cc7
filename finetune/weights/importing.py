"""`finetune import`: a file of foreign weights -> a folder that the later stages and timm take like
a checkpoint of ours.

Beside names and shapes (foreign.py) it needs what neither holds: normalisation, class names,
activation. They come from the command line; else from the config that stands beside the file; else
from a word in the file's name; else they are the family's.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch

from data_prep.errors import UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from data_prep.settings import read_lines
from finetune.weights.foreign import Family, Foreign, convert
from finetune.weights.reading import Kind, read_weights
from pretrain.augment.augmentation import Normalisation
from pretrain.checkpoints.card import CONFIG, TIMM_TRANSFORM, ModelCard, config_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.checkpoints.run import is_output
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters
from pretrain.models.spec import Activation

IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = Normalisation((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768))
STL10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NONE = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
NORMALISATIONS: dict[Family, dict[str, Normalisation]] = {
    "scaling_mlps": {"cifar": CIFAR, "stl10": STL10, "": IMAGENET},
    "timm": {"miil": NONE, "": HALF},
}
"""By the first word that the file's name contains, as the public data_stats.py and timm's
default_cfgs have them."""
SQUARES: dict[str, Any] = {
    "stored_crop": "longer_side",
    "stored_interpolation": "area",
    "fed_interpolation": "area",
}
"""How scaling_mlps has FFCV make and feed its pictures."""


def import_weights(given: argparse.Namespace) -> list[str]:
    """Writes the folder, once; the lines say what was found. `given`: the command line's `file`,
    `out`, `classes`, `name`, `flattening`, `activation`, `weights`, `mean` and `std`."""
    file: Path = given.file
    stored, beside = read_weights(file, kind=given.weights), config_beside(file)
    activation, learned_from = _activation(given.activation, beside)
    foreign = convert(
        stored.weights, source=file, flattening=given.flattening, activation=activation
    )
    normalisation, reason = _normalisation(given, beside, foreign)
    transform, transform_of = _transform(beside, foreign, file)
    fed = {"fed_interpolation": "bicubic"} if transform.get("interpolation") == "bicubic" else {}
    names, naming = _classes(given.classes, beside, foreign)
    card = ModelCard(
        model=foreign.spec,
        image_size=foreign.image_size,
        classes=names,
        channel_mean=normalisation.mean,
        channel_std=normalisation.std,
        dataset=given.name or file.stem,
        origin=f"{foreign.family}: {file.name}, sha256 {sha256_of(file)}, "
        + (f"{_AVERAGE[given.weights]}, " if stored.average else "")
        + f"read as {given.flattening}",
        timm_transform=transform,
        **(SQUARES if foreign.family == "scaling_mlps" else fed),
    )
    if is_output(given.out, config_of(card), record=CONFIG, kind="these weights", field="out"):
        Checkpoint.open(given.out)  # the same command, typed again
    else:
        save_folder(given.out, card=card, weights=foreign.weights)
    with torch.device("meta"):
        count = num_parameters(
            build_model(card.model, num_classes=len(names), image_size=card.image_size)
        )
    lines = [
        (
            f"{given.out}: {card.model.label} of {foreign.family}, {card.image_size} px,"
            f" {len(names):,} classes, {count:,} parameters"
        ),
        f"  activation: {activation} ({learned_from})",
        f"  normalisation: mean {_row(card.channel_mean)}, std {_row(card.channel_std)} ({reason})",
        f"  classes: {names[0]} ... {names[-1]} ({naming})",
    ]
    if card.stored_crop:
        crop, interpolation = card.stored_crop, card.stored_interpolation
        lines.append(
            f"  pictures: squares by {crop} and {interpolation}, fed with {card.fed_interpolation},"
            f" as {foreign.family} has it; datasets are built alike with crop={crop}"
            f" interpolation={interpolation}"
        )
    if stored.average:
        other: Kind = "raw" if given.weights == "ema" else "ema"
        lines.append(
            f"  weights: {_AVERAGE[given.weights]} (the file holds both, the average as"
            f" {stored.average}; --weights {other} takes {_AVERAGE[other]})"
        )
    if transform:
        words = ", ".join(f"{key} {value}" for key, value in transform.items())
        lines.append(f"  timm's transform: {words} ({transform_of}; kept in {CONFIG} for timm)")
    return lines


def config_beside(file: Path) -> dict[str, Any]:
    """timm's config.json (with its pretrained_cfg at the top, too), or scaling_mlps' NAME_config
    beside NAME_weights or config.txt; {} where there is none."""
    named = file.with_name(file.name.removesuffix("_weights") + "_config")
    for path in (named, file.with_name("config.txt"), file.with_name("config.json")):
        try:
            tree = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(tree, dict) and "architecture" in tree:
            inner = tree.get("pretrained_cfg")
            return tree | inner if isinstance(inner, dict) else tree
    return {}


_AVERAGE: dict[Kind, str] = {"ema": "the running average", "raw": "the weights as trained"}


def _activation(given: str | None, beside: dict[str, Any]) -> tuple[Activation, str]:
    found = given or beside.get("act", "gelu")
    if found not in get_args(Activation):
        raise UserError(f"activation: {found!r} is not one of {', '.join(get_args(Activation))}")
    guess = (
        "the usual; weights do not tell, and with a wrong one the answers are wrong: --activation"
        " names another"
    )
    return cast(Activation, found), (
        "as given" if given else "of the config beside the file" if "act" in beside else guess
    )


def _transform(
    beside: dict[str, Any], foreign: Foreign, file: Path
) -> tuple[dict[str, str | float], str]:
    if foreign.family != "timm":
        return {}, ""
    found = {key: beside[key] for key in TIMM_TRANSFORM if key in beside}
    if found:
        return found, "of the config beside the file"
    return {
        "interpolation": "bilinear" if "miil" in file.name.lower() else "bicubic",
        "crop_pct": 0.875,
    }, "the usual of timm"


def _normalisation(
    given: argparse.Namespace, beside: dict[str, Any], foreign: Foreign
) -> tuple[Normalisation, str]:
    if given.mean and given.std:
        return Normalisation(tuple(given.mean), tuple(given.std)), "as given"
    if foreign.family == "timm" and "mean" in beside and "std" in beside:
        return (
            Normalisation(_three(beside["mean"]), _three(beside["std"])),
            "of the config beside the file",
        )
    known, text = NORMALISATIONS[foreign.family], given.file.name.lower()
    words = [word for word in known if word and word in text]
    if not words and foreign.family == "scaling_mlps":
        words = [word for word in known if word and word in str(beside.get("dataset", ""))]
    reason = (
        f"those of {foreign.family} for {words[0]}" if words else f"the usual of {foreign.family}"
    )
    return known[words[0] if words else ""], f"{reason}; --mean and --std change them"


def _three(values: object) -> tuple[float, float, float]:
    if not (
        isinstance(values, list)
        and len(values) == 3
        and all(isinstance(value, int | float) for value in values)
    ):
        raise UserError(
            f"the config beside the file: {values!r} is no mean or std of three colours; give"
            " --mean and --std"
        )
    red, green, blue = map(float, values)
    return red, green, blue


def _classes(
    given: str | None, beside: dict[str, Any], foreign: Foreign
) -> tuple[tuple[str, ...], str]:
    count, labels = (
        foreign.num_classes,
        beside.get("label_names") if foreign.family == "timm" else None,
    )
    if given is None and isinstance(labels, list) and len(labels) == len(set(labels)) == count:
        return tuple(map(str, labels)), "of the config beside the file"
    if given is None or given.isdigit():
        if given is not None and int(given) != count:
            raise UserError(f"--classes: {given}, but the last layer has {count}")
        unnamed = (
            "their names are not in the file; --classes LIST.txt or --classes DATASET gives them,"
            " for finetune evaluate"
        )
        return tuple(f"class_{number:05d}" for number in range(count)), unnamed
    dataset = local_copy(given, storage=None)
    names = (
        load_manifest(dataset).classes
        if dataset.is_dir()
        else tuple(read_lines("--classes", given))
    )
    if len(names) != count:
        raise UserError(f"--classes: {given} names {len(names)}, but the last layer has {count}")
    if len(set(names)) < count:
        doubled = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"--classes: {given} names {doubled!r} twice; every class needs a name of its own"
        )
    return names, f"of {given}"


def _row(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)
