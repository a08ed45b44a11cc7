"""`finetune import`: convert a file of other weights to a checkpoint folder.

Names and shapes (foreign.py) show neither normalization nor class names nor activation. The first
source that has a fact is used: command line, config next to the file, word in the file's name,
default of the family.
"""

import argparse
import json
from pathlib import Path
from typing import Any, cast, get_args

import torch

from data_prep.errors import UserError
from data_prep.publish import sha256_of
from finetune.weights.command import names_of
from finetune.weights.foreign import Family, Foreign, convert
from finetune.weights.reading import Kind, read_weights
from pretrain.augment.augmentation import Normalization
from pretrain.checkpoints.card import CONFIG, TIMM_TRANSFORM, ModelCard, config_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.checkpoints.run import is_output
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters
from pretrain.models.spec import Activation

IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = Normalization((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768))
STL10 = Normalization((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
HALF = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NONE = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
NORMALIZATIONS: dict[Family, dict[str, Normalization]] = {
    "scaling_mlps": {"cifar": CIFAR, "stl10": STL10, "": IMAGENET},
    "timm": {"miil": NONE, "": HALF},
}
"""Normalization, by family and by a word in the file's name. Sources: data_stats.py of scaling_mlps
and default_cfgs of timm."""
SQUARES: dict[str, Any] = {
    "stored_crop": "longer_side",
    "stored_interpolation": "area",
    "fed_interpolation": "area",
}
"""Crop and interpolation of stored images, as in the FFCV files of scaling_mlps."""
FROM_CONFIG, DEFAULT = "from the config next to the file", "the default of"
_AVERAGE: dict[Kind, str] = {"ema": "the running average", "raw": "the plain weights"}


def import_weights(given: argparse.Namespace) -> list[str]:
    """Write the folder, and return the lines to print. `given`: the options of the command."""
    file: Path = given.file
    stored, config = read_weights(file, kind=given.weights), config_beside(file)
    activation, learned_from = _activation(given.activation, config)
    foreign = convert(
        stored.weights, source=file, flattening=given.flattening, activation=activation
    )
    normalization, reason = _normalization(given, config, foreign.family)
    names, naming = _classes(given.classes, config, foreign)
    average = f"{_AVERAGE[given.weights]}, " if stored.average else ""
    facts: dict[str, Any] = SQUARES
    if foreign.family == "timm":
        transform = {key: config[key] for key in TIMM_TRANSFORM if key in config}
        default = "bilinear" if "miil" in file.name.lower() else "bicubic"
        transform = transform or {"interpolation": default, "crop_pct": 0.875}
        facts = {"timm_transform": transform}
        if transform.get("interpolation") == "bicubic":
            facts["fed_interpolation"] = "bicubic"
    card = ModelCard(
        model=foreign.spec,
        image_size=foreign.image_size,
        classes=names,
        channel_mean=normalization.mean,
        channel_std=normalization.std,
        dataset=given.name or file.stem,
        origin=(
            f"{foreign.family}: {file.name}, sha256 {sha256_of(file)}, {average}read as"
            f" {given.flattening}"
        ),
        **facts,
    )
    if is_output(given.out, config_of(card), record=CONFIG, kind="these weights"):
        Checkpoint.open(given.out)
    else:
        save_folder(given.out, card=card, weights=foreign.weights)
    with torch.device("meta"):
        model = build_model(card.model, num_classes=len(names), image_size=card.image_size)
    mean, std = (
        " ".join(f"{value:.4g}" for value in row) for row in (card.channel_mean, card.channel_std)
    )
    lines = [
        f"{given.out}: {card.model.label} of {foreign.family}, {card.image_size} px,"
        f" {len(names):,} classes, {num_parameters(model):,} parameters",
        f"  activation: {activation} ({learned_from})",
        f"  normalization: mean {mean}, std {std} ({reason})",
        f"  classes: {names[0]} ... {names[-1]} ({naming})",
    ]
    if card.stored_crop:
        lines.append(
            f"  squares: build datasets with crop={card.stored_crop}"
            f" interpolation={card.stored_interpolation}, as {foreign.family} does"
        )
    if stored.average:
        other: Kind = "raw" if given.weights == "ema" else "ema"
        lines.append(f"  weights: {_AVERAGE[given.weights]} (--weights {other}: {_AVERAGE[other]})")
    if card.timm_transform:
        words = ", ".join(f"{key} {value}" for key, value in card.timm_transform.items())
        lines.append(f"  timm's transform: {words}")
    return lines


def config_beside(file: Path) -> dict[str, Any]:
    """Return timm's config.json with its pretrained_cfg, or NAME_config or config.txt of
    scaling_mlps; empty without a config."""
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


def _activation(given: str | None, config: dict[str, Any]) -> tuple[Activation, str]:
    found = given or config.get("act", "gelu")
    if found not in get_args(Activation):
        fix = f"choose --activation from {', '.join(get_args(Activation))}"
        raise UserError("activation", f"{found!r} is not supported", fix, code="bad-value")
    default = "default; a wrong --activation gives wrong predictions"
    source = "as given" if given else FROM_CONFIG if "act" in config else default
    return cast(Activation, found), source


def _normalization(
    given: argparse.Namespace, config: dict[str, Any], family: Family
) -> tuple[Normalization, str]:
    if given.mean and given.std:
        return Normalization(tuple(given.mean), tuple(given.std)), "as given"
    if family == "timm" and "mean" in config and "std" in config:
        return Normalization(_three(config["mean"]), _three(config["std"])), FROM_CONFIG
    known, text = NORMALIZATIONS[family], given.file.name.lower()
    if not any(word in text for word in known if word) and family == "scaling_mlps":
        text = str(config.get("dataset", ""))
    word = next(word for word in known if word in text)
    what = f" for {word}" if word else ""
    return known[word], f"{DEFAULT} {family}{what}; --mean and --std change it"


def _three(values: object) -> tuple[float, float, float]:
    try:
        red, green, blue = map(float, cast(Any, values))
    except (TypeError, ValueError):
        fix = "give --mean and --std"
        raise UserError(
            "config", f"{values!r} is not a valid mean or std", fix, code="damaged"
        ) from None
    return red, green, blue


def _classes(
    given: str | None, config: dict[str, Any], foreign: Foreign
) -> tuple[tuple[str, ...], str]:
    count = foreign.num_classes
    labels = config.get("label_names") if foreign.family == "timm" else None
    if given is None and isinstance(labels, list) and len(labels) == len(set(labels)) == count:
        return tuple(map(str, labels)), FROM_CONFIG
    if given is None or given.isdigit():
        names = tuple(f"class_{number:05d}" for number in range(int(given or count)))
        origin = "unknown; finetune evaluate needs an import with --classes"
    else:
        names, origin = names_of(given), f"from {given}"
    if len(names) != count:
        problem = f"{len(names)} classes are given, but the last layer has {count}"
        raise UserError("--classes", problem, f"give {count} classes", code="mismatch")
    if len(set(names)) < count:
        twice = next(name for name in names if names.count(name) > 1)
        fix = "give every class its own name"
        raise UserError("--classes", f"{given} has {twice!r} twice", fix, code="conflict")
    return names, origin
