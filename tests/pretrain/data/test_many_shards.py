"""Any number of shards of any size gives the same samples in any order, without a file descriptor
for each and without reading ahead."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.data.loader import Batch
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader
from tests.pretrain.data.tiny import few_files, loaded, opened, packed
from tests.ranks import REPOSITORY


@pytest.fixture(scope="module")
def images(shapes: Path) -> Path:
    return Path(f"{shapes}-images")


@pytest.fixture(scope="module")
def one_shard(images: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    return opened(
        packed(images, tmp_path_factory.mktemp("one") / "shapes", "samples_per_shard=1000")
    )


def epoch_of(reader: ShardReader, *, ranks: int, threads: int) -> list[Batch]:
    plan, order = BatchPlan(60, 60 // ranks, ranks), Order(reader.num_samples, 2, "block", 7, 3)
    batches = []
    for rank in range(ranks):
        with loaded(reader, order, plan, rank=rank, num_threads=threads) as found:
            batches += [next(found) for _ in range(reader.num_samples // 60)]
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(("samples_per_shard", "encoding"), [(1, "raw"), (7, "jpeg"), (239, "raw")])
def test_every_cut_into_shards_gives_every_rank_the_same_pictures(
    images: Path, tmp_path: Path, one_shard: ShardReader, samples_per_shard: int, encoding: str
) -> None:
    """One image per shard (more shards than file descriptors), uneven shards, a last shard of one
    image, and more ranks than shards."""
    reader = opened(
        packed(
            images,
            tmp_path / "shapes",
            f"samples_per_shard={samples_per_shard}",
            f"encoding={encoding}",
        )
    )
    with few_files():
        whole = reader.images(np.arange(240))
    assert encoding == "jpeg" or torch.equal(whole, one_shard.images(np.arange(240)))
    assert reader.labels.tolist() == one_shard.labels.tolist()
    for ranks in (1, 3, 5):
        batches = epoch_of(reader, ranks=ranks, threads=2)
        assert sorted(sample for batch in batches for sample in batch.samples.tolist()) == list(
            range(240)
        )
        for batch in batches:
            assert torch.equal(batch.images_BHWC, whole[torch.from_numpy(batch.samples)])
            assert batch.labels_B.tolist() == reader.labels[batch.samples].tolist()


def test_a_reader_that_is_gone_gives_its_addresses_back(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "shapes", "samples_per_shard=30")

    def mappings() -> int:
        return sum(
            "shapes/train" in line for line in Path("/proc/self/maps").read_text().splitlines()
        )

    before = mappings()
    for _ in range(3):
        reader = opened(tmp_path / "shapes")
        reader.images(np.arange(240))
        assert mappings() == before + 16  # eight shards, eight indices
        del reader
        assert mappings() == before


def test_reading_epochs_leaves_memory_where_it_was(one_shard: ShardReader) -> None:
    epoch_of(one_shard, ranks=1, threads=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        epoch_of(one_shard, ranks=1, threads=2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@pytest.mark.processes
def test_what_runs_at_the_very_end_of_a_process_may_still_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    program = (
        "import atexit; atexit.register(lambda: print(bytes(files.content[:3])))\n"
        "from pathlib import Path; from pretrain.data.reader import FileRange\n"
        "files = FileRange([3]); files.map(0, Path('file'), num_bytes=3)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert (
        subprocess.check_output(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True
        )
        == "b'abc'\n"
    )
