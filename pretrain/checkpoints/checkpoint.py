"""A checkpoint as one finds it: resolved, held to its hashes and its card read ONCE, then handed
on. No torch here.

    RUN/checkpoints/step-00000120/
      model.safetensors        fp32 weights by name
      config.json              the card: what makes the weights usable, here and in timm
      optimizer.safetensors    KIND.NAME
      trainer.json             step, samples consumed, updates, the best evaluation so far, whether one is still owed
      sha256.json              of the four files above
    RUN/checkpoints/latest     the name of the newest good one
    RUN/checkpoints/best.json  the best evaluation of those that are there

A folder of weights that was imported or exported is a checkpoint without what only a resume needs.
How one is written: files.py.
"""  # noqa: E501 (a table)

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.errors import SettingsError
from data_prep.manifest import MANIFEST_NAME
from data_prep.progress import doing
from data_prep.publish import sha256_of
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
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import rank_of

OPTIMIZER, TRAINER, HASHES = "optimizer.safetensors", "trainer.json", "sha256.json"
LATEST = "latest"


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    card: ModelCard
    hashes: Mapping[str, str]
    """By file; {} where a folder came without."""
    origin: str = ""
    """On the hub, with its commit: hf-hub:USER/NAME@COMMIT; "" of what lies on a disk of ours."""

    @classmethod
    def open(cls, place: Path | str, *, verify: bool = True) -> "Checkpoint":
        """What a user means by `place`: a checkpoint, a folder of weights, or a run, of which it is
        the newest whole checkpoint; or RUN@50epochs, that of an earlier step; or a name on the hub
        (hub.py).

        `verify`: the weights are held to their hash, which reads them; one process of a node need
        do that for a checkpoint that is named itself. Of a run every process verifies, so that all
        fall back alike from one that is damaged.
        """
        name, origin = str(place), ""
        if is_on_hub(name):
            place, origin = fetch(name, files=(MODEL, CONFIG, HASHES))
            if not (place / MODEL).is_file() or not (place / CONFIG).is_file():
                raise CheckpointError(
                    f"{name}: has no {MODEL} with a {CONFIG}, and no other file is read; name"
                    " another"
                )
        place = checkpoint_at(str(place)) or Path(place)
        if not (place / MODEL).is_file():
            newest = cls.newest(place, to_read=True)
            if newest is None:
                raise _no_checkpoint(place)
            return newest
        with doing(f"{place}: reading its weights", enabled=rank_of() == 0):
            fault = (
                fault_of(place, needed=(MODEL, CONFIG))
                if verify and (place / HASHES).exists()
                else None
            )
        if fault is not None:
            remedy = (
                "remove it, and it is fetched again" if origin else "copy it again, or use another"
            )
            raise CheckpointError(f"{place}: no checkpoint there is whole ({fault}); {remedy}")
        return cls.read(place, origin=origin)

    @classmethod
    def newest(cls, run_dir: Path, *, to_read: bool = False) -> "Checkpoint | None":
        """Of a run, the newest of which all that is needed is whole; None where there never was a
        checkpoint. `to_read`: the weights alone are needed, which a user may have copied without
        their hashes; else training goes on from it.
        """
        found, fault = list_checkpoints(run_dir), f"{LATEST} names one that is gone"
        needed = (MODEL, CONFIG) if to_read else (MODEL, OPTIMIZER, CONFIG, TRAINER)
        for directory in reversed(found):
            is_bare = to_read and not (directory / HASHES).exists()
            with doing(f"{directory}: reading it", enabled=rank_of() == 0):
                fault = "" if is_bare else fault_of(directory, needed=needed) or ""
            if not fault:
                return cls.read(directory)
            if directory != found[0] and rank_of() == 0:
                print(
                    f"checkpoint {directory} is damaged ({fault}); trying the one before",
                    file=sys.stderr,
                )
        if found or (checkpoints_dir(run_dir) / LATEST).exists():
            remedy = (
                "use another" if to_read else f"move {checkpoints_dir(run_dir)} away to begin anew"
            )
            raise CheckpointError(
                f"{run_dir}: no checkpoint there is whole ({fault}); copy it again, or {remedy}"
            )
        return None

    @classmethod
    def read(cls, directory: Path, *, origin: str = "") -> "Checkpoint":
        """One that has been verified already, by this process or by another of its node."""
        try:
            hashes = json.loads((directory / HASHES).read_text())
        except (OSError, ValueError):
            hashes = {}
        card = read_card(directory)
        if origin:  # it goes along with what is made of the weights
            card = card.model_copy(
                update={"origin": f"{origin}, {card.origin}" if card.origin else origin}
            )
        return cls(directory, card, hashes, origin)

    @classmethod
    def found(cls, place: str) -> "Checkpoint | None":
        """What `place` means, its weights unread; None where it is gone, or not there yet, as who
        opens it will say."""
        try:
            if is_on_hub(place):
                directory, origin = fetch(place, files=(CONFIG, HASHES))
                return (
                    cls.read(directory, origin=origin)
                    if (directory / HASHES).is_file()
                    else cls.open(place, verify=False)
                )
            return cls.read(
                checkpoint_at(place) or (list_checkpoints(Path(place)) or [Path(place)])[-1]
            )
        except (CheckpointError, HubError, OSError):
            return None

    @property
    def name(self) -> str:
        """Under which others find it."""
        return self.origin or str(self.directory.absolute())

    @property
    def home(self) -> Path:
        """Beside which lies what is made of it. What came from the hub lies in a cache, which is no
        place for that."""
        if not self.origin:
            return self.directory.absolute()
        repository = self.origin.partition("@")[0].rpartition(":")[2]
        return (
            Path("runs") / repository.replace("/", "--")
        ).absolute()  # as the hub's own cache spells it: others have a NAME, too

    @cached_property
    def sha256(self) -> str:
        """Of the weights: their name everywhere."""
        return self.hashes.get(MODEL) or sha256_of(self.directory / MODEL)

    @property
    def mark(self) -> dict[str, Any]:
        """What a run that begins with these weights records of them."""
        mark = {"weights_sha256": self.sha256, "weights_step": self.card.step}
        return mark | ({"weights_from": self.origin} if self.origin else {})

    @property
    def run_dir(self) -> Path | None:
        """The run that it belongs to; None for a bare folder of weights."""
        place = self.directory.absolute().parent
        run_dir = place.parent if place.name == "checkpoints" else None
        return run_dir if run_dir is not None and (run_dir / CONFIG_FILE).is_file() else None


def check_source(run_dir: Path, pretrained: str | None) -> None:
    """A run is of the weights that it began with, also where `pretrained` names a run that has been
    trained on since."""
    begun = begun_with(run_dir)
    if pretrained is None or not begun:
        return
    source = Checkpoint.found(pretrained)
    now = begun if source is None else source.mark
    if now["weights_sha256"] != begun["weights_sha256"]:
        steps = (
            f"is at step {now['weights_step']:,} now, but {run_dir} began with its step"
            f" {begun['weights_step']:,}"
        )
        if now["weights_step"] == begun["weights_step"]:
            steps = f"holds other weights now than those that {run_dir} began with"
        raise SettingsError(f"pretrained: {pretrained} {steps}; name another run_dir")


def fault_of(directory: Path, *, needed: tuple[str, ...]) -> str | None:
    """What is wrong with the needed files of a directory that holds its hashes, or None."""
    try:
        hashes: dict[str, str] = json.loads((directory / HASHES).read_text())
        changed = [
            name
            for name in needed
            if sha256_of(directory / name, after_each_piece=PROGRESS.touch) != hashes.get(name)
        ]
        return f"{changed[0]} has changed" if changed else None
    except (OSError, ValueError) as error:
        return str(error)


def _no_checkpoint(place: Path) -> CheckpointError:
    repetitions = [str(each) for each in sorted(place.glob("*/")) if list_checkpoints(each)]
    if repetitions:
        names = ", ".join(repetitions[:3]) + (", ..." if len(repetitions) > 3 else "")
        return CheckpointError(
            f"{place}: holds no checkpoint itself, but its repetitions do; name one of them:"
            f" {names}"
        )
    if not place.exists():
        why = (
            "is not there;"
            f" {near_path(place) or 'give a run directory (runs/NAME), or a folder of weights'}"
        )
    elif place.is_file():
        why = (
            "is a file; give the directory that it is in, or for foreign weights what pretrain"
            f" import {place} --out DIR makes"
        )
    elif (place / MANIFEST_NAME).exists():
        why = "is a dataset, and holds no checkpoint; give a run directory (runs/NAME)"
    elif (place / CONFIG_FILE).exists():
        why = "holds no checkpoint yet; let this run go on to its first one, or give another"
    else:
        why = (
            "holds no checkpoint; give a run directory (runs/NAME) or one of its checkpoints/step-*"
        )
    return CheckpointError(f"{place}: {why}")
