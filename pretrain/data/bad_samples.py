"""Replace samples that do not decode during training, and log each one. Too many bad samples stop
the run.

The replacement (stand-in) depends on the bad sample only, so every rank, world size and resume
trains on the same images. RUN/bad_samples/rank-R.jsonl gets a line for each bad sample, once per
process.
"""

import json
import sys
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import DatasetError
from pretrain.data.order import Ids, hash64
from pretrain.data.reader import ShardReader, Unreadable

MAX_ATTEMPTS = 16


class TooManyBadSamples(UserError):  # noqa: N818
    of_all_ranks = True


class BadSampleLog:
    """Log of one rank's bad samples, for all threads of its loader."""

    def __init__(self, log: Path | None):
        self._log = log
        self._known = set[Hashable]()
        self._lock = threading.Lock()

    def note(self, bad: Unreadable, stand_in: int | None, *, known_as: Hashable) -> None:
        """Log the bad sample once, identified by `known_as`, because datasets of a mixture may have
        equal shard names and keys. `stand_in` None: a stream skips the sample."""
        with self._lock:
            if known_as in self._known:
                return
            self._known.add(known_as)
            instead = "skipped" if stand_in is None else f"replaced by sample {stand_in}"
            print(f"bad sample: {bad.shard}: {bad.key}: {bad.reason}; {instead}", file=sys.stderr)
            if self._log is not None:
                line = {
                    "sample": bad.sample,
                    "shard": bad.shard,
                    "key": bad.key,
                    "reason": bad.reason,
                    "stand_in": stand_in,
                }
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with open(self._log, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


class BadSamples(BadSampleLog):
    """Stand-ins for the bad samples of one reader."""

    def __init__(self, reader: ShardReader, *, log: Path | None = None):
        super().__init__(log)
        self._reader = reader

    def replace(self, bad: Sequence[Unreadable], ids: Ids, batch_BHWC: Tensor) -> Ids:
        """Fill the rows of bad samples with their stand-ins. Return `ids` with the ids of the
        stand-ins."""
        shown = ids.copy()
        for each in bad:
            shown[each.place] = self._stand_in(each, batch_BHWC[each.place : each.place + 1])
        return shown

    def _stand_in(self, bad: Unreadable, place_1HWC: Tensor) -> int:
        fold = self._reader.parts[0].chosen
        for attempt in range(MAX_ATTEMPTS):
            if fold is None:
                candidate = self._reader.stand_in(bad.sample, attempt)
            else:
                candidate = int(fold[int(hash64(bad.sample, attempt)) % len(fold)])
            if not self._reader.read(self._reader.locate(np.array([candidate])), place_1HWC):
                self.note(bad, candidate, known_as=bad.sample)
                return candidate
        raise DatasetError(
            bad.shard,
            f"{bad.key} does not decode ({bad.reason}), and {MAX_ATTEMPTS} attempts found no sample"
            " to replace it",
            "build the dataset again",
            code="damaged",
        )


def left_out(bad: Sequence[Unreadable], ids: Ids, images_BHWC: Tensor) -> Ids:
    """Mask the bad samples of an evaluation (-1 in the returned ids), and print each sample once,
    because padding repeats a sample."""
    for each in {each.sample: each for each in bad}.values():
        print(
            f"bad sample: {each.shard}: {each.key}: {each.reason}; the score ignores it",
            file=sys.stderr,
        )
    return masked(bad, ids, images_BHWC)


def masked(bad: Sequence[Unreadable], ids: Ids, images_BHWC: Tensor) -> Ids:
    kept = ids.copy()
    for each in bad:
        kept[each.place] = -1
        images_BHWC[each.place] = 0
    return kept


def check_fraction(num_bad: int, *, num_seen: int, num_samples: int, max_fraction: float) -> None:
    """Raise an error if `num_bad` exceeds `max_fraction` of `num_seen` and of `num_samples`."""
    count = max(num_seen, num_samples)
    if num_bad > max_fraction * count:
        raise TooManyBadSamples(
            "data.max_bad_fraction",
            f"{num_bad:,} of {count:,} samples do not decode, over {100 * max_fraction:g} %",
            "read RUN/bad_samples/, run data_prep verify, and exclude the samples with data_prep"
            " subset, or raise the fraction",
            code="too-many-faults",
        )
