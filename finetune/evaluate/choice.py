"""Which augmentation makes the views of test-time augmentation, and why. No torch here.

Views that the model was never trained on can cost more than averaging brings (flips, where classes are left and right). Hence, in
this order: what the user names; the crops and flips of the training, where the run that made the weights says them; those of the
paper's public command.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.settings import SettingsError, read_yaml, validate
from finetune.evaluate.config import ViewSettings
from pretrain.checkpoints.run import CONFIG_FILE
from pretrain.config import AugmentSettings

GEOMETRY = ("crop_scale", "crop_ratio", "crop_interpolation", "crop_padding", "padding_mode", "flip_probability")
"""All that is taken of a training: views are to be other pictures of the same thing, not harder ones."""
PUBLIC: dict[str, Any] = {"crop_scale": (0.4, 1.0), "crop_ratio": (1.0, 1.0), "flip_probability": 0.5}


@dataclass(frozen=True)
class Choice:
    augment: ViewSettings
    source: str
    """In words."""


def choose(asked: ViewSettings, run_dir: Path | None) -> Choice:
    """`run_dir`: of the run that made the weights."""
    named = {name: getattr(asked, name) for name in sorted(asked.model_fields_set)}
    base, source = PUBLIC, "the public command's, for the training's is not known"
    trained = _trained_with(run_dir) if run_dir is not None else None
    if run_dir is not None and trained is not None:
        base = {name: getattr(trained, name) for name in GEOMETRY}
        source = f"as {run_dir.name} was trained"
        if trained.crop_scale is None and not trained.crop_padding and not trained.flip_probability:
            base, source = PUBLIC, f"the public command's, for {run_dir.name} was trained without crops and flips"
    if named.get("crop_padding") and "crop_scale" not in named:
        base = base | {"crop_scale": None}  # the other way to crop
    if named.get("crop_scale") and "crop_padding" not in named:
        base = base | {"crop_padding": 0}
    if named:
        source = f"{', '.join(named)} as asked; the rest {source}"
    # every field is set: config.yaml and --show say what was chosen
    whole = ViewSettings().model_dump() | base | named
    return Choice(validate(ViewSettings, whole), source)


def _trained_with(run_dir: Path) -> AugmentSettings | None:
    try:
        section = read_yaml(run_dir / CONFIG_FILE).get("augment")
        if not isinstance(section, dict):
            return None
        return validate(AugmentSettings, {name: section[name] for name in GEOMETRY if name in section})
    except SettingsError:  # of a stranger, or of another version
        return None


def recipe(augment: dict[str, Any]) -> str:
    """What such views are, in the words of the settings."""
    none: dict[str, Any] = AugmentSettings(flip_probability=0, crop_interpolation="bilinear").model_dump(mode="json")
    shown = {name: value for name, value in augment.items() if value != none[name]}
    return ", ".join(f"{name} {_short(value)}" for name, value in shown.items()) or "none"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_short(each) for each in value)}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
