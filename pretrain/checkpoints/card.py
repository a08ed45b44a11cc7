"""The card of weights, config.json beside them: what makes them usable, in our words and in timm's.
No torch here."""

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
    """A checkpoint that is missing or damaged; the text names it and the remedy."""


class WeightsError(CheckpointError):
    """Weights or metadata that cannot be used; another attempt would read the same."""

    is_final = True


class ModelCard(PixelOrder):
    """What weights need in order to be used, and where they come from; config.json holds it, and
    timm's words for it beside it."""

    model: ModelSpec
    image_size: int
    classes: tuple[str, ...]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    dataset: str
    """The name of what they were trained on."""
    stream: bool = False
    """Trained on shards without an index (data.stream): no resume on the way was exact, and no
    shuffle over all of them."""
    stored_crop: CropPolicy | None = None
    stored_interpolation: Filter | None = None
    """How the pictures there had become squares; None where that is not known, or not one thing."""
    stored_size: int | None = None
    """Of those squares; None as above, and where they have `image_size`."""
    fed_interpolation: Filter = "bilinear"
    """With which stored squares are resized to `image_size`."""
    content_hash: str = ""
    pixels_hash: str = ""
    """Of what they were trained on, and of that together with what readers made of it."""
    step: int = 0
    run_key: str = ""
    """These four are of a run of ours; imported weights have none."""
    origin: str = ""
    """Of imported weights: the file that they were read from."""
    timm_transform: dict[str, str | float] = Field(default_factory=dict)
    """Of weights that were imported from timm: what its transform does (interpolation, crop_pct,
    crop_mode), for config.json."""

    def other_pixels(self, manifest: Manifest, *, dataset: str) -> str | None:
        """A warning where the squares of a dataset were made in another way than those that the
        weights were trained on."""
        known, here = (
            (self.stored_crop, self.stored_interpolation),
            (manifest.crop, manifest.interpolation),
        )
        if None in known or known == here:
            return None
        return (
            f"{dataset}: its pictures became squares by {here[0]} and {here[1]}, those of the"
            f" weights' source by {known[0]} and {known[1]}; unless all were squares of"
            f" {manifest.image_size} px before, the model sees other pixels than there; build the"
            f" dataset with crop={known[0]} interpolation={known[1]}"
        )


TIMM_ARCHITECTURE = "wide_mlps"
"""What `pretrain.models.timm_names` registers for any spec."""

TIMM_MIXERS = {
    (32, 8, 512): "mixer_s32_224",
    (16, 8, 512): "mixer_s16_224",
    (32, 12, 768): "mixer_b32_224",
    (16, 12, 768): "mixer_b16_224",
    (32, 24, 1024): "mixer_l32_224",
    (16, 24, 1024): "mixer_l16_224",
}
"""(patch size, blocks, channels) of the Mixers that timm has itself; it lets image size and hidden
widths be chosen."""

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
    """(architecture, arguments) of the model that computes the same in timm without this package,
    where there is one."""
    spec, size = card.model, card.image_size
    if (
        not isinstance(spec, MixerSpec)
        or spec.layers_per_mixing != 2
        or spec.num_tokens
        or spec.permuted_blocks
    ):
        return None
    name = TIMM_MIXERS.get((spec.patch_size, spec.depth, spec.num_channels))
    if name is None or spec.activation != "gelu":
        return None
    hidden = spec.hidden_sizes(num_tokens=spec.tokens(image_size=size))
    # timm cuts ratio x channels down to a whole number; a half more keeps rounding from losing one
    return name, {
        "img_size": size,
        "mlp_ratio": [(width + 0.5) / spec.num_channels for width in hidden],
    }


def config_of(card: ModelCard, *, for_plain_timm: bool = False) -> dict[str, Any]:
    """config.json: the card, and what `timm.create_model("local-dir:...")` or `"hf-hub:..."` asks
    for.

    `for_plain_timm`: the weights beside it have the names of `timms_own`, and timm loads them
    without this package.
    """
    fields = card.model_dump(mode="json")
    own = timms_own(card) if for_plain_timm else None
    architecture, arguments = own or (
        TIMM_ARCHITECTURE,
        {"spec": fields["model"], "img_size": card.image_size},
    )
    timm = {
        "architecture": architecture,
        "num_classes": len(card.classes),
        "model_args": arguments,
        "pretrained_cfg": (
            {
                "architecture": architecture,
                "input_size": [3, card.image_size, card.image_size],
                "fixed_input_size": True,
                "interpolation": (
                    "box" if card.fed_interpolation == "area" else card.fed_interpolation
                ),
                "crop_pct": 1.0,
                "mean": fields["channel_mean"],
                "std": fields["channel_std"],
                "num_classes": len(card.classes),
                "label_names": fields["classes"],
                "classifier": "head",
            }
            | ({"first_conv": "stem.proj"} if own else {})
            | card.timm_transform
        ),
    }
    return fields | timm


def read_card(directory: Path) -> ModelCard:
    """Of a directory of weights."""
    path = directory / CONFIG
    try:
        tree = json.loads(path.read_text())
        if is_of_timm(tree):
            return _card_of_timm(tree, shapes=_shapes_in(directory / MODEL))
        fields = (
            {key: value for key, value in tree.items() if key not in _TIMM_KEYS}
            if isinstance(tree, dict)
            else tree
        )
        return ModelCard.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        fault = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise WeightsError(
            str(path), f"is not valid ({fault})", "Use other weights", code="unknown-format"
        ) from None
    except OSError as error:
        problem, fix = f"cannot be read ({error})", "Copy the checkpoint again, or use another"
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            raise WeightsError(str(path), problem, fix, code="missing-path") from None
        raise CheckpointError(str(path), problem, fix, code="unreadable") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # written by others
        problem = f"is not valid ({str(error).splitlines()[0]})"
        raise WeightsError(str(path), problem, "Use other weights", code="unknown-format") from None


# ---- folders that timm has written
# -----------------------------------------------------------------------------------

_SYNSETS = {
    1000: "imagenet",
    11221: "imagenet21k_miil",
    11821: "imagenet12k",
    21841: "imagenet22k",
    21842: "imagenet22k_ms",
    21843: "imagenet21k_goog",
}
"""timm's lists of WordNet's names, by how many classes they have, as timm itself tells them
apart."""


def is_of_timm(tree: Any) -> bool:
    """Whether a config.json is timm's alone."""
    return (
        isinstance(tree, dict)
        and "pretrained_cfg" in tree
        and "architecture" in tree
        and "model" not in tree
    )


def _card_of_timm(tree: dict[str, Any], *, shapes: dict[str, list[int]]) -> ModelCard:
    """As far as this project has the architecture itself, its own; else one that timm builds."""
    told, name = tree["pretrained_cfg"], tree["architecture"]
    arguments = {
        key: value
        for key, value in (tree.get("model_args") or {}).items()
        if key not in ("num_classes", "in_chans")
    }
    colours, height, width = told["input_size"]
    if colours != 3 or height != width:
        raise CheckpointError(
            f"{name} takes pictures of {width} x {height} in {colours} colours; here they are"
            " square and RGB"
        )
    if not isinstance(told.get("classifier"), str):
        raise CheckpointError(f"{name} has no classifier, or several; here a model has one")
    count, head = (
        tree.get("num_classes", told.get("num_classes", 0)),
        shapes.get(f"{told['classifier']}.weight"),
    )
    if told.get("fixed_input_size"):
        arguments = {"img_size": height} | arguments
    arguments |= {"global_pool": told["global_pool"]} if "global_pool" in told else {}
    return ModelCard(
        model=_mixer_of_timm(name, arguments)
        or TimmModelSpec(
            kind="timm_model",
            name=name,
            arguments=json.dumps(arguments, sort_keys=True),
            num_features=head[1] if head and count else tree["num_features"],
        ),
        image_size=height,
        classes=tuple(
            tree.get("label_names") or told.get("label_names") or _classes_of_timm(count)
        ),
        channel_mean=tuple(told["mean"]),
        channel_std=tuple(told["std"]),
        dataset=told.get("tag") or "not stated",
        fed_interpolation="bicubic" if told.get("interpolation") == "bicubic" else "bilinear",
        timm_transform={
            key: told[key] for key in ("interpolation", "crop_pct", "crop_mode") if key in told
        },
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
    """In the order of the classifier; numbers where timm has no list."""
    package = importlib.util.find_spec("timm")  # to import it would import torch
    if count not in _SYNSETS or package is None or package.origin is None:
        return [f"class_{number:05d}" for number in range(count)]
    return (
        (Path(package.origin).parent / "data" / "_info" / f"{_SYNSETS[count]}_synsets.txt")
        .read_text()
        .split()
    )


def _shapes_in(path: Path) -> dict[str, list[int]]:
    """Of the tensors of a safetensors file, by its head alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None
