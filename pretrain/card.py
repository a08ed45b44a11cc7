"""Finding and judging checkpoints, without torch: what a config check may look at before anything heavy is imported.

A checkpoint is a directory `RUN/checkpoints/step-NNNNNNNN` (see checkpoint.py for its files and how it is published).
"""

import json
from pathlib import Path

from pydantic import ValidationError

from data_prep.publish import sha256_of
from data_prep.settings import Settings, UserError
from pretrain.models.spec import ModelSpec

MODEL, CONFIG, OPTIMIZER, TRAINER, HASHES = (
    "model.safetensors",
    "config.json",
    "optimizer.safetensors",
    "trainer.json",
    "sha256.json",
)
LATEST = "latest"


class CheckpointError(UserError):
    """A checkpoint that is missing or damaged; the text names it and the remedy."""


class ModelCard(Settings):
    """config.json: what weights need in order to be used."""

    model: ModelSpec
    image_size: int
    classes: tuple[str, ...]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    dataset: str
    manifest_hash: str
    step: int
    run_key: str


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(checkpoints_dir(run_dir).glob("step-*"))


def fault_of(path: Path, *, needed: tuple[str, ...] = (MODEL, OPTIMIZER, CONFIG, TRAINER)) -> str | None:
    """What is wrong with the needed files of a published checkpoint, or None."""
    try:
        hashes: dict[str, str] = json.loads((path / HASHES).read_text())
        for name in needed:
            if sha256_of(path / name) != hashes.get(name):
                return f"{name} has changed"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def read_card(path: Path) -> ModelCard:
    """The card of a checkpoint directory, or of the newest whole checkpoint of a run directory."""
    return parse_card(resolve(path))


def parse_card(directory: Path) -> ModelCard:
    try:
        return ModelCard.model_validate_json((directory / CONFIG).read_text())
    except (ValidationError, json.JSONDecodeError, OSError) as error:
        raise CheckpointError(f"{directory / CONFIG}: cannot be read ({str(error).splitlines()[0]})") from None


def resolve(path: Path) -> Path:
    """The checkpoint directory that a user means by `path`; verified when it carries hashes."""
    candidates = [path] if (path / MODEL).is_file() else list(reversed(list_checkpoints(path)))
    if not candidates:
        raise CheckpointError(
            f"{path}: holds no checkpoint; give a run directory (runs/NAME) or one of its checkpoints/step-*"
        )
    for directory in candidates:
        fault = fault_of(directory, needed=(MODEL, CONFIG)) if (directory / HASHES).exists() else None
        if fault is None:
            return directory
    raise CheckpointError(f"{path}: no checkpoint there is whole ({fault}); copy it again, or use another")
