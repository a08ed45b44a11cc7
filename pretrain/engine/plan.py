"""`pretrain plan`: what each ZeRO stage would cost a model on a cluster, before a job is queued. Arithmetic alone, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from pretrain.engine.zero_cost import Precision, Stage, Training, bytes_sent, held
from pretrain.models.cost import cost_of
from pretrain.models.presets import PRESETS, spec_of

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Plan:
    """What is asked for; the batch must split evenly over the ranks of every line."""

    model: str
    global_batch_size: int
    num_nodes: Sequence[int]
    gpus_per_node: int
    precision: Precision = "bf16"
    num_states: int = 1
    gbit_per_s: float = 200
    """Of a node's network, which a ring that spans nodes crosses once."""
    teraflops: float = 300
    """What a GPU is assumed to reach."""
    num_classes: int | None = None
    image_size: int | None = None


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
    preset = PRESETS[plan.model]
    size, classes = plan.image_size or preset.image_size, plan.num_classes or preset.num_classes
    cost, found = cost_of(spec_of(plan.model), num_classes=classes, image_size=size), []
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
                compute_ms=3 * 2 * cost.multiply_adds * local / (plan.teraflops * 1e12) * 1e3,
                held_gb=tuple(held(training).on_device / 1e9 for training in trainings),
                sent_mb=tuple(count / 1e6 for count in sent),
                network_ms=tuple(count / (plan.gbit_per_s / 8 * 1e9) * 1e3 if num_nodes > 1 else 0.0 for count in sent),
            )
        )
    return found


def print_plan(plan: Plan, console: Console) -> None:
    """A line for each number of nodes; the four stages stand side by side within a column."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    stages = "/".join(map(str, STAGES))
    for word in (
        "nodes",
        "ranks",
        "batch/rank",
        "compute ms",
        *(f"{each}, {stages}" for each in ("GB held", "MB sent", "network ms")),
    ):
        table.add_column(word, justify="right", no_wrap=True)
    for row in rows(plan):
        cells = [f"{row.num_nodes}", f"{row.num_ranks}", f"{row.local_batch_size:,.0f}", f"{row.compute_ms:.1f}"]
        cells += [" ".join(f"{value:4.2f}" for value in row.held_gb), " ".join(f"{value:5,.0f}" for value in row.sent_mb)]
        table.add_row(*cells, " ".join(f"{value:4.1f}" for value in row.network_ms))
    console.print(
        f"{plan.model}, batch {plan.global_batch_size:,}, {plan.precision}, {plan.gpus_per_node} GPUs a node", style="bold"
    )
    console.print(table)
    console.print(
        f"By ZeRO stage {stages}. Held: by a rank, without activations (stage 2 keeps its gradients in fp32, so it may hold more "
        f"than stage 1). Compute: at {plan.teraflops:g} TFLOP/s a GPU. Network: what is sent in a step over {plan.gbit_per_s:g} "
        "Gbit/s a node, none of it hidden behind compute (docs/scaling.md).",
        style="dim",
    )
