"""`finetune knn`: exact nearest neighbors by cosine similarity, with weighted votes.

Among equally near training rows, the first rows vote. Predictions therefore do not depend on blocks
and ranks. Each rank evaluates a range of the test split.

Products are in double precision and rounded to multiples of 2^-23, so a pair of rows has the same
similarity in any block. A key combines similarity and row number in one integer, so that one `topk`
finds the nearest rows. Shapes: Q test rows, T training rows, q and t of them in a block, D
features, M neighbors, K classes.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from data_prep.manifest import load_manifest
from data_prep.progress import ProgressLine
from finetune.probe.config import KnnSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.rows import OnDevice
from finetune.session import PatientGroup, register, session
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import save_result
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of

_CLOSEST = 1e-6
"""Lower bound of the cosine distance in votes with weights=distance."""
_GRID, _MOST_ROWS = 2**23, 2**29
"""Number of similarity steps in 0..1, and largest number of training rows. A key is similarity *
_GRID * _MOST_ROWS - row. Keys are below 2^53, so doubles represent them exactly."""
BLOCK_BYTES = 256_000_000
"""Memory for blocks of features and similarities."""
_MOST_TRAINING = 2048
"""Largest number of training rows in a block."""


def knn(
    settings: KnnSettings, world: World, checkpoint: Checkpoint | None
) -> dict[str, Any] | None:
    """Return the result on the first rank, None on other ranks."""
    manifest, run_dir = load_manifest(settings.data.directory), Path(settings.run_dir)
    used = settings.used(manifest)
    with session(settings, world, used=used, checkpoint=checkpoint, task="knn") as (
        device,
        tracker,
    ):
        maker = FeatureMaker.open(settings, manifest, checkpoint, world, device)
        train, test = (
            maker.tables(split, [None])[0]
            for split in (settings.data.train_split, settings.data.test_split)
        )
        top1 = accuracies(
            train, test, settings=settings, num_classes=len(manifest.classes), world=world,
            device=device,
        )  # fmt: skip
        if not world.is_first:
            return None
        result: dict[str, Any] = {f"top1_k{count}": value for count, value in sorted(top1.items())}
        logged = {f"knn/{name}": value for name, value in result.items()}
        tracker.metrics(logged, step=0)
        if checkpoint is not None:
            register(tracker, checkpoint, logged, target=target_of(manifest))
        k = settings.neighbors[0]
        return save_result(run_dir, result | {"test_top1": top1[k], "k": k})


def accuracies(
    train: Table,
    test: Table,
    *,
    settings: KnnSettings,
    num_classes: int,
    world: World,
    device: torch.device,
) -> dict[int, float]:
    """Return the accuracy on the complete test split for each k."""
    counts, size, group = sorted(settings.neighbors), len(test), PatientGroup()
    first, end = (size * rank // world.num_ranks for rank in (world.rank, world.rank + 1))
    num_queries, num_training = block_sizes(
        BLOCK_BYTES, num_features=train.num_features, num_classes=num_classes, count=counts[-1]
    )
    placed_TD = None
    if device.type == "cuda":  # copy the table if it takes less than half of the free memory
        placed_TD = OnDevice(device, room=torch.cuda.mem_get_info(device)[0] // 2).of(train)
    train_labels_T = train.labels_N.to(device)
    right = torch.zeros(len(counts), dtype=torch.float64, device=device)
    PROGRESS.mark("looking for neighbors")
    with ProgressLine(
        "neighbors", total=end - first, unit="images", enabled=world.is_first
    ) as line:
        for start in range(first, end, num_queries):
            own = torch.arange(start, min(end, start + num_queries))
            (queries_QD,) = unit_rows([test.gather(own)], device=device)
            parts: Iterable[Tensor] = train.chunks(num_training)
            if placed_TD is not None:
                parts = torch.split(placed_TD, num_training)
            similarities, rows = neighbors_of(
                queries_QD, unit_rows(parts, device=device), count=counts[-1]
            )
            found = answers(similarities, train_labels_T[rows], settings, num_classes=num_classes)
            labels_Q = test.labels_N[own].to(device)
            right += torch.stack([(found[count] == labels_Q).sum() for count in counts])
            line.advance(len(labels_Q))
    return dict(zip(counts, (group.all_sum(right.cpu()) / size).tolist(), strict=True))


def block_sizes(
    num_bytes: int, *, num_features: int, num_classes: int, count: int
) -> tuple[int, int]:
    """Return the numbers of test and training rows of a block that fits into `num_bytes`."""
    per_training = 20 * num_features  # a row in fp32, and two copies in double precision
    num_training = min(_MOST_TRAINING, max(1, num_bytes // 4 // per_training))
    # bytes of rows, products, keys, merged keys and votes
    per_query = 20 * num_features + 24 * num_training + 56 * count + 8 * num_classes
    return max(1, (num_bytes - num_training * per_training) // per_query), num_training


def neighbors_of(
    queries_qD: Tensor, training: Iterator[Tensor], *, count: int
) -> tuple[Tensor, Tensor]:
    """Return (similarities, row numbers) of the `count` nearest training rows, nearest first. All
    rows must have norm 1."""
    best_qM = torch.empty(len(queries_qD), 0, dtype=torch.float64, device=queries_qD.device)
    start = 0
    for part_tD in training:
        end = start + len(part_tD)
        rows_t = torch.arange(start, end, dtype=torch.float64, device=part_tD.device)
        keys_qt = (queries_qD @ part_tD.T).mul_(_GRID).round_().mul_(_MOST_ROWS).sub_(rows_t)
        both = torch.cat([best_qM, keys_qt], dim=1)
        best_qM = both.topk(min(count, both.shape[1]), dim=1).values
        start = end
    assert start <= _MOST_ROWS
    rounded_qM = best_qM.div(_MOST_ROWS).ceil_()
    return rounded_qM.div(_GRID).float(), (rounded_qM * _MOST_ROWS - best_qM).long()


def answers(
    similarities_QM: Tensor, labels_QM: Tensor, settings: KnnSettings, *, num_classes: int
) -> dict[int, Tensor]:
    """Return {k: class with the most votes for each test row}. The first class wins a tie."""
    match settings.weights:
        case "softmax":  # relative to the nearest row, so that small temperatures do not overflow
            votes_QM = ((similarities_QM - similarities_QM[:, :1]) / settings.temperature).exp()
        case "uniform":
            votes_QM = torch.ones_like(similarities_QM)
        case "distance":
            votes_QM = 1 / (1 - similarities_QM).clamp(min=_CLOSEST)
    sums_QK = votes_QM.new_zeros(len(votes_QM), num_classes)
    found, done = {}, 0
    for count in sorted(settings.neighbors):
        sums_QK.scatter_add_(1, labels_QM[:, done:count], votes_QM[:, done:count])
        found[count], done = sums_QK.argmax(dim=1), count
    return found


def unit_rows(chunks: Iterable[Tensor], *, device: torch.device) -> Iterator[Tensor]:
    """Yield rows on the device, in double precision, scaled to norm 1."""
    for part in chunks:
        PROGRESS.touch()
        yield normalize(part.to(device).double(), dim=1)
