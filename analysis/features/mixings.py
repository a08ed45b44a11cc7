"""What a model's mixings put out just before they are added to the skip path: two in a block of a Mixer (across tokens, across
channels), one in each layer of an MLP or a SW-MLP, in the order in which the forward pass makes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analysis.features.hsic import FEWEST
from data_prep.manifest import Manifest
from data_prep.settings import UserError
from finetune.session import Backbone, open_backbone
from pretrain.augment.augmentation import Augmentation
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.data.loader import Batch
from pretrain.data.reader import ShardReader
from pretrain.models.image_model import ImageModel
from pretrain.models.mixer import MixerBlock
from pretrain.models.mlp import Block


def mixings_of(model: ImageModel) -> dict[str, nn.Module]:
    """By name: the module whose last output in a forward pass is the mixing's. The permutation behind that of an RP block changes
    no product of two rows."""
    found: dict[str, nn.Module] = {}
    for block in model.modules():
        if isinstance(block, MixerBlock):
            number = len(found) // 2 + 1
            found |= {f"{number} tokens": block.token_mixing, f"{number} channels": block.channel_mixing}
        elif isinstance(block, Block):
            found[f"{len(found) + 1}"] = block.dropout  # the end of each branch; an inverted one has it in its middle, too
    return found


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is looked at."""

    place: str
    backbone: Backbone
    mixings: dict[str, nn.Module]
    plain: Augmentation

    @classmethod
    def of(cls, place: str, backbone: Backbone, *, device: torch.device) -> "Subject":
        assert backbone.model is not None and backbone.checkpoint is not None
        if not (mixings := mixings_of(backbone.model)):
            raise UserError(
                f"{place}: is {backbone.checkpoint.card.model.label}, which has no mixings; give a Mixer, MLP or SW-MLP"
            )
        return cls(place, backbone, mixings, backbone.augmentation(device=device))

    @property
    def card(self) -> ModelCard:
        assert self.backbone.checkpoint is not None
        return self.backbone.checkpoint.card

    @property
    def label(self) -> str:
        return self.card.model.label

    def only(self, number: int) -> "Subject":
        """With one of its mixings."""
        name = list(self.mixings)[number]
        return replace(self, mixings={name: self.mixings[name]})

    @torch.no_grad()
    def run(self, images_BCHW: Tensor, take: Callable[[Tensor], Any]) -> tuple[Tensor, list[Any]]:
        """(logits, what `take` makes of each mixing's output). One output is held at a time."""
        taken, last = dict[str, Any](), list[tuple[str, Tensor]]()

        def settle() -> None:
            while last:
                name, output = last.pop()
                taken[name] = take(output)

        def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def note(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
                if last and last[0][0] == name:
                    last.clear()  # it was not the last one of this mixing
                settle()
                last.append((name, output))

            return note

        handles = [module.register_forward_hook(hook(name)) for name, module in self.mixings.items()]
        try:
            assert self.backbone.model is not None
            logits = self.backbone.model(images_BCHW)
        finally:
            for handle in handles:
                handle.remove()
        settle()
        return logits, [taken[name] for name in self.mixings]


def open_subjects(places: Sequence[str], manifest: Manifest, *, device: torch.device) -> dict[str, Subject]:
    """Each run once, in the order in which they are named first."""
    return {
        place: Subject.of(place, open_backbone(Checkpoint.open(place), manifest, device=device), device=device)
        for place in dict.fromkeys(places)
    }


def too_few(dataset: str, split: str) -> str:
    return f"{dataset}, {split}: too few of its pictures decode, {FEWEST} are needed; give another split, or run data_prep verify"


def stored_batches(reader: ShardReader, *, size: int, count: int | None = None, seed: int = 0) -> Iterator[Batch]:
    """Batches of a split in one fixed random order: one that is stored class by class would show features of one class at a time.
    `count`: no more pictures than that. What does not decode is left out; a last batch of less than half the size or too few for
    HSIC1, too."""
    order = np.random.default_rng(seed).permutation(reader.num_samples)[:count]
    for first in range(0, len(order), size):
        ids = order[first : first + size]
        places, images = reader.locate(ids), torch.empty(len(ids), reader.stored_size, reader.stored_size, 3, dtype=torch.uint8)
        bad = [each.place for each in reader.read(places, images)]
        good = np.setdiff1d(np.arange(len(ids)), bad)
        if len(good) < max(FEWEST, min(size, len(order)) / 2):
            continue
        labels = torch.from_numpy(np.ascontiguousarray(places.labels[good]))
        epochs = np.zeros(len(good), np.int64)
        yield Batch(images[torch.from_numpy(good)], labels, epochs, ids[good], epochs)
