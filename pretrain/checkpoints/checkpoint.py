"""Find and verify a checkpoint, and read its metadata once. This file does not import torch.

    RUN/checkpoints/step-00000120/
      model.safetensors        fp32 weights by name
      config.json              metadata, for this package and timm (card.py)
      optimizer.safetensors    optimizer state by KIND.NAME
      trainer.json             step, samples consumed, updates, best evaluation (files.py)
      sha256.json              hashes of these four files
    RUN/checkpoints/latest     name of the newest complete checkpoint
    RUN/checkpoints/best.json  step and accuracy of the best existing checkpoint

A folder of imported or exported weights is a checkpoint without the files for a resume.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_prep.errors import Code, SettingsError
from data_prep.manifest import MANIFEST_NAME
from data_prep.progress import doing
from data_prep.publish import hash_of_json, sha256_of
from data_prep.settings import near_path
from pretrain.checkpoints.card import CONFIG, MODEL, CheckpointError, ModelCard, read_card
from pretrain.checkpoints.hub import HubError, fetch, is_on_hub
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    begun_with,
    checkpoint_at,
    checkpoints_dir,
    list_checkpoints,
)
from pretrain.models.imported import check_allowed
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import rank_of

OPTIMIZER, TRAINER, HASHES = "optimizer.safetensors", "trainer.json", "sha256.json"
LATEST = "latest"


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    card: ModelCard
    hashes: Mapping[str, str]
    """Hashes (sha256) by file name, or {} for a folder without hashes."""
    origin: str = ""
    """Name of weights from the hub (hf-hub:USER/NAME@COMMIT), or "" for other weights."""

    @classmethod
    def open(cls, place: Path | str, *, verify: bool = True) -> "Checkpoint":
        """Open a checkpoint, a folder of weights, a run (its newest complete checkpoint),
        RUN@50epochs, or a name on the hub.

        `verify`: check the hashes of a checkpoint or folder. At least one process of a node must
        check them. If you pass a run, they are always checked, so all processes fall back to the
        same checkpoint.
        """
        name, origin = str(place), ""
        if is_on_hub(name):
            place, origin = fetch(name, files=(MODEL, CONFIG, HASHES))
            if not (place / MODEL).is_file() or not (place / CONFIG).is_file():
                problem, fix = f"has no {MODEL} with a {CONFIG}", "Choose another repository"
                raise CheckpointError(name, problem, fix, code="unknown-format")
        place = checkpoint_at(str(place)) or Path(place)
        if not (place / MODEL).is_file():
            newest = cls.newest(place, to_read=True)
            if newest is None:
                raise _no_checkpoint(place)
            check_allowed(newest.card.model, source=newest.directory)
            return newest
        fault = None
        if verify and (place / HASHES).exists():
            with doing(f"{place}: reading its weights", enabled=rank_of() == 0):
                fault = fault_of(place, needed=(MODEL, CONFIG))
        if fault is not None:
            fix = "Remove it to fetch it again" if origin else "Copy it again, or choose another"
            problem = f"the checkpoint is damaged ({fault})"
            raise CheckpointError(str(place), problem, fix, code="damaged")
        checkpoint = cls.read(place, origin=origin)
        check_allowed(checkpoint.card.model, source=checkpoint.name)
        return checkpoint

    @classmethod
    def newest(cls, run_dir: Path, *, to_read: bool = False) -> "Checkpoint | None":
        """Return the newest complete checkpoint of a run, or None if the run never had a
        checkpoint. Raise CheckpointError if all checkpoints are damaged.

        `to_read`: accept a copy without sha256.json, because only the weights are needed.
        """
        places, fault = list_checkpoints(run_dir), f"{LATEST} names a missing checkpoint"
        needed = (MODEL, CONFIG) if to_read else (MODEL, OPTIMIZER, CONFIG, TRAINER)
        for directory in reversed(places):
            is_bare = to_read and not (directory / HASHES).exists()
            with doing(f"{directory}: reading it", enabled=rank_of() == 0):
                fault = "" if is_bare else fault_of(directory, needed=needed) or ""
            if not fault:
                return cls.read(directory)
            if directory != places[0] and rank_of() == 0:
                words = f"checkpoint {directory} is damaged ({fault}); trying the previous one"
                print(words, file=sys.stderr)
        if not places and not (checkpoints_dir(run_dir) / LATEST).exists():
            return None
        fix = (
            "use another run" if to_read else f"move {checkpoints_dir(run_dir)} away to begin again"
        )
        problem = f"every checkpoint is damaged ({fault})"
        raise CheckpointError(
            str(run_dir), problem, f"Copy a checkpoint again, or {fix}", code="damaged"
        )

    @classmethod
    def read(cls, directory: Path, *, origin: str = "") -> "Checkpoint":
        """Return a checkpoint that a process of this node has already verified."""
        try:
            hashes = json.loads((directory / HASHES).read_text())
        except (OSError, ValueError):
            hashes = {}
        card = read_card(directory)
        if origin:
            origins = f"{origin}, {card.origin}" if card.origin else origin
            card = card.model_copy(update={"origin": origins})
        return cls(directory, card, hashes, origin)

    @classmethod
    def found(cls, place: str) -> "Checkpoint | None":
        """Return a checkpoint without reading its weights, or None if it is missing or
        unreadable."""
        try:
            if is_on_hub(place):
                directory, origin = fetch(place, files=(CONFIG, HASHES))
                if not (directory / HASHES).is_file():
                    return cls.open(place, verify=False)
                return cls.read(directory, origin=origin)
            newest = list_checkpoints(Path(place))[-1:] or [Path(place)]
            return cls.read(checkpoint_at(place) or newest[0])
        except (CheckpointError, HubError, OSError):
            return None

    @property
    def name(self) -> str:
        return self.origin or str(self.directory.absolute())

    @property
    def home(self) -> Path:
        """Directory next to which commands write results of these weights. For weights from the hub
        it is runs/USER--NAME, because the hub's folder is a cache."""
        if not self.origin:
            return self.directory.absolute()
        repository = self.origin.partition("@")[0].rpartition(":")[2]
        return (Path("runs") / repository.replace("/", "--")).absolute()

    @cached_property
    def sha256(self) -> str:
        """Hash (sha256) of the weights. Records identify weights by this hash."""
        return self.hashes.get(MODEL) or sha256_of(self.directory / MODEL)

    @cached_property
    def model_sha256(self) -> str:
        """Hash of the model: its weights, and the metadata that its predictions depend on. Results
        and features are reused only if this hash is equal."""
        names = {
            *("model", "image_size", "classes", "channel_mean", "channel_std"),
            *("fed_interpolation", "eval_crop", "pixel_permutation", "permute"),
        }
        facts = self.card.model_dump(mode="json", include=names, exclude_defaults=True)
        return hash_of_json([self.sha256, facts])

    @property
    def run_dir(self) -> Path | None:
        """Run directory of the checkpoint, or None for a folder of weights."""
        above = self.directory.absolute().parent
        is_in_run = above.name == "checkpoints" and (above.parent / CONFIG_FILE).is_file()
        return above.parent if is_in_run else None


def check_source(run_dir: Path, pretrained: str | None) -> None:
    """Raise SettingsError if the weights in `pretrained` have changed since the run began."""
    begun = begun_with(run_dir)
    source = Checkpoint.found(pretrained) if pretrained is not None and begun else None
    if source is None or source.sha256 == begun["weights_sha256"]:
        return
    step, before = source.card.step, begun["weights_step"]
    problem = f"is at step {step:,} now, but {run_dir} began from step {before:,}"
    if step == before:
        problem = f"has other weights than when {run_dir} began"
    fix = "Choose another run_dir"
    raise SettingsError("pretrained", f"{pretrained} {problem}", fix, code="changed")


def fault_of(directory: Path, *, needed: tuple[str, ...]) -> str | None:
    """Compare the needed files with their hashes. Return the first problem, or None."""
    try:
        hashes: dict[str, str] = json.loads((directory / HASHES).read_text())
        for name in needed:
            if sha256_of(directory / name, after_each_piece=PROGRESS.touch) != hashes.get(name):
                return f"{name} has changed"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _no_checkpoint(place: Path) -> CheckpointError:
    repetitions = [str(each) for each in sorted(place.glob("*/")) if list_checkpoints(each)]
    problem, fix = "holds no checkpoint", "Give a run directory (runs/NAME)"
    code: Code = "empty"
    if repetitions:
        names = ", ".join(repetitions[:3]) + (", ..." if len(repetitions) > 3 else "")
        problem, fix = "only the runs in it hold checkpoints", f"Choose one run: {names}"
    elif not place.exists():
        problem, code = "does not exist", "missing-path"
        fix = near_path(place) or f"{fix}, or a folder of weights"
    elif place.is_file():
        problem, code = "is a file", "wrong-command"
        fix = f"Give its directory, or convert it: finetune import {place} --out DIR"
    elif (place / MANIFEST_NAME).exists():
        problem, code = "is a dataset, and holds no checkpoint", "wrong-command"
    elif (place / CONFIG_FILE).exists():
        problem, code = "holds no checkpoint yet", "unfinished"
        fix = "Continue this run to its first checkpoint, or choose another run"
    else:
        fix += " or one of its checkpoints/step-*"
    return CheckpointError(str(place), problem, fix, code=code)
