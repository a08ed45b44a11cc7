"""Exact scores on any number of ranks, compared with a plain loop over the images, with ReaL labels
if a split has them."""

import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data_prep.build.merge import write_annotation
from data_prep.manifest import DatasetError, load_manifest
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.config import AugmentSettings
from pretrain.data.datasets import Part
from pretrain.data.reader import ShardReader, Unreadable
from pretrain.loop.evaluate import Scores, evaluate
from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.world import World
from tests.data_prep.test_verify import change_manifest
from tests.errors import fails

CLASSES = (4, 9, 0, 1, 7, 3, 2, 5)
"""The model's numbers of the dataset's classes, without 6 and 8."""
AUGMENTATION = Augmentation(
    AugmentSettings(),
    seed=0,
    image_size=16,
    normalization=Normalization((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
    device=torch.device("cpu"),
    dtype=torch.float32,
)


@pytest.fixture(scope="module")
def annotated(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with ReaL labels for val: a fifth of the bits; some images have none."""
    directory = shutil.copytree(shapes, tmp_path_factory.mktemp("real") / "shapes")
    bits = np.random.default_rng(0).random((72, 8)) < 0.2
    assert 0 < (~bits.any(axis=1)).sum() < 30
    fact = write_annotation(directory, "val-real", bits).model_dump()
    change_manifest(
        directory, lambda manifest: manifest["splits"]["val"]["annotations"].update(real=fact)
    )
    return directory


def reader_of(directory: Path) -> ShardReader:
    return ShardReader([Part(directory, load_manifest(directory), "val", CLASSES)])


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 10))


def scores_of(reader: ShardReader, stop: StopFlag | None = None) -> Scores:
    return evaluate(
        classifier(),
        reader,
        AUGMENTATION,
        local_batch_size=40,
        world=World(0, 0, 1),
        stop=stop or StopFlag(),
    )


def plain_scores(reader: ShardReader, model: nn.Module, bits: np.ndarray) -> Scores:
    """Return the scores of a loop over single images."""
    rights, losses, real = [], [], []
    for sample, label in enumerate(reader.labels.tolist()):
        pixels = reader.images(np.array([sample])).permute(0, 3, 1, 2).float() / 255
        scores = model((pixels - 0.5) / 0.2)[0].log_softmax(dim=0)
        ranked = scores.argsort(descending=True).tolist()
        rights.append(ranked.index(label))
        losses.append(-scores[label].item())
        if bits[sample].any():
            real.append(ranked[0] in [CLASSES[column] for column in np.flatnonzero(bits[sample])])
    size = len(rights)
    return Scores(
        top1=sum(place < 1 for place in rights) / size,
        top5=sum(place < 5 for place in rights) / size,
        loss=sum(losses) / size,
        num_samples=size,
        real=sum(real) / len(real),
    )


@pytest.mark.parametrize(("num_ranks", "batch"), [(1, 72), (1, 7), (2, 7), (3, 5)])
def test_scores_are_those_of_a_plain_loop_on_any_number_of_ranks(
    annotated: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, batch: int
) -> None:
    """Ranks are threads, whose sums meet at a barrier."""
    model, reader = classifier().requires_grad_(False), reader_of(annotated)
    bits = np.unpackbits(np.load(annotated / "val-real.npy"), axis=1, count=8).astype(np.bool_)
    expected, barrier, summed = (
        plain_scores(reader, model, bits),
        threading.Barrier(num_ranks),
        list[Tensor](),
    )

    def all_sum(sums: Tensor) -> Tensor:
        summed.append(sums)
        barrier.wait(60)
        return torch.stack(summed).sum(dim=0)

    monkeypatch.setattr("pretrain.loop.evaluate.all_sum", all_sum)
    worlds = [World(rank, rank, num_ranks) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        scores = list(
            threads.map(
                lambda world: evaluate(
                    model,
                    reader,
                    AUGMENTATION,
                    local_batch_size=batch,
                    world=world,
                    stop=StopFlag(),
                ),
                worlds,
            )
        )
    assert (
        expected.real is not None
        and 0 < expected.real != expected.top1
        and len(scores) == num_ranks
    )
    for found in scores:
        assert replace(found, loss=expected.loss) == expected and found.loss == pytest.approx(
            expected.loss, rel=1e-5
        )


@torch.no_grad()
def test_a_stop_lets_go_of_a_picture_that_never_comes(
    shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image never arrives, as if its server is gone. The stop must end the wait, otherwise the
    thread blocks the end."""
    reader, arrives, stop = reader_of(shapes), threading.Event(), StopFlag()
    stop.is_alone = True
    waited: list[bool] = []

    def read(*unused: object) -> list[Unreadable]:
        stop._raise(signal.SIGTERM, None)
        waited.append(arrives.wait(20))
        return []

    monkeypatch.setattr(reader, "read", read)
    monkeypatch.setattr(reader, "end_waits", arrives.set)
    with pytest.raises(Interrupted):
        scores_of(reader, stop)
    assert waited and all(waited)


@torch.no_grad()
def test_there_is_no_real_score_without_its_labels(shapes: Path) -> None:
    scores, names = scores_of(reader_of(shapes)), {"eval/top1", "eval/top5", "eval/loss"}
    assert scores.real is None and set(scores.metrics()) == names
    assert set(replace(scores, real=0.5).metrics()) == names | {"eval/real"}


@torch.no_grad()
def test_real_labels_of_other_classes_are_refused(shapes: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(shapes, tmp_path / "shapes")
    fact = write_annotation(directory, "val-real", np.ones((72, 5), np.bool_)).model_dump()
    change_manifest(
        directory, lambda manifest: manifest["splits"]["val"]["annotations"].update(real=fact)
    )
    with fails("mismatch", kind=DatasetError):
        scores_of(reader_of(directory))
