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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pretrain.models.cost import Cost, cost_of
from pretrain.models.spec import AnySpec

if TYPE_CHECKING:
    from rich.console import Console

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
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


# ---- `pretrain plan`: what each stage would cost a model on a cluster, before a job is queued -------------------------


@dataclass(frozen=True)
class Plan:
    """What is asked for; the batch must split evenly over the ranks of every line."""

    name: str
    spec: AnySpec
    num_classes: int
    image_size: int
    global_batch_size: int
    num_nodes: Sequence[int]
    gpus_per_node: int
    precision: Precision = "bf16"
    num_states: int = 1
    gbit_per_s: float = 200
    """Of a node's network, which a ring that spans nodes crosses once."""
    teraflops: float = 300
    """What a GPU is assumed to reach."""
    num_steps: int | None = None
    """Of a whole training."""

    @property
    def cost(self) -> Cost:
        return cost_of(self.spec, num_classes=self.num_classes, image_size=self.image_size)

    @property
    def step_flops(self) -> int:
        """Forward and backward, of the whole batch."""
        return 3 * 2 * self.cost.multiply_adds * self.global_batch_size

    @property
    def gpu_hours(self) -> float | None:
        """If GPUs did nothing but compute, at `teraflops`: a lower bound, whatever their number."""
        return None if self.num_steps is None else self.num_steps * self.step_flops / (self.teraflops * 1e12) / 3600


def in_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"  # a bound has no more digits


@dataclass(frozen=True)
class Row:
    num_nodes: int
    num_ranks: int
    local_batch_size: float
    compute_ms: float
    held_gb: tuple[float, ...]
    """By stage; without activations."""
    sent_mb: tuple[float, ...]
    network_ms: tuple[float, ...]
    """If nothing of it is hidden behind compute."""


def rows(plan: Plan) -> list[Row]:
    cost, found = plan.cost, []
    for num_nodes in plan.num_nodes:
        num_ranks = num_nodes * plan.gpus_per_node
        local = plan.global_batch_size / num_ranks
        trainings = [Training(cost.num_parameters, stage, plan.precision, num_ranks, plan.num_states) for stage in STAGES]
        sent = [bytes_sent(training) for training in trainings]
        found.append(
            Row(
                num_nodes=num_nodes,
                num_ranks=num_ranks,
                local_batch_size=local,
                compute_ms=plan.step_flops / num_ranks / (plan.teraflops * 1e12) * 1e3,
                held_gb=tuple(held(training).on_device / 1e9 for training in trainings),
                sent_mb=tuple(count / 1e6 for count in sent),
                network_ms=tuple(count / (plan.gbit_per_s / 8 * 1e9) * 1e3 if num_nodes > 1 else 0.0 for count in sent),
            )
        )
    return found


def print_plan(plan: Plan, console: "Console") -> None:
    """A line for each number of nodes; the four stages stand side by side within a column."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    stages, has_network = "/".join(map(str, STAGES)), max(plan.num_nodes) > 1
    by_stage = (f"{each}, {stages}" for each in ("GB held", "MB sent", *["network ms"] * has_network))
    for word in ("nodes", "ranks", "batch/rank", "compute ms", *by_stage):
        table.add_column(word, justify="right", no_wrap=True)
    for row in rows(plan):
        cells = [f"{row.num_nodes}", f"{row.num_ranks}", f"{row.local_batch_size:,.0f}", f"{row.compute_ms:.1f}"]
        cells += [" ".join(f"{value:4.2f}" for value in row.held_gb), " ".join(f"{value:5,.0f}" for value in row.sent_mb)]
        cells += [" ".join(f"{value:4.1f}" for value in row.network_ms)] * has_network
        table.add_row(*cells)
    console.print(
        f"{plan.name}, batch {plan.global_batch_size:,}, {plan.precision}, {plan.gpus_per_node} GPUs a node", style="bold"
    )
    console.print(table)
    if plan.gpu_hours is not None:
        nothing_else = f"{plan.num_steps:,} steps of nothing but compute, at {plan.teraflops:g} TFLOP/s a GPU"
        console.print(f"at least {in_hours(plan.gpu_hours)} GPU-hours: {nothing_else}")
    network = f" Network: what is sent in a step over {plan.gbit_per_s:g} Gbit/s a node, none of it hidden behind compute."
    console.print(
        f"By ZeRO stage {stages}. Held: by a rank, without activations (stage 2 keeps its gradients in fp32, so it may hold more "
        f"than stage 1). Compute: at {plan.teraflops:g} TFLOP/s a GPU.{network * has_network} See docs/scaling.md.",
        style="dim",
    )
