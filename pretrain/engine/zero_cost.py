"""What a ZeRO stage costs: bytes that a rank holds, and bytes that it sends in a step, as functions
of the number of parameters.

P parameters on N ranks; w bytes per weight in the forward pass (4 in fp32, 2 in bf16 and fp16;
stage 0 keeps fp32 weights in any precision); K optimizer values per weight (Lion and SGD 1, AdamW
and LAMB 2), in fp32, as the master weights and the average are.

    stage   weights   master     optimizer   gradients                                   sent in a step of A micro-batches
    0       4 P       -          4 K P       4 P                                         2 r 4 P
    1       w P       4 P / N    4 K P / N   w P / N; with accumulation *             2 r w P + r w P
    2       w P       4 P / N    4 K P / N   4 P / N                                     2 r w P A + r w P
    3       w P / N   4 P / N    4 K P / N   4 P / N                                     at most 3 r w P A

* The sum over micro-batches is in fp32: in bf16 4 P + 4 P / N, on one rank 4 P; in fp32 8 P, on one
  rank 4 P. fp16 and offload
have 4 P + 4 P / N without accumulation, too.

r = (N - 1) / N is a ring's share. Stage 1 reduces once a step, stages 2 and 3 with each
micro-batch. Stage 2's reduction is twice what a reduce-scatter would be, for DeepSpeed does it as
an all-reduce; stage 3 gathers the weights twice (forward, and backward but for the layers that it
begins with) and scatters the gradients once. tests/distributed/test_zero_cost.py compares this with
what ranks really hold and send. Activations are not in it (micro_batch.py), nor is padding.
"""  # noqa: E501 (a table)

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pretrain.config import PretrainSettings
from pretrain.models.cost import Cost, cost_of
from pretrain.models.spec import AnySpec

if TYPE_CHECKING:
    from rich.console import Console

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Offload = Literal["none", "optimizer", "all"]

NUM_STATES = {"lion": 1, "sgd": 1, "adamw": 2, "lamb": 2}
"""K, by `optimizer.name`."""
MAX_BUCKET_ELEMENTS = 25_000_000
"""Gradients that are reduced together, while the backward pass makes those of the next bucket:
there are two of them on GPUs of several ranks. DeepSpeed's own 500 million would be 1 GB of bf16
however small the model, and all at the end."""
MAX_DOUBLINGS = 10
"""Of a batch, in the search for one that more nodes are worth."""


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
        return 4 if self.stage == 0 or self.precision in ("fp32", "tf32") else 2


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
            gradients = _gradients_at_stage_1(training)
        case _:
            gradients = 4 * share
    bucket = 0.0 if stage == 0 else float(each * bucket_elements(size))
    if stage in (1, 2) and training.num_ranks > 1:
        bucket *= 2
    on_host = 0.0
    if training.offload != "none":
        on_host = (
            shards
            + (gradients if stage >= 2 else 0.0)
            + (weights if training.offload == "all" else 0.0)
        )
    return Held(weights + shards + gradients + bucket - on_host, on_host, bucket)


def _gradients_at_stage_1(training: Training) -> float:
    size, num_ranks, is_accumulated = (
        training.num_parameters,
        training.num_ranks,
        training.accumulation_steps > 1,
    )
    has_loss_scale_or_offload = training.precision == "fp16" or training.offload != "none"
    if training.bytes_per_weight == 2 and (is_accumulated or has_loss_scale_or_offload):
        return 4 * (size + (size / num_ranks if num_ranks > 1 or has_loss_scale_or_offload else 0))
    return training.bytes_per_weight * (
        2 * size if is_accumulated and num_ranks > 1 else size / num_ranks
    )


def bytes_sent(training: Training) -> float:
    """By a rank in one step."""
    ring, steps = (training.num_ranks - 1) / training.num_ranks, training.accumulation_steps
    times = {0: 2, 1: 3, 2: 2 * steps + 1, 3: 3 * steps}[training.stage]
    return times * ring * training.num_parameters * training.bytes_per_weight


# ---- the time of a step, and the number of nodes
# -------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds."""

    compute: float
    network: float
    """Of all that a rank sends."""
    hidden: float
    """Of the network's, behind computation."""

    @property
    def whole(self) -> float:
        return self.compute + self.network - self.hidden


def step_of(training: Training, *, compute_s: float, bytes_per_s: float) -> Step:
    """A reduction in k equal buckets begins each when its gradients are there, 1/k of the backward
    pass after the one before, and when that one is reduced. So both take max(b + r / k, b / k + r),
    where r is the reduction alone and b what it runs beside, and min(b, r) (1 - 1/k) is hidden.
    Beside: at stages 1 and 2 the backward pass, two thirds of a micro-batch's compute, at stage 1
    of the last one; at stage 3, which fetches ahead, either pass. Stage 0 reduces when all
    gradients are there, and nothing hides the gathering of stages 1 and 2, which follows the
    update."""
    size, stage = training.num_parameters, training.stage
    network = bytes_sent(training) / bytes_per_s
    if stage == 0:
        return Step(compute_s, network, 0.0)
    times = training.accumulation_steps if stage > 1 else 1
    share = (2 * times / (2 * times + 1)) if stage < 3 else 1.0
    beside = compute_s / training.accumulation_steps * (2 / 3 if stage < 3 else 1.0)
    num_buckets = -(-size // bucket_elements(size))
    return Step(
        compute_s, network, times * min(beside, share * network / times) * (1 - 1 / num_buckets)
    )


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
    stage: Stage = 1
    micro_batch_size: int | None = None
    """That a rank takes at once; None: its whole share of the batch."""
    gbit_per_s: float = 200
    """Of a node's network, which a ring that spans nodes crosses once."""
    gbit_per_s_inside: float = 3600
    """From a GPU to another of its node: NVLink 4. PCIe 5 has 500."""
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
        return (
            None
            if self.num_steps is None
            else self.num_steps * self.step_flops / (self.teraflops * 1e12) / 3600
        )

    def training(self, stage: Stage, num_nodes: int) -> Training:
        num_ranks = num_nodes * self.gpus_per_node
        local = self.global_batch_size / num_ranks
        steps = math.ceil(local / self.micro_batch_size) if self.micro_batch_size else 1
        return Training(
            self.cost.num_parameters, stage, self.precision, num_ranks, self.num_states, steps
        )

    def step(self, num_nodes: int, *, stage: Stage | None = None) -> Step:
        training = self.training(self.stage if stage is None else stage, num_nodes)
        slowest = (
            self.gbit_per_s_inside
            if num_nodes == 1
            else min(self.gbit_per_s, self.gbit_per_s_inside)
        )
        compute_s = self.step_flops / training.num_ranks / (self.teraflops * 1e12)
        return step_of(training, compute_s=compute_s, bytes_per_s=slowest / 8 * 1e9)

    def best(self, num_nodes: Sequence[int] = ()) -> int:
        """The number of nodes whose step is the shortest; of equals the least."""
        return min(num_nodes or self.num_nodes, key=lambda count: (self.step(count).whole, count))

    def batch_for(self, num_nodes: int) -> int | None:
        """The batch, doubled as often as it takes, from which so many nodes are faster than any
        fewer ones that are asked for."""
        fewer = [count for count in self.num_nodes if count < num_nodes]
        larger = (
            replace(self, global_batch_size=self.global_batch_size << doublings)
            for doublings in range(MAX_DOUBLINGS + 1)
        )
        return next(
            (
                plan.global_batch_size
                for plan in larger
                if plan.best([*fewer, num_nodes]) == num_nodes
            ),
            None,
        )


def plan_of(settings: PretrainSettings, *, num_classes: int, image_size: int, **more: Any) -> Plan:
    """`more`: nodes, GPUs and their speeds."""
    local = settings.train.local_batch_size
    return Plan(
        spec=settings.model,
        num_classes=num_classes,
        image_size=image_size,
        global_batch_size=settings.train.global_batch_size,
        precision=settings.engine.precision,
        num_states=NUM_STATES[settings.optimizer.name],
        stage=settings.engine.zero_stage,
        micro_batch_size=local if isinstance(local, int) else None,
        **more,
    )


def advice(plan: Plan) -> str:
    """What to do, and what more nodes are good for."""
    best = plan.best()
    step = plan.step(best)
    said = (
        f"Use {_nodes(best)}: a step takes {_ms(step.whole)}, {step.compute / step.whole:.0%} of it"
        " computing."
    )
    more = min((count for count in plan.num_nodes if count > best), default=None)
    if more is None:
        return said
    batch = plan.batch_for(more)
    pays = (
        f"from a batch of {batch:,} on"
        if batch
        else f"at no batch up to {plan.global_batch_size << MAX_DOUBLINGS:,}"
    )
    return (
        f"{said} {_nodes(more)} take {_ms(plan.step(more).whole)} and pay off {pays}: give spare"
        " nodes other trainings."
    )


def slower_than_fewer(plan: Plan, num_nodes: int) -> str | None:
    """A line for who is about to ask for so many nodes, where fewer (1, 2, 4, ...) would take less
    time for a step."""
    counts = [1 << power for power in range(num_nodes.bit_length()) if 1 << power < num_nodes]
    fewer = [
        count for count in counts if plan.global_batch_size % (count * plan.gpus_per_node) == 0
    ]
    best = replace(plan, num_nodes=fewer).best([*fewer, num_nodes])
    if best == num_nodes:
        return None
    batch = replace(plan, num_nodes=fewer).batch_for(num_nodes)
    times = (
        f"{_nodes(num_nodes)} would take {_ms(plan.step(num_nodes).whole)} a step, {_nodes(best)}"
        f" {_ms(plan.step(best).whole)}"
    )
    at = f"at {plan.teraflops:g} TFLOP/s a GPU and {plan.gbit_per_s:g} Gbit/s a node"
    return f"{times} ({at}); use --nodes={best}" + (
        f", or a batch of {batch:,} and more" if batch else ""
    )


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# ---- `pretrain plan`: what each stage would cost a model on a cluster, before a job is queued
# -------------------------


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
    """If nothing of it is hidden."""


def rows(plan: Plan) -> list[Row]:
    found = []
    for num_nodes in plan.num_nodes:
        trainings = [plan.training(stage, num_nodes) for stage in STAGES]
        found.append(
            Row(
                num_nodes=num_nodes,
                num_ranks=trainings[0].num_ranks,
                local_batch_size=plan.global_batch_size / trainings[0].num_ranks,
                compute_ms=plan.step(num_nodes).compute * 1e3,
                held_gb=tuple(held(training).on_device / 1e9 for training in trainings),
                sent_mb=tuple(bytes_sent(training) / 1e6 for training in trainings),
                network_ms=tuple(
                    plan.step(num_nodes, stage=stage).network * 1e3 for stage in STAGES
                ),
            )
        )
    return found


def print_plan(plan: Plan, console: "Console") -> None:
    """A line for each number of nodes: of the four stages, side by side within a column, and of a
    step at the plan's own."""
    from rich.table import Table

    stages = "/".join(map(str, STAGES))
    by_stage = (f"{each}, {stages}" for each in ("GB held", "MB sent", "network ms"))
    words = ("nodes", "ranks", "batch/rank", *by_stage)
    costs, steps = (
        Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold") for _ in range(2)
    )
    for word in words:
        costs.add_column(word, justify="right", no_wrap=True)
    for word in (
        "nodes",
        "compute ms",
        "network ms",
        "hidden ms",
        "step ms",
        "images/s",
        "computing",
    ):
        steps.add_column(word, justify="right", no_wrap=True)
    steps.add_column("", no_wrap=True)
    best = plan.best()
    for row in rows(plan):
        cells = [f"{row.num_nodes}", f"{row.num_ranks}", f"{row.local_batch_size:,.0f}"]
        cells += [
            " ".join(f"{value:4.2f}" for value in row.held_gb),
            " ".join(f"{value:5,.0f}" for value in row.sent_mb),
        ]
        costs.add_row(*cells, " ".join(f"{value:4.1f}" for value in row.network_ms))
        step = plan.step(row.num_nodes)
        cells = [
            f"{each * 1e3:.1f}" for each in (step.compute, step.network, step.hidden, step.whole)
        ]
        cells += [f"{plan.global_batch_size / step.whole:,.0f}", f"{step.compute / step.whole:.0%}"]
        steps.add_row(
            f"{row.num_nodes}",
            *cells,
            "<- best" * (row.num_nodes == best),
            style="bold" * (row.num_nodes == best),
        )
    nodes = f"{plan.gpus_per_node} GPUs a node"
    console.print(
        f"{plan.name}, batch {plan.global_batch_size:,}, {plan.precision}, {nodes}", style="bold"
    )
    console.print(costs)
    most = max(plan.training(plan.stage, count).accumulation_steps for count in plan.num_nodes)
    pieces = (
        f", micro-batches of {plan.micro_batch_size:,}"
        if plan.micro_batch_size and most > 1
        else ""
    )
    links = f"{plan.gbit_per_s:g} Gbit/s between nodes, {plan.gbit_per_s_inside:g} inside"
    console.print(
        f"\nA step at ZeRO {plan.stage}{pieces}: {plan.teraflops:g} TFLOP/s a GPU, {links}",
        style="bold",
    )
    console.print(steps)
    console.print(advice(plan))
    if plan.gpu_hours is not None:
        nothing_else = (
            f"{plan.num_steps:,} steps of nothing but compute, at {plan.teraflops:g} TFLOP/s a GPU"
        )
        console.print(f"at least {in_hours(plan.gpu_hours)} GPU-hours: {nothing_else}")
