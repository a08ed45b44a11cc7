"""Write, read and remove the files of a checkpoint, and make models from them.

The first rank publishes a checkpoint, in the background (writer.py):
1. It writes the four files into a temporary directory, then sha256.json.
2. It syncs each file, renames the directory to step-N, and syncs the parent. A restart then
   resumes from this checkpoint.
3. It writes `latest`.
4. It writes best.json, if trainer.json of this checkpoint has a better evaluation.
5. It removes the checkpoints that no retention rule keeps.

A crash at any point leaves the newest published checkpoint complete. Incomplete files have a
temporary name, and the next attempt removes them.

Retention rules keep the newest checkpoints, the best by evaluation, milestones, and multiples of a
length. No checkpoint is removed before a newer one is published. A resumed run reads the best
evaluation from trainer.json.

Tensors are hashed while they are written. Reading and writing report their progress, so a slow file
system is not mistaken for a hang.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.publish import atomic_directory, sha256_of, withdraw, write_atomic, write_json
from pretrain.checkpoints.card import CONFIG, MODEL, ModelCard, WeightsError, config_of, is_of_timm
from pretrain.checkpoints.checkpoint import HASHES, LATEST, OPTIMIZER, TRAINER, Checkpoint
from pretrain.checkpoints.run import checkpoint_dir, checkpoints_dir, list_checkpoints, step_of
from pretrain.checkpoints.timm_weights import by_our_names, model_of_timm
from pretrain.checkpoints.weights import check_weights, load_strictly
from pretrain.engine.step import EngineState
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import TimmModelSpec
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.starts import check_owner

BEST = "best.json"
PIECE_BYTES = 4 << 20
FLUSHED_BYTES = 256 << 20
"""Bytes written between two syncs. At 1 MB/s this takes half of hang_timeout_s."""
_PAGE_BYTES = 4096
_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors' order: wide types come first, so every tensor is aligned."""


# ---- tensors


def flush(descriptor: int) -> None:
    """Wait until the file is on disk. Other threads can run meanwhile."""
    os.fsync(descriptor)
    PROGRESS.touch()


class Flusher:
    """Sync one file after every FLUSHED_BYTES, because a single sync at the end could look like a
    hang."""

    def __init__(self) -> None:
        self._in_memory = 0

    def wrote(self, num_bytes: int, descriptor: int) -> None:
        self._in_memory += num_bytes
        if self._in_memory >= FLUSHED_BYTES:
            flush(descriptor)
            self._in_memory = 0


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write CPU tensors to a file, and return its sha256."""
    digest, flusher = hashlib.sha256(), Flusher()
    with open(path, "xb", buffering=0) as file:
        for piece in _pieces(tensors):
            PROGRESS.touch()
            digest.update(piece)
            left = piece
            while left:
                left = left[file.write(left) :]
            flusher.wrote(len(piece), file.fileno())
        flush(file.fileno())
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    assert sys.byteorder == "little"
    order = list(_TYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        whole = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(whole), PIECE_BYTES):
            yield whole[start : start + PIECE_BYTES]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Map a file of tensors into memory, shared by the ranks of a node. Read each page now, to
    report progress."""
    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            tensors[name] = file.get_tensor(name)
            PROGRESS.touch()
            mapped = tensors[name].reshape(-1).view(torch.uint8)
            for start in range(0, len(mapped), PIECE_BYTES):
                mapped[start : start + PIECE_BYTES : _PAGE_BYTES].sum()
                PROGRESS.touch()
    return tensors


# ---- the state of a training


@dataclass(frozen=True)
class Best:
    """First step with the highest top-1 accuracy so far."""

    step: int
    score: float


@dataclass(frozen=True)
class TrainerState:
    """State that a resume needs, except the engine's state."""

    step: int
    samples_consumed: int
    best: Best | None = None
    owes_evaluation: bool = False
    """True if this step's evaluation was skipped to stop sooner. A resume begins with the
    evaluation."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    num_cpu_threads: int | None = None
    lengths: tuple[int, ...] = ()
    """Planned lengths of the run in steps, oldest first. The last length is current."""


@dataclass(frozen=True)
class Snapshot:
    engine: EngineState
    trainer: TrainerState
    card: ModelCard

    def place(self, run_dir: Path) -> Path:
        return checkpoint_dir(run_dir, self.trainer.step)


def publish(run_dir: Path, snapshot: Snapshot) -> int:
    """Do steps 1 and 2 of the list at the top of this file. Return the size in bytes."""
    check_owner()
    engine = snapshot.engine
    state = asdict(snapshot.trainer) | {
        "num_updates": engine.num_updates,
        "engine.loss_scale": engine.scale,
    }
    with atomic_directory(snapshot.place(run_dir)) as directory:
        hashes = {
            MODEL: write_tensors(directory / MODEL, engine.weights),
            OPTIMIZER: write_tensors(directory / OPTIMIZER, engine.optimizer),
        }
        for name, content in ((CONFIG, config_of(snapshot.card)), (TRAINER, state)):
            write_json(directory / name, content)
            hashes[name] = sha256_of(directory / name)
        write_json(directory / HASHES, hashes)
        check_owner()  # again, because the write may have been frozen
        return sum(file.stat().st_size for file in directory.iterdir())


def load_state(directory: Path) -> tuple[EngineState, TrainerState]:
    state: dict[str, Any] = json.loads((directory / TRAINER).read_text())
    num_updates, scale = state.pop("num_updates"), state.pop("engine.loss_scale")
    engine = EngineState(
        read_tensors(directory / MODEL), read_tensors(directory / OPTIMIZER), num_updates, scale
    )
    best, lengths = state.pop("best"), tuple(state.pop("lengths"))
    return engine, TrainerState(**state, best=Best(**best) if best else None, lengths=lengths)


# ---- retention


@dataclass(frozen=True)
class Retention:
    keep_last: int
    keep_every_steps: int | None = None
    steps: frozenset[int] = frozenset()

    def keeps(self, step: int) -> bool:
        """Return True if the checkpoint of this step is kept forever."""
        every = self.keep_every_steps
        return step in self.steps or (every is not None and step % every == 0)


def settle(run_dir: Path, snapshot: Snapshot, retention: Retention) -> None:
    """Do steps 3 to 5 of the list at the top of this file."""
    check_owner()
    newest, best = snapshot.place(run_dir), snapshot.trainer.best
    write_atomic(checkpoints_dir(run_dir) / LATEST, newest.name.encode() + b"\n")
    if (
        best is not None
        and best != read_best(run_dir)
        and checkpoint_dir(run_dir, best.step).exists()
    ):
        write_json(checkpoints_dir(run_dir) / BEST, asdict(best))
    found = list_checkpoints(run_dir)
    for path in superfluous(found, newest=newest, retention=retention, best=read_best(run_dir)):
        withdraw(path)


def superfluous(
    found: list[Path], *, newest: Path, retention: Retention, best: Best | None
) -> list[Path]:
    """Return the checkpoints to remove: older checkpoints that no rule keeps, and later checkpoints
    than `newest`, which a resume has abandoned. `found`: all checkpoints, oldest first."""
    older = [path for path in found if step_of(path) < step_of(newest)]
    kept = {newest, *older[max(0, len(older) - (retention.keep_last - 1)) :]}
    best_step = None if best is None else best.step
    kept |= {each for each in older if retention.keeps(step_of(each)) or step_of(each) == best_step}
    return [path for path in found if path not in kept]


def read_best(run_dir: Path) -> Best | None:
    """Return the content of best.json, or None if its checkpoint does not exist."""
    try:
        best = Best(**json.loads((checkpoints_dir(run_dir) / BEST).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return best if checkpoint_dir(run_dir, best.step).exists() else None


# ---- weights and models


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    if _is_of_timm(checkpoint):
        return model_of_timm(checkpoint.directory, card=checkpoint.card).state_dict()
    path = checkpoint.directory / MODEL
    try:
        return by_our_names(read_tensors(path), checkpoint.card.model)
    except (SafetensorError, OSError) as error:
        problem, fix = f"cannot be read ({error})", "copy the file again, or use another"
        raise WeightsError(str(path), problem, fix, code="damaged") from None


def _is_of_timm(checkpoint: Checkpoint) -> bool:
    """Return True if timm wrote the folder and we do not have its architecture. Return False for
    checkpoints of our training, even with such an architecture."""
    return isinstance(checkpoint.card.model, TimmModelSpec) and is_of_timm(
        json.loads((checkpoint.directory / CONFIG).read_text())
    )


def load_model(checkpoint: Checkpoint) -> ImageModel:
    card = checkpoint.card
    if _is_of_timm(checkpoint):
        return model_of_timm(checkpoint.directory, card=card)
    weights = load_weights(checkpoint)
    model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    load_strictly(model, weights, source=checkpoint.directory, label=card.model.label)
    return model


def take_weights(model: ImageModel, checkpoint: Checkpoint, *, classes: tuple[str, ...]) -> None:
    """Load the checkpoint's weights into a model of the same spec. If the classes differ, the model
    keeps its own head."""
    weights, label = load_weights(checkpoint), checkpoint.card.model.label
    if checkpoint.card.classes != classes:
        own = model.state_dict()
        heads = {name for name in (*weights, *own) if name.startswith("head.")}
        weights = {name: weights[name] for name in weights if name not in heads}
        weights |= {name: own[name] for name in own if name in heads}
    load_strictly(model, weights, source=checkpoint.directory, label=label)


def save_folder(directory: Path, *, card: ModelCard, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint without the files for a resume. All commands read it like a run. timm
    reads it as `local-dir:DIRECTORY` or, once uploaded, as `hf-hub:USER/NAME`.

    `weights`: a state_dict of the card's model. The directory appears atomically, and replaces an
    earlier one.
    """
    with torch.device("meta"):
        model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    check_weights(model, weights, source=directory, label=card.model.label)
    with atomic_directory(directory) as temporary:
        write_json(temporary / CONFIG, config_of(card))
        on_cpu = {name: tensor.cpu() for name, tensor in weights.items()}
        hashes = {MODEL: write_tensors(temporary / MODEL, on_cpu)}
        hashes[CONFIG] = sha256_of(temporary / CONFIG)
        write_json(temporary / HASHES, hashes)
