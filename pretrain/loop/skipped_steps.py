"""Count and record the steps that the engine skipped because the loss or a gradient was not finite.
Too many in a row raise TooManySkippedSteps.

A skipped step changes only the position in the data and, in fp16, the loss scale.
RUN/skipped_steps/rank-R.jsonl gets a line for each sample (step, loss, sample, shard, key). A rank
writes if its own loss was not finite. If only gradients were not finite, all ranks write. In fp16,
the search for the loss scale skips steps with finite losses. These steps are counted, but not
written.
"""

import json
from pathlib import Path

import numpy as np

from data_prep.errors import UserError
from pretrain.config import PretrainSettings
from pretrain.data.order import BatchPlan, Ids, Line
from pretrain.data.reader import ShardReader
from pretrain.data.stream import Stream
from pretrain.ranks.collectives import Agreed

MAX_WRITTEN = 50
"""Largest number of skipped steps that a process writes to its file."""


class TooManySkippedSteps(UserError):  # noqa: N818
    of_all_ranks = True


class SkippedSteps:
    def __init__(
        self,
        settings: PretrainSettings,
        reader: ShardReader | Stream,
        order: Line,
        plan: BatchPlan,
        *,
        rank: int,
    ):
        self._reader, self._order, self._plan, self._rank = reader, order, plan, rank
        self._log = Path(settings.run_dir) / "skipped_steps" / f"rank-{rank}.jsonl"
        self._max_in_a_row = settings.train.max_skipped_steps
        self._scales_loss = settings.engine.precision == "fp16"
        self.total = self.in_a_row = 0
        self._num_written = 0
        self._are_named = False
        """True if a rank has written the samples of the latest steps that were skipped in a row."""

    def go_on(self, *, total: int, in_a_row: int) -> None:
        self.total, self.in_a_row = total, in_a_row

    def note(self, step: int, agreed: Agreed) -> None:
        """Count a step, skipped or not. `step`: number of finished steps, including this one."""
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
        fix = (
            "set engine.precision=bf16, or a lower optimizer.lr, in another run_dir. The gradients"
            " overflow in fp16 at every loss scale, whatever the sample"
        )
        if self._are_named:
            fix = (
                "set a lower optimizer.lr, or engine.gradient_clip_norm=1, in another run_dir, or"
                f" look at the samples in {self._log.parent}"
            )
        raise TooManySkippedSteps(
            "train.max_skipped_steps",
            f"{self.in_a_row} steps in a row, up to step {step}, had a loss or gradients that are"
            f" not finite (the last loss is {agreed.loss})",
            fix,
            code="not-finite",
        )

    def _write(self, step: int, loss: float) -> None:
        self._num_written += 1
        samples = samples_of_rank(self._order, self._plan, step=step - 1, rank=self._rank)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "a", encoding="utf-8") as file:
            names = self._reader.names(samples)
            for sample, (shard, key) in zip(samples.tolist(), names, strict=True):
                line = {"step": step, "loss": str(loss), "sample": sample}
                file.write(json.dumps(line | {"shard": shard, "key": key}) + "\n")


def samples_of_rank(order: Line, plan: BatchPlan, *, step: int, rank: int) -> Ids:
    consumed = step * plan.global_batch_size
    positions = [
        plan.positions(consumed=consumed, micro_step=micro_step, rank=rank)
        for micro_step in range(plan.accumulation_steps)
    ]
    return order.locate(np.concatenate(positions))[1]
