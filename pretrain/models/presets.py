"""The papers' models by name, without torch: fields of a spec, image size, and source."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field, create_model

from data_prep.errors import SettingsError
from data_prep.settings import Settings, nearest, validate
from pretrain.models.spec import OWN_CLASS, AnySpec, ModelSpec


@dataclass(frozen=True)
class Preset:
    fields: Mapping[str, Any]
    image_size: int
    source: str
    num_classes: int = 1000


class NamedModel(Settings):
    """A model of the papers by name, with changed fields."""

    model_config = ConfigDict(extra="allow")
    preset: str = Field(
        examples=["mlp_b12_wi1024"],
        json_schema_extra=lambda schema: schema.update(enum=list(PRESETS)),
    )
    """Name of a model that `pretrain models` lists. Cannot be combined with `kind`."""


_PATH = Field(
    description="Your own torch module with timm's interface, as module:Class. All other keys of"
    " `model` are arguments of the class. Cannot be combined with `preset` or `kind`.",
    examples=["my_package.my_module:MyModel"],
)
_OPEN: Any = ConfigDict(extra="allow")
OwnModel = create_model("OwnModel", __config__=_OPEN, **{"import": (str, _PATH)})  # type: ignore[call-overload]


class _Named(Settings):
    model: ModelSpec


def spec_of(name: str, **changes: Any) -> AnySpec:
    return validate(_Named, {"model": {**preset(name).fields, **changes}}).model


def preset(name: object) -> Preset:
    if not isinstance(name, str) or name not in PRESETS:
        raise SettingsError(
            "model.preset",
            f"{name!r} is not a known model",
            nearest(str(name), list(PRESETS)),
            code="unknown-name",
        )
    return PRESETS[name]


def expand_preset(model: object) -> object:
    """Expand `preset: NAME` to all fields of the named model, and `import: PATH` to the fields of
    an ImportSpec. Return other values unchanged for pydantic to check.

    `preset` and `import` cannot be combined with `kind`: the override `model.preset=NAME` does not
    remove the fields of a config's model.
    """
    if isinstance(model, str):
        raise SettingsError(
            "model",
            f"{model!r} is not valid",
            f"for a named model write model='{{preset: {model}}}'",
            code="bad-value",
        )
    if not isinstance(model, dict):
        return model
    chosen = [key for key in ("preset", "import", "kind") if key in model]
    if not chosen or chosen == ["kind"]:
        return model
    name, field = model[chosen[0]], f"model.{chosen[0]}"
    if other := chosen[1:2]:
        raise SettingsError(
            field,
            f"{name!r} and model.{other[0]}={model[other[0]]!r} exclude each other",
            f"write model='{{{chosen[0]}: {name}}}', or remove {other[0]} and its fields",
            code="conflict",
        )
    fields = {key: value for key, value in model.items() if key != chosen[0]}
    if chosen == ["preset"]:
        return {**preset(name).fields, **fields}
    if re.fullmatch(OWN_CLASS, str(name)) is None:
        fix = "write module:Class, for example my_package.my_module:MyModel"
        raise SettingsError(field, f"{name!r} is not valid", fix, code="bad-value")
    return {"kind": "import", "path": name, "arguments": json.dumps(fields, sort_keys=True)}


def _mlps() -> dict[str, Preset]:
    found = {}
    for depth, width in (
        (6, 256),
        (6, 512),
        (6, 1024),
        (12, 256),
        (12, 512),
        (12, 768),
        (12, 1024),
    ):
        fields = {"kind": "mlp", "depth": depth, "width": width}
        found[f"mlp_b{depth}_wi{width}"] = Preset(fields, 64, "table of models")
    paper = {"kind": "mlp", "depth": 6, "width": 1024, "bottleneck": "none", "activation": "relu"}
    public = {
        "kind": "mlp",
        "depth": 5,
        "width": 1024,
        "bottleneck": "none",
        "activation_first": True,
    }
    found["mlp_l6_wi1024"] = Preset(paper, 64, "standard MLP: relu(W LN z)")
    found["mlp_l5_wi1024_public"] = Preset(public, 64, "public code, standard MLP: W gelu(LN z)")
    return found


def _mixers() -> dict[str, Preset]:
    """Return the Mixers. Some numbers in the paper disagree (docs/papers.md).

    Mixer-B-W: Omega = 2.6e8 and width 6.2e5 in its table need gamma = 3456/844, but section C.3
    prints gamma = 4.57 (Omega = 2.90e8). Each gamma has its own preset. Mixer-SS-W: the paper
    prints 255M connections, but C = 487 gives 276M (`num_channels=467` gives 255M). The sweep over
    P has C = 3 P^2, and S follows from Omega = 290,217,984.
    """
    b_16 = {
        "kind": "mixer",
        "patch_size": 16,
        "num_channels": 768,
        "token_hidden": 384,
        "channel_hidden": 3072,
    }
    b_w = {"kind": "mixer", "patch_size": 14, "num_channels": 588, "depth": 8, "expansion": 4.0948}
    ss_8 = {"kind": "mixer", "patch_size": 8, "num_channels": 986, "depth": 2}
    ss_w = {"kind": "mixer", "patch_size": 4, "num_channels": 487, "depth": 2}
    found = {
        "mixer_b_16": Preset(b_16, 224, "ImageNet-1k"),
        "mixer_b_4": Preset({"kind": "mixer", "patch_size": 4}, 64, "Scaling MLPs, Table 4"),
        "mixer_b_w": Preset(b_w, 224, "Table 1 (ImageNet-1k)"),
        "mixer_b_w_c3": Preset({**b_w, "expansion": 4.57}, 224, "C.3 (ImageNet-1k)"),
        "mixer_ss_8": Preset(ss_8, 32, "CIFAR Table 1", 10),
        "mixer_ss_w": Preset(ss_w, 32, "CIFAR Table 1", 10),
        "rp_mixer_b_w": Preset({**b_w, "permuted_blocks": "all"}, 224, "RP variant"),
        "rp_mixer_ss_w": Preset({**ss_w, "permuted_blocks": "all"}, 32, "RP variant", 10),
    }
    for patch, tokens in {7: 923, 8: 779, 14: 283, 16: 196, 28: 26, 32: 15}.items():
        fields = {
            "kind": "mixer",
            "patch_size": patch,
            "num_channels": 3 * patch**2,
            "depth": 8,
            "num_tokens": tokens,
        }
        found[f"mixer_p{patch}"] = Preset(fields, 224, "sweep over P")
    for channels, tokens in ((32, 113), (128, 128)):
        fields = {
            "kind": "mixer",
            "patch_size": 4,
            "num_channels": channels,
            "num_tokens": tokens,
            "depth": 8,
            "layers_per_mixing": 1,
        }
        found[f"smixer_c{channels}"] = Preset(fields, 32, "Fig. 5 and 7", 10)
        found[f"rp_smixer_c{channels}"] = Preset(
            {**fields, "permuted_blocks": "all"}, 32, "Fig. 5 and 7", 10
        )
    return found


def _others() -> dict[str, Preset]:
    found = {}
    for width, density in {
        540: 0.9,
        612: 0.7,
        724: 0.5,
        935: 0.3,
        1619: 0.1,
    }.items():  # Omega = p m^2 = 2^18
        found[f"sw_mlp_{width}"] = Preset(
            {"kind": "sw_mlp", "width": width, "density": density}, 32, "Fig. 5", 10
        )
    for form in ("monarch", "kronecker"):
        found[f"{form}_mnist"] = Preset({"kind": "structured", "form": form}, 28, "Fig. 2d", 10)
    for name, size, num_classes in (("resnet18_32", 32, 10), ("resnet18_224", 224, 1000)):
        fields = {"kind": "timm", "name": name}
        found[name] = Preset(fields, size, "Table 1; our recipe", num_classes)
    for name in ("resnet152_64", "vit_b_4"):
        found[name] = Preset({"kind": "timm", "name": name}, 64, "Scaling MLPs, Table 4")
    return found


PRESETS: dict[str, Preset] = {**_mlps(), **_mixers(), **_others()}
