"""Samples that are unreadable during training: every world uses the same substitutes, names each
sample once, and ignores them in scores. Too many end the run on all ranks at the same step.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.manifest import load_index, load_manifest, load_paths
from pretrain.data.bad_samples import BadSamples, TooManyBadSamples, check_fraction
from pretrain.data.loader import Batch, evaluation_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader
from pretrain.ranks.world import World
from tests.errors import fails, printed_errors
from tests.pretrain.data.tiny import loaded, opened, packed
from tests.training import finish, start, write_config

BAD = (3, 64, 130)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def dataset(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged(shapes, tmp_path_factory.mktemp("bad") / "shapes", BAD)


def damaged(shapes: Path, out: Path, samples: Iterable[int], split: str = "train") -> Path:
    """Return a dataset of 240 JPEGs in shards of 50, with some of them overwritten after the
    build."""
    packed(f"{shapes}-images", out, "samples_per_shard=50", "encoding=jpeg")
    for sample in samples:
        shard = load_manifest(out).split(split).shards[sample // 50]
        with open(out / shard.file, "r+b") as file:
            file.seek(int(load_index(out, shard)[sample % 50, 0]))
            file.write(b"no picture")
    return out


@pytest.fixture
def reader(dataset: Path) -> ShardReader:
    return opened(dataset)


def epoch_of(
    reader: ShardReader, *, ranks: int, log: Path | None = None
) -> dict[int, tuple[torch.Tensor, int]]:
    """Return the (image, label) that training used for each sample."""
    plan, order = BatchPlan(60, 60 // ranks, ranks), Order(reader.num_samples, 2)
    found, num_bad = {}, 0
    for rank in range(ranks):
        with loaded(
            reader, order, plan, rank=rank, bad_samples=BadSamples(reader, log=log)
        ) as batches:
            for _ in range(4):
                batch: Batch = next(batches)
                num_bad += batch.num_bad
                for sample, picture, label in zip(
                    batch.samples, batch.images_BHWC, batch.labels_B, strict=True
                ):
                    found[int(sample)] = (picture, int(label))
    assert num_bad == len(BAD) and len(found) == 240
    return found


def test_every_world_trains_on_the_same_stand_ins_with_their_labels(reader: ShardReader) -> None:
    one, four = epoch_of(reader, ranks=1), epoch_of(reader, ranks=4)
    for sample in range(240):
        assert torch.equal(one[sample][0], four[sample][0]) and one[sample][1] == four[sample][1]
    good = [sample for sample in range(240) if sample not in BAD]
    whole = dict(zip(good, reader.images(np.array(good)), strict=True))
    for sample in good:
        assert (
            torch.equal(one[sample][0], whole[sample]) and one[sample][1] == reader.labels[sample]
        )
    for sample in BAD:
        same = [other for other in good if torch.equal(whole[other], one[sample][0])]
        assert len(same) == 1 and same[0] // 50 == sample // 50  # in the same shard
        assert one[sample][1] == reader.labels[same[0]]


def replaced(
    reader: ShardReader, bad_samples: BadSamples, *, sample: int
) -> tuple[np.ndarray, torch.Tensor]:
    """Return the substitute's number and its image."""
    ids, batch = (
        np.array([sample]),
        torch.empty(1, reader.stored_size, reader.stored_size, 3, dtype=torch.uint8),
    )
    return bad_samples.replace(reader.read(reader.locate(ids), batch), ids, batch), batch


def test_in_a_fold_its_own_samples_stand_in(
    reader: ShardReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = np.array([BAD[0], 0, 60, 119, 200])
    assert len(set(fold.tolist()) & set(BAD)) == 1
    monkeypatch.setitem(vars(reader.parts[0]), "chosen", fold)
    shown, batch = replaced(reader, BadSamples(reader), sample=BAD[0])
    assert shown[0] in fold[1:] and torch.equal(batch, reader.images(shown))


def test_each_is_logged_once_with_its_shard_and_key(
    reader: ShardReader, dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    log = tmp_path / "bad" / "rank-0.jsonl"
    epoch_of(reader, ranks=1, log=log)
    lines = sorted(
        (json.loads(line) for line in log.read_text().splitlines()), key=lambda line: line["sample"]
    )
    assert [line["sample"] for line in lines] == list(BAD)
    for line in lines:
        shard = load_manifest(dataset).split("train").shards[line["sample"] // 50]
        assert line["shard"] == shard.name
        assert line["key"] == load_paths(dataset, shard)[line["sample"] % 50]
        assert line["reason"].startswith("not_an_image")
        assert line["stand_in"] not in BAD
    assert capsys.readouterr().err.count("bad sample: ") == len(BAD)


def test_evaluation_leaves_it_out_and_says_so(reader: ShardReader, capsys: Capture) -> None:
    for ranks in (1, 3):
        counted, num_bad = [], 0
        for rank in range(ranks):
            with evaluation_batches(
                reader, local_batch_size=37, world=World(rank, rank, ranks)
            ) as batches:
                for batch in batches:
                    assert batch.mask_B is not None
                    counted += batch.samples[batch.mask_B.numpy()].tolist()
                    num_bad += batch.num_bad
        assert sorted(counted) == [sample for sample in range(240) if sample not in BAD]
        assert num_bad == len(BAD)
    assert "the score ignores it" in capsys.readouterr().err


def test_a_bad_last_sample_is_named_once_however_often_it_pads(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    reader = opened(damaged(shapes, tmp_path / "shapes", [71], split="val"), "val")
    capsys.readouterr()
    with evaluation_batches(reader, local_batch_size=100, world=World(0, 0, 1)) as batches:
        (batch,) = batches
    assert batch.mask_B is not None and int(batch.mask_B.sum()) == 71 and batch.num_bad == 1
    assert capsys.readouterr().err.count("bad sample: ") == 1


def test_whoever_asks_for_the_pictures_themselves_gets_an_error(reader: ShardReader) -> None:
    with fails("damaged", "train-000000"):
        reader.images(np.array([2, 3]))


def test_a_shard_without_one_good_picture_is_an_error(shapes: Path, tmp_path: Path) -> None:
    reader = opened(damaged(shapes, tmp_path / "shapes", range(100, 150)))
    with fails("damaged", "train-000002"):
        replaced(reader, BadSamples(reader), sample=120)


def test_the_threshold_is_a_share_of_what_was_seen_but_of_an_epoch_at_least() -> None:
    check_fraction(10, num_seen=50, num_samples=10_000, max_fraction=0.001)
    check_fraction(30, num_seen=30_000, num_samples=10_000, max_fraction=0.001)
    for num_bad, num_seen in [(11, 50), (31, 30_000)]:
        with fails("too-many-faults", "data.max_bad_fraction", kind=TooManyBadSamples) as caught:
            check_fraction(num_bad, num_seen=num_seen, num_samples=10_000, max_fraction=0.001)
        assert f"{max(num_seen, 10_000):,}" in caught.value.problem


@pytest.mark.processes
def test_a_run_goes_on_with_few_and_stops_with_many_on_all_ranks(
    dataset: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, dataset=dataset)
    words = ["train.duration=1 epochs", "train.eval_every=1000 steps", "data.verify_hashes=never"]
    output = finish(start(config, tmp_path / "few", "data.max_bad_fraction=0.02", *words))
    assert output.count("bad sample: ") in range(3, 7) and "finished" in output
    logs = sorted((tmp_path / "few" / "bad_samples").iterdir())
    found = {json.loads(line)["sample"] for log in logs for line in log.read_text().splitlines()}
    assert found == set(BAD) and not (tmp_path / "few" / "checked").exists(), (
        "data.verify_hashes=never: nothing is hashed"
    )
    process = start(config, tmp_path / "many", "data.max_bad_fraction=0.005", *words)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert printed_errors(output) == [("data.max_bad_fraction", "too-many-faults")]
    assert "Traceback" not in output
