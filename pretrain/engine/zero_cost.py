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

    @property
    def share(self) -> float:
        """Of what a stage cuts up."""
        return 1.0 if self.stage == 0 else 1 / self.num_ranks


@dataclass(frozen=True)
class Held:
    """Bytes of a rank."""

    weights: float
    master: float
    optimizer: float
    average: float
    gradients: float
    bucket: float
    on_device: float
    on_host: float
    """With offload."""

    @property
    def at_rest(self) -> float:
        """Between two steps: what stage 3 keeps for its gradients included."""
        return self.on_device + self.on_host


def held(training: Training) -> Held:
    size, each, share = training.num_parameters, training.bytes_per_weight, training.share
    weights = size * each * (share if training.stage == 3 else 1)
    master = 0.0 if training.stage == 0 else 4 * size * share
    optimizer = 4 * training.num_states * size * share
    average = 4 * size * share if training.ema else 0.0
    match training.stage:
        case 0:
            gradients = 4.0 * size
        case 1:
            gradients = each * size * (share if training.accumulation_steps == 1 else 2)
        case _:
            gradients = 4 * size * share
    bucket = 0.0 if training.stage == 0 else float(each * bucket_elements(size))
    moved = 0.0
    if training.offload != "none":
        moved = master + optimizer + average + (gradients if training.stage >= 2 else 0.0)
    if training.offload == "all":
        moved += weights
    total = weights + master + optimizer + average + gradients + bucket
    return Held(weights, master, optimizer, average, gradients, bucket, total - moved, moved)


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in one step."""

    gradients: float
    weights: float

    @property
    def total(self) -> float:
        return self.gradients + self.weights


def sent(training: Training) -> Sent:
    ring = (training.num_ranks - 1) / training.num_ranks
    whole = ring * training.num_parameters * training.bytes_per_weight
    steps = training.accumulation_steps
    match training.stage:
        case 0:
            return Sent(2 * whole, 0.0)
        case 1:
            return Sent(2 * whole, whole)
        case 2:
            return Sent(2 * whole * steps, whole)
        case 3:
            return Sent(whole * steps, 2 * whole * steps)
