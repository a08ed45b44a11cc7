"""Nearest neighbors equal scikit-learn's for any chunk size. The command evaluates a complete test
split on any number of ranks."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from finetune.probe import knn as knn_room
from finetune.probe.config import KnnSettings
from finetune.probe.features import Table
from finetune.probe.knn import accuracies, answers, neighbors_of, unit_rows
from pretrain.ranks.world import World
from tests.conftest import Capture, Patch
from tests.finetune.tiny import ALONE, CPU, Largest
from tests.training import Run, finish

CLASSES, COUNTS = 4, (1, 5, 20, 60)
KINDS: tuple[Any, ...] = ("softmax", "uniform", "distance")


def table(count: int, *, seed: int) -> Table:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    centers = torch.randn(CLASSES, 9, generator=torch.Generator().manual_seed(0))
    return Table(centers[labels] + 1.5 * torch.randn(count, 9, generator=generator), labels)


def settings_of(**changes: Any) -> KnnSettings:
    return KnnSettings.model_validate(
        {"run_dir": "r", "data": {"dataset": "d"}, "neighbors": COUNTS} | changes, strict=False
    )


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("chunk", [7, 23, 1000])
def test_answers_are_scikit_learns(weights: Any, chunk: int) -> None:
    train, test = table(150, seed=1), table(80, seed=2)
    (queries,) = unit_rows(torch.split(test.values_ND, 1000), device=CPU)
    parts = unit_rows(torch.split(train.values_ND, chunk), device=CPU)
    similarities, places = neighbors_of(queries, parts, count=max(COUNTS))
    found = answers(
        similarities,
        train.labels_N[places],
        settings_of(weights=weights, temperature=0.2),
        num_classes=CLASSES,
    )
    by_hand = {
        "softmax": lambda distances: np.exp((1 - distances) / 0.2),
        "uniform": "uniform",
        "distance": lambda distances: 1 / np.maximum(distances, 1e-6),
    }
    for count in COUNTS:
        peer = KNeighborsClassifier(count, metric="cosine", weights=by_hand[weights])
        peer.fit(train.values_ND.double().numpy(), train.labels_N.numpy())
        assert found[count].tolist() == peer.predict(test.values_ND.double().numpy()).tolist(), (
            count
        )
        distances, _ = peer.kneighbors(test.values_ND.double().numpy())
        np.testing.assert_allclose(1 - similarities[:, :count].numpy(), distances, atol=1e-5)


def test_small_temperatures_do_not_overflow() -> None:
    similarities, labels = torch.tensor([[0.9, 0.8, -1.0]]), torch.tensor([[1, 0, 2]])
    assert answers(
        similarities, labels, settings_of(temperature=1e-3, neighbors=[3]), num_classes=3
    )[3].tolist() == [1]


def test_ranks_and_chunks_change_nothing(monkeypatch: Patch) -> None:
    train, test = table(150, seed=1), table(83, seed=2)
    shared = {"settings": settings_of(), "num_classes": CLASSES, "device": CPU}
    whole = accuracies(train, test, world=ALONE, **shared)  # type: ignore[arg-type]
    peer = KNeighborsClassifier(
        20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07)
    )
    peer.fit(train.values_ND.numpy(), train.labels_N.numpy())
    assert whole[20] == pytest.approx(peer.score(test.values_ND.numpy(), test.labels_N.numpy()))
    monkeypatch.setattr(knn_room, "block_sizes", Mock(return_value=(10, 7)))
    parts = [accuracies(train, test, world=World(rank, rank, 3), **shared) for rank in range(3)]  # type: ignore[arg-type]
    for count in COUNTS:
        assert sum(part[count] for part in parts) == pytest.approx(whole[count])


def test_of_rows_that_are_equally_near_the_first_ones_count_whatever_the_blocks() -> None:
    """Every training row appears four times with random labels, so nearly every neighbor is a
    tie."""
    train, test = table(40, seed=1), table(90, seed=2)
    places = torch.from_numpy(np.random.default_rng(0).permutation(np.tile(np.arange(40), 4)))
    (queries,) = unit_rows(torch.split(test.values_ND, 1000), device=CPU)
    by_row = unit_rows(torch.split(train.values_ND, 1000), device=CPU)
    cosines = (queries @ next(by_row).T)[:, places].numpy()
    expected = np.argsort(-cosines.round(9), axis=1, kind="stable")[:, :30]
    for size in (1, 7, 33, 160):
        parts = unit_rows(torch.split(train.values_ND[places], size), device=CPU)
        similarities, rows = neighbors_of(queries, parts, count=30)
        np.testing.assert_array_equal(rows.numpy(), expected)
        np.testing.assert_allclose(
            similarities.numpy(), np.take_along_axis(cosines, expected, axis=1), atol=2e-7
        )


@pytest.mark.parametrize(("num_train", "num_test"), [(4000, 4), (300, 3000)])
def test_no_table_and_no_product_is_larger_than_asked(
    num_train: int, num_test: int, monkeypatch: Patch
) -> None:
    train, test = (
        Table(torch.randn(count, 512), torch.zeros(count, dtype=torch.int64))
        for count in (num_train, num_test)
    )
    monkeypatch.setattr(knn_room, "BLOCK_BYTES", 1_000_000)
    settings = settings_of()
    with Largest() as largest:
        accuracies(train, test, settings=settings, num_classes=CLASSES, world=ALONE, device=CPU)
    assert 50_000 < largest.num_bytes < 1_000_000


@pytest.mark.processes
def test_the_command_judges_and_refuses(
    folder: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("knn.yaml").write_text(
        f"pretrained: {folder}\ndata: {{dataset: {other_shapes}}}\nrun_dir: runs/k\ntracking:"
        " {enabled: false}\n"
    )
    output = finish(
        Run(
            ["knn", "knn.yaml", "neighbors=[5, 60]", "weights=uniform"], ranks=1, program="finetune"
        )
    )
    result = json.loads(Path("runs/k/result.json").read_text())
    assert result["top1_k60"] == pytest.approx(
        0.2
    )  # all rows vote: five classes have twelve rows each
    assert (
        result["test_top1"] == result["top1_k5"] and result["k"] == 5
    )  # the first k in the list, not the best on test
    assert f"{result['top1_k5']:.1%} (k=5)" in output
