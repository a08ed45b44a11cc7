"""`finetune knn`: what the nearest training pictures say of each test picture, from the features
that a probe uses, too.

Weighted votes of the nearest neighbours by cosine similarity, exact, in blocks of both tables. Of
rows that are equally near the first ones count, so no setting changes an answer. Each rank judges a
range of the test split; sums are reduced at the end.

Products are in double precision and rounded to 2^-23: the same pair of rows has the same similarity
in whatever block it stands. A similarity and its row are one whole number, which is larger for what
is nearer, so that the best of many are one `topk`. Q test rows, T training rows, t and q of a
block, D features, M the largest number of neighbours, K classes.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from data_prep.manifest import load_manifest
from data_prep.progress import progress
from finetune.probe.config import KnnSettings
from finetune.probe.features import FeatureMaker, Table
from finetune.probe.rows import OnDevice
from finetune.session import PatientGroup, open_backbone, register, session
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import save_result
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of

_CLOSEST = 1e-6
"""Cosine distance that counts as 0 where votes are weighed by its inverse."""
_GRID, _MOST_ROWS = 2**23, 2**29
"""A key is similarity * _GRID * _MOST_ROWS - row: whole, and below 2^53, up to which doubles are
exact."""
_MOST_TRAINING = 2048
"""Training rows of a block: more make no product faster, and take room from test rows, for each
block of which all training rows are read."""


def knn(
    settings: KnnSettings, world: World, checkpoint: Checkpoint | None
) -> dict[str, Any] | None:
    """The result, on the first rank. `checkpoint`: of `settings.pretrained`."""
    manifest, run_dir = load_manifest(settings.data.directory), Path(settings.run_dir)
    used = settings.used(manifest)
    with session(
        settings, world, run_dir=run_dir, used=used, checkpoint=checkpoint, task="knn"
    ) as (device, tracker):
        fed: dict[str, Any] = {
            "image_size": settings.data.image_size,
            "channel_stats": settings.channel_stats,
        }
        backbone = open_backbone(
            checkpoint, manifest, device=device, precision=settings.feature_precision, **fed
        )
        maker = FeatureMaker(settings, manifest, backbone, world, device)
        train, test = (
            maker.tables(split, [None])[0]
            for split in (settings.data.train_split, settings.data.test_split)
        )
        num_classes = len(manifest.classes)
        top1 = accuracies(
            train, test, settings=settings, num_classes=num_classes, world=world, device=device
        )
        if not world.is_first:
            return None
        result: dict[str, Any] = {f"top1_k{count}": value for count, value in sorted(top1.items())}
        logged = {f"knn/{name}": value for name, value in result.items()}
        tracker.metrics(logged, step=0)
        if checkpoint is not None:
            register(tracker, checkpoint, logged, target=target_of(manifest))
        # the best of them would be a choice on the test split
        save_result(
            run_dir,
            result | {"test_top1": top1[settings.neighbours[0]], "k": settings.neighbours[0]},
        )
        return result


def accuracies(
    train: Table,
    test: Table,
    *,
    settings: KnnSettings,
    num_classes: int,
    world: World,
    device: torch.device,
) -> dict[int, float]:
    """k -> top-1 on the whole test split."""
    counts, size, group = sorted(settings.neighbours), len(test), PatientGroup()
    first, end = (size * rank // world.num_ranks for rank in (world.rank, world.rank + 1))
    room = settings.chunk_mb * 1_000_000
    num_queries, num_training = block_sizes(
        room, num_features=train.num_features, num_classes=num_classes, count=counts[-1]
    )
    placed_TD = None
    if (
        device.type == "cuda"
    ):  # where it takes less than half of what is free; else it is copied chunk by chunk
        placed_TD = OnDevice(device, room=torch.cuda.mem_get_info(device)[0] // 2).of(train)
    train_labels_T = train.labels_N.to(device)
    right = torch.zeros(len(counts), dtype=torch.float64, device=device)
    PROGRESS.mark("looking for neighbours")
    with progress("neighbours", total=end - first, unit="images", enabled=world.is_first) as line:
        for start in range(first, end, num_queries):
            mine = torch.arange(start, min(end, start + num_queries))
            (queries_QD,) = unit_rows([test.gather(mine)], device=device)
            parts = (
                train.chunks(num_training)
                if placed_TD is None
                else torch.split(placed_TD, num_training)
            )
            similarities, places = neighbours_of(
                queries_QD, unit_rows(parts, device=device), count=counts[-1]
            )
            found = answers(similarities, train_labels_T[places], settings, num_classes=num_classes)
            labels_Q = test.labels_N[mine].to(device)
            right += torch.stack([(found[count] == labels_Q).sum() for count in counts])
            line.advance(len(labels_Q))
    shares = (group.all_sum(right.cpu()) / size).tolist()
    return dict(zip(counts, shares, strict=True))


def block_sizes(
    num_bytes: int, *, num_features: int, num_classes: int, count: int
) -> tuple[int, int]:
    """How many test and training rows are looked at together, so that all that is made of them
    takes no more than that; or one row of each where that is too much."""
    per_training = 20 * num_features  # as they are, and twice in double precision
    num_training = min(_MOST_TRAINING, max(1, num_bytes // 4 // per_training))
    per_query = (
        20 * num_features + 24 * num_training + 56 * count + 8 * num_classes
    )  # products, keys, their merging; votes
    return max(1, (num_bytes - num_training * per_training) // per_query), num_training


def neighbours_of(
    queries_qD: Tensor, training: Iterator[Tensor], *, count: int
) -> tuple[Tensor, Tensor]:
    """(similarities, rows) of the `count` nearest, nearest first; both tables are normalised,
    `training` in order."""
    best_qM = torch.empty(len(queries_qD), 0, dtype=torch.float64, device=queries_qD.device)
    start = 0
    for part_tD in training:
        rows_t = torch.arange(
            start, start + len(part_tD), dtype=torch.float64, device=part_tD.device
        )
        keys_qt = (queries_qD @ part_tD.T).mul_(_GRID).round_().mul_(_MOST_ROWS).sub_(rows_t)
        both = torch.cat([best_qM, keys_qt], dim=1)
        best_qM = both.topk(min(count, both.shape[1]), dim=1).values
        start += len(part_tD)
    assert start <= _MOST_ROWS
    whole_qM = best_qM.div(_MOST_ROWS).ceil_()
    return whole_qM.div(_GRID).float(), (whole_qM * _MOST_ROWS - best_qM).long()


def answers(
    similarities_QM: Tensor, labels_QM: Tensor, settings: KnnSettings, *, num_classes: int
) -> dict[int, Tensor]:
    """The class with most votes of the k nearest, for each k; of equals the first class."""
    match settings.weights:
        case (
            "softmax"
        ):  # up to a factor of the query's own, which keeps small temperatures from overflowing
            votes_QM = ((similarities_QM - similarities_QM[:, :1]) / settings.temperature).exp()
        case "uniform":
            votes_QM = torch.ones_like(similarities_QM)
        case "distance":
            votes_QM = 1 / (1 - similarities_QM).clamp(min=_CLOSEST)
    sums_QK = votes_QM.new_zeros(len(votes_QM), num_classes)
    found, done = {}, 0
    for count in sorted(
        settings.neighbours
    ):  # the votes of k neighbours are those of fewer, and some more
        sums_QK.scatter_add_(1, labels_QM[:, done:count], votes_QM[:, done:count])
        found[count], done = sums_QK.argmax(dim=1), count
    return found


def unit_rows(chunks: Iterable[Tensor], *, device: torch.device) -> Iterator[Tensor]:
    """Rows of length 1, in double precision, on the device."""
    for part in chunks:
        PROGRESS.touch()
        yield normalize(part.to(device).double(), dim=1)
