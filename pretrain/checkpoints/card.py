"""Checkpoint metadata: config.json next to the weights, for this package and timm. This file does
not import torch."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from data_prep.errors import UserError
from data_prep.manifest import CropPolicy, Filter, Manifest
from pretrain.config import PixelOrder
from pretrain.models.spec import TIMM_NORM_EPS, AnySpec, MixerSpec, ModelSpec, TimmModelSpec

CONFIG, MODEL = "config.json", "model.safetensors"


class CheckpointError(UserError):
    """A checkpoint is missing or damaged."""


class WeightsError(CheckpointError):
    """Weights or metadata cannot be used, and a retry would not help."""

    is_final = True


class ModelCard(PixelOrder):
    """Metadata needed to use weights, and the origin of the weights."""

    model: ModelSpec
    image_size: int
    classes: tuple[str, ...]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    dataset: str
    """Name of the training data."""
    stream: bool = False
    """True if the model was trained with data.stream. Such runs have no exact resume and no global
    shuffle."""
    stored_crop: CropPolicy | None = None
    stored_interpolation: Filter | None = None
    """Filter that resized the training images to stored squares. None if unknown, or if there were
    several."""
    stored_size: int | None = None
    """Side of the stored squares in pixels. None: unknown, so `image_size` is used."""
    fed_interpolation: Filter = "bilinear"
    """Filter that resizes stored squares to `image_size`."""
    eval_crop: float = 1.0
    """Central fraction of the image side that evaluation uses (timm's crop_pct)."""
    content_hash: str = ""
    pixels_hash: str = ""
    """`content_hash`: hash of the training data. `pixels_hash`: also covers the resizing."""
    step: int = 0
    run_key: str = ""
    """Key of the run. Only weights trained by this package have content_hash, pixels_hash, step and
    run_key."""
    origin: str = ""
    """File or repository of imported weights."""
    code_sha256: str = ""
    """Hash of the code of model.import, or "" for other models."""
    timm_transform: dict[str, str | float] = Field(default_factory=dict)
    """Interpolation, crop_pct and crop_mode of weights imported from timm, as timm names them."""

    def other_pixels(self, manifest: Manifest, *, dataset: str) -> str | None:
        """Return a warning if a dataset's images were made square in another way than the training
        images."""
        known = self.stored_crop, self.stored_interpolation
        own = manifest.crop, manifest.interpolation
        if None in known or known == own:
            return None
        return (
            f"{dataset} has crop={own[0]} interpolation={own[1]}, but the training images of the"
            f" weights have crop={known[0]} interpolation={known[1]}. Build the dataset with these"
            f" values, unless its original images are squares of {manifest.image_size} px"
        )


TIMM_ARCHITECTURE = "wide_mlps"
"""Name under which `pretrain.models.timm_names` registers our models in timm."""

TIMM_MIXERS = {
    (32, 8, 512): "mixer_s32_224",
    (16, 8, 512): "mixer_s16_224",
    (32, 12, 768): "mixer_b32_224",
    (16, 12, 768): "mixer_b16_224",
    (32, 24, 1024): "mixer_l32_224",
    (16, 24, 1024): "mixer_l16_224",
}
"""Mixers of timm by (patch size, blocks, channels). timm takes image size and widths as arguments.
"""

TIMM_TRANSFORM = ("interpolation", "crop_pct", "crop_mode")
"""Settings of timm that define how images are made square."""

_TIMM_KEYS = (
    "architecture",
    "num_classes",
    "num_features",
    "global_pool",
    "label_names",
    "label_descriptions",
    "model_args",
    "pretrained_cfg",
)


def timms_own(card: ModelCard) -> tuple[str, dict[str, Any]] | None:
    """Return (architecture, arguments) of timm's own model that equals the card's model, or None if
    timm has no such model."""
    spec, size = card.model, card.image_size
    if not isinstance(spec, MixerSpec) or spec.activation != "gelu":
        return None
    name = TIMM_MIXERS.get((spec.patch_size, spec.depth, spec.num_channels))
    if name is None or spec.layers_per_mixing != 2 or spec.num_tokens or spec.permuted_blocks:
        return None
    hidden = spec.hidden_sizes(num_tokens=spec.tokens(image_size=size))
    # timm rounds ratio x channels down; adding 0.5 guards against rounding errors
    ratios = [(width + 0.5) / spec.num_channels for width in hidden]
    return name, {"img_size": size, "mlp_ratio": ratios}


def config_of(card: ModelCard, *, for_plain_timm: bool = False) -> dict[str, Any]:
    """Return the content of config.json: metadata, and arguments of
    `timm.create_model("local-dir:...")`.

    `for_plain_timm`: the weights have timm's names (see `timms_own`), so timm loads them without
    this package.
    """
    fields, count = card.model_dump(mode="json"), len(card.classes)
    architecture = TIMM_ARCHITECTURE
    arguments = {"spec": fields["model"], "img_size": card.image_size}
    pretrained = {
        "input_size": [3, card.image_size, card.image_size],
        "fixed_input_size": True,
        "interpolation": "box" if card.fed_interpolation == "area" else card.fed_interpolation,
        "crop_pct": card.eval_crop,
        "mean": fields["channel_mean"],
        "std": fields["channel_std"],
        "num_classes": count,
        "label_names": fields["classes"],
        "classifier": "head",
    }
    if for_plain_timm and (own := timms_own(card)):
        architecture, arguments = own
        pretrained["first_conv"] = "stem.proj"
    return fields | {
        "architecture": architecture,
        "num_classes": count,
        "model_args": arguments,
        "pretrained_cfg": {"architecture": architecture} | pretrained | card.timm_transform,
    }


def read_card(directory: Path) -> ModelCard:
    path = directory / CONFIG
    try:
        tree = json.loads(path.read_text())
        if is_of_timm(tree):
            return _card_of_timm(tree, shapes=shapes_in(directory / MODEL))
        if isinstance(tree, dict):
            tree = {key: value for key, value in tree.items() if key not in _TIMM_KEYS}
        return ModelCard.model_validate_json(json.dumps(tree))
    except WeightsError:
        raise
    except OSError as error:
        problem, fix = (
            f"the file cannot be read ({error})",
            "Copy the checkpoint again, or use another",
        )
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            raise WeightsError(str(path), problem, fix, code="missing-path") from None
        raise CheckpointError(str(path), problem, fix, code="unreadable") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # another program's file
        problem = str(error).splitlines()[0]
        if isinstance(error, ValidationError):
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]]
            problem = "; ".join(faults)
        problem, fix = f"the file is not valid ({problem})", "Use other weights"
        raise WeightsError(str(path), problem, fix, code="unknown-format") from None


# ---- folders of timm

_SYNSETS = {
    1000: "imagenet",
    11221: "imagenet21k_miil",
    11821: "imagenet12k",
    21841: "imagenet22k",
    21842: "imagenet22k_ms",
    21843: "imagenet21k_goog",
}
"""Names of timm's lists of WordNet classes, by number of classes."""


def is_of_timm(tree: Any) -> bool:
    """Return True if timm wrote this config.json, False if this package did."""
    keys = tree.keys() if isinstance(tree, dict) else set()
    return keys >= {"pretrained_cfg", "architecture"} and "model" not in keys


def _card_of_timm(tree: dict[str, Any], *, shapes: dict[str, list[int]]) -> ModelCard:
    """Return metadata for weights that timm saved. The spec is a MixerSpec if this package has the
    architecture, otherwise a TimmModelSpec."""
    config, name = tree["pretrained_cfg"], tree["architecture"]
    arguments = {
        key: value
        for key, value in (tree.get("model_args") or {}).items()
        if key not in ("num_classes", "in_chans")
    }
    channels, height, width = config["input_size"]
    problem = ""
    if channels != 3 or height != width:
        problem = f"its images are {width} x {height} in {channels} channels, not square and RGB"
    elif not isinstance(config.get("classifier"), str):
        problem = "it does not have exactly one classifier"
    if problem:
        raise WeightsError(name, problem, "choose another model", code="unsupported")
    count = tree.get("num_classes", config.get("num_classes", 0))
    head = shapes.get(f"{config['classifier']}.weight")
    if config.get("fixed_input_size"):
        arguments = {"img_size": height} | arguments
    if "global_pool" in config:
        arguments["global_pool"] = config["global_pool"]
    labels = tree.get("label_names") or config.get("label_names") or _classes_of_timm(count)
    transform = {key: config[key] for key in TIMM_TRANSFORM if key in config}
    return ModelCard(
        model=_mixer_of_timm(name, arguments)
        or TimmModelSpec(
            kind="timm_model",
            name=name,
            arguments=json.dumps(arguments, sort_keys=True),
            num_features=head[1] if head and count else tree["num_features"],
        ),
        image_size=height,
        classes=tuple(labels),
        channel_mean=tuple(config["mean"]),
        channel_std=tuple(config["std"]),
        dataset=config.get("tag") or "not stated",
        fed_interpolation="bicubic" if transform.get("interpolation") == "bicubic" else "bilinear",
        timm_transform=transform,
    )


def _mixer_of_timm(name: str, arguments: dict[str, Any]) -> AnySpec | None:
    known = next((sizes for sizes, mixer in TIMM_MIXERS.items() if mixer == name), None)
    if known is None or not arguments.keys() <= {"img_size", "mlp_ratio", "global_pool"}:
        return None
    patch_size, depth, channels = known
    token_hidden, channel_hidden = (
        int(ratio * channels) for ratio in arguments.get("mlp_ratio", (0.5, 4.0))
    )
    return MixerSpec(
        kind="mixer",
        patch_size=patch_size,
        num_channels=channels,
        depth=depth,
        token_hidden=token_hidden,
        channel_hidden=channel_hidden,
        norm_eps=TIMM_NORM_EPS,
    )


def _classes_of_timm(count: int) -> list[str]:
    """Return the class names in the classifier's order, or numbered names if timm has no list."""
    package = importlib.util.find_spec("timm")  # an import would import torch, too
    if count not in _SYNSETS or package is None or package.origin is None:
        return [f"class_{number:05d}" for number in range(count)]
    lists = Path(package.origin).parent / "data" / "_info"
    return (lists / f"{_SYNSETS[count]}_synsets.txt").read_text().split()


def shapes_in(path: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None
