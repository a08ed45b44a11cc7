"""What a model's mixings put out just before they are added to the skip path: two in a block of a
Mixer (across tokens, across channels), one in each layer of an MLP or a SW-MLP, in the order in
which the forward pass makes them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analysis.features.hsic import FEWEST
from data_prep.errors import UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import Manifest
from data_prep.progress import progress
from finetune.session import Backbone, open_backbone
from pretrain.augment.augmentation import Augmentation
from pretrain.augment.feed import on_device
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import ReadingSettings
from pretrain.data.bad_samples import masked
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch, Batches, Request
from pretrain.data.order import Ids
from pretrain.data.reader import reading
from pretrain.models.image_model import ImageModel
from pretrain.models.mixer import MixerBlock
from pretrain.models.mlp import Block
from pretrain.ranks.world import read_alone


def mixings_of(model: ImageModel) -> dict[str, nn.Module]:
    """By name: the module whose last output in a forward pass is the mixing's. The permutation
    behind that of an RP block changes no product of two rows."""
    found: dict[str, nn.Module] = {}
    for block in model.modules():
        if isinstance(block, MixerBlock):
            number = len(found) // 2 + 1
            found |= {
                f"{number} tokens": block.token_mixing,
                f"{number} channels": block.channel_mixing,
            }
        elif isinstance(block, Block):
            found[f"{len(found) + 1}"] = (
                block.dropout
            )  # the end of each branch; an inverted one has it in its middle, too
    return found


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is looked at."""

    place: str
    backbone: Backbone
    card: ModelCard
    mixings: dict[str, nn.Module]
    plain: Augmentation

    @classmethod
    def of(cls, place: str, backbone: Backbone, *, device: torch.device) -> "Subject":
        assert backbone.model is not None and backbone.checkpoint is not None
        card = backbone.checkpoint.card
        if not (mixings := mixings_of(backbone.model)):
            raise UserError(
                f"{place}: is {card.model.label}, which has no mixings; give a Mixer, MLP or SW-MLP"
            )
        return cls(place, backbone, card, mixings, backbone.augmentation(device=device))

    def only(self, number: int) -> "Subject":
        """With one of its mixings."""
        name = list(self.mixings)[number]
        return replace(self, mixings={name: self.mixings[name]})

    @torch.no_grad()
    def run(self, images_BCHW: Tensor, take: Callable[[Tensor], Any]) -> tuple[Tensor, list[Any]]:
        """(logits, what `take` makes of each mixing's output). One output is held at a time: until
        another mixing has one."""
        assert self.backbone.model is not None
        taken, last = dict[str, Any](), dict[str, Tensor]()

        def note(name: str, output: Tensor) -> None:
            for before in last.keys() - {name}:
                taken[before] = take(last.pop(before))
            last[name] = output

        handles = [
            module.register_forward_hook(
                lambda _module, _arguments, output, name=name: note(name, output)
            )
            for name, module in self.mixings.items()
        ]
        try:
            note("logits", self.backbone.model(images_BCHW))
        finally:
            for handle in handles:
                handle.remove()
        return last["logits"], [taken[name] for name in self.mixings]


def open_subjects(
    places: Iterable[str], manifest: Manifest, *, device: torch.device
) -> dict[str, Subject]:
    """Each run once, in the order in which they are named first."""
    return {
        place: Subject.of(
            place, open_backbone(Checkpoint.open(place), manifest, device=device), device=device
        )
        for place in dict.fromkeys(places)
    }


@dataclass(frozen=True)
class Pictures:
    """What subjects are shown."""

    dataset: str
    manifest: Manifest
    split: str
    batch: int = 256
    count: int | None = None
    """No more than that; None: all of the split."""

    def batches(
        self, title: str, *, size: int, device: torch.device, times: int = 1
    ) -> Iterator[Batch]:
        """At this size, on the device, in one fixed random order: a split that is stored class by
        class would show features of one class at a time. What does not decode is left out; a batch
        of which less than half is left or too little for HSIC1, too. `times`: how often each
        picture is looked at, for the progress."""
        part, found = Part(local_copy(self.dataset, storage=None), self.manifest, self.split), False
        with ExitStack() as opened:
            reader = opened.enter_context(
                reading([part], ReadingSettings(dataset=self.dataset), image_size=size)
            )
            drawn = Drawn(np.random.default_rng(0).permutation(reader.num_samples)[: self.count])
            line = opened.enter_context(
                progress(title, total=len(drawn.ids) * times, unit="images")
            )
            requests = np.split(
                np.arange(len(drawn.ids)), range(self.batch, len(drawn.ids), self.batch)
            )
            stored = Batches(
                reader,
                drawn,
                (Request(each, np.ones(len(each), np.bool_)) for each in requests),
                finish=readable,
                on_bad=masked,
                num_threads=read_alone().num_cores,
                prefetch=2,
                pin=device.type == "cuda",
            )
            shown = opened.enter_context(on_device(opened.enter_context(stored), device))
            for request, batch in zip(requests, shown, strict=True):
                if len(batch.samples) >= max(FEWEST, min(self.batch, len(drawn.ids)) / 2):
                    yield batch
                    found = True
                line.advance(len(request) * times)
        if not found:
            lack = (
                f"too few of its pictures decode, {FEWEST} are needed; give another split, or run"
                " data_prep verify"
            )
            raise UserError(f"{self.dataset}, {self.split}: {lack}")


@dataclass(frozen=True)
class Drawn:
    """Pictures in the order in which they are looked at."""

    ids: Ids

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        return np.zeros_like(positions), self.ids[positions % len(self.ids)]


def readable(batch: Batch) -> Batch:
    """Without the pictures that do not decode."""
    assert batch.mask_B is not None
    good = batch.mask_B.numpy()
    if good.all():
        return batch
    kept: dict[str, Any] = {
        name: value[good] for name, value in vars(batch).items() if isinstance(value, np.ndarray)
    }
    return replace(
        batch,
        images_BHWC=batch.images_BHWC[batch.mask_B],
        labels_B=batch.labels_B[batch.mask_B],
        mask_B=None,
        **kept,
    )
