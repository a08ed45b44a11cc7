"""Outputs of a model's mixings, before they are added to the skip path, in the order of the forward
pass.

A block of a Mixer has two mixings (tokens, then channels). A layer of an MLP or a SW-MLP has one.
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
from data_prep.progress import ProgressLine
from finetune.session import Backbone, open_backbone
from pretrain.augment.augmentation import Augmentation
from pretrain.augment.feed import on_device
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import ReadingSettings
from pretrain.data.bad_samples import masked
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch, Batches, Request
from pretrain.data.order import Order
from pretrain.data.reader import reading
from pretrain.models.image_model import ImageModel
from pretrain.models.mixer import MixerBlock
from pretrain.models.mlp import Block
from pretrain.ranks.world import read_alone


def mixings_of(model: ImageModel) -> dict[str, nn.Module]:
    """Return {name: module}. The last output of a module in a forward pass is the output of its
    mixing. The permutation of an RP mixing is omitted: it does not change Gram matrices."""
    found: dict[str, nn.Module] = {}
    for block in model.modules():
        if isinstance(block, MixerBlock):
            number = len(found) // 2 + 1
            found |= {
                f"{number} tokens": block.token_mixing,
                f"{number} channels": block.channel_mixing,
            }
        elif isinstance(block, Block):
            # each branch ends in its dropout; an inverted block also has dropout in the middle
            found[f"{len(found) + 1}"] = block.dropout
    return found


@dataclass(frozen=True)
class Subject:
    """A checkpoint whose features are compared."""

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
            problem, fix = f"{card.model.label} has no mixings", "give a Mixer, MLP or SW-MLP"
            raise UserError(place, problem, fix, code="unsupported")
        return cls(place, backbone, card, mixings, backbone.augmentation(device=device))

    def only(self, number: int) -> "Subject":
        name = list(self.mixings)[number]
        return replace(self, mixings={name: self.mixings[name]})

    @torch.no_grad()
    def run(self, images_BCHW: Tensor, take: Callable[[Tensor], Any]) -> tuple[Tensor, list[Any]]:
        """Return the logits, and `take(output)` for the output of each mixing. Memory holds one
        output at a time."""
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
    """Open each checkpoint once, in the order of the arguments."""
    return {
        place: Subject.of(
            place, open_backbone(Checkpoint.open(place), manifest, device=device), device=device
        )
        for place in dict.fromkeys(places)
    }


@dataclass(frozen=True)
class Images:
    dataset: str
    manifest: Manifest
    split: str
    batch: int = 256
    count: int | None = None
    """Number of random images; None for the complete split."""

    def batches(
        self, title: str, *, size: int, device: torch.device, times: int = 1
    ) -> Iterator[Batch]:
        """Yield batches of this image size on the device in a fixed random order, because splits
        may be stored class by class. A batch is skipped if less than half of its images, or fewer
        than FEWEST, decode. Raise UserError if all batches are skipped. `times`: how often each
        image is used, for the progress line."""
        part, found = Part(local_copy(self.dataset, storage=None), self.manifest, self.split), False
        with ExitStack() as opened:
            settings = ReadingSettings(dataset=self.dataset)
            reader = opened.enter_context(reading([part], settings, image_size=size))
            ids = np.random.default_rng(0).permutation(reader.num_samples)[: self.count]
            line = opened.enter_context(ProgressLine(title, total=len(ids) * times, unit="images"))
            chunks = np.split(ids, range(self.batch, len(ids), self.batch))
            stored = Batches(
                reader,
                Order(reader.num_samples, 0, "none"),
                (Request(chunk, np.ones(len(chunk), np.bool_)) for chunk in chunks),
                finish=readable,
                on_bad=masked,
                num_threads=read_alone().num_cores,
                prefetch=2,
                pin=device.type == "cuda",
            )
            shown = opened.enter_context(on_device(opened.enter_context(stored), device))
            for chunk, batch in zip(chunks, shown, strict=True):
                if len(batch.samples) >= max(FEWEST, min(self.batch, len(ids)) / 2):
                    yield batch
                    found = True
                line.advance(len(chunk) * times)
        if not found:
            problem = f"too few images decode ({FEWEST} are needed)"
            fix = f"give another --split, or run data_prep verify {self.dataset}"
            raise UserError(f"{self.dataset}, {self.split}", problem, fix, code="damaged")


def readable(batch: Batch) -> Batch:
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
