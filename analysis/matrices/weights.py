"""The matrices of a checkpoint, and those that its run began with.

A mixing's effective matrix is I (x) W or W (x) I, in an RP Mixer between two permutations: it has
the singular values of W, each of them C or S times, so W stands for it, with the number of its
copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from data_prep.progress import progress
from finetune.runs import read_run
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import begun_with, list_checkpoints
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.layers.sparse import MaskedLinear, SparseLinear
from pretrain.models.spec import AnySpec, MixerSpec, SparseMlpSpec
from pretrain.models.structured import Kronecker, Monarch

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Matrix:
    name: str
    """As in the state dict, without `blocks.N.` and `.weight`."""
    block: int | None
    """None of the stem, of what widens, and of the head."""
    weight: "Array | csr_matrix"
    """(outputs, inputs); of a Monarch layer one such matrix after the other."""
    copies: int


def matrices_of(model: ImageModel, spec: AnySpec, *, image_size: int) -> Iterator[Matrix]:
    for path, module in model.named_modules():
        parts = path.split(".")
        block = int(parts[1]) if parts[0] == "blocks" and len(parts) > 1 else None
        name = ".".join(parts[2:]) if block is not None else path
        copies = _copies(name, spec, image_size=image_size)
        if isinstance(module, MaskedLinear | SparseLinear):
            yield Matrix(name, block, module.matrix(), copies)
        elif isinstance(module, nn.Linear):
            yield Matrix(name, block, module.weight.detach().numpy(), copies)
        elif isinstance(module, Kronecker | Monarch):
            for which, weight in module.named_parameters():
                yield Matrix(f"{name}.{which}", block, weight.detach().numpy(), copies)


def _copies(name: str, spec: AnySpec, *, image_size: int) -> int:
    if name == "stem" and isinstance(spec, MixerSpec | SparseMlpSpec):
        return int((image_size // spec.patch_size) ** 2)
    if isinstance(spec, MixerSpec) and name.startswith(("token_mixing", "skip")):
        return spec.num_channels
    if isinstance(spec, MixerSpec) and name.startswith("channel_mixing"):
        return spec.tokens(image_size=image_size)
    return 1


def initial_model(opened: Checkpoint) -> ImageModel | None:
    """As its run built it, from the seed. None where that cannot be told: imported weights, or a
    run that began with others."""
    run_dir = opened.run_dir
    if run_dir is None or begun_with(run_dir):
        return None
    run, card = read_run(run_dir), opened.card
    if run.task not in ("pretrain", "scratch") or run.record.seed is None:
        return None
    return build_model(
        card.model, num_classes=len(card.classes), image_size=card.image_size, seed=run.record.seed
    )


def checkpoints_of(
    places: list[Path], *, newest_only: bool
) -> tuple[dict[str, list[Checkpoint]], list[Path]]:
    """By the run's name, which is its path where two are named alike; of a run all its checkpoints,
    of a checkpoint that one. And where all of them lie."""
    found: dict[str, list[Checkpoint]] = {}
    names = [name_of(place) for place in places]
    for place, name in zip(places, names, strict=True):
        steps = [] if newest_only else list_checkpoints(place)
        found[name if names.count(name) == 1 else str(place)] = [
            Checkpoint.open(each) for each in steps or [place]
        ]
    return found, [opened.directory for checkpoints in found.values() for opened in checkpoints]


def steps_of(
    runs: dict[str, list[Checkpoint]], *, what: str
) -> Iterator[tuple[str, ModelCard, int, list[Matrix], list[Matrix]]]:
    """(run, card, step, matrices, initial matrices) of each checkpoint, before them those of step 0
    where the run began from a seed; else there are no initial ones."""
    with progress(what, total=sum(map(len, runs.values())), unit="checkpoints") as line:
        for run, checkpoints in runs.items():
            card, begun = checkpoints[0].card, initial_model(checkpoints[0])
            initial = (
                list(matrices_of(begun, card.model, image_size=card.image_size))
                if begun is not None
                else []
            )
            if initial:
                yield run, card, 0, initial, initial
            for opened in checkpoints:
                found = list(
                    matrices_of(load_model(opened), card.model, image_size=card.image_size)
                )
                yield run, card, opened.card.step, found, initial
                line.advance(note=f"{run}, step {opened.card.step:,}")


def name_of(place: Path) -> str:
    return (
        f"{place.parent.parent.name}/{place.name}"
        if place.parent.name == "checkpoints"
        else place.name
    )
