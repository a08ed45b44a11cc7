"""What a checkpoint's files are made of and made into: tensors, the state of a training, a model;
and which checkpoints stay.

Publishing, by the first rank alone (in the background: see writer.py):
1. the four files into a temporary directory, then sha256.json, hashed while they are written;
2. fsync of each, rename to step-N, fsync of the parent: from here on it is what a restart goes on
   from;
3. `latest`; 4. `best.json`, if this checkpoint knows a better one;
5. what no rule keeps is renamed, then removed.
A crash anywhere leaves the newest published checkpoint whole; what is half written or half removed
has a temporary name, in the start's workspace, which the next start removes (starts.py). Restoring
verifies the hashes and falls back to the newest checkpoint that is whole (checkpoint.py).

Which stay: the last ones, the best by evaluation, and those at multiples of a length, for ever.
Which one is the best is part of the training state (trainer.json holds it), so a run that goes on
knows it as an undisturbed one would; best.json repeats it for people and scripts, and names only
one that is there. Nothing is removed before a newer checkpoint is published, and the best that is
published stays until a better one is.

Tensors are written in pieces, and hashed on the way: no second reading, and hardly a moment of
Python's lock, which `safetensors.save_file` holds for the whole file: training would stop for as
long. The bytes are those that safetensors would write. Reading and writing report their progress
(hangs.py) whenever the file system has done some more, so a slow one is no hang.
"""

import hashlib
import json
import math
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
from pretrain.checkpoints.foreign import by_our_names, model_of_timm
from pretrain.checkpoints.run import checkpoint_dir, checkpoints_dir, list_checkpoints, step_of
from pretrain.checkpoints.weights import (
    check_finite,
    check_fit,
    load_strictly,
    needed_shapes,
    shapes,
)
from pretrain.engine.step import EngineState
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import TimmModelSpec
from pretrain.ranks.hangs import PROGRESS

BEST = "best.json"
PIECE_BYTES = 4 << 20
FLUSHED_BYTES = 256 << 20
"""Written to disk at once: at 1 MB/s still in half of hang_timeout_s."""
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
"""safetensors' names, in its order: wide types come first, so that every tensor lies aligned."""


# ---- tensors
# --------------------------------------------------------------------------------------------------


def flush(descriptor: int) -> None:
    """Waits until the disk has it, without Python's lock."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has but the latter
    PROGRESS.touch()


class Flusher:
    """Of one file, whenever so much more has been written to it. What is written lies in memory
    first, and all at once at the end would take any time without a sign of progress."""

    def __init__(self, every_bytes: int):
        self._every_bytes, self._in_memory = every_bytes, 0

    def wrote(self, num_bytes: int, descriptor: int) -> None:
        self._in_memory += num_bytes
        if self._in_memory >= self._every_bytes:
            flush(descriptor)
            self._in_memory = 0


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The file's sha256. The tensors are on the CPU."""
    digest, flusher = hashlib.sha256(), Flusher(FLUSHED_BYTES)
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
    """As safetensors itself does: mapped into memory, so the ranks of a node share what they read.

    What is merely mapped is read when it is first looked at: so each page is, here, where progress
    is reported.
    """
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
# -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest top-1 accuracy so far; of equal ones the first."""

    step: int
    score: float


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
    """The last ones, up to this step: a run that diverges and is started again and again still
    stops in the end."""
    num_cpu_threads: int | None = None
    """See `num_cpu_threads`."""
    lengths: tuple[int, ...] = ()
    """How many steps the run was to have: the present number comes last, those before it are what
    it was extended from."""


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint is made of, in memory."""

    engine: EngineState
    trainer: TrainerState
    card: ModelCard

    def place(self, run_dir: Path) -> Path:
        return checkpoint_dir(run_dir, self.trainer.step)


def publish(run_dir: Path, snapshot: Snapshot) -> int:
    """Steps 1 and 2; the bytes written."""
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
        return sum(file.stat().st_size for file in directory.iterdir())


def load_state(directory: Path) -> tuple[EngineState, TrainerState]:
    """Of a checkpoint that has been verified."""
    state: dict[str, Any] = json.loads((directory / TRAINER).read_text())
    num_updates, scale = state.pop("num_updates"), state.pop("engine.loss_scale", {})
    engine = EngineState(
        read_tensors(directory / MODEL), read_tensors(directory / OPTIMIZER), num_updates, scale
    )
    best, lengths = state.pop("best", None), tuple(state.pop("lengths", ()))
    return engine, TrainerState(**state, best=Best(**best) if best else None, lengths=lengths)


# ---- which checkpoints stay
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retention:
    keep_last: int
    keep_every_steps: int | None = None
    steps: frozenset[int] = frozenset()

    def keeps(self, step: int) -> bool:
        """For ever."""
        return step in self.steps or (
            self.keep_every_steps is not None and step % self.keep_every_steps == 0
        )


def settle(
    run_dir: Path, snapshot: Snapshot, retention: Retention, *, spared: int | None = None
) -> None:
    """Steps 3 to 5."""
    newest, trainer = snapshot.place(run_dir), snapshot.trainer
    best = published_best(run_dir, trainer.best, newest_step=trainer.step)
    write_atomic(checkpoints_dir(run_dir) / LATEST, newest.name.encode() + b"\n")
    write_best(run_dir, best)
    prune(run_dir, newest, retention, spared=spared)


def prune(run_dir: Path, newest: Path, retention: Retention, *, spared: int | None = None) -> None:
    """`spared`: the step of one that is being read, whose turn comes later."""
    best = _read_best(run_dir)
    for path in superfluous(
        list_checkpoints(run_dir), newest=newest, retention=retention, best=best
    ):
        if step_of(path) != spared:
            withdraw(path)


def superfluous(
    found: list[Path], *, newest: Path, retention: Retention, best: Best | None
) -> list[Path]:
    """Of all (oldest first) the older ones that no rule keeps, and those newer than `newest`:
    training had gone on there."""
    older = [path for path in found if step_of(path) < step_of(newest)]
    kept = {newest, *older[max(0, len(older) - (retention.keep_last - 1)) :]}
    kept |= {
        path
        for path in older
        if retention.keeps(step_of(path)) or (best is not None and step_of(path) == best.step)
    }
    return [path for path in found if path not in kept]


def published_best(
    run_dir: Path, best: Best | None, *, newest_step: float = math.inf
) -> Best | None:
    """This one, or, where its checkpoint never came to be, the one that best.json names. What is
    newer than `newest_step` goes."""
    published = {
        step_of(path) for path in list_checkpoints(run_dir) if step_of(path) <= newest_step
    }
    found = (best, _read_best(run_dir))
    return next((each for each in found if each is not None and each.step in published), None)


def write_best(run_dir: Path, best: Best | None) -> None:
    """Of a published one. Does nothing where it is known already."""
    path = checkpoints_dir(run_dir) / BEST
    if best is None:
        if path.exists():
            withdraw(path)
    elif _read_best(run_dir) != best:
        write_json(path, asdict(best))


def _read_best(run_dir: Path) -> Best | None:
    try:
        return Best(**json.loads((checkpoints_dir(run_dir) / BEST).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


# ---- weights and models
# ----------------------------------------------------------------------------------------------


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    if _is_of_timm(checkpoint):
        return model_of_timm(checkpoint.directory, card=checkpoint.card).state_dict()
    path = checkpoint.directory / MODEL
    try:
        return by_our_names(read_tensors(path), checkpoint.card.model)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: cannot be read ({error}); copy it again, or use another"
        ) from None


def _is_of_timm(checkpoint: Checkpoint) -> bool:
    """What timm has written, and we have no architecture for; not what was trained on here
    since."""
    is_another = isinstance(checkpoint.card.model, TimmModelSpec)
    return is_another and is_of_timm(json.loads((checkpoint.directory / CONFIG).read_text()))


def load_model(checkpoint: Checkpoint) -> ImageModel:
    if _is_of_timm(checkpoint):
        return model_of_timm(checkpoint.directory, card=checkpoint.card)
    card, weights = checkpoint.card, load_weights(checkpoint)
    model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    load_strictly(model, weights, source=checkpoint.directory, label=card.model.label)
    return model


def take_weights(model: ImageModel, checkpoint: Checkpoint, *, classes: tuple[str, ...]) -> None:
    """Into a model of the checkpoint's spec: all of them, or where the classes are others, all but
    the head's."""
    weights, label = load_weights(checkpoint), checkpoint.card.model.label
    if checkpoint.card.classes != classes:
        own = {
            name: tensor for name, tensor in model.state_dict().items() if name.startswith("head.")
        }
        weights = {
            name: tensor for name, tensor in weights.items() if not name.startswith("head.")
        } | own
    load_strictly(model, weights, source=checkpoint.directory, label=label)


def save_folder(directory: Path, *, card: ModelCard, weights: Mapping[str, Tensor]) -> None:
    """Weights that one can pass on: a checkpoint without what only a resume needs. Probe, tune,
    evaluate and analysis take it as they take a run, and timm as `local-dir:DIRECTORY`; uploaded as
    it is, as `hf-hub:OWNER/NAME`.

    `weights`: a state_dict of the card's model; the directory appears whole, in place of one that
    was there.
    """
    with torch.device("meta"):
        model = build_model(card.model, num_classes=len(card.classes), image_size=card.image_size)
    given = shapes(weights)
    check_fit(given, needed_shapes(model, given), source=directory, label=card.model.label)
    check_finite(weights, source=directory)
    with atomic_directory(directory) as temporary:
        write_json(temporary / CONFIG, config_of(card))
        model_sha256 = write_tensors(
            temporary / MODEL, {name: tensor.cpu() for name, tensor in weights.items()}
        )
        write_json(temporary / HASHES, {MODEL: model_sha256, CONFIG: sha256_of(temporary / CONFIG)})
