"""Shards of all sizes and in any number: read alike, in any order, without a file descriptor each and without reading ahead."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from pretrain.data.loader import Batch, as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader, open_split
from tests.ranks import REPOSITORY


def packed(images: Path, out: Path, *, samples_per_shard: int, encoding: str = "raw") -> ShardReader:
    words = [f"source.path={images}", f"out={out}", "image_size=16", f"samples_per_shard={samples_per_shard}"]
    assert data_prep(["build", "--source", "folder", *words, f"encoding={encoding}", "num_workers=1"]) == 0
    return open_split(out, load_manifest(out), "train")


@pytest.fixture(scope="module")
def images(shapes: Path) -> Path:
    return Path(f"{shapes}-images")


@pytest.fixture(scope="module")
def one_shard(images: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    return packed(images, tmp_path_factory.mktemp("one") / "shapes", samples_per_shard=1000)


def epoch_of(reader: ShardReader, *, ranks: int, threads: int) -> list[Batch]:
    plan, order = BatchPlan(60, 60 // ranks, ranks), Order(reader.num_samples, 2, "block", 7, 3)
    batches = []
    for rank in range(ranks):
        with training_batches(
            reader, order, plan, rank=rank, consumed=0, num_threads=threads, prefetch=2, pin=False, finish=as_stored
        ) as found:
            batches += [next(found) for _ in range(reader.num_samples // 60)]
    return batches


@pytest.mark.parametrize("samples_per_shard", [1, 7, 239])
@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_every_cut_into_shards_gives_every_rank_the_same_pictures(
    images: Path, tmp_path: Path, one_shard: ShardReader, samples_per_shard: int, encoding: str
) -> None:
    """One picture a shard, uneven shards, a shard of one picture at the end, and more ranks than shards."""
    reader = packed(images, tmp_path / "shapes", samples_per_shard=samples_per_shard, encoding=encoding)
    if encoding == "raw":
        assert torch.equal(reader.images(np.arange(240)), one_shard.images(np.arange(240)))
    assert reader.labels.tolist() == one_shard.labels.tolist()
    whole = reader.images(np.arange(240))
    for ranks in (1, 3, 5):
        batches = epoch_of(reader, ranks=ranks, threads=2)
        assert sorted(sample for batch in batches for sample in batch.samples.tolist()) == list(range(240))
        for batch in batches:
            assert torch.equal(batch.images_BHWC, whole[torch.from_numpy(batch.samples)])
            assert batch.labels_B.tolist() == reader.labels[batch.samples].tolist()


def test_more_shards_than_a_process_may_open_files(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "shapes", samples_per_shard=1)
    program = """
import resource, sys
import numpy as np
from pathlib import Path
from data_prep.manifest import load_manifest
from pretrain.data.reader import open_split
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
reader = open_split(Path(sys.argv[1]), load_manifest(sys.argv[1]), "train")
assert len(load_manifest(sys.argv[1]).splits["train"].shards) == 240
print(int(reader.images(np.arange(240)).sum()), reader.labels.sum())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "shapes")], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reader = open_split(tmp_path / "shapes", load_manifest(tmp_path / "shapes"), "train")
    assert done.stdout.split() == [str(int(reader.images(np.arange(240)).sum())), str(reader.labels.sum())]


def test_a_reader_that_is_gone_gives_its_addresses_back(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "shapes", samples_per_shard=30)
    manifest = load_manifest(tmp_path / "shapes")

    def mappings() -> int:
        return sum("shapes/train" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    for _ in range(3):
        reader = open_split(tmp_path / "shapes", manifest, "train")
        reader.images(np.arange(240))
        assert mappings() == before + 16  # eight shards, eight indices
        del reader
        assert mappings() == before


def test_reading_epochs_leaves_memory_where_it_was(one_shard: ShardReader) -> None:
    epoch_of(one_shard, ranks=1, threads=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        epoch_of(one_shard, ranks=1, threads=2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_what_runs_at_the_very_end_of_a_process_may_still_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    program = (
        "import atexit; atexit.register(lambda: print(bytes(files.content[:3])))\n"
        "from pathlib import Path; from pretrain.data.reader import FileRange\n"
        "files = FileRange([3]); files.map(0, Path('file'), num_bytes=3)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "b'abc'\n")
