"""Steps that the engine did not take because loss or gradients were not finite: counted, named, and
in the end too many.

A skipped step changes nothing but the position in the data: training goes on with the next batch,
and every rank skips the same steps. Lines go to RUN/skipped_steps/rank-R.jsonl (step, loss, sample,
shard, key): from a rank whose own loss is not finite, its share of the batch; from all ranks where
only the gradients are not. fp16 skips steps with finite losses while it looks for its
scale: these are counted, not written.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_prep.errors import UserError
from pretrain.data.order import BatchPlan, Ids, Line
from pretrain.data.reader import ShardReader
from pretrain.data.stream import Stream
from pretrain.ranks.collectives import Agreed

MAX_WRITTEN = 50
"""Steps of a process: the names of a few batches are enough to look at."""


class TooManySkippedSteps(UserError):  # noqa: N818
    """Training has diverged, or the data are broken."""

    of_all_ranks = True


class SkippedSteps:
    """What one rank makes of them."""

    def __init__(
        self,
        samples_of: Callable[[int], Ids],
        reader: ShardReader | Stream,
        *,
        log: Path,
        max_in_a_row: int,
        scales_loss: bool,
    ):
        self._samples_of, self._reader, self._log = samples_of, reader, log
        self._max_in_a_row, self._scales_loss = max_in_a_row, scales_loss
        self.total = self.in_a_row = 0
        self._num_written = 0
        self._are_named = False
        """Whether samples of the last ones in a row were written, by whichever rank."""

    def go_on(self, *, total: int, in_a_row: int) -> None:
        """From a checkpoint."""
        self.total, self.in_a_row = total, in_a_row

    def note(self, step: int, agreed: Agreed) -> None:
        """`step`: how many steps are done with this one, as on the progress line."""
        if agreed.applied:
            self.in_a_row, self._are_named = 0, False
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        has_loss = bool(np.isfinite(agreed.loss))
        if not has_loss or not self._scales_loss:
            self._are_named = True
            if (has_loss or not np.isfinite(agreed.own_loss)) and self._num_written < MAX_WRITTEN:
                self._write(step, agreed.own_loss)
        if self.in_a_row < self._max_in_a_row:
            return
        remedy = (
            "the gradients overflow in fp16 though the loss scale was lowered on the way, and no"
            " sample is to blame. Set engine.precision=bf16, which has the range of fp32 (or fp32"
            " itself), or lower optimizer.lr, in another run_dir"
        )
        if self._are_named:
            remedy = (
                f"their samples are in {self._log.parent}. Lower optimizer.lr or set"
                " engine.gradient_clip_norm=1, in another run_dir, or look at those samples"
            )
        raise TooManySkippedSteps(
            f"{self.in_a_row} steps in a row, to step {step}, had a loss or gradients that are not"
            f" finite (the last loss is {agreed.loss}), as many as train.max_skipped_steps allows;"
            f" {remedy}"
        )

    def _write(self, step: int, loss: float) -> None:
        self._num_written += 1
        samples = self._samples_of(step - 1)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "a", encoding="utf-8") as file:
            for sample, (shard, key) in zip(
                samples.tolist(), self._reader.names(samples), strict=True
            ):
                line = {
                    "step": step,
                    "loss": str(loss),
                    "sample": sample,
                    "shard": shard,
                    "key": key,
                }
                file.write(json.dumps(line) + "\n")


def samples_of_rank(order: Line, plan: BatchPlan, *, step: int, rank: int) -> Ids:
    """The samples of a rank's share of the step's global batch."""
    consumed = step * plan.global_batch_size
    positions = [
        plan.positions(consumed=consumed, micro_step=micro_step, rank=rank)
        for micro_step in range(plan.accumulation_steps)
    ]
    return order.locate(np.concatenate(positions))[1]
