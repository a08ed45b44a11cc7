"""The cost of a ZeRO stage: bytes that a rank holds and sends in a step, and the time of a step.

P parameters on N ranks; w bytes per weight in the forward pass: 4 in fp32, 2 in bf16 and fp16.
Stage 0 keeps fp32 weights in any precision. The optimizer keeps K values per weight (Lion and SGD
1, AdamW 2). These values, the master weights and the moving average are in fp32.

    stage  weights  master  optimizer  gradients             sent in a step of A micro-batches
    0      4 P      -       4 K P      4 P                   2 r 4 P
    1      w P      4 P/N   4 K P/N    w P/N, or the sum *   2 r w P + r w P
    2      w P      4 P/N   4 K P/N    4 P/N                 2 r w P A + r w P
    3      w P/N    4 P/N   4 K P/N    4 P/N                 at most 3 r w P A

* The sum over micro-batches is in fp32. It takes 4 P + 4 P/N in bf16 and 8 P in fp32, or 4 P on
  one rank. fp16, and bf16 with offload, need 4 P + 4 P/N even without accumulation.

r = (N - 1) / N is the fraction of a tensor that each rank of a ring sends. Stage 1 reduces once a
step, stages 2 and 3 in each micro-batch. Stage 2 reduces by an all-reduce. Stage 3 gathers the
weights twice and scatters the gradients once. Activations and padding are not included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pretrain.config import PretrainSettings
from pretrain.models.cost import Cost, cost_of

if TYPE_CHECKING:
    from rich.console import Console

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Offload = Literal["none", "optimizer", "all"]

NUM_STATES = {"lion": 1, "sgd": 1, "adamw": 2}
"""Optimizer values per weight (K), by `optimizer.name`."""
MAX_BUCKET_ELEMENTS = 25_000_000
"""Largest number of gradients to reduce together. DeepSpeed's default of 500 million takes 1 GB in
bf16 even for a small model."""


def bucket_elements(num_parameters: int) -> int:
    return min(-(-num_parameters // 8) * 8, MAX_BUCKET_ELEMENTS)  # DeepSpeed needs an even size


@dataclass(frozen=True)
class Training:
    num_parameters: int
    stage: Stage
    precision: Precision
    num_ranks: int
    num_states: int = 1
    accumulation_steps: int = 1
    ema: bool = False
    offload: Offload = "none"

    @property
    def bytes_per_weight(self) -> int:
        return 4 if self.stage == 0 or self.precision in ("fp32", "tf32") else 2


def held(training: Training) -> float:
    """Return the bytes that a rank holds on its device, including communication buckets."""
    size, each, stage = training.num_parameters, training.bytes_per_weight, training.stage
    share = size if stage == 0 else size / training.num_ranks
    weights = each * (share if stage == 3 else size)
    shards = 4.0 * share * ((stage > 0) + training.num_states + training.ema)
    gradients = _gradients_at_stage_1(training) if stage == 1 else 4 * share
    if training.offload != "none":  # offloaded state is in host memory
        shards, gradients = 0.0, 0.0 if stage >= 2 else gradients
    if training.offload == "all":
        weights = 0
    return weights + shards + gradients + bucket_bytes(training)


def bucket_bytes(training: Training) -> float:
    """Return the bytes of communication buckets. Only stage 3 keeps them between two steps."""
    if training.stage == 0:
        return 0
    num_buckets = 2 if training.stage < 3 and training.num_ranks > 1 else 1
    return num_buckets * training.bytes_per_weight * bucket_elements(training.num_parameters)


def _gradients_at_stage_1(training: Training) -> float:
    size, num_ranks, each = training.num_parameters, training.num_ranks, training.bytes_per_weight
    is_accumulated = training.accumulation_steps > 1
    is_summed = training.precision == "fp16" or training.offload != "none"
    if each == 2 and (is_accumulated or is_summed):
        return 4 * (size + (size / num_ranks if num_ranks > 1 or is_summed else 0))
    return each * (2 * size if is_accumulated and num_ranks > 1 else size / num_ranks)


def bytes_sent(training: Training) -> float:
    ring, steps = (training.num_ranks - 1) / training.num_ranks, training.accumulation_steps
    times = {0: 2, 1: 3, 2: 2 * steps + 1, 3: 3 * steps}[training.stage]
    return times * ring * training.num_parameters * training.bytes_per_weight


# ---- the time of a step, and the number of nodes


@dataclass(frozen=True)
class Cluster:
    gpus_per_node: int
    gbit_per_s: float = 200
    """Network bandwidth of a node. A ring over several nodes enters and leaves a node once."""
    gbit_per_s_inside: float = 3600
    """Bandwidth between two GPUs of a node (NVLink 4: 3600, PCIe 5: 500)."""
    teraflops: float = 300
    """Assumed throughput of a GPU."""


@dataclass(frozen=True)
class Plan:
    cost: Cost
    global_batch_size: int
    cluster: Cluster
    precision: Precision = "bf16"
    num_states: int = 1
    stage: Stage = 1
    micro_batch_size: int | None = None
    """Samples that a rank processes at once; None: its complete part of the batch."""

    @property
    def step_flops(self) -> int:
        """Return the FLOP of one step: forward and backward pass of the global batch."""
        return 3 * 2 * self.cost.multiply_adds * self.global_batch_size

    def gpu_hours(self, num_steps: int) -> float:
        """Return a lower bound of the GPU-hours: the compute time at `teraflops`, without
        communication."""
        return num_steps * self.step_flops / (self.cluster.teraflops * 1e12) / 3600

    def training(self, stage: Stage, num_nodes: int) -> Training:
        num_ranks = num_nodes * self.cluster.gpus_per_node
        local = self.global_batch_size / num_ranks
        steps = math.ceil(local / self.micro_batch_size) if self.micro_batch_size else 1
        return Training(
            self.cost.num_parameters, stage, self.precision, num_ranks, self.num_states, steps
        )

    def compute_s(self, num_nodes: int) -> float:
        num_gpus = num_nodes * self.cluster.gpus_per_node
        return self.step_flops / num_gpus / (self.cluster.teraflops * 1e12)

    def step_s(self, num_nodes: int) -> float:
        """Return the seconds of a step: compute, and the network time that compute does not hide.

        Stages 1 and 2 reduce gradients in k buckets during the backward pass (two thirds of the
        compute). Stage 1 does so in the last micro-batch, stage 2 in each. Stage 3 fetches weights
        during both passes. Compute of b seconds hides min(b, r) (1 - 1/k) of a reduction of r
        seconds, because the last bucket comes after the compute. Stage 0 reduces after the backward
        pass. Stages 1 and 2 gather weights after the update.
        """
        cluster, training = self.cluster, self.training(self.stage, num_nodes)
        gbit_per_s = cluster.gbit_per_s_inside
        if num_nodes > 1:
            gbit_per_s = min(cluster.gbit_per_s, gbit_per_s)
        compute_s = self.compute_s(num_nodes)
        network_s = bytes_sent(training) / (gbit_per_s / 8 * 1e9)
        if self.stage == 0:
            return compute_s + network_s
        num_reductions = training.accumulation_steps if self.stage > 1 else 1
        reduced = 2 * num_reductions / (2 * num_reductions + 1) if self.stage < 3 else 1.0
        beside_s = compute_s / training.accumulation_steps * (2 / 3 if self.stage < 3 else 1.0)
        size = training.num_parameters
        num_buckets = max(1, -(-size // max(1, bucket_elements(size))))
        hidden_s = min(num_reductions * beside_s, reduced * network_s) * (1 - 1 / num_buckets)
        return compute_s + network_s - hidden_s

    def best(self, num_nodes: Sequence[int]) -> int:
        """Return the number of nodes with the shortest step. If several are equally fast, return
        the lowest."""
        return min(num_nodes, key=lambda count: (self.step_s(count), count))


def plan_of(
    settings: PretrainSettings, cluster: Cluster, *, num_classes: int, image_size: int
) -> Plan:
    local = settings.train.local_batch_size
    return Plan(
        cost=cost_of(settings.model, num_classes=num_classes, image_size=image_size),
        global_batch_size=settings.train.global_batch_size,
        cluster=cluster,
        precision=settings.engine.precision,
        num_states=NUM_STATES[settings.optimizer.name],
        stage=settings.engine.zero_stage,
        micro_batch_size=local if isinstance(local, int) else None,
    )


def slower_than_fewer(plan: Plan, num_nodes: int) -> str | None:
    """Return a warning if a step would take less time on fewer nodes (1, 2, 4, ...)."""
    cluster = plan.cluster
    counts = [1 << power for power in range(num_nodes.bit_length()) if 1 << power < num_nodes]
    fewer = [
        count for count in counts if plan.global_batch_size % (count * cluster.gpus_per_node) == 0
    ]
    best = plan.best([*fewer, num_nodes])
    if best == num_nodes:
        return None
    return (
        f"{_nodes(num_nodes)} would take {_ms(plan.step_s(num_nodes))} a step, but"
        f" {_nodes(best)} {_ms(plan.step_s(best))} (at {cluster.teraflops:g} TFLOP/s a GPU and"
        f" {cluster.gbit_per_s:g} Gbit/s a node); use --nodes={best}"
    )


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# ---- `pretrain estimate`


def in_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"  # a lower bound needs no more digits


def print_plan(plan: Plan, num_nodes: Sequence[int], console: "Console") -> None:
    """Print a row for each number of nodes: bytes at the four stages, and the plan's step time."""
    from rich.table import Table

    cluster, best = plan.cluster, plan.best(num_nodes)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    stages = "/".join(map(str, STAGES))
    for word in ("nodes", "batch/rank", f"GB at ZeRO {stages}", f"MB sent at ZeRO {stages}"):
        table.add_column(word, justify="right", no_wrap=True)
    for word in ("compute ms", "step ms", "images/s", ""):
        table.add_column(word, justify="right", no_wrap=True)
    for count in num_nodes:
        trainings, step_s = [plan.training(stage, count) for stage in STAGES], plan.step_s(count)
        table.add_row(
            str(count),
            f"{plan.global_batch_size / trainings[0].num_ranks:,.0f}",
            " ".join(f"{held(each) / 1e9:4.2f}" for each in trainings),
            " ".join(f"{bytes_sent(each) / 1e6:5,.0f}" for each in trainings),
            f"{plan.compute_s(count) * 1e3:.1f}",
            f"{step_s * 1e3:.1f}",
            f"{plan.global_batch_size / step_s:,.0f}",
            "<- best" * (count == best),
            style="bold" * (count == best),
        )
    links = f"{cluster.gbit_per_s:g} Gbit/s between nodes, {cluster.gbit_per_s_inside:g} inside"
    pieces = f", micro-batches of {plan.micro_batch_size:,}" if plan.micro_batch_size else ""
    console.print(
        f"Batch {plan.global_batch_size:,}, {plan.precision}, ZeRO {plan.stage}{pieces};"
        f" {cluster.gpus_per_node} GPUs a node, {cluster.teraflops:g} TFLOP/s each, {links}",
        style="bold",
    )
    console.print(table)
    console.print(
        f"Use {_nodes(best)}: a step takes {_ms(plan.step_s(best))},"
        f" {plan.compute_s(best) / plan.step_s(best):.0%} of it computing."
    )
