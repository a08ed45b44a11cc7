"""Checkpoints that appear whole, are verified before they are trusted, and are all that later stages read.

    RUN/checkpoints/step-00000120/
      model.safetensors        fp32 weights by name
      config.json              model spec, classes, image size, normalisation: what makes the weights usable, here and in timm
      optimizer.safetensors    KIND.NAME
      trainer.json             step, samples consumed, updates
      sha256.json              of the four files above
    RUN/checkpoints/latest     the name of the newest good one

Publishing, by the first rank: 1. all files into a temporary directory; 2. sha256.json; 3. fsync and rename; 4. `latest`; 5. older
ones beyond keep_last go. Restoring verifies the hashes and falls back to the newest checkpoint that is whole.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.publish import atomic_directory, sha256_of, write_atomic, write_json
from pretrain.card import (
    CONFIG,
    HASHES,
    LATEST,
    MODEL,
    OPTIMIZER,
    TRAINER,
    CheckpointError,
    ModelCard,
    checkpoints_dir,
    config_of,
    fault_of,
    list_checkpoints,
    parse_card,
    resolve,
)
from pretrain.step import EngineState


@dataclass(frozen=True)
class TrainerState:
    """Where training stood: all that a resume needs besides weights."""

    step: int
    samples_consumed: int


@dataclass(frozen=True)
class Restored:
    path: Path
    engine: EngineState
    trainer: TrainerState


def save(run_dir: Path, *, engine: EngineState, trainer: TrainerState, card: ModelCard, keep_last: int) -> Path:
    path = checkpoints_dir(run_dir) / f"step-{trainer.step:08d}"
    with atomic_directory(path) as directory:
        write_json(directory / CONFIG, config_of(card))
        for name, tensors in ((MODEL, engine.weights), (OPTIMIZER, engine.optimizer)):
            save_file(tensors, directory / name)
            shutil.copymode(directory / CONFIG, directory / name)  # safetensors writes for the owner alone
        state = {"step": trainer.step, "samples_consumed": trainer.samples_consumed, "num_updates": engine.num_updates}
        write_json(directory / TRAINER, state | ({"engine.loss_scale": engine.scale} if engine.scale else {}))
        write_json(
            directory / HASHES, {name: sha256_of(directory / name) for name in (MODEL, OPTIMIZER, CONFIG, TRAINER)}
        )
    write_atomic(checkpoints_dir(run_dir) / LATEST, path.name.encode() + b"\n")
    prune(run_dir, newest=path, keep_last=keep_last)
    return path


def prune(run_dir: Path, *, newest: Path, keep_last: int) -> None:
    """Removes what is older than the last ones, and what is newer than this one: damaged, or training had gone on there."""
    others = [path for path in list_checkpoints(run_dir) if path != newest]
    older = [path for path in others if path.name < newest.name]
    for path in [*older[: max(0, len(older) - (keep_last - 1))], *(path for path in others if path.name > newest.name)]:
        shutil.rmtree(path)


def restore(run_dir: Path) -> Restored | None:
    """The newest whole checkpoint; None where there never was one; an error where all are damaged."""
    found = list_checkpoints(run_dir)
    for path in reversed(found):
        fault = fault_of(path)
        if fault is None:
            state = json.loads((path / TRAINER).read_text())
            scale = state.get("engine.loss_scale", {})
            engine = EngineState(load_file(path / MODEL), load_file(path / OPTIMIZER), state["num_updates"], scale)
            return Restored(path, engine, TrainerState(state["step"], state["samples_consumed"]))
        print(f"checkpoint {path} is damaged ({fault}); trying the one before", file=sys.stderr)
    if found or (checkpoints_dir(run_dir) / LATEST).exists():
        where = checkpoints_dir(run_dir)
        raise CheckpointError(
            f"{where}: no checkpoint is whole, and training never silently starts over; move it away to do so"
        )
    return None


def load_weights(path: Path) -> tuple[ModelCard, dict[str, Tensor]]:
    """The card and the weights of a checkpoint directory, or of the newest whole checkpoint of a run directory."""
    directory = resolve(path)
    card = parse_card(directory)
    try:
        return card, load_file(directory / MODEL)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / MODEL}: cannot be read ({error}); copy it again, or use another") from None
