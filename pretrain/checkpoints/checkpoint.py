"""Checkpoints that appear whole, are verified before they are trusted, and are all that later stages read.

    RUN/checkpoints/step-00000120/
      model.safetensors        fp32 weights by name
      config.json              model spec, classes, image size, normalisation: what makes the weights usable, here and in timm
      optimizer.safetensors    KIND.NAME
      trainer.json             step, samples consumed, updates, the best evaluation so far, whether one is still owed
      sha256.json              of the four files above
    RUN/checkpoints/latest     the name of the newest good one
    RUN/checkpoints/best.json  see retention.py

Publishing, by the first rank alone (in the background: see checkpoint_writer.py):
1. the four files into a temporary directory, then sha256.json, hashed while they are written;
2. fsync of each, rename to step-N, fsync of the parent: from here on it is what a restart goes on from;
3. `latest`; 4. `best.json`, if this checkpoint knows a better one;
5. what no rule keeps is renamed, then removed.
A crash anywhere leaves the newest published checkpoint whole; what is half written or half removed has a temporary name, on the
start's workspace, which the next start removes (starts.py). Restoring verifies the hashes and falls back to the newest checkpoint
that is whole.
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from data_prep.publish import (
    atomic_directory,
    sha256_of,
    write_atomic,
    write_json,
)
from pretrain.checkpoints.card import (
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
from pretrain.checkpoints.retention import Best, Retention, prune, published_best, write_best
from pretrain.checkpoints.tensor_file import read_tensors, write_tensors
from pretrain.engine.step import EngineState
from pretrain.models.foreign import by_our_names


@dataclass(frozen=True)
class TrainerState:
    """Where training stood: all that a resume needs besides weights."""

    step: int
    samples_consumed: int
    best: Best | None = None
    owes_evaluation: bool = False
    """The evaluation that was due at this step was given up, to stop sooner."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """The last ones, up to this step: a run that diverges and is started again and again still stops in the end."""
    num_cpu_threads: int | None = None
    """See `num_cpu_threads`."""


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint is made of, in memory."""

    engine: EngineState
    trainer: TrainerState
    card: ModelCard

    def place(self, run_dir: Path) -> Path:
        return checkpoints_dir(run_dir) / f"step-{self.trainer.step:08d}"


@dataclass(frozen=True)
class Restored:
    path: Path
    engine: EngineState
    trainer: TrainerState


def save(run_dir: Path, *, engine: EngineState, trainer: TrainerState, card: ModelCard, keep_last: int) -> Path:
    """The whole protocol, on the spot."""
    snapshot = Snapshot(engine, trainer, card)
    publish(run_dir, snapshot)
    settle(run_dir, snapshot, Retention(keep_last))
    return snapshot.place(run_dir)


def publish(run_dir: Path, snapshot: Snapshot) -> int:
    """Steps 1 and 2; the bytes written."""
    engine = snapshot.engine
    state = asdict(snapshot.trainer) | {"num_updates": engine.num_updates}
    if engine.scale:
        state["engine.loss_scale"] = engine.scale
    with atomic_directory(snapshot.place(run_dir)) as directory:
        hashes = {
            MODEL: write_tensors(directory / MODEL, engine.weights),
            OPTIMIZER: write_tensors(directory / OPTIMIZER, engine.optimizer),
        }
        for name, content in ((CONFIG, config_of(snapshot.card)), (TRAINER, state)):
            write_json(directory / name, content)
            hashes[name] = sha256_of(directory / name)
        write_json(directory / HASHES, hashes)
        return sum(file.stat().st_size for file in directory.iterdir())


def settle(run_dir: Path, snapshot: Snapshot, retention: Retention) -> None:
    """Steps 3 to 5."""
    newest, trainer = snapshot.place(run_dir), snapshot.trainer
    best = published_best(run_dir, trainer.best, newest_step=trainer.step)
    write_atomic(checkpoints_dir(run_dir) / LATEST, newest.name.encode() + b"\n")
    write_best(run_dir, best)
    prune(run_dir, newest=newest, retention=retention, best=best)


def newest_whole(run_dir: Path) -> Path | None:
    """Hashes read; None where there never was a checkpoint; an error where all are damaged."""
    found = list_checkpoints(run_dir)
    for path in reversed(found):
        fault = fault_of(path)
        if fault is None:
            return path
        print(f"checkpoint {path} is damaged ({fault}); trying the one before", file=sys.stderr)
    if found or (checkpoints_dir(run_dir) / LATEST).exists():
        where = checkpoints_dir(run_dir)
        raise CheckpointError(
            f"{where}: no checkpoint is whole, and training never silently starts over; move it away to do so"
        )
    return None


def mark_of(path: Path | None) -> int:
    """A number that tells one checkpoint's content from another's: of its hashes, which are read, not checked."""
    if path is None:
        return 0
    try:
        return int.from_bytes(hashlib.sha256((path / HASHES).read_bytes()).digest()[:7], "big")
    except OSError:
        return -1


def load(path: Path) -> Restored:
    """Of a checkpoint that has been verified."""
    state = json.loads((path / TRAINER).read_text())
    scale = state.get("engine.loss_scale", {})
    engine = EngineState(read_tensors(path / MODEL), read_tensors(path / OPTIMIZER), state["num_updates"], scale)
    best = state.get("best")  # older checkpoints do not know of it, nor of what follows
    trainer = TrainerState(
        state["step"],
        state["samples_consumed"],
        Best(**best) if best else None,
        owes_evaluation=state.get("owes_evaluation", False),
        skipped_steps=state.get("skipped_steps", 0),
        skipped_in_a_row=state.get("skipped_in_a_row", 0),
        num_cpu_threads=state.get("num_cpu_threads"),
    )
    return Restored(path, engine, trainer)


def restore(run_dir: Path) -> Restored | None:
    path = newest_whole(run_dir)
    return None if path is None else load(path)


def load_weights(path: Path) -> tuple[ModelCard, dict[str, Tensor]]:
    """The card and the weights of a checkpoint directory, or of the newest whole checkpoint of a run directory."""
    directory = resolve(path)
    card = parse_card(directory)
    try:
        return card, by_our_names(read_tensors(directory / MODEL), card.model)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / MODEL}: cannot be read ({error}); copy it again, or use another") from None
