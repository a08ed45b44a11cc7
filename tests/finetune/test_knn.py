"""Nearest neighbours equal scikit-learn's, whatever the chunks; the command judges all of a test split on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from finetune.probing import knn as knn_room
from finetune.probing.config import KnnSettings
from finetune.probing.features import Table
from finetune.probing.knn import accuracies
from finetune.probing.nearest import answers, neighbours_of, unit_rows, vote_weights
from pretrain.world import World
from tests.conftest import Command
from tests.finetune.conftest import ALONE, CPU

CLASSES, COUNTS = 4, (1, 5, 20, 60)
KINDS: tuple[Any, ...] = ("softmax", "uniform", "distance")


def table(count: int, *, seed: int) -> Table:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    centres = torch.randn(CLASSES, 9, generator=torch.Generator().manual_seed(0))
    return Table(centres[labels] + 1.5 * torch.randn(count, 9, generator=generator), labels)


def settings_of(**changes: Any) -> KnnSettings:
    return KnnSettings.model_validate({"run_dir": "r", "dataset": "d", "neighbours": COUNTS} | changes, strict=False)


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("chunk", [7, 23, 1000])
def test_answers_are_scikit_learns(weights: Any, chunk: int) -> None:
    train, test = table(150, seed=1), table(80, seed=2)
    (queries,) = unit_rows(test.features_ND, size=1000, device=CPU)
    parts = unit_rows(train.features_ND, size=chunk, device=CPU)
    similarities, places = neighbours_of(queries, parts, count=max(COUNTS))
    found = answers(
        similarities, train.labels_N[places], counts=COUNTS, num_classes=CLASSES, weights=weights, temperature=0.2
    )
    by_hand = {
        "softmax": lambda distances: np.exp((1 - distances) / 0.2),
        "uniform": "uniform",
        "distance": lambda distances: 1 / np.maximum(distances, 1e-6),
    }
    for count in COUNTS:
        peer = KNeighborsClassifier(count, metric="cosine", weights=by_hand[weights])
        peer.fit(train.features_ND.double().numpy(), train.labels_N.numpy())
        assert found[count].tolist() == peer.predict(test.features_ND.double().numpy()).tolist(), count
        distances, _ = peer.kneighbors(test.features_ND.double().numpy())
        np.testing.assert_allclose(1 - similarities[:, :count].numpy(), distances, atol=1e-5)


def test_small_temperatures_do_not_overflow() -> None:
    weights = vote_weights(torch.tensor([[0.9, 0.8, -1.0]]), weights="softmax", temperature=1e-3)
    assert weights.isfinite().all() and weights[0, 0] == 1


def test_ranks_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = table(150, seed=1), table(83, seed=2)
    shared = {"settings": settings_of(), "num_classes": CLASSES, "device": CPU}
    whole = accuracies(train, test, world=ALONE, **shared)  # type: ignore[arg-type]
    peer = KNeighborsClassifier(20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    peer.fit(train.features_ND.numpy(), train.labels_N.numpy())
    assert whole[20] == pytest.approx(peer.score(test.features_ND.numpy(), test.labels_N.numpy()))
    monkeypatch.setattr(knn_room, "QUERIES", 10)
    parts = [accuracies(train, test, world=World(rank, rank, 3), **shared) for rank in range(3)]  # type: ignore[arg-type]
    for count in COUNTS:
        assert sum(part[count] for part in parts) == pytest.approx(whole[count])


def test_the_command_judges_and_refuses(
    command: Command, backbone_folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    (tmp_path / "knn.yaml").write_text(
        f"pretrained: {backbone_folder}\ndataset: {other_shapes}\nrun_dir: runs/k\ntracking: {{enabled: false}}\n"
    )
    refused = command("finetune", "knn", "knn.yaml")
    assert refused.returncode == 2
    assert "neighbours: 200 is more than the 60 samples of 'train'; leave it out" in refused.stderr
    done = command("finetune", "knn", "knn.yaml", "neighbours=[5, 60]", "weights=uniform")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs" / "k" / "result.json").read_text())
    assert result["top1_k60"] == pytest.approx(0.2)  # everybody votes: twelve for each of five classes, of seven each
    assert result["test_top1"] == result["top1_k5"] and result["k"] == 5  # the first named, not the best on test
    assert f"{result['top1_k5']:.1%} (k=5)" in done.stdout
