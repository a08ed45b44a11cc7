"""The matrices of a checkpoint, and the initial matrices of its run.

The effective matrix of a mixing is I (x) W or W (x) I; an RP Mixer puts it between two
permutations. Each singular value of W occurs C or S times in the effective matrix. Commands
therefore analyze W and record this number as `copies`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from data_prep.progress import ProgressLine
from finetune.runs import read_run
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import list_checkpoints
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.layers.sparse import MaskedLinear, SparseLinear
from pretrain.models.spec import MixerSpec, SparseMlpSpec
from pretrain.models.structured import Kronecker, Monarch

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Matrix:
    name: str
    """Name in the state dict, without `blocks.N.` and `.weight`."""
    block: int | None
    """Number of the block; None for the stem, widening layers and the head."""
    weight: "Array | csr_matrix"
    """Weights (outputs, inputs). A Monarch layer has a stack of such matrices."""
    copies: int


def matrices_of(model: ImageModel, card: ModelCard) -> Iterator[Matrix]:
    spec, size = card.model, card.image_size
    for path, module in model.named_modules():
        parts = path.split(".")
        block = int(parts[1]) if parts[0] == "blocks" and len(parts) > 1 else None
        name, copies = path if block is None else ".".join(parts[2:]), 1
        if name == "stem" and isinstance(spec, MixerSpec | SparseMlpSpec):
            copies = int((size // spec.patch_size) ** 2)
        elif isinstance(spec, MixerSpec) and name.startswith(("token_mixing", "skip")):
            copies = spec.num_channels
        elif isinstance(spec, MixerSpec) and name.startswith("channel_mixing"):
            copies = spec.tokens(image_size=size)
        if isinstance(module, MaskedLinear | SparseLinear):
            yield Matrix(name, block, module.matrix(), copies)
        elif isinstance(module, nn.Linear):
            yield Matrix(name, block, module.weight.detach().numpy(), copies)
        elif isinstance(module, Kronecker | Monarch):
            for which, weight in module.named_parameters():
                yield Matrix(f"{name}.{which}", block, weight.detach().numpy(), copies)


def initial_model(opened: Checkpoint) -> ImageModel | None:
    """Return the model with the initial weights of the checkpoint's run, built from the run's seed.
    Return None for imported weights, and if the run started from other weights."""
    run_dir, card = opened.run_dir, opened.card
    run = read_run(run_dir) if run_dir else None
    if run is None or run.record.parents or run.record.seed is None:
        return None
    if run.task not in ("pretrain", "scratch"):
        return None
    sizes = {"num_classes": len(card.classes), "image_size": card.image_size}
    return build_model(card.model, **sizes, seed=run.record.seed)


def checkpoints_of(
    places: list[Path], *, newest_only: bool
) -> tuple[dict[str, list[Checkpoint]], list[Path]]:
    """Return {run: checkpoints} and the directories of all checkpoints. The key of a run is its
    name, or its path if two names are equal."""
    found: dict[str, list[Checkpoint]] = {}
    names = [name_of(place) for place in places]
    for place, name in zip(places, names, strict=True):
        steps = [] if newest_only else list_checkpoints(place)
        key = name if names.count(name) == 1 else str(place)
        found[key] = [Checkpoint.open(each) for each in steps or [place]]
    return found, [opened.directory for checkpoints in found.values() for opened in checkpoints]


def steps_of(
    runs: dict[str, list[Checkpoint]], *, title: str
) -> Iterator[tuple[str, ModelCard, int, list[Matrix], list[Matrix]]]:
    """Yield (run, card, step, matrices, initial matrices) for each checkpoint. Runs with random
    initial weights also have step 0. Other runs have no initial matrices."""
    with ProgressLine(title, total=sum(map(len, runs.values())), unit="checkpoints") as line:
        for run, checkpoints in runs.items():
            card, model = checkpoints[0].card, initial_model(checkpoints[0])
            initial = [*matrices_of(model, card)] if model is not None else []
            if initial:
                yield run, card, 0, initial, initial
            for opened in checkpoints:
                yield run, card, opened.card.step, [*matrices_of(load_model(opened), card)], initial
                line.advance(note=f"{run}, step {opened.card.step:,}")


def name_of(place: Path) -> str:
    is_checkpoint = place.parent.name == "checkpoints"
    return f"{place.parent.parent.name}/{place.name}" if is_checkpoint else place.name
