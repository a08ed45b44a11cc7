"""Ranks that probe together compute each row and candidate once, wait for long work, and agree on
the end after a fault. A rank without progress is named; finished ranks do not delay others.
"""

import errno
import os
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data_prep.errors import UserError
from finetune import session as session_room
from finetune.probe import features, probe
from finetune.probe.probe import candidates_of, choose_and_test, judged_candidates, shares
from finetune.probe.source import source_of
from finetune.session import session, start_accelerator
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model, save_folder
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from tests import training
from tests.finetune.tiny import (
    ALONE,
    CLASSES,
    CROPS,
    PROBE,
    blobs,
    feature_settings,
    maker_of,
    probe_settings,
    rows_of,
    whole,
)
from tests.forked import begin, environments, wait
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


def test_the_longest_cells_are_dealt_first_and_evenly() -> None:
    candidates = candidates_of(
        probe_settings(lrs=tuple(range(1, 6)), weight_decays=tuple(range(5)), epochs=(10, 100))
    )
    for num_ranks in (1, 2, 3, 8, 60):
        dealt = shares(candidates, num_ranks)
        assert sorted(number for numbers in dealt for number in numbers) == list(range(50))
        work = [sum(candidates[number].epochs for number in numbers) for numbers in dealt]
        assert max(work) - min(work) <= 100
        assert num_ranks != 2 or max(work) == 1380


PATIENCE_S, WORK_S = 3.0, 4.5


def patient_case(world: World) -> float:
    """Probe one candidate, on which only the first rank works, longer than a collective's timeout.
    Return its top-1."""
    start_accelerator(world, timeout_s=PATIENCE_S)
    plain = probe.heads_of

    def slow(*words: Any, **also: Any) -> Any:
        time.sleep(WORK_S)
        return plain(*words, **also)

    probe.heads_of = slow  # type: ignore[assignment]
    rows = rows_of(blobs(40, seed=1))
    settings = probe_settings(lrs=(0.1,), weight_decays=(0.0,), epochs=(2,))
    judged, _ = judged_candidates(rows, rows, settings=settings, num_classes=CLASSES, world=world)
    return judged[0].score.top1


def test_a_rank_without_a_cell_waits_as_long_as_it_takes() -> None:
    one, other = run_ranks(patient_case, num_ranks=2)
    assert one == other > 0.5


def quarrel_case(world: World, folder: str, other: str, dataset: str, place: str) -> list[str]:
    """Return each rank's error codes: different weights, different evaluations, a full disk of one
    rank, and an error of one rank."""
    start_accelerator(world, timeout_s=20)
    settings = feature_settings(Path(dataset), Path(place), Path(folder))
    said = []
    for weights, facts in (((folder, other)[world.rank], None), (folder, {"rank": world.rank})):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as quarrel:
            patch.setattr(session_room, "watched", lambda *_words, **_also: nullcontext())
            with session(
                settings,
                world,
                used=[],
                checkpoint=Checkpoint.open(weights),
                task="probe",
                facts=facts,
            ):
                pass
        said.append(quarrel.value.code)
    maker = maker_of(settings, world=world)
    full, out_of_memory = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), MemoryError("none left")
    for place_of, name, error in ((os, "fsync", full), (features, "view_of", out_of_memory)):
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises((UserError, MemoryError)) as fault,
        ):
            if world.rank == 1:
                patch.setattr(place_of, name, Mock(side_effect=error))
            maker.tables("val", [None])
        said.append(getattr(fault.value, "code", type(fault.value).__name__))
    return said


def test_a_fault_of_one_rank_is_the_end_of_all(
    folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    checkpoint = Checkpoint.open(folder)
    card, model = checkpoint.card, load_model(checkpoint)
    save_folder(
        other, card=card, weights={name: tensor + 1 for name, tensor in model.state_dict().items()}
    )
    words = (str(folder), str(other), str(other_shapes), str(tmp_path / "place"))
    one, two = run_ranks(quarrel_case, *words, num_ranks=2)
    assert {*one[:2], *two[:2]} == {"mismatch"}
    assert one[2:] == ["another-rank"] * 2
    assert two[2] == "no-space" and two[3] == "MemoryError"
    assert list((tmp_path / "place" / "features").iterdir()) == []


def rank_case(world: World, folder: str, dataset: str, place: str) -> list[Any]:
    """Return the test samples that this rank computes, the table, and the candidates that all ranks
    know."""
    start_accelerator(world)
    computed: list[int] = []
    write = features._File.write

    def counted(file: Any, rows_BD: Any, first: int) -> None:
        if "-val-" in file.path.parent.name:
            computed.extend(range(first, first + len(rows_BD)))
        write(file, rows_BD, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features._File, "write", counted)
        settings = feature_settings(Path(dataset), Path(place), Path(folder), **PROBE)
        maker = maker_of(settings, world=world)
        train, test = maker.tables("train", [None])[0], maker.tables("val", [None])[0]
    rows, held = rows_of(train), rows_of(test)
    judged, heads = judged_candidates(rows, held, settings=settings, num_classes=5, world=world)
    assert len(heads) == len(range(world.rank, 4, world.num_ranks))
    table = whole(test)
    assert torch.equal(table, torch.cat(list(test.chunks(4))))
    return [computed, table.tolist(), [[each.score.top1, each.score.loss] for each in judged]]


def test_three_ranks_make_each_row_once_and_share_the_candidates(
    folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    words = (str(folder), str(other_shapes))
    _, one_table, one_scores = rank_case(ALONE, *words, str(tmp_path / "one"))
    said = run_ranks(rank_case, *words, str(tmp_path / "three"), num_ranks=3)
    rows = [row for computed, _, _ in said for row in computed]
    assert sorted(rows) == list(range(35)) and all(computed for computed, _, _ in said)
    for _, table, scores in said:
        np.testing.assert_allclose(table, one_table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(scores, one_scores, rtol=1e-4, atol=1e-6)
    computed, table, _ = rank_case(ALONE, *words, str(tmp_path / "three"))
    assert computed == [] and table == said[0][1]  # one rank reuses the features of three


GRID = {
    "lrs": (1e-2, 1e-1),
    "weight_decays": (0.0,),
    "epochs": (3, 1),
    "num_views": 2,
    "augment": CROPS,
    "batch_size": 16,
    "cache_gb": 0,
}


def streamed_case(
    world: World, folder: str, dataset: str, place: str, features: str
) -> list[Any] | None:
    start_accelerator(world)
    settings = feature_settings(
        Path(dataset), Path(place), Path(folder), optimizer="sgd", features=features, **GRID
    )
    with source_of(settings, maker_of(settings, world=world)) as source:
        outcome = choose_and_test(source, settings=settings, num_classes=5, world=world)
    return outcome and [*(each.tolist() for each in outcome.classifier), outcome.result]


@pytest.mark.parametrize("num_ranks", [1, 3, 5])
def test_streamed_features_train_the_heads_that_kept_ones_train(
    folder: Path, other_shapes: Path, tmp_path: Path, num_ranks: int
) -> None:
    """Four candidates of two lengths on five ranks: one rank has no candidate, and helps others."""
    words = (str(folder), str(other_shapes))
    kept = streamed_case(ALONE, *words, str(tmp_path / "kept"), "cache")
    place = str(tmp_path / "streamed")
    said = (
        [streamed_case(ALONE, *words, place, "auto")]
        if num_ranks == 1
        else run_ranks(streamed_case, *words, place, "stream", num_ranks=num_ranks)
    )
    assert kept is not None and said[0] is not None and said[1:] == [None] * (num_ranks - 1)
    assert (tmp_path / "kept" / "features").is_dir() and not (tmp_path / "streamed").exists()
    for one, other in zip(kept[:2], said[0][:2], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    assert kept[2].keys() == said[0][2].keys()
    for name in kept[2].keys() - {"grid"}:
        assert said[0][2][name] == pytest.approx(kept[2][name], rel=1e-5), name


TARGET = "tests.finetune.test_probe_ranks:"


def is_stuck(*_given: object) -> None:
    PROGRESS._touched_s = time.monotonic() - 1000  # as if 1000 s had passed
    time.sleep(600)


def with_one_stuck_rank(words: list[str]) -> int:
    if os.environ["RANK"] == "1":
        features.view_of = is_stuck  # type: ignore[assignment]
    return training.main("finetune", words)


def run_probe(
    case: str, folder: Path, place: Path, dataset: Path, **settings: object
) -> tuple[list[int | None], str]:
    config = place / "probe.yaml"
    config.write_text(
        "tracking: {enabled: false}\noptimizer: lion\nlrs: [0.1]\nfeature_batch_size:"
        " 8\nweight_decays: [0]\nepochs: [2]\n"
    )
    given = {
        "run_dir": place / "run",
        "data.dataset": dataset,
        "pretrained": folder,
        "features_dir": place / "features",
    }
    words = [
        "probe",
        str(config),
        *(f"{name}={value}" for name, value in (given | settings).items()),
    ]
    ranks = [
        begin(TARGET + case, words, environment=each, output=place / "output")
        for each in environments(2)
    ]
    return wait(ranks, timeout_s=300), (place / "output").read_text()


def test_a_stuck_rank_is_named_and_all_show_where_they_are(
    folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    case = with_one_stuck_rank.__name__
    codes, output = run_probe(case, folder, tmp_path, other_shapes, **{"ranks.hang_timeout_s": 500})
    assert codes == [1, 1], output
    (line,) = re.findall("^rank 1 .* has made no progress for 1,0.*$", output, re.MULTILINE)
    assert "; the others are waiting for the other ranks; the run stops" in line
    waiting, stuck = (
        (tmp_path / "run" / "stacks" / f"rank-{rank:04}.txt").read_text() for rank in (0, 1)
    )
    assert " in is_stuck\n" in stuck and " in all_sum\n" in waiting
