"""What a ZeRO stage costs: bytes that a rank holds, and bytes that it sends in a step, as functions of the number of parameters.

P parameters on N ranks; w bytes per weight in the forward pass (4 in fp32, 2 in bf16 and fp16; stage 0 keeps fp32 weights in any
precision); K optimizer values per weight (Lion and SGD 1, AdamW and LAMB 2), in fp32, as the master weights and the average are.

    stage   weights   master     optimizer   gradients                                   sent in a step of A micro-batches
    0       4 P       -          4 K P       4 P                                         2 r 4 P
    1       w P       4 P / N    4 K P / N   w P / N; with accumulation 2 w P            2 r w P + r w P
    2       w P       4 P / N    4 K P / N   4 P / N                                     2 r w P A + r w P
    3       w P / N   4 P / N    4 K P / N   4 P / N                                     at most 3 r w P A

where r = (N - 1) / N is a ring's share. Stage 1 reduces once a step, stages 2 and 3 with each micro-batch. Stage 2's reduction is
twice what a reduce-scatter would be, for DeepSpeed does it as an all-reduce; stage 3 gathers the weights twice (forward, and
backward but for the layers that it begins with) and scatters the gradients once. tests/distributed/test_zero_cost.py compares this
with what ranks really hold and send. Activations are not in it (micro_batch.py), nor is padding.
"""

from dataclasses import dataclass
from typing import Literal

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "fp16"]
Offload = Literal["none", "optimizer", "all"]

NUM_STATES = {"lion": 1, "sgd": 1, "adamw": 2, "lamb": 2}
"""K, by `optimizer.name`."""
MAX_BUCKET_ELEMENTS = 50_000_000
"""Gradients that are reduced together. DeepSpeed's own 500 million would be 1 GB of bf16 however small the model."""


def bucket_elements(num_parameters: int) -> int:
    return min(-(-num_parameters // 8) * 8, MAX_BUCKET_ELEMENTS)  # DeepSpeed wants an even number


@dataclass(frozen=True)
class Training:
    """What the costs depend on."""

    num_parameters: int
    stage: Stage
    precision: Precision
    num_ranks: int
    num_states: int = 1
    """Optimizer values per weight."""
    accumulation_steps: int = 1
    ema: bool = False
    offload: Offload = "none"

    @property
    def bytes_per_weight(self) -> int:
        return 4 if self.stage == 0 or self.precision == "fp32" else 2


@dataclass(frozen=True)
class Held:
    """Bytes of a rank."""

    on_device: float
    on_host: float
    """With offload."""
    bucket: float
    """On the device, too; only stage 3 keeps it between two steps."""


def held(training: Training) -> Held:
    size, each, stage = training.num_parameters, training.bytes_per_weight, training.stage
    share = size if stage == 0 else size / training.num_ranks
    weights = each * (share if stage == 3 else size)
    shards = 4 * share * ((stage > 0) + training.num_states + training.ema)
    match stage:
        case 0:
            gradients = 4.0 * size
        case 1:
            gradients = each * (share if training.accumulation_steps == 1 else 2 * size)
        case _:
            gradients = 4 * share
    bucket = 0.0 if stage == 0 else float(each * bucket_elements(size))
    on_host = 0.0
    if training.offload != "none":
        on_host = shards + (gradients if stage >= 2 else 0.0) + (weights if training.offload == "all" else 0.0)
    return Held(weights + shards + gradients + bucket - on_host, on_host, bucket)


def bytes_sent(training: Training) -> float:
    """By a rank in one step."""
    ring, steps = (training.num_ranks - 1) / training.num_ranks, training.accumulation_steps
    times = {0: 2, 1: 3, 2: 2 * steps + 1, 3: 3 * steps}[training.stage]
    return times * ring * training.num_parameters * training.bytes_per_weight
