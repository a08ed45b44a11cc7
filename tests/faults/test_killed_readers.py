"""After eight kills at random points, each followed by another number of ranks, every sample of
every epoch was read exactly once."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from data_prep.manifest import load_manifest
from pretrain.data.reader import open_split
from tests.faults.reading import GLOBAL_BATCH, WORLDS
from tests.ranks import REPOSITORY
from tests.soak import soaked

pytestmark = pytest.mark.processes

NUM_KILLS, NUM_STEPS = 8, 100


@soaked
def test_every_sample_of_every_epoch_exactly_once(shapes: Path, tmp_path: Path, salt: int) -> None:
    words = [str(shapes), str(tmp_path), str(NUM_KILLS), str(NUM_STEPS), "block", str(salt or 3)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.reading", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reader = open_split(shapes, load_manifest(shapes), "train")
    batches: dict[int, dict[int, dict[int, dict[str, list[int]]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    worlds = set()
    for line in (tmp_path / "log").read_text().splitlines():
        entry = json.loads(line)
        worlds.add(entry["ranks"])
        assert entry["labels"] == reader.labels[entry["samples"]].tolist()
        batches[entry["consumed"]][entry["ranks"]][entry["rank"]] = entry
    assert worlds == set(WORLDS)
    assert sorted(batches) == list(range(0, NUM_STEPS * GLOBAL_BATCH, GLOBAL_BATCH))

    line_of_samples: list[int] = []
    for start in sorted(batches):
        # the next world reads a killed world's batch again: the same samples on any number of ranks
        whole = [
            sorted(sample for entry in of_rank.values() for sample in entry["samples"])
            for ranks, of_rank in batches[start].items()
            if len(of_rank) == ranks
        ]
        assert whole and all(samples == whole[0] for samples in whole)
        line_of_samples += whole[0]
    num_epochs = len(line_of_samples) // reader.num_samples
    assert num_epochs == NUM_STEPS * GLOBAL_BATCH // 240 == 10
    for epoch in range(num_epochs):
        here = line_of_samples[epoch * reader.num_samples : (epoch + 1) * reader.num_samples]
        assert sorted(here) == list(range(reader.num_samples))
